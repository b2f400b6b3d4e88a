"""Streams of workers that end in their own ways: what is whole passes, and of the rest the end never reaches a client."""

from __future__ import annotations

import json

from supervisor.gateway.attempt import Outcome
from supervisor.gateway.filters.stream_end import END_OF, StreamJudge
from tests.support.cases import cases

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}\n\n'
PING = b": ping\n\n"


def event(reason=None, text="a", end="\n\n", **more):
    fields = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}], **more}
    return f"data: {json.dumps(fields)}{end}".encode()


def sent(pieces, path=CHAT):
    """What the client gets, and what is wrong with the stream."""
    outcome, out, error = Outcome(), b"", None
    judge = StreamJudge(END_OF[path])
    for number, piece in enumerate(pieces, 1):
        piece, error = judge.passed(piece, number == len(pieces), outcome.tail)
        outcome.keep(piece)
        out += piece
        if error is not None:
            break
    return out, error and error.message


CRLF = "\r\n\r\n"
LARGE = event("stop", token_ids=[*range(3000)])
ECHO = f"data: {json.dumps({'content': '', 'stop': True, 'prompt': 'x' * 60_000})}\n\n".encode()
COMPLETED = f"data: {json.dumps({'type': 'response.completed', 'response': {'instructions': 'x' * 6000}})}\n\n".encode()


@cases(
    ("path", "pieces"),
    [
        (CHAT, [event(), event("stop"), DONE]),
        (CHAT, [event(end=CRLF), event("stop", end=CRLF), b"data: [DONE]\r\n\r\n"]),
        (CHAT, [event(), event("stop"), *[PING] * 8, USAGE, DONE]),
        (CHAT, [event(), LARGE, DONE]),
        (CHAT, [event(), event("stop"), b"data: [DO", b"NE]\n\n"]),
        (CHAT, [bytes([byte]) for byte in event() + event("stop") + PING * 8 + USAGE + DONE]),
        (CHAT, [event(), event("stop", text="\ndata: [DONE]"), DONE]),
        (CHAT, [event(text="[DONE]"), event("stop")]),
        (CHAT, [event(), event("stop")[:-2]]),
        ("/completion", [b'data: {"content":"a","stop":false}\n\n', ECHO]),
        ("/completion", [b'data: {"content":"a","stop":false}\n\n', ECHO[:30], ECHO[30:20_000], ECHO[20_000:]]),
        ("/v1/responses", [COMPLETED]),
    ],
)
def test_a_whole_stream_passes(path, pieces):
    assert sent(pieces, path) == (b"".join(pieces), None)


@cases(
    "end",
    [
        [DONE],
        [b"data: [DONE]\r\n\r\n"],
        [b"data:[DONE]\n\n"],
        [b"data: [DO", b"NE]\n\n"],
        [DONE + b": bye\n\n"],
        [],
        [b""],
        [event(""), DONE],
        [event("abort"), DONE],
    ],
)
@cases("goes_on", [False, True])
def test_one_that_is_not_has_no_end(end, goes_on):
    """Also while its worker keeps the connection."""
    found, error = sent([event(), *end, *([PING] if goes_on else [])])
    assert "without saying" in error
    assert b"DONE" not in found


def test_a_failed_response_counts_as_failed():
    failed = b'event: response.failed\ndata: {"type":"response.failed","response":{}}\n\n'
    assert sent([failed], "/v1/responses") == (failed, "The worker ended its answer with an error.")


def test_an_error_in_two_pieces():
    found, error = sent([event(), b'data: {"err', b'or":{"message":"boom","code":500}}\n\n', DONE])
    assert (b"[DONE]" in found, error) == (False, "The worker ended its answer with an error.")


def test_tokens_that_only_its_timings_tell():
    outcome = Outcome()
    outcome.keep(
        b'data: {"stop":true,"generation_settings":{"max_tokens":4},"timings":{"prompt_n":7,"predicted_n":4}}\n\n'
    )
    assert outcome.usage()[:2] == (7, 4)
