"""Sounds, pictures and vectors of the fakes, all real: standard library only."""

from __future__ import annotations

import base64
import io
import json
import math
import struct
import wave
import zlib

RATE = 8000
SIDE = 96


def answer(path: str, body: bytes) -> tuple[str, bytes]:
    """A tone of a second; the sample rate and length of the WAV in a form; pictures of one colour; counts of letters."""
    if path == "/v1/audio/speech":
        return "audio/wav", tone()
    if path == "/v1/audio/transcriptions":
        found: object = {"text": heard(body)}
    elif path == "/v1/images/generations":
        picture = {"b64_json": base64.b64encode(png(SIDE, SIDE, bytes((60, 148, 180)) * SIDE)).decode()}
        found = {"data": [picture] * json.loads(body)["n"]}
    else:  # equal texts are alike, others less
        rows = [{"index": i, "embedding": letters(line)} for i, line in enumerate(json.loads(body)["input"])]
        found = {"object": "list", "data": rows}
    return "application/json", json.dumps(found).encode()


def tone() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        samples = (int(9000 * math.sin(2 * math.pi * 440 * i / RATE)) for i in range(RATE))
        sound.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return file.getvalue()


def endless_head() -> bytes:
    """Of a WAV whose length is unknown."""
    form = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    return b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<I", len(form)) + form + b"data\xff\xff\xff\xff"


def heard(form: bytes) -> str:
    """What the WAV in a form is, in words."""
    with wave.open(io.BytesIO(form[form.find(b"RIFF") :]), "rb") as sound:
        return f"{sound.getframerate()} Hz, {sound.getnchannels()} channel, heard {sound.getnframes() > 0}"


def png(width: int, height: int, line: bytes) -> bytes:
    """Each row is `line`: three bytes a pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + line) * height
    head = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def letters(text: str) -> list[float]:
    return [float(text.lower().count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"]
