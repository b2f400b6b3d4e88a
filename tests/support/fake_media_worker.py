"""A worker that speaks, listens, paints and embeds, for the playground: stdlib only, every answer is fixed and real.

Called with a port, the MiB of memory to take and its name.

Speech is a second of a tone as WAV; a transcription tells the sample rate and length of the WAV it was given; an image is
one PNG of a single colour; embeddings are counts of letters, so that equal texts are alike and others less.
"""

from __future__ import annotations

import base64
import http.server
import io
import json
import math
import struct
import sys
import wave
import zlib

RATE = 8000


def tone() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        samples = (int(9000 * math.sin(2 * math.pi * 440 * i / RATE)) for i in range(RATE))
        sound.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return file.getvalue()


def picture(side: int = 96) -> bytes:
    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes((60, 100 + y, 180)) * side for y in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(b"".join(rows))) + part(b"IEND", b"")
    )


def heard(form: bytes) -> str:
    """What the WAV in a form is, in words."""
    at = form.find(b"RIFF")
    with wave.open(io.BytesIO(form[at:]), "rb") as sound:
        return f"{sound.getframerate()} Hz, {sound.getnchannels()} channel, heard {sound.getnframes() > 0}"


def letters(text: str) -> list[float]:
    return [float(text.lower().count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"]


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        print("asked for", self.path, flush=True)

    def give(self, content_type: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def give_json(self, value: object) -> None:
        self.give("application/json", json.dumps(value).encode())

    def do_GET(self) -> None:
        self.give_json({"status": "ok"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        match self.path.partition("?")[0]:
            case "/v1/audio/speech":
                self.give("audio/wav", tone())
            case "/v1/audio/transcriptions":
                self.give_json({"text": heard(body)})
            case "/v1/images/generations":
                count = json.loads(body)["n"]
                self.give_json({"data": [{"b64_json": base64.b64encode(picture()).decode()} for _ in range(count)]})
            case "/v1/embeddings":
                lines = json.loads(body)["input"]
                rows = [{"index": i, "embedding": letters(line)} for i, line in enumerate(lines)]
                self.give_json({"object": "list", "data": rows})
            case _:
                self.send_error(404)


if __name__ == "__main__":
    taken = bytearray(b"\1") * (int(sys.argv[2]) << 20)  # as a model would
    print(sys.argv[3], "speaks", flush=True)
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
