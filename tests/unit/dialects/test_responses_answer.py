"""Chat completions become responses: whole ones, and streams event by event."""

from __future__ import annotations

import json
import time

import msgspec
import pytest

from supervisor.dialects.responses import RESPONSES
from supervisor.errors import UpstreamError
from supervisor.gateway.error_response import error_event
from supervisor.gateway.filters.translation import TargetModel
from tests.support.cases import cases
from tests.support.stream_ends import ended

USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
AS_RESPONSES = {
    "input_tokens": 10,
    "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 15,
}
TOKEN = {"token": "H", "bytes": [72], "logprob": -0.1, "top_logprobs": []}
EMPTY = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}


def answers(**fields):
    request = {"model": "asked", "input": "Hi", **fields}
    encoded = {key: msgspec.Raw(json.dumps(value).encode()) for key, value in request.items()}
    return RESPONSES.translation("POST", "/v1/responses").request(encoded)[1]


def whole(message, finish="stop", **keys):
    body = {"model": "theirs", "choices": [{"message": message, "finish_reason": finish, **keys}], "usage": USAGE}
    return json.loads(answers().answer(json.dumps(body).encode()))


def call(name, arguments, **keys):
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}, **keys}


def framed(*events):
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def deltas(*found, finish="stop"):
    events = [{"model": "theirs", "choices": [{"delta": delta}]} for delta in found]
    end = [{"choices": [{"delta": {}, "finish_reason": finish}]}, {"choices": [], "usage": USAGE}]
    return framed(*events, *end) + b"data: [DONE]\n\n"


def read(stream):
    """The events, each of which must have its type as the name, and the next number."""
    events = []
    for frame in stream.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event.pop("sequence_number") == len(events)
        events.append(event)
    return events


def streamed(stream, size=None, **fields):
    translation = answers(**fields).stream()
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)] if size else [stream]
    return read(b"".join([*map(translation.feed, pieces), ended(translation)]))


def kinds(events):
    return [event["type"].removeprefix("response.") for event in events]


def without_ids(value):
    """A response, with ids and times left out."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: without_ids(one) for key, one in value.items() if key not in {"id", "created_at", "completed_at"}}


class TestWhole:
    """The response object."""

    def test_a_text(self):
        told = whole({"content": "Hello"}, logprobs={"content": [TOKEN]})
        assert told["id"].startswith("resp_")
        assert told["output"][0].pop("id").startswith("msg_")
        assert told["completed_at"] >= told["created_at"] > 1_700_000_000
        part = EMPTY | {"text": "Hello", "logprobs": [TOKEN]}
        assert without_ids(told) == {
            "object": "response",
            "status": "completed",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": None,
            "max_tool_calls": None,
            "model": "asked",
            "output": [{"type": "message", "status": "completed", "role": "assistant", "content": [part]}],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "temperature": None,
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": None,
            "truncation": "disabled",
            "usage": AS_RESPONSES,
            "user": None,
            "metadata": {},
        }

    @pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
    def test_thoughts_and_calls(self, field):
        message = {"content": None, field: "Hm", "tool_calls": [call("a", "{}"), call("b", "[]", id=None)]}
        told = whole(message, "tool_calls")
        thought, first, second = told["output"]
        assert (told["status"], thought["type"], thought["summary"]) == ("completed", "reasoning", [])
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm"}]
        assert (first["type"], first["status"], first["call_id"]) == ("function_call", "completed", "call_a")
        assert (second["name"], second["arguments"], second["call_id"][:5]) == ("b", "[]", "call_")
        assert len({item["id"] for item in told["output"]}) == 3

    def test_a_refusal(self):
        assert whole({"refusal": "No."})["output"][0]["content"] == [{"type": "refusal", "refusal": "No."}]

    @pytest.mark.parametrize(
        ("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
    )
    def test_one_that_was_cut_short(self, finish, reason):
        told = whole({"reasoning_content": "Hm", "content": "Hel"}, finish)
        assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": reason})
        assert [item["status"] for item in told["output"]] == ["completed", "incomplete"]
        assert told["completed_at"] is None

    def test_one_that_says_nothing(self):
        assert whole({"content": ""})["output"] == []

    def test_without_usage_and_a_model(self):
        body = b'{"model": "theirs", "choices": [{"message": {"content": "x"}}]}'
        told = json.loads(answers(model=None).answer(body))
        assert (told["usage"], told["model"]) == (None, "theirs")

    @cases("body", [b"", b"{}", b'{"choices": []}', b"[1]", b"\xff"])
    def test_what_is_no_chat_completion(self, body):
        with pytest.raises(UpstreamError):
            answers().answer(body)


STREAM = deltas(
    {"role": "assistant", "content": ""},
    {"reasoning_content": "H"},
    {"reasoning_content": "mü"},
    {"content": "I "},
    {"content": "will."},
    {"tool_calls": [call("a", "", index=0)]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}, call("b", "{}", index=1)]},
    finish="tool_calls",
)


class TestStream:
    """Events in OpenAI's order."""

    def test_a_text(self):
        events = streamed(deltas({"content": "Hel"}, {"content": "lo"}))
        created, in_progress, added, part_added, first, second, done, part_done, item_done, completed = events
        assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
        assert created["response"] == in_progress["response"]
        begun = created["response"]
        assert (begun["status"], begun["output"], begun["usage"], begun["model"]) == ("in_progress", [], None, "asked")
        item = added["item"]
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        assert added == {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {"id": item["id"], "type": "message", "status": "in_progress", "role": "assistant", "content": []},
        }
        assert part_added == {"type": "response.content_part.added", **place, "part": EMPTY}
        text = {"type": "response.output_text.delta", **place, "logprobs": []}
        assert (first, second) == (text | {"delta": "Hel"}, text | {"delta": "lo"})
        assert done == {"type": "response.output_text.done", **place, "text": "Hello", "logprobs": []}
        part = EMPTY | {"text": "Hello"}
        assert part_done == {"type": "response.content_part.done", **place, "part": part}
        whole_item = item | {"status": "completed", "content": [part]}
        assert item_done == {"type": "response.output_item.done", "output_index": 0, "item": whole_item}
        response = completed["response"]
        assert (completed["type"], response["output"], response["usage"]) == (
            "response.completed",
            [whole_item],
            AS_RESPONSES,
        )
        assert begun.items() >= {key: response[key] for key in ("id", "created_at", "model", "tools")}.items()

    def test_thoughts_text_and_calls(self):
        events = streamed(STREAM)
        assert kinds(events) == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
        output = events[-1]["response"]["output"]
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
        assert [event["output_index"] for event in events if "item" in event] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert [event.get("content_index") for event in events[4:7]] == [0, 0, 0]
        done = events[19]
        assert (done["name"], done["arguments"], done["item_id"]) == ("a", '{"x": 1}', output[2]["id"])

    def test_it_ends_as_the_whole_answer(self):
        message = {
            "reasoning_content": "Hmü",
            "content": "I will.",
            "tool_calls": [call("a", '{"x": 1}'), call("b", "{}")],
        }
        assert without_ids(streamed(STREAM)[-1]["response"]) == without_ids(whole(message, "tool_calls"))

    @cases("stream", [STREAM, STREAM.replace(b"\n", b"\r\n"), STREAM.removesuffix(b"\n\n")])
    @cases("size", [1, 2, 3, 7, 64])
    def test_pieces_may_end_anywhere(self, stream, size):
        assert without_ids(streamed(stream, size)[-1]) == without_ids(streamed(STREAM)[-1])
        assert kinds(streamed(stream, size)) == kinds(streamed(STREAM))

    def test_cut_at_each_byte(self):
        expected = kinds(streamed(STREAM))
        for at in range(len(STREAM)):
            translation = answers().stream()
            told = translation.feed(STREAM[:at]) + translation.feed(STREAM[at:]) + translation.end()
            assert kinds(read(told)) == expected

    @pytest.mark.parametrize(
        ("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
    )
    def test_one_that_was_cut_short(self, finish, reason):
        *_, item, last = streamed(deltas({"reasoning": "Hm"}, {"content": "Hel"}, finish=finish))
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
        assert last["response"]["incomplete_details"] == {"reason": reason}
        assert [one["status"] for one in last["response"]["output"]] == ["completed", "incomplete"]
        assert item["item"]["status"] == "incomplete"

    def test_a_refusal(self):
        events = streamed(deltas({"refusal": "No"}, {"refusal": "."}))
        assert kinds(events)[3:8] == [
            "content_part.added",
            "refusal.delta",
            "refusal.delta",
            "refusal.done",
            "content_part.done",
        ]
        assert (events[6]["refusal"], events[7]["part"]) == ("No.", {"type": "refusal", "refusal": "No."})

    def test_logprobs(self):
        choice = {"delta": {"content": "H"}, "logprobs": {"content": [TOKEN]}}
        nothing = {"delta": {"content": ""}, "logprobs": {"content": [TOKEN]}}
        events = streamed(
            framed({"choices": [nothing]}, {"choices": [choice]}, {"choices": [nothing | {"finish_reason": "stop"}]})
        )
        assert [event["logprobs"] for event in events if "logprobs" in event] == [[TOKEN], [TOKEN], [TOKEN, TOKEN]]
        assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [TOKEN, TOKEN]

    def test_calls_without_numbers(self):
        stream = deltas(
            {"tool_calls": [call("a", "{}")]}, {"tool_calls": [call("b", "{}"), {"function": {"arguments": " "}}]}
        )
        assert [item["arguments"] for item in streamed(stream)[-1]["response"]["output"]] == ["{}", "{} "]

    def test_a_call_that_goes_on_after_its_end(self):
        stream = deltas({"tool_calls": [call("a", "", index=0)]}, {"tool_calls": [call("b", "", index=1)]})
        late = deltas({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]})
        translation = answers().stream()
        translation.feed(stream)
        with pytest.raises(UpstreamError):
            translation.feed(late)

    def test_one_that_says_nothing(self):
        assert kinds(streamed(deltas())) == ["created", "in_progress", "completed"]

    @pytest.mark.parametrize("stream", [b"", b"data: [DONE]\n\n", framed({"choices": [{"delta": {"content": "Hel"}}]})])
    def test_one_that_comes_to_no_end(self, stream):
        with pytest.raises(UpstreamError, match="without saying that it is complete"):
            streamed(stream)

    def test_what_is_no_chat_completion(self):
        with pytest.raises(UpstreamError):
            answers().stream().feed(b"data: [1]\n\n")


class TestFailures:
    """Of a worker, in the middle of its stream."""

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            ({"message": "out of luck", "code": 500}, "server_error"),
            ({"message": "out of luck", "code": "bad_luck"}, "bad_luck"),
            ({"message": "the request exceeds the available context size"}, "context_length_exceeded"),
            ("out of luck", "server_error"),
        ],
    )
    def test_the_response_failed_and_nothing_follows(self, error, code):
        stream = framed({"choices": [{"delta": {"content": "Hel"}}]}, {"error": error}) + deltas({"content": "lo"})
        for size in (1, None):
            *_, before, last = streamed(stream, size)
            assert (before["type"], last["type"]) == ("response.output_text.delta", "response.failed")
            assert (last["response"]["status"], last["response"]["error"]["code"]) == ("failed", code)
            assert last["response"]["error"]["message"] in {
                "out of luck",
                "the request exceeds the available context size",
            }
            (item,) = last["response"]["output"]
            assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hel")

    def test_at_its_beginning(self):
        events = streamed(framed({"error": {"message": "out of luck"}}))
        assert kinds(events) == ["created", "in_progress", "failed"]

    def test_what_breaks_it_off_has_the_next_number(self):
        translation = answers().stream()
        sent = translation.feed(framed({"choices": [{"delta": {"content": '"sequence_number":99,' + "x" * 9000}}]}))
        error = error_event(UpstreamError("It broke off."), RESPONSES, sent[-4096:])
        assert [
            json.loads(frame.partition("data: ")[2])["sequence_number"]
            for frame in (sent + error).decode().split("\n\n")
            if frame
        ] == [0, 1, 2, 3, 4, 5]

    def test_what_comes_before_any_event_is_no_first_one(self):
        """OpenAI's own SDKs raise at any event before `response.created`."""
        created, error = read(error_event(UpstreamError("It never began."), RESPONSES))
        assert (created["type"], created["response"]["object"], created["response"]["output"]) == (
            "response.created",
            "response",
            [],
        )
        assert (error["type"], error["message"], error["param"]) == ("error", "It never began.", None)


class Times:
    """Of a request that came half a second before its worker got it."""

    def __init__(self):
        self.admitted_at = time.monotonic()
        self.entered_at = self.arrived_at = self.admitted_at - 0.5


class TestMetrics:
    """llm-pool's stand beside OpenAI's fields, where the times are known."""

    def asked(self):
        fields = {"model": msgspec.Raw(b'"asked"'), "input": msgspec.Raw(b'"Hi"')}
        return RESPONSES.translation("POST", "/v1/responses").of(TargetModel(), Times()).request(fields)[1]

    def test_of_a_whole_answer(self):
        body = {
            "choices": [{"message": {"content": "Hello"}}],
            "usage": USAGE,
            "timings": {"prompt_ms": 3, "predicted_ms": 4},
        }
        metrics = json.loads(self.asked().answer(json.dumps(body).encode()))["metrics"]
        assert (metrics["engine_queue_wait_ms"], metrics["engine_output_tokens"]) == (500, 5)
        assert (metrics["gpu_time_to_first_token_ms"], metrics["gpu_generate_total_ms"]) == (3, 7)
        assert metrics["engine_tokenize_ms"] is None
        assert "metrics" not in whole({"content": "Hello"})

    def test_of_a_stream(self):
        stream = self.asked().stream()
        events = read(stream.feed(deltas({"content": "Hello"})) + stream.end())
        assert [("metrics" in event.get("response", {})) for event in events] == [False] * (len(events) - 1) + [True]
        metrics = events[-1]["response"]["metrics"]
        assert metrics["engine_prompt_tokens"] == 10
        assert None not in (metrics["gpu_time_to_first_token_ms"], metrics["backend_inference_wall_ms"])


class TestCustomTools:
    """A call of a custom tool has the tool's text, not a function's arguments."""

    TOOLS = ({"type": "custom", "name": "exec"},)

    @pytest.mark.parametrize(("arguments", "text"), [('{"input":"ls\\n"}', "ls\n"), ("ls", "ls"), ("[1]", "[1]")])
    def test_whole(self, arguments, text):
        message = {"content": None, "tool_calls": [call("exec", arguments)]}
        body = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
        (item,) = json.loads(answers(tools=self.TOOLS).answer(json.dumps(body).encode()))["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "exec", text)
        assert "arguments" not in item

    def test_streamed(self):
        pieces = [call("exec", '{"inp', index=0), {"index": 0, "function": {"arguments": 'ut":"ls"}'}}]
        stream = deltas(*({"tool_calls": [piece]} for piece in pieces), finish="tool_calls")
        events = streamed(stream, tools=self.TOOLS)
        assert [event["type"] for event in events[2:-1]] == [
            "response.output_item.added",
            "response.custom_tool_call_input.delta",
            "response.custom_tool_call_input.done",
            "response.output_item.done",
        ]
        assert (events[3]["delta"], events[4]["input"]) == ("ls", "ls")
        assert events[-1]["response"]["output"] == [events[5]["item"]]
