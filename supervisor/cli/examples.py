"""`llmux config example`: the configurations of the folder `config`, which the wheel holds inside this package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from supervisor.errors import InvalidRequestError

_PACKAGED: Final = Path(__file__).parents[1] / "config"
FOLDER: Final = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[2] / "config"
EVERY_KEY: Final = ("llmux.example.yaml", "llmux.schema.json")


def files(name: str | None) -> dict[str, str]:
    """The texts of an example's files by where they belong, the configuration first. None: the one with every key."""
    if name is None:
        return {file: (FOLDER / file).read_text(encoding="utf-8") for file in EVERY_KEY}
    folder = FOLDER / "examples" / name
    found = (path for path in folder.rglob("*") if path.is_file())
    paths = sorted(found, key=lambda path: (path.name != "llmux.yaml", path))
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in paths}


def write(texts: Mapping[str, str], folder: Path) -> tuple[Path, ...]:
    """Write them, readable for this user alone: keys will be in them.

    Raises InvalidRequestError where one is there already, and has written nothing then, or where it can't write.
    """
    paths = {folder / name: text for name, text in texts.items()}
    if there := [str(path) for path in paths if os.path.lexists(path)]:
        raise InvalidRequestError(f"{', '.join(there)}: there already. Name another folder with --to, or move it away.")
    try:
        for path, text in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600, exist_ok=False)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"{error.filename}: {error.strerror}. Name another folder with --to.") from error
    return tuple(paths)
