"""Why an answer ended, of workers that speak Anthropic's messages themselves."""

from __future__ import annotations

import json

import msgspec
import pytest

from supervisor.dialects.anthropic import ANTHROPIC, stops
from tests.support.cases import cases

ASKED = {"stop_sequences": msgspec.Raw(b'["END"]')}
DELTA = {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": "END"}, "usage": {}}


def passed(*pieces, stream=False):
    completion = ANTHROPIC.repair("m", ASKED, stream=stream)
    return b"".join([*(completion.feed(piece) for piece in pieces), completion.end()])


def whole(**more):
    return {"content": [{"type": "text", "text": 'é"'}], "stop_reason": "end_turn", "stop_sequence": "END", **more}


@pytest.mark.parametrize("raw", [None, b"null", b"[]"])
def test_nothing_is_looked_at_where_no_text_ends_the_answer(raw):
    fields = {} if raw is None else {"stop_sequences": msgspec.Raw(raw)}
    assert ANTHROPIC.repair("m", fields, stream=True) is None


class TestWhole:
    """A whole answer."""

    def test_a_text_ended_it(self):
        body = json.dumps(whole()).encode()
        assert json.loads(passed(body[:20], body[20:])) == whole(stop_reason="stop_sequence")

    @pytest.mark.parametrize(
        "more",
        [
            {"stop_sequence": None},
            {"stop_reason": "tool_use"},
            {"stop_reason": "stop_sequence"},
            {"stop_reason": None, "content": [{"type": "tool_use", "input": DELTA["delta"]}]},
        ],
    )
    def test_all_others_stay_byte_for_byte(self, more):
        body = json.dumps(whole(**more)).encode()
        assert passed(body) == body

    @pytest.mark.parametrize("body", [b"", b"no JSON", b"[]"])
    def test_what_is_none(self, body):
        assert passed(body) == body


class TestStream:
    """A stream, in whatever pieces it comes."""

    @cases("separators", [(",", ":"), (", ", ": ")])
    @cases("size", [1, 7, 1000])
    def test_a_text_ended_it(self, size, separators):
        text = b"event: message_delta\ndata: " + json.dumps(DELTA, separators=separators).encode() + b"\n\n"
        told = passed(*(text[at : at + size] for at in range(0, len(text), size)), stream=True)
        mended = DELTA | {"delta": {"stop_reason": "stop_sequence", "stop_sequence": "END"}}
        assert told == b"event: message_delta\ndata: " + json.dumps(mended, separators=separators).encode() + b"\n\n"

    def test_all_else_stays(self):
        quoted = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": json.dumps(DELTA)}}
        ended = {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}}
        text = b"".join(b"data: " + json.dumps(event).encode() + b"\r\n\r\n" for event in (quoted, ended))
        assert passed(text, stream=True) == text

    def test_lines_come_at_once(self):
        completion = ANTHROPIC.repair("m", ASKED, stream=True)
        assert completion.feed(b"event: ping\nda") == b"event: ping\n"
        assert completion.feed(b"ta: {}\n\n") == b"data: {}\n\n"

    def test_a_line_without_end_passes(self, monkeypatch):
        monkeypatch.setattr(stops, "LINE_LIMIT", 10)
        completion = ANTHROPIC.repair("m", ASKED, stream=True)
        assert completion.feed(b"x" * 20) == b"x" * 20
