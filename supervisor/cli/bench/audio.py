"""Sound without a library: a signal shaped like speech, and the length of a WAV file."""

from __future__ import annotations

import io
import wave
from array import array
from functools import cache
from math import pi, sin
from typing import Final

RATE: Final = 16_000
SECONDS: Final = 30  # Whisper's window
WAV_HEAD: Final = 44
_PHRASE_S: Final = 3


@cache
def murmur() -> bytes:
    """SECONDS of syllables, four a second, as WAV: a voice's pitch and overtones, rising and falling, with pauses.

    It has no words, but its loudness rises and falls like that of speech. Takes about 200 ms.
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
    """The length of a WAV with the usual head, by the file's size: a streamed head lacks the length. 0 for anything else."""
    a_second = int.from_bytes(content[28:32], "little")
    return (len(content) - WAV_HEAD) / a_second if content[:4] == b"RIFF" and a_second else 0.0
