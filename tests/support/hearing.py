"""Tiny speech recognition models and sound files for tests, made once per machine and kept in the user's cache.

`whisper()` and `converted()` are the same scripted Whisper for transformers and for CTranslate2, `cohere()` a CohereAsr;
`sounds()` is a folder of files of every kind (see generators/sounds.py), of a spoken sentence.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import wave
from array import array
from functools import cache
from math import pi, sin
from pathlib import Path

from tests.support import environments
from tests.support.build_llama_server import CACHE
from tests.support.generators import whisper as generator
from tests.support.generators import whisper_ggml as ggml_generator
from tests.support.limits import LIMIT_S

GENERATORS = Path(__file__).parent / "generators"
SAID = generator.SAID  # by every Whisper, in every window
COHERE_SAID = "one two three"
WORDS = list(zip(SAID.split(), generator.BOUNDS, generator.BOUNDS[1:], strict=False))
SENTENCES = {
    "en": "Good morning. Please write down what I am saying, and tell me when you are done.",
    "de": "Guten Morgen. Schreib bitte auf, was ich sage, und sag mir, wann du fertig bist.",
}


def python(runtime: str) -> Path:
    """The interpreter of an installed runtime."""
    return environments.installed(runtime) / runtime / "bin" / "python"


@cache
def whisper(*, multilingual: bool = True) -> Path:
    """For transformers."""
    name = "whisper" if multilingual else "whisper-english"
    return generator.checkpoint(where(name, "whisper.py"), multilingual=multilingual)


@cache
def converted(*, multilingual: bool = True) -> Path:
    """For CTranslate2."""
    source = whisper(multilingual=multilingual)
    return made("faster_whisper", source.with_name(f"{source.name}-ct2"), "whisper.py", str(source))


@cache
def ggml() -> Path:
    """For whisper.cpp."""
    place = where("whisper-ggml", "whisper_ggml.py")
    return ggml_generator.model(place / "ggml-tiny.bin")


@cache
def cohere() -> Path:
    """A CohereAsr for transformers."""
    return made("transformers", where("cohere", "cohere.py"), "cohere.py")


@cache
def sounds(language: str = "en") -> Path:
    """A folder of sound files."""
    place = where(f"sounds-{language}", "sounds.py")
    speech = place.with_suffix(".wav")
    if not place.exists():
        _speak(speech, language)
    return made("faster_whisper", place, "sounds.py", str(speech))


def _speak(path: Path, language: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if shutil.which("espeak-ng"):
        subprocess.run(["espeak-ng", "-v", language, "-w", path, SENTENCES[language]], check=True, timeout=LIMIT_S)
        return
    rate = 22050  # without a speaking program: a tone that rises and falls
    pitch = (sin(2 * pi * at * (220 + 40 * sin(at / 5000)) / rate) for at in range(5 * rate))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(array("h", (int(9000 * value) for value in pitch)).tobytes())


def where(name: str, source: str) -> Path:
    """Where a generator's model lies; another one for each version of the generator."""
    digest = hashlib.sha256((GENERATORS / source).read_bytes()).hexdigest()[:12]
    return CACHE / "models" / f"{name}-{digest}"


def made(runtime: str, place: Path, source: str, *arguments: str) -> Path:
    """What a generator writes into a folder, which appears once it is complete."""
    if not place.exists():
        aside = place.with_name(f"{place.name}.{os.getpid()}")
        place.parent.mkdir(parents=True, exist_ok=True)
        command = [str(python(runtime)), str(GENERATORS / source), *arguments, str(aside)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": ""}
        )
        assert done.returncode == 0, done.stderr
        with contextlib.suppress(OSError):  # somebody else was first
            aside.rename(place)
    return place
