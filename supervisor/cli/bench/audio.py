"""Sound without a library: something that is shaped like speech, and how long a WAV is."""

from __future__ import annotations

import io
import wave
from array import array
from functools import cache
from math import pi, sin
from typing import Final

RATE: Final = 16_000
SECONDS: Final = 30  # what Whisper hears at once
WAV_HEAD: Final = 44
_PHRASE_S: Final = 3


@cache
def murmur() -> bytes:
    """SECONDS of syllables, four a second, as WAV: a voice's pitch and overtones, rising and falling, with pauses.

    Nobody understands it, but it is loud where speech is loud. About 200 ms.
    """
    phrase = array("h")
    phase = 0.0
    for at in range(_PHRASE_S * RATE):
        seconds = at / RATE
        phase += 2 * pi * (130 + 30 * sin(2 * pi * 0.7 * seconds)) / RATE
        loud = max(0.0, sin(2 * pi * 4 * seconds)) if seconds < _PHRASE_S - 0.5 else 0.0
        vowel = 0.5 + 0.5 * sin(2 * pi * 1.3 * seconds)
        tone = sin(phase) + 0.6 * sin(4 * phase) * vowel + 0.4 * sin(9 * phase) * (1 - vowel)
        phrase.append(int(9000 * loud * tone / 2))
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(RATE)
        written.writeframes(phrase.tobytes() * (SECONDS // _PHRASE_S))
    return file.getvalue()


def seconds_of(content: bytes) -> float:
    """How long a WAV is; 0 for anything else. A head that was written before the length was known doesn't count."""
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        return 0.0
    at, a_second = 12, 0
    while at + 8 <= len(content):
        name, size = content[at : at + 4], int.from_bytes(content[at + 4 : at + 8], "little")
        at += 8
        if name == b"fmt ":
            a_second = int.from_bytes(content[at + 8 : at + 12], "little")
        elif name == b"data":
            there = len(content) - at
            return min(size or there, there) / a_second if a_second else 0.0
        at += size + size % 2
    return 0.0
