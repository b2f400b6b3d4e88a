"""What stands in for Chatterbox: clips, checkpoints with hardly anything in them, an environment."""

from __future__ import annotations

import json
import struct
import wave
from pathlib import Path

import pytest

from runtimes.chatterbox.adapter import OTHERS, WEIGHTS
from tests.support import fake_chatterbox


def clip(path: Path, seconds: float = 6.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(24000)
        file.writeframes(b"".join(struct.pack("<h", (i * 37) % 8000) for i in range(int(24000 * seconds))))


def checkpoint(folder: Path, variant: str) -> Path:
    """The files that a variant has, with hardly anything in them."""
    folder.mkdir(parents=True, exist_ok=True)
    head = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    for name in (*WEIGHTS[variant], *OTHERS[variant]):
        (folder / name).write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
    return folder


@pytest.fixture(scope="module")
def runtimes_dir(tmp_path_factory) -> Path:
    """An environment `chatterbox` of what its worker needs beside the library, and our replacement of that."""
    folder = tmp_path_factory.mktemp("runtimes")
    fake_chatterbox.environment(folder / "chatterbox")
    return folder
