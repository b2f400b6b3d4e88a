"""A `whisper-server` without whisper.cpp: it starts, hears and answers as examples/server does, and can misbehave.

It says what the tiny models of generators/whisper.py say, in the server's own words. One request at a time; WAV only; a
connection that is closed ends the work. What the last request asked for is in its log. The sound decides about tricks: a
first sample of 1 kills it, of 2 makes it fail, of 3 answers nonsense, of 4 works until the client has left.

`program()` is the real program where there is one (LLMUX_TEST_WHISPER_SERVER, or on PATH), else this.
"""

from __future__ import annotations

import email.parser
import email.policy
import io
import json
import math
import os
import select
import shutil
import signal
import threading
import wave
from http.server import ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

from tests.support import fake_http, fake_programs

OPTIONS = Path(__file__).parent / "options"
LOCK = threading.Lock()
SEGMENTS = [
    (0.0, 1.0, [(" one", 0.0, 0.5), (" two", 0.5, 1.0)]),
    (1.02, 2.0, [(" three", 1.02, 1.38), (" fo", 1.38, 1.5), ("ur", 1.5, 1.68), (" five", 1.68, 2.0)]),
]
LANGUAGES = {"en": "english", "de": "german", "fr": "french"}
WINDOW_S = 30


def real() -> Path | None:
    """The real program."""
    found = os.environ.get("LLMUX_TEST_WHISPER_SERVER") or shutil.which("whisper-server")
    return Path(found) if found else None


def program(folder: Path) -> Path:
    """The real one, or one in this folder."""
    if (found := real()) is not None:
        return found
    return fake(folder)


def fake(folder: Path) -> Path:
    """One in this folder."""
    return fake_programs.program(folder / "whisper-server", "fake_whisper_server.run")


class Answer(fake_http.Handler):
    def do_GET(self) -> None:
        if self.path == "/health":
            self.send(200, b'{"status":"ok"}')
        else:
            self.send(404, f"File Not Found ({self.path})".encode(), "text/plain")

    def do_POST(self) -> None:
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        parts = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + self.body())
        fields = {
            part.get_param("name", header="content-disposition"): part.get_payload(decode=True)
            for part in parts.iter_parts()
        }
        with LOCK:
            self.hear(fields)

    def hear(self, fields: dict[str, bytes]) -> None:
        if "file" not in fields:
            return self.send(400, b'{"error":"no \'file\' field in the request"}')
        try:
            with wave.open(io.BytesIO(fields.pop("file"))) as sound:
                samples, seconds = sound.readframes(sound.getnframes()), sound.getnframes() / sound.getframerate()
        except (wave.Error, EOFError):
            return self.send(400, b'{"error":"failed to read audio data"}')
        said = {name: value.decode() for name, value in fields.items()}
        print("asked:", json.dumps(said), flush=True)
        match int.from_bytes(samples[:2], "little", signed=True):
            case 1:
                os.kill(os.getpid(), signal.SIGKILL)
            case 2:
                return self.send(500, b'{"error":"failed to process audio"}')
            case 3:
                return self.send(200, b"not JSON", "text/plain")
            case 4:
                select.select([self.connection], [], [])
                print("client disconnected, aborted processing", flush=True)
                return None
        language = said["language"]
        answer = {
            "task": "translate" if said["translate"] == "true" else "transcribe",
            "language": LANGUAGES["en" if language == "auto" else language],
            "duration": seconds,
            "segments": [
                {
                    "id": number,
                    "text": "".join(word for word, *_ in words),
                    "start": begin + start,
                    "end": begin + end,
                    "tokens": [256 + at for at in range(len(words))],
                    "words": [
                        {"word": word, "start": begin + a, "end": begin + b, "probability": 1.0} for word, a, b in words
                    ],
                    "temperature": float(said["temperature"]),
                    "avg_logprob": 0.0,
                    "no_speech_prob": 0.0,
                }
                for begin in range(0, math.ceil(seconds), WINDOW_S)
                for number, (start, end, words) in enumerate(SEGMENTS)
            ],
        }
        if said["no_language_probabilities"] != "true":
            answer |= {"detected_language": "english", "detected_language_probability": 0.875}
        return self.send_json(200, answer)


def run(words: list[str]) -> int:
    print("argv:", json.dumps(words), flush=True)
    said = dict(pairwise(words))
    with open(said["--model"], "rb") as file:
        magic, vocabulary = file.read(4), file.read(4)
    if magic != b"lmgg" or int.from_bytes(vocabulary, "little") < 50_000:
        print("error: failed to initialize whisper context", flush=True)
        return 3
    server = ThreadingHTTPServer((said["--host"], int(said["--port"])), Answer)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever()
    return 0
