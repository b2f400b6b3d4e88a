"""The events of a Responses stream: errors in their shape, and what llama.cpp leaves out put in."""

from __future__ import annotations

import json

import pytest

from supervisor.dialects import dialect_of
from supervisor.dialects.responses import RESPONSES, ResponsesRepair
from supervisor.dialects.responses import stream_repair as module
from supervisor.errors import UnavailableError
from supervisor.gateway.error_response import error_event


def framed(*events):
    return b"".join(
        f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n".encode() for event in events
    )


def read(stream):
    return [json.loads(frame.partition(b"data: ")[2]) for frame in stream.split(b"\n\n") if b"data: " in frame]


LLAMA = framed(
    {"type": "response.created", "response": {"id": "r", "object": "response", "status": "in_progress"}},
    {"type": "response.output_item.added", "item": {"id": "rs_1", "type": "reasoning"}},
    {"type": "response.reasoning_text.delta", "delta": "hm", "item_id": "rs_1"},
    {"type": "response.output_item.added", "item": {"content": [], "id": "msg_1", "type": "message"}},
    {"type": "response.output_text.delta", "item_id": "msg_1", "delta": 'say "item_id":"rs_1"'},
    {"type": "response.output_item.done", "item": {"id": "rs_1", "type": "reasoning"}},
    {"type": "response.completed", "response": {"id": "r", "output": [{"id": "rs_1"}, {"id": "msg_1"}]}},
)


class TestCompletion:
    """Numbers, places and the empty output, wherever the stream is split."""

    @pytest.mark.parametrize("size", [1, 7, 100, 10_000])
    def test_llama_cpps(self, size):
        completion = ResponsesRepair("chat")
        pieces = [completion.feed(LLAMA[start : start + size]) for start in range(0, len(LLAMA), size)]
        events = read(b"".join([*pieces, completion.end()]))
        assert [event["sequence_number"] for event in events] == list(range(7))
        assert [event.get("output_index") for event in events] == [None, 0, 0, 1, 1, 0, None]
        assert [event.get("content_index") for event in events] == [None, None, 0, None, 0, None, None]
        begun = events[0]["response"]
        assert (begun["output"], begun["model"], begun["status"]) == ([], "chat", "in_progress")
        before = read(LLAMA)
        assert all(before[at].items() <= event.items() for at, event in enumerate(events) if at), "nothing else changed"

    def test_a_complete_one_passes_as_it_is(self):
        stream = framed(
            {"type": "response.created", "sequence_number": 0, "response": {}}, {"type": "x", "item_id": "y"}
        )
        completion = ResponsesRepair("chat")
        assert completion.feed(stream[:20]) + completion.feed(stream[20:]) + completion.end() == stream
        assert completion.feed(b"whatever") == b"whatever", "no longer looked at"

    def test_comments_and_what_follows_the_last_event(self):
        completion = ResponsesRepair("chat")
        assert completion.feed(b": comment\n\n: half") == b": comment\n\n"
        assert completion.end() == b": half"

    def test_other_ends_of_lines_are_not_waited_for(self):
        completion = ResponsesRepair("chat")
        first, second = LLAMA[:40], LLAMA[40:].replace(b"\n", b"\r\n")
        assert completion.feed(first) + completion.feed(second) == first + second
        assert completion.feed(b"whatever") == b"whatever"

    def test_an_endless_event_is_not_kept(self, monkeypatch):
        monkeypatch.setattr(module, "EVENT_LIMIT", 10)
        completion = ResponsesRepair("chat")
        assert completion.feed(b"data: {" + b"x" * 10) == b"data: {" + b"x" * 10


class TestErrors:
    """`event: error`, its fields on top, and the next number."""

    def test_in_band(self):
        error = UnavailableError("No room.", code="insufficient_memory")
        sent = framed({"type": "a", "sequence_number": 3}, {"type": "b", "sequence_number": 4})
        name, data = error_event(error, RESPONSES, sent).decode().strip().split("\n")
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: ")) == {
            "type": "error",
            "code": "insufficient_memory",
            "message": "No room.",
            "param": None,
            "sequence_number": 5,
        }

    def test_in_a_stream_without_numbers(self):
        """As llm-pool's."""
        sent = framed({"type": "response.output_text.delta", "delta": "Hel"})
        event = error_event(UnavailableError("No room.", code="insufficient_memory"), RESPONSES, sent)
        assert read(event) == [{"type": "error", "code": "insufficient_memory", "message": "No room.", "param": None}]

    def test_as_the_first_event(self):
        assert b'"sequence_number":0' in error_event(UnavailableError("x"), RESPONSES)

    @pytest.mark.parametrize("path", ["/v1/responses", "/responses"])
    def test_paths(self, path):
        assert dialect_of({"path": path, "headers": []}) is RESPONSES
        assert dialect_of({"path": f"{path}/input_tokens", "headers": []}) is RESPONSES

    @pytest.mark.parametrize(
        "path", ["/x/responses", "/v1/x/responses", "/v1/models/a/responses", "/v1/models/a/responses/input_tokens"]
    )
    def test_paths_of_others(self, path):
        """A model may be called so, and a worker may have such a path of its own."""
        assert dialect_of({"path": path, "headers": []}) is not RESPONSES
