"""What translations see of a worker's stream, whoever's it is."""

from __future__ import annotations

import json

import pytest

from supervisor.dialects.chat import ChatStream


class Seen(ChatStream):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.events = []
        self.errors = []

    def event(self, answer):
        self.events.append(answer)
        return b""

    def failed(self, error):
        self.errors.append(error)
        return b""

    def over(self):
        return b""


def seen(*chunks):
    stream = Seen()
    for chunk in chunks:
        stream.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    return stream


def calls(*pieces, index=0):
    named = [{"function": {"name": name}} if name else {"function": {"arguments": "{}"}} for name in pieces]
    return {"choices": [{"index": index, "delta": {"tool_calls": named}}]}


def test_a_call_without_a_number_begins_with_its_name():
    events = seen(calls("f"), calls(None), calls("g", None)).events
    assert [piece.index for event in events for piece in event.choices[0].delta.tool_calls] == [0, 0, 1, 1]


def test_only_the_first_answer_counts():
    """A configuration may ask a worker for several, for which no translated API has a place."""
    events = seen(calls("f"), calls("g", index=1), {"choices": [*calls("h", index=1)["choices"], {"index": 0}]}).events
    assert [[choice.index for choice in event.choices] for event in events] == [[0], [], [0]]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        ({"message": "Too long", "code": 400}, 400, "Too long"),
        ({"message": "Odd", "code": "odd"}, 500, "Odd"),
        ({"message": "Odd", "code": 7}, 500, "Odd"),
        ("Out of memory", 500, "Out of memory"),
    ],
)
def test_an_error_ends_it(error, status, message):
    stream = seen({"error": error}, calls("f"))
    assert [(told.status, told.message) for told in stream.errors] == [(status, message)]
    assert stream.events == []
