"""Voices are files: a clip of a few seconds in a folder is the voice of that name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

SUFFIXES: Final = frozenset({".wav", ".flac", ".mp3", ".ogg"})
BUILT_IN: Final = "default"
BUILT_IN_FILE: Final = "conds.pt"


def clips(folder: Path | None) -> dict[str, Path]:
    """Clips by voice, sorted by name. A missing folder has none."""
    if folder is None or not folder.is_dir():
        return {}
    found = [file for file in sorted(folder.iterdir()) if file.suffix.lower() in SUFFIXES and file.is_file()]
    return {file.stem: file for file in found}


def voice_names(model: Path, folder: Path | None, aliases: Mapping[str, str]) -> list[str]:
    """All valid names of voices: clips, the model's own voice, aliases."""
    own = [BUILT_IN] if (model / BUILT_IN_FILE).is_file() else []
    return list(dict.fromkeys([*clips(folder), *own, *aliases]))
