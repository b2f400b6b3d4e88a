"""A model that is as fast as its device: quick where it sees a GPU, slow where it doesn't. Standard library only.

`--quick` and `--slow` are seconds a token; its last request goes to the file `--asked-to`; it speaks two seconds of silence, streamed as a WAV of unknown length, and
compares documents. A start leaves the file `--started`.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import time
from pathlib import Path

RATE = 8000
SPEECH_S = 2


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    token_s: float
    asked_to: Path | None

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_json({"status": "ok"})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.asked_to is not None:
            self.asked_to.write_text(json.dumps(request))
        if self.path == "/v1/rerank":
            self.send_json(
                {"results": [{"index": at, "relevance_score": 0.5} for at in range(len(request["documents"]))]}
            )
        elif self.path == "/v1/audio/speech":
            assert request["response_format"] == "wav"
            self.stream("audio/wav", self.speech())
        else:
            self.stream("text/event-stream", self.tokens(request["max_tokens"]))

    def speech(self):
        unknown = b"\xff\xff\xff\xff"
        form = b"".join(
            n.to_bytes(size, "little") for n, size in ((1, 2), (1, 2), (RATE, 4), (2 * RATE, 4), (2, 2), (16, 2))
        )
        yield b"RIFF" + unknown + b"WAVEfmt " + (16).to_bytes(4, "little") + form + b"data" + unknown
        for _ in range(SPEECH_S * 10):
            time.sleep(self.token_s)
            yield bytes(2 * RATE // 10)

    def tokens(self, count):
        yield event({"choices": [{"delta": {"role": "assistant", "content": None}}]})
        for _ in range(count):
            time.sleep(self.token_s)
            yield event({"choices": [{"delta": {"content": "two tokens "}}]})
        yield event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        yield event({"choices": [], "usage": {"completion_tokens": 2 * count}})
        yield b"data: [DONE]\n\n"

    def send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, kind, pieces):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")


def event(value: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--port", type=int)
    flags.add_argument("--quick", type=float, default=0.001)
    flags.add_argument("--slow", type=float, default=0.03)
    flags.add_argument("--started", type=Path)
    flags.add_argument("--asked-to", type=Path)
    options = flags.parse_args()
    if options.started is not None:
        options.started.touch()
    Answer.asked_to = options.asked_to
    Answer.token_s = options.quick if os.environ["CUDA_VISIBLE_DEVICES"] else options.slow
    http.server.ThreadingHTTPServer(("127.0.0.1", options.port), Answer).serve_forever()


if __name__ == "__main__":
    main()
