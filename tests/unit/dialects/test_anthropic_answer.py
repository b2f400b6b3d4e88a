"""Chat completions become Anthropic's messages, whole and event by event."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.dialects.anthropic import ANTHROPIC
from supervisor.errors import UpstreamError
from tests.support.cases import cases
from tests.support.stream_ends import ended

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}}
TOKENS = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 6,
    "output_tokens": 4,
}
NO_TOKENS = dict.fromkeys(TOKENS, 0)
HELLO = [{"role": "user", "content": "Hello"}]


def answers(path="/v1/messages", **fields):
    request = {"model": "asked", "max_tokens": 5, "messages": HELLO, **fields}
    raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in request.items()}
    return ANTHROPIC.translation("POST", path).request(raw)[1]


def whole(message, finish="stop", *, usage=USAGE, stop_sequences=(), **choice):
    completion = {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "model": "worker",
        "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, **choice}],
        "usage": usage,
    }
    return json.loads(answers(stop_sequences=list(stop_sequences)).answer(json.dumps(completion).encode()))


def call(index, name=None, arguments=None, **fields):
    return {"index": index, "function": {"name": name, "arguments": arguments}, **fields}


def chunk(delta=None, finish=None, **fields):
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    value = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "model": "worker", "choices": choices, **fields}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def streamed(*pieces, **fields):
    stream = answers(stream=True, **fields).stream()
    return b"".join(map(stream.feed, pieces)) + ended(stream)


def events(text):
    """Its events' data; each event is named by its type."""
    found = []
    for event in text.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        found.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    assert text.endswith(b"\n\n")
    return found


def tell(*deltas, finish="stop", **fields):
    """The events of a stream of these deltas."""
    return events(streamed(*map(chunk, deltas), chunk({}, finish), chunk(usage=USAGE), b"data: [DONE]\n\n", **fields))


def start(index, **block):
    return {"type": "content_block_start", "index": index, "content_block": block}


def add(index, **delta):
    return {"type": "content_block_delta", "index": index, "delta": delta}


def stop(index):
    return {"type": "content_block_stop", "index": index}


BEGIN = [
    {
        "type": "message_start",
        "message": {
            "id": "msg_7",
            "type": "message",
            "role": "assistant",
            "model": "asked",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": NO_TOKENS,
        },
    },
    {"type": "ping"},
]


def end(reason, sequence=None, usage=TOKENS):
    delta = {"stop_reason": reason, "stop_sequence": sequence}
    return [{"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]


class TestWhole:
    """An answer at once."""

    def test_text(self):
        assert whole({"content": "Hello"}) == {
            "id": "msg_7",
            "type": "message",
            "role": "assistant",
            "model": "asked",
            "content": [{"type": "text", "text": "Hello"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": TOKENS,
        }

    @pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
    def test_thoughts_text_and_calls_in_this_order(self, field):
        calls = [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": ""}},
        ]
        told = whole({field: "Hm.", "content": "Yes.", "tool_calls": calls}, "tool_calls")
        assert told["content"] == [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Yes."},
            {"type": "tool_use", "id": "a", "name": "f", "input": {"x": [1, "é"]}},
            {"type": "tool_use", "id": "b", "name": "g", "input": {}},
        ]
        assert told["stop_reason"] == "tool_use"

    def test_a_call_without_an_id_gets_one(self):
        (block,) = whole({"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]})["content"]
        assert block["id"].startswith("toolu_")

    @pytest.mark.parametrize("arguments", ['{"x": ', "[1]", "x"])
    def test_arguments_that_are_no_object_are_kept(self, arguments):
        (block,) = whole({"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}]})["content"]
        assert block["input"] == {"arguments": arguments}

    @cases(
        ("finish", "reason"),
        [
            ("stop", "end_turn"),
            ("length", "max_tokens"),
            ("tool_calls", "tool_use"),
            ("content_filter", "refusal"),
            (None, "end_turn"),
            ("other", "end_turn"),
        ],
    )
    def test_stop_reasons(self, finish, reason):
        assert whole({"content": "x"}, finish)["stop_reason"] == reason

    def test_a_call_is_a_reason(self):
        assert whole({"tool_calls": [{"id": "a", "function": {"name": "f"}}]}, "stop")["stop_reason"] == "tool_use"

    @pytest.mark.parametrize(
        ("told", "expected"),
        [("END", ("stop_sequence", "END")), ("other", ("end_turn", None)), (7, ("end_turn", None))],
    )
    def test_a_stop_sequence_that_the_worker_tells(self, told, expected):
        answer = whole({"content": "x"}, stop_sequences=["END"], stop_reason=told)
        assert (answer["stop_reason"], answer["stop_sequence"]) == expected

    def test_a_refusal_is_text(self):
        assert whole({"refusal": "No."})["content"] == [{"type": "text", "text": "No."}]

    def test_nothing_said(self):
        answer = whole({"content": None}, usage=None)
        assert (answer["content"], answer["usage"]) == ([], NO_TOKENS)

    def test_without_a_name_the_worker_knows_it(self):
        body = b'{"model": "own", "choices": [{"message": {"content": "x"}}]}'
        told = json.loads(
            ANTHROPIC.translation("POST", "/v1/messages")
            .request({"max_tokens": msgspec.Raw(b"5"), "messages": msgspec.Raw(json.dumps(HELLO).encode())})[1]
            .answer(body)
        )
        assert told["model"] == "own"
        assert len(told["id"]) > len("msg_")

    @cases("body", [b"", b"x", b"{}", b"[]", b'{"choices": []}', b'{"choices": 5}'])
    def test_no_chat_completion(self, body):
        with pytest.raises(UpstreamError):
            answers().answer(body)


class TestCount:
    """Tokens that are only counted."""

    COUNT = "/v1/messages/count_tokens"

    def test_a_count(self):
        body = b'{"object": "response.input_tokens", "input_tokens": 12}'
        assert json.loads(answers(self.COUNT).answer(body)) == {"input_tokens": 12}

    @pytest.mark.parametrize("body", [b"x", b"{}", b'{"input_tokens": "many"}'])
    def test_no_count(self, body):
        with pytest.raises(UpstreamError):
            answers(self.COUNT).answer(body)

    def test_no_stream(self):
        with pytest.raises(UpstreamError):
            answers(self.COUNT).stream()


THOUGHT_TEXT_CALLS = (
    {"role": "assistant", "content": None},
    {"reasoning_content": "Hm"},
    {"reasoning_content": "."},
    {"content": "Let me "},
    {"content": "see é."},
    {"tool_calls": [call(0, "f", "", id="a", type="function")]},
    {"tool_calls": [call(0, arguments='{"x"')]},
    {"tool_calls": [call(0, arguments=": 1}")]},
    {"tool_calls": [call(1, "g", "{", id="b", type="function")]},
    {"tool_calls": [call(1, arguments="}")]},
)
ITS_EVENTS = [
    *BEGIN,
    start(0, type="thinking", thinking="", signature=""),
    add(0, type="thinking_delta", thinking="Hm"),
    add(0, type="thinking_delta", thinking="."),
    add(0, type="signature_delta", signature=""),
    stop(0),
    start(1, type="text", text=""),
    add(1, type="text_delta", text="Let me "),
    add(1, type="text_delta", text="see é."),
    stop(1),
    start(2, type="tool_use", id="a", name="f", input={}),
    add(2, type="input_json_delta", partial_json='{"x"'),
    add(2, type="input_json_delta", partial_json=": 1}"),
    stop(2),
    start(3, type="tool_use", id="b", name="g", input={}),
    add(3, type="input_json_delta", partial_json="{"),
    add(3, type="input_json_delta", partial_json="}"),
    stop(3),
    *end("tool_use"),
]


class TestStream:
    """An answer event by event."""

    def test_thoughts_text_and_calls(self):
        assert tell(*THOUGHT_TEXT_CALLS, finish="tool_calls") == ITS_EVENTS

    def test_the_worker_is_cut_anywhere(self):
        text = b"".join(map(chunk, THOUGHT_TEXT_CALLS)) + chunk({}, "tool_calls") + chunk(usage=USAGE)
        text += b"data: [DONE]\n\n"
        for newline in (b"\n", b"\r\n"):
            sent = text.replace(b"\n", newline)
            for at in range(len(sent) + 1):
                assert events(streamed(sent[:at], sent[at:])) == ITS_EVENTS
            assert events(streamed(*(sent[at : at + 1] for at in range(len(sent))))) == ITS_EVENTS

    def test_each_event_is_sent_at_once(self):
        stream = answers(stream=True).stream()
        assert events(stream.feed(chunk({"role": "assistant"}))) == BEGIN
        assert events(stream.feed(chunk({"content": "a"}))) == [
            start(0, type="text", text=""),
            add(0, type="text_delta", text="a"),
        ]
        assert stream.feed(chunk({}, "stop")) == b""

    def test_calls_in_one_event(self):
        calls = {"tool_calls": [call(0, "f", "{}", id="a"), call(1, "g", "{}", id="b")]}
        assert tell(calls)[2:] == [
            start(0, type="tool_use", id="a", name="f", input={}),
            add(0, type="input_json_delta", partial_json="{}"),
            stop(0),
            start(1, type="tool_use", id="b", name="g", input={}),
            add(1, type="input_json_delta", partial_json="{}"),
            stop(1),
            *end("tool_use"),
        ]

    def test_calls_without_numbers_begin_with_their_names(self):
        deltas = [{"tool_calls": [call(None, *piece)]} for piece in (("f", "{"), (None, "}"), ("g", "{}"))]
        told = [event for event in tell(*deltas) if event["type"].startswith("content_block_")]
        assert [event["index"] for event in told] == [0, 0, 0, 0, 1, 1, 1]
        assert [event["content_block"]["name"] for event in told if "content_block" in event] == ["f", "g"]

    def test_text_after_a_call_is_another_block(self):
        told = tell({"content": "a"}, {"tool_calls": [call(0, "f", id="a")]}, {"content": "b"})
        assert [event["content_block"]["type"] for event in told if "content_block" in event] == [
            "text",
            "tool_use",
            "text",
        ]

    def test_a_call_that_goes_on_after_another(self):
        with pytest.raises(UpstreamError):
            tell(*({"tool_calls": [call(index, "f", "{", id="a")]} for index in (0, 1, 0)))

    def test_nothing_said(self):
        assert tell({"role": "assistant", "content": ""}) == [*BEGIN, *end("end_turn")]

    def test_usage_beside_the_reason(self):
        assert events(streamed(chunk({"content": "a"}), chunk({}, "length", usage=USAGE)))[-2:] == end("max_tokens")

    def test_without_usage(self):
        assert events(streamed(chunk({"content": "a"}, "stop")))[-2:] == end("end_turn", usage=NO_TOKENS)

    def test_a_stop_sequence(self):
        choice = {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "END"}
        told = streamed(chunk({"content": "a"}), chunk(choices=[choice]), stop_sequences=["END"])
        assert events(told)[-2:] == end("stop_sequence", "END", NO_TOKENS)

    @cases(
        ("error", "kind", "message"),
        [
            ({"code": 500, "message": "CUDA error", "type": "server_error"}, "api_error", "CUDA error"),
            ({"code": 400, "message": "too long", "type": "BadRequestError"}, "invalid_request_error", "too long"),
            ({"code": "busy", "message": "later"}, "api_error", "later"),
            ({"code": 503, "message": "later"}, "overloaded_error", "later"),
            ("went wrong", "api_error", "went wrong"),
        ],
    )
    def test_an_error_of_the_worker_is_the_last_event(self, error, kind, message):
        sent = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
        told = events(streamed(chunk({"content": "a"}), sent, chunk({"content": "b"}, "stop")))
        assert told[:-1] == [*BEGIN, start(0, type="text", text=""), add(0, type="text_delta", text="a")]
        assert (told[-1]["type"], told[-1]["error"]["type"]) == ("error", kind)
        assert told[-1]["error"]["message"] == message

    def test_a_field_for_errors_without_one(self):
        assert tell({"content": "a"}) == events(
            streamed(chunk({"content": "a"}, error=None), chunk({}, "stop"), chunk(usage=USAGE))
        )

    @pytest.mark.parametrize(
        "sent", [(), (chunk({"content": "a"}),), (b"data: x\n\n",), (b'data: {"choices": 5}\n\n',)]
    )
    def test_a_stream_that_is_none_or_not_complete(self, sent):
        with pytest.raises(UpstreamError):
            streamed(*sent)

    @given(
        st.lists(
            st.one_of(
                st.fixed_dictionaries({"content": st.text()}),
                st.fixed_dictionaries({"reasoning": st.text()}),
                st.builds(lambda text: {"tool_calls": [call(None, "f", text, id="a")]}, st.text()),
            ),
            max_size=8,
        )
    )
    def test_blocks_are_opened_and_closed_in_turn_and_nothing_is_lost(self, deltas):
        told = tell(*deltas)
        opened, said, index = None, {"text": "", "thinking": "", "partial_json": ""}, -1
        for event in told[2:-2]:
            if event["type"] == "content_block_start":
                assert opened is None
                opened = index = index + 1
            assert event["index"] == opened
            if event["type"] == "content_block_stop":
                opened = None
            for field, value in event.get("delta", {}).items():
                if field in said:
                    said[field] += value
        assert opened is None
        assert said["text"] == "".join(delta.get("content", "") for delta in deltas)
        assert said["thinking"] == "".join(delta.get("reasoning", "") for delta in deltas)
        calls = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas if "tool_calls" in delta]
        assert said["partial_json"] == "".join(calls)
