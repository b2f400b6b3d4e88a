"""A daemon with one API dialect more, which only this file defines: `python -m tests.support.toy_dialect serve …`.

`POST /toy/say` takes `{"model": MODEL, "say": TEXT, "live": true}` and answers in text, live in lines of JSON.
"""

from __future__ import annotations

import json
from typing import ClassVar

import msgspec

from supervisor import dialects
from supervisor.cli.main import main
from supervisor.dialects.openai import OpenAI


class Say:
    path = "/v1/chat/completions"

    def request(self, fields):
        said = {key: msgspec.json.decode(value) for key, value in fields.items()}
        request = {
            "model": said["model"],
            "messages": [{"role": "user", "content": said["say"]}],
            "stream": said.get("live", False),
        }
        ignored = sorted(said.keys() - {"model", "say", "live"})
        return {key: msgspec.Raw(msgspec.json.encode(value)) for key, value in request.items()}, Said(ignored)


class Said:
    content_type = b"text/plain"
    stream_content_type = b"application/x-ndjson"
    names: ClassVar[dict[str, str]] = {}

    def __init__(self, ignored):
        self.ignored = ignored

    def answer(self, body):
        return json.loads(body)["choices"][0]["message"]["content"].encode() + b"\n"

    def stream(self):
        return Words()


class Words:
    def __init__(self):
        self.rest = b""

    def feed(self, piece):
        *events, self.rest = (self.rest + piece).split(b"\n\n")
        chunks = [json.loads(event[6:]) for event in events if event[6:] != b"[DONE]"]
        words = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
        return b"".join(json.dumps({"said": word}).encode() + b"\n" for word in words if word)

    def end(self):
        return b'{"said": "bye"}\n'

    @property
    def gathered(self):
        return len(self.rest)


class Toy(OpenAI):
    name = "toy"
    credential_headers = frozenset({b"x-toy-key"})
    keepalive = b'{"wait": true}\n'
    has_openai_errors = False

    def owns(self, path):
        return path == "/toy/say"

    def translation(self, method, path):
        return Say()

    def error(self, fields, status):
        return b'"sorry: %d %s"' % (status, fields["message"].encode())

    def routes(self, daemon):
        return []


if __name__ == "__main__":
    dialects.DIALECTS = (Toy(), *dialects.DIALECTS)
    main()
