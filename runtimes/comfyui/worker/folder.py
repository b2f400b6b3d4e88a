"""The worker's own folder, for what clients send and get."""

from __future__ import annotations

from typing import Final

from runtimes.sdk.own_folder import OwnFolder

PREFIX: Final = "llmux-comfy-"
KINDS: Final = ("input", "output", "temp")


class Folder(OwnFolder):
    """Made at once, with a folder for each kind in it."""

    def __init__(self) -> None:
        super().__init__(PREFIX)
        for kind in KINDS:
            (self.path / kind).mkdir()

    def clear(self) -> None:
        """Delete all files in it."""
        for path in self.path.rglob("*"):
            if path.is_file():
                path.unlink(missing_ok=True)
