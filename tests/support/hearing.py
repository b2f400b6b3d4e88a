"""Tiny speech recognition models and sound files for tests, made once per machine and kept in the user's cache.

`whisper()` and `converted()` are the same scripted Whisper for transformers and for CTranslate2, `cohere()` a CohereAsr;
`sounds()` is a folder of files of every kind (see generators/sounds.py). No model here understands what it hears.
"""

from __future__ import annotations

import wave
from array import array
from math import pi, sin
from pathlib import Path

from tests.support.generators import whisper as generator
from tests.support.generators import whisper_ggml as ggml_generator
from tests.support.made_once import generated, made, program, python

__all__ = ["python"]

EXTENSION_FIELDS = generator.EXTENSION_FIELDS  # by every Whisper, in every window
COHERE_SAID = "one two three"
WORDS = list(zip(EXTENSION_FIELDS.split(), generator.BOUNDS, generator.BOUNDS[1:], strict=False))
RATE, SAMPLES = 22050, 96128  # of the sound: no whole number of milliseconds


def whisper(*, multilingual: bool = True) -> Path:
    """For transformers."""
    name = "whisper" if multilingual else "whisper-english"
    return made(
        name,
        lambda folder: generator.checkpoint(folder, multilingual=multilingual),
        program("whisper"),
        multilingual,
    )


def converted(*, multilingual: bool = True) -> Path:
    """For CTranslate2."""
    return generated("whisper-ct2", "whisper", "faster_whisper", source=str(whisper(multilingual=multilingual)))


def ggml() -> Path:
    """For whisper.cpp."""

    def write(folder: Path) -> None:
        folder.mkdir()
        ggml_generator.model(folder / "ggml-tiny.bin")

    return made("whisper-ggml", write, program("whisper_ggml")) / "ggml-tiny.bin"


def cohere() -> Path:
    """A CohereAsr for transformers."""
    return generated("cohere", "cohere", "transformers")


def sounds() -> Path:
    """A folder of sound files."""
    return generated("sounds", "sounds", "faster_whisper", speech=str(made("sound.wav", _rise_and_fall, None)))


def _rise_and_fall(path: Path) -> None:
    pitch = (sin(2 * pi * at * (220 + 40 * sin(at / 5000)) / RATE) for at in range(SAMPLES))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(array("h", (int(9000 * value) for value in pitch)).tobytes())
