"""Streams of workers that end in their own ways: what is whole passes, and of the rest the end never reaches a client."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from supervisor.errors import LlmuxError
from supervisor.proxy.forward import Outcome, _send_body
from supervisor.proxy.stream_end import END_OF

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}\n\n'
PING = b": ping\n\n"


def event(reason=None, text="a", end="\n\n", **more):
    fields = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}], **more}
    return f"data: {json.dumps(fields)}{end}".encode()


class Response:
    """A worker's, of these pieces."""

    def __init__(self, pieces):
        self._pieces = list(pieces)

    @property
    def drained(self):
        return not self._pieces

    async def next_chunk(self):
        return self._pieces.pop(0) if self._pieces else b""


CLOCK = SimpleNamespace(loop=SimpleNamespace(time=lambda: 0.0))


async def sent(pieces, path=CHAT):
    """What the client gets, and what is wrong with the stream."""
    out = bytearray()

    async def send(message):
        out.extend(message["body"])

    outcome = Outcome()
    try:
        await _send_body(send, Response(pieces), outcome, 0.0, CLOCK, END_OF[path])
    except LlmuxError as error:
        return bytes(out), error.message, outcome
    return bytes(out), None, outcome


CRLF = "\r\n\r\n"
LARGE = event("stop", token_ids=[*range(3000)])
ECHO = f"data: {json.dumps({'content': '', 'stop': True, 'prompt': 'x' * 60_000})}\n\n".encode()
COMPLETED = f"data: {json.dumps({'type': 'response.completed', 'response': {'instructions': 'x' * 6000}})}\n\n".encode()


@pytest.mark.parametrize(
    ("path", "pieces"),
    [
        (CHAT, [event(), event("stop"), DONE]),
        (CHAT, [event(end=CRLF), event("stop", end=CRLF), b"data: [DONE]\r\n\r\n"]),
        (CHAT, [event(), event("stop"), *[PING] * 8, USAGE, DONE]),
        (CHAT, [event(), LARGE, DONE]),
        (CHAT, [event(), event("stop"), b"data: [DO", b"NE]\n\n"]),
        (CHAT, [event(), event("stop", text="\ndata: [DONE]"), DONE]),
        (CHAT, [event(text="[DONE]"), event("stop")]),
        (CHAT, [event(), event("stop")[:-2]]),
        ("/completion", [b'data: {"content":"a","stop":false}\n\n', ECHO]),
        ("/completion", [b'data: {"content":"a","stop":false}\n\n', ECHO[:30], ECHO[30:20_000], ECHO[20_000:]]),
        ("/v1/responses", [COMPLETED]),
    ],
)
async def test_a_whole_stream_passes(path, pieces):
    found, error, _ = await sent(pieces, path)
    assert (found, error) == (b"".join(pieces), None)


@pytest.mark.parametrize(
    "end",
    [
        [DONE],
        [b"data: [DONE]\r\n\r\n"],
        [b"data:[DONE]\n\n"],
        [b"data: [DO", b"NE]\n\n"],
        [DONE + b": bye\n\n"],
        [],
        [event(""), DONE],
        [event("abort"), DONE],
    ],
)
async def test_one_that_is_not_has_no_end(end):
    found, error, outcome = await sent([event(), *end])
    assert "without saying" in error
    assert b"DONE" not in found
    assert outcome.bytes_sent == len(found)


async def test_a_failed_response_counts_as_failed():
    failed = b'event: response.failed\ndata: {"type":"response.failed","response":{}}\n\n'
    found, error, _ = await sent([failed], "/v1/responses")
    assert (found, error) == (failed, "The worker ended its answer with an error.")


async def test_tokens_that_only_its_timings_tell():
    last = b'data: {"stop":true,"generation_settings":{"max_tokens":4},"timings":{"prompt_n":7,"predicted_n":4}}\n\n'
    *_, outcome = await sent([last], "/completion")
    assert outcome.usage()[:2] == (7, 4)
