"""The worker's own folder for clients' pictures."""

from __future__ import annotations

from typing import Final

from runtimes.sdk.own_folder import OwnFolder

PREFIX: Final = "llmux-comfy-"
KINDS: Final = ("input", "output", "temp")


class Folder(OwnFolder):
    """A new folder with a subfolder for each kind of ComfyUI's files."""

    def __init__(self) -> None:
        super().__init__(PREFIX)
        for kind in KINDS:
            (self.path / kind).mkdir()

    def clear(self) -> None:
        """Delete all files in the folder."""
        for path in self.path.rglob("*"):
            if path.is_file():
                path.unlink(missing_ok=True)
