"""Ollama's API in both directions: requests, whole answers, lines of streams, embeddings, names and refusals."""

from __future__ import annotations

import asyncio
import json
import re
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.dialects import dialect_of
from supervisor.dialects.ollama import OLLAMA
from supervisor.dialects.ollama.decode import TRANSLATIONS
from supervisor.dialects.openai import OPENAI
from supervisor.errors import InvalidRequestError, UnavailableError, UpstreamError
from supervisor.gateway.body.body import KEEP_ALIVE
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.error_response import error_event
from tests.support.cases import cases
from tests.support.stream_ends import ended

HELLO = [{"role": "user", "content": "hello"}]
CALL = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
PNG = "iVBORw0KGgoAAAANSUhEUg=="


def asked(path, **fields):
    """The canonical request, and what its answers become."""
    raw = {key: msgspec.Raw(json.dumps(value).encode()) for key, value in fields.items()}
    translation = OLLAMA.required_translation("POST", path, raw) or TRANSLATIONS[path]
    mapped, answers = translation.request(raw)
    return {key: json.loads(bytes(value)) for key, value in mapped.items()}, answers


def chat(**fields):
    return asked("/api/chat", **{"model": "m", "messages": HELLO, **fields})


def generate(**fields):
    return asked("/api/generate", **{"model": "m", "prompt": "hello", **fields})


def event(delta=None, reason=None, **more):
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    return b"data: " + json.dumps({"model": "m", "choices": choices} | more).encode() + b"\n\n"


def lines(answers, stream, size=10_000):
    feed = answers.stream()
    pieces = [feed.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
    return [json.loads(line) for line in b"".join([*pieces, ended(feed)]).splitlines()]


def whole(answers, message, reason="stop", **more):
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    return json.loads(answers.answer(json.dumps({"model": "m", "choices": [choice], **more}).encode()))


STREAM = b"".join(
    [
        event({"role": "assistant", "content": None}),
        event({"reasoning_content": "hm"}),
        event({"content": "Hé"}),
        event({"content": "llo"}),
        event({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "weather", "arguments": '{"ci'}}]}),
        event({"tool_calls": [{"index": 0, "function": {"arguments": 'ty": "Paris"}'}}]}),
        event({"tool_calls": [{"index": 1, "id": "b", "function": {"name": "time", "arguments": ""}}]}),
        event({}, "tool_calls"),
        event(
            usage={"prompt_tokens": 7, "completion_tokens": 5}, timings={"prompt_ms": 1.5, "predicted_ms": 2.5, "x": 1}
        ),
        b"data: [DONE]\n\n",
    ]
)


class TestRequests:
    """What clients send, as a canonical request."""

    def test_a_chat_streams_unless_it_says_otherwise(self):
        told, answers = chat()
        assert told == {
            "model": "m",
            "messages": HELLO,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert answers.ignored == ()
        assert "stream" not in chat(stream=False)[0]

    def test_options(self):
        told, answers = chat(
            options={
                "temperature": 0.5,
                "num_predict": 9,
                "stop": ["x"],
                "repeat_penalty": 1.1,
                "seed": None,
                "num_ctx": 4096,
                "mirostat": 1,
            }
        )
        assert told.items() >= {"temperature": 0.5, "max_tokens": 9, "stop": ["x"], "repetition_penalty": 1.1}.items()
        assert "seed" not in told
        assert answers.ignored == ("options.num_ctx", "options.mirostat")

    def test_a_whole_number_may_be_written_as_another(self):
        assert chat(options={"num_predict": 9.0})[0]["max_tokens"] == 9

    @pytest.mark.parametrize("most", [-1, -2, 0])
    def test_no_limit(self, most):
        assert "max_tokens" not in chat(options={"num_predict": most})[0]

    @pytest.mark.parametrize(
        ("think", "told"),
        [
            (True, {"enable_thinking": True}),
            (False, {"enable_thinking": False}),
            ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
        ],
    )
    def test_thinking(self, think, told):
        asked = chat(think=think)[0]
        assert asked["chat_template_kwargs"] == told
        assert asked.get("reasoning_effort") == told.get("reasoning_effort")

    def test_formats(self):
        schema = {"type": "object", "properties": {"a": {"type": "string"}}}
        assert chat(format="json")[0]["response_format"] == {"type": "json_object"}
        assert chat(format=schema)[0]["response_format"]["json_schema"] == {"name": "response", "schema": schema}
        assert "response_format" not in chat(format="")[0]

    @cases(
        ("said", "seconds"),
        [
            (300, 300),
            ("5m", 300),
            ("1h30m", 5400),
            ("1.5s", 1.5),
            ("1h.5m", 3630),
            ("90", 90),
            (-1, 86_400),
            ("-1", 86_400),
            ("+.5h", 1800),
            ("5m\n", 300),
            ("48h", 86_400),
        ],
    )
    def test_keep_alive(self, said, seconds):
        told, answers = chat(keep_alive=said)
        assert (told[KEEP_ALIVE], answers.ignored) == (seconds, ())

    @cases("said", ["", "\n", None])
    def test_a_keep_alive_that_says_nothing(self, said):
        told, answers = chat(keep_alive=said)
        assert (KEEP_ALIVE in told, answers.ignored) == (False, ())

    @cases("said", ["soon", "5 m", "m", True, [], {}, "9" * 101])
    def test_a_keep_alive_that_is_none_has_its_code(self, said):
        with pytest.raises(InvalidRequestError, match="-1: for ever") as refused:
            chat(keep_alive=said)
        assert (refused.value.code, refused.value.param) == ("invalid_keep_alive", "keep_alive")

    def test_a_model_is_not_unloaded_behind_an_answer(self):
        told, answers = chat(keep_alive=0)
        assert (KEEP_ALIVE in told, answers.ignored) == (False, ("keep_alive",))

    @pytest.mark.parametrize(
        ("begins", "kind"), [("/9j/4AAQ", "jpeg"), (PNG, "png"), ("UklGRiQA", "webp"), ("R0lGODlh", "gif")]
    )
    def test_pictures(self, begins, kind):
        url = f"data:image/{kind};base64,{begins}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
        message = {"role": "user", "content": "what?", "images": [begins]}
        assert chat(messages=[message])[0]["messages"] == [{"role": "user", "content": parts}]
        assert generate(prompt="what?", images=[begins])[0]["messages"][0]["content"] == parts

    def test_calls_get_ids_by_which_results_find_them(self):
        calls = [CALL, {"function": {"name": "time", "arguments": {}}}]
        turns = [
            *HELLO,
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
            {"role": "tool", "content": "noon", "tool_name": "time"},
            {"role": "tool", "content": "sun"},
        ]
        _, assistant, noon, sun = chat(messages=turns)[0]["messages"]
        first, second = assistant["tool_calls"]
        assert first == {
            "id": first["id"],
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city":"Paris"}'},
        }
        assert assistant["reasoning_content"] == "hm"
        assert (noon["tool_call_id"], sun["tool_call_id"]) == (second["id"], first["id"])
        assert first["id"] != second["id"]

    def test_ids_of_the_client_stay(self):
        turns = [
            {"role": "assistant", "tool_calls": [{"id": "mine", **CALL}]},
            {"role": "tool", "content": "sun", "tool_call_id": "mine"},
        ]
        assistant, result = chat(messages=turns)[0]["messages"]
        assert assistant["tool_calls"][0]["id"] == result["tool_call_id"] == "mine"

    def test_results_find_calls_in_any_order(self):
        def call(name, **more):
            return {"function": {"name": name}, **more}

        calls = [call("a"), call("b"), call("a", id="mine"), call("b")]
        results = [{"tool_name": "b"}, {"tool_call_id": "mine"}, {"tool_name": "a"}, {}, {"tool_name": "c"}, {}]
        turns = [{"role": "assistant", "tool_calls": calls}, *({"role": "tool", **result} for result in results)]
        assistant, *told = chat(messages=turns)[0]["messages"]
        ids = [one["id"] for one in assistant["tool_calls"]]
        found = [one["tool_call_id"] for one in told]
        assert found[:4] == [ids[1], "mine", ids[0], ids[3]]
        assert len({*ids, *found[4:]}) == 6, "no call is left for the last ones"

    def test_arguments_in_a_text_stay_as_they_are(self):
        call = {"function": {"name": "f", "arguments": '{"b" : 1e2, "a":2}'}}
        assistant = chat(messages=[{"role": "assistant", "tool_calls": [call]}])[0]["messages"][0]
        assert assistant["tool_calls"][0]["function"]["arguments"] == '{"b" : 1e2, "a":2}'

    def test_unknown_fields_are_named_where_they_are(self):
        call = {
            "id": "a",
            "type": "function",
            "index": 0,
            "function": {"index": 0, "name": "f", "arguments": {}, "x": 1},
        }
        turns = [{"role": "assistant", "tool_calls": [call, call], "x": 1, "y": None}, {"role": "tool", "x": ""}]
        assert chat(messages=turns)[1].ignored == ("messages[].tool_calls[].function.x", "messages[].x")

    def test_empty_fields_say_nothing(self):
        told, answers = chat(tools=[], format="", options={}, suffix="", template="", context=[], width={})
        assert answers.ignored == ()
        assert told["tools"] == []

    def test_many_calls_take_no_longer_each(self):
        def steps(count):
            turns = [{"role": "assistant", "tool_calls": [CALL] * count}, *[{"role": "tool", "tool_name": "x"}] * count]
            taken = 0

            def trace(*_):
                nonlocal taken
                taken += 1
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                chat(messages=turns)
            finally:
                sys.settrace(before)
            return taken

        assert steps(400) < 2.5 * steps(200)

    def test_a_prompt(self):
        told, answers = generate(system="be brief", context=[], raw=False, truncate=True)
        assert told["messages"] == [{"role": "system", "content": "be brief"}, *HELLO]
        assert answers.ignored == ("truncate",)

    @cases(
        ("path", "fields", "param"),
        [
            ("generate", {"template": "{{ .Prompt }}"}, "template"),
            ("generate", {"context": [1, 2]}, "context"),
            ("generate", {"prompt": 1}, "prompt"),
            ("chat", {"messages": "hello"}, "messages"),
            ("chat", {"messages": [{"role": "user", "content": ["hello"]}]}, "messages"),
            ("chat", {"messages": [{"content": "hello"}]}, "messages"),
            ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"name": "x"}]}]}, "messages"),
            ("chat", {"messages": [{"role": "user", "images": ["http://there/x.png"]}]}, "images"),
            ("chat", {"options": [1]}, "options"),
            ("chat", {"options": {"num_predict": "many"}}, "options.num_predict"),
            ("chat", {"options": {"num_predict": 2.5}}, "options.num_predict"),
            ("generate", {"images": ["R0xG"]}, "images"),
            ("generate", {"raw": True, "images": [PNG]}, "images"),
            ("generate", {"suffix": "x", "context": [1]}, "context"),
            ("chat", {"think": "hard"}, "think"),
            ("chat", {"format": "xml"}, "format"),
            ("chat", {"keep_alive": "soon"}, "keep_alive"),
            ("chat", {"stream": "yes"}, "stream"),
            ("embed", {"input": 3}, "input"),
            ("embed", {"input": ["a", 3]}, "input"),
            ("embed", {"input": "a", "dimensions": "x"}, "dimensions"),
            ("embed", {"input": "a", "dimensions": -1}, "dimensions"),
            ("embeddings", {"prompt": ["a"]}, "prompt"),
        ],
    )
    def test_what_is_refused_is_named(self, path, fields, param):
        rest = {"chat": {"messages": HELLO}, "generate": {"prompt": "hello"}}.get(path, {})
        with pytest.raises(InvalidRequestError) as refused:
            asked(f"/api/{path}", **{"model": "m", **rest, **fields})
        assert refused.value.param == param

    @given(
        st.sampled_from(sorted(TRANSLATIONS)),
        st.dictionaries(
            st.sampled_from(
                ["tools", "think", "format", "options", "keep_alive", "raw", "suffix", "template", "context", "images",
                 "system", "truncate", "shift", "logprobs", "top_logprobs", "dimensions", "input", "prompt", "messages",
                 "stream", "width"]
            ) | st.text("abcdef_", min_size=1, max_size=8),
            st.sampled_from(
                [True, 1, "json", "high", "5m", "x", [PNG], [1], {"num_ctx": 1}, {"seed": 3}, HELLO, [{"type": "function"}]]
            ),
            max_size=4,
        ),
    )  # fmt: skip
    def test_no_field_is_lost(self, path, fields):
        """Each one changes the canonical request or is named as ignored, unless the request is refused."""
        base = {"model": "m"}
        base |= {"/api/chat": {"messages": HELLO}, "/api/embed": {"input": "x"}}.get(path, {"prompt": "x"})
        given_fields = {**base, **fields}
        try:
            told, answers = asked(path, **given_fields)
        except InvalidRequestError:
            return
        for name, value in fields.items():
            told_without, without = asked(path, **{key: each for key, each in given_fields.items() if key != name})
            is_default = (
                (name in {"stream", "truncate"} and value is True)
                or name in base
                or (name == "input" and path == "/api/embed")
            )
            ignored = {each.partition(".")[0] for each in answers.ignored}
            is_done_here = name == "dimensions" and getattr(answers, name, None) == value
            is_named = name in ignored or answers.ignored != without.ignored
            assert is_default or told != told_without or is_done_here or is_named, name


class TestLoads:
    """Without a prompt, the model is all that is asked for."""

    @cases(
        ("path", "fields"),
        [
            ("/api/chat", {}),
            ("/api/chat", {"messages": []}),
            ("/api/generate", {}),
            ("/api/generate", {"prompt": "", "keep_alive": "5m"}),
        ],
    )
    @cases("stream", [True, False])
    def test_the_smallest_request(self, path, fields, stream):
        told, answers = asked(path, model="m", stream=stream, **fields)
        assert (told["max_tokens"], len(told["messages"])) == (1, 1)
        (line,) = lines(answers, STREAM) if stream else [whole(answers, {"content": "x"})]
        empty = {"message": {"role": "assistant", "content": ""}} if path == "/api/chat" else {"response": ""}
        assert line == {"model": "m", "created_at": line["created_at"], **empty, "done": True, "done_reason": "load"}

    def test_what_ollamas_command_sends_besides_says_nothing(self):
        empty = {"suffix": "", "system": "", "template": "", "options": None, "context": [], "images": []}
        assert asked("/api/generate", model="m", prompt="", **empty)[1].ignored == ()
        assert asked("/api/generate", model="m", prompt="", system="x")[1].ignored == ("system",)

    def test_an_empty_input(self):
        told, answers = asked("/api/embed", model="m", input=[])
        assert told["input"] == "."
        assert json.loads(answers.answer(b'{"data": [{"embedding": [1]}]}'))["embeddings"] == []

    @cases(
        ("path", "fields", "scope"),
        [
            ("/api/generate", {"keep_alive": 0}, "admin"),
            ("/api/chat", {"messages": [], "keep_alive": "0s"}, "admin"),
            ("/api/generate", {"keep_alive": 0, "prompt": "x"}, None),
            ("/api/generate", {"keep_alive": 5}, None),
            ("/api/generate", {}, None),
            ("/api/embed", {"keep_alive": 0}, None),
        ],
    )
    def test_which_one_unloads(self, path, fields, scope):
        raw = {key: msgspec.Raw(json.dumps(value).encode()) for key, value in fields.items()}
        assert OLLAMA.daemon_scope(path, raw) == scope


class TestAnswers:
    """Whole answers."""

    def test_a_chat(self):
        _, answers = chat(model="m:latest", stream=False)
        told = whole(
            answers,
            {"content": "Hi", "reasoning_content": "hm", "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
            "tool_calls",
            usage={"prompt_tokens": 7, "completion_tokens": 5},
            timings={"prompt_ms": 1.5, "predicted_ms": 2.5},
        )
        assert told["message"] == {
            "role": "assistant",
            "content": "Hi",
            "thinking": "hm",
            "tool_calls": [{"id": "a", "function": {"index": 0, "name": "f", "arguments": {}}}],
        }
        assert (told["model"], told["done"], told["done_reason"]) == ("m:latest", True, "stop")
        assert (told["prompt_eval_count"], told["eval_count"]) == (7, 5)
        assert (told["prompt_eval_duration"], told["eval_duration"]) == (1_500_000, 2_500_000)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", told["created_at"])

    def test_a_prompt(self):
        told = whole(generate()[1], {"content": "Hi"}, "length")
        assert (told["response"], told["done_reason"], "message" in told) == ("Hi", "length", False)
        assert 0 < told["eval_duration"] <= told["total_duration"]

    def test_log_probabilities(self):
        told, answers = chat(logprobs=True, top_logprobs=1)
        row = {"token": "Hi", "logprob": -0.5, "top_logprobs": []}
        assert (told["logprobs"], told["top_logprobs"]) == (True, 1)
        body = {"choices": [{"message": {"content": "Hi"}, "logprobs": {"content": [row]}}]}
        assert json.loads(answers.answer(json.dumps(body).encode()))["logprobs"] == [row]
        assert answers.ignored == ()

    def test_alternatives_need_log_probabilities(self):
        told, answers = chat(top_logprobs=1)
        assert ("top_logprobs" in told, answers.ignored) == (False, ("top_logprobs",))

    def test_a_call_that_was_cut_off_is_left_out(self):
        calls = [{"id": "a", "function": {"name": "f", "arguments": '{"x'}}]
        assert "tool_calls" not in whole(chat()[1], {"content": "Hi", "tool_calls": calls}, "length")["message"]
        with pytest.raises(UpstreamError, match="no JSON object"):
            whole(chat()[1], {"content": "Hi", "tool_calls": calls})

    @pytest.mark.parametrize("body", [b"", b"[]", b'{"choices": []}', b'{"data": 1}'])
    def test_what_is_no_answer(self, body):
        for path in TRANSLATIONS:
            with pytest.raises(UpstreamError):
                asked(path, model="m", prompt="x", input="x", messages=HELLO)[1].answer(body)

    def test_embeddings(self):
        told, answers = asked("/api/embed", model="m", input=["a", "b"], dimensions=2, truncate=True, options={"a": 1})
        assert told == {"model": "m", "input": ["a", "b"], "encoding_format": "float", "truncate": True}
        assert answers.ignored == ("options.a",)
        assert asked("/api/embed", model="m", input="a", dimensions=[])[1].dimensions == 0
        rows = [{"index": 1, "embedding": [3, 4]}, {"index": 0, "embedding": [1, 2.5]}]
        got = json.loads(answers.answer(json.dumps({"data": rows, "usage": {"prompt_tokens": 2}}).encode()))
        assert got["embeddings"] == [[1, 2.5], [3, 4]]
        assert (got["model"], got["prompt_eval_count"]) == ("m", 2)

    def test_vectors_are_cut_to_the_dimensions_asked_for(self):
        _, answers = asked("/api/embed", model="m", input="a", dimensions=2)
        got = json.loads(answers.answer(b'{"data": [{"embedding": [3, 4, 12]}, {"embedding": [1, 2]}]}'))
        assert got["embeddings"] == [[0.6, 0.8], [1, 2]]

    def test_the_older_embeddings(self):
        told, answers = asked("/api/embeddings", model="m", prompt="a")
        assert told["input"] == "a"
        assert json.loads(answers.answer(b'{"data": [{"index": 0, "embedding": [0.5]}]}')) == {"embedding": [0.5]}


class TestStreams:
    """Lines of JSON, wherever the worker's stream is cut."""

    @cases("size", [1, 2, 7, 64, 10_000])
    def test_a_chat(self, size):
        told = lines(chat()[1], STREAM, size)
        messages = [line["message"] for line in told]
        assert [message["content"] for message in messages] == ["", "Hé", "llo", "", ""]
        assert messages[0]["thinking"] == "hm"
        assert messages[3]["tool_calls"] == [
            {"id": "a", "function": {"index": 0, "name": "weather", "arguments": {"city": "Paris"}}},
            {"id": "b", "function": {"index": 1, "name": "time", "arguments": {}}},
        ]
        assert [line["done"] for line in told] == [False] * 4 + [True]
        assert told[-1]["done_reason"] == "stop"
        assert (told[-1]["prompt_eval_count"], told[-1]["eval_count"]) == (7, 5)
        assert told[-1]["eval_duration"] == 2_500_000
        assert told[-1]["total_duration"] > 0

    def test_calls_without_numbers_and_ids(self):
        pieces = [("f", "{"), (None, "}"), ("g", "{}")]
        calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in pieces]
        told = lines(chat()[1], b"".join(event({"tool_calls": [call]}) for call in calls) + event({}, "tool_calls"))
        assert [call["function"]["name"] for call in told[0]["message"]["tool_calls"]] == ["f", "g"]

    def test_log_probabilities_within_a_character(self):
        row = {"token": "\\xc3", "logprob": -0.5}
        choice = {"index": 0, "delta": {"content": ""}, "logprobs": {"content": [row]}}
        told = lines(chat(logprobs=True)[1], event(choices=[choice]) + event({"content": "é"}) + event({}, "stop"))
        assert told[0]["logprobs"] == [row]

    def test_a_prompt(self):
        told = lines(generate()[1], event({"content": "a"}) + event({}, "length"))
        assert [line["response"] for line in told] == ["a", ""]
        assert told[-1]["done_reason"] == "length"

    @pytest.mark.parametrize("error", [{"message": "out of memory", "code": 500}, "out of memory"])
    def test_an_error_of_the_worker_is_the_last_line(self, error):
        stream = event({"content": "a"}) + b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
        assert lines(chat()[1], stream)[1:] == [{"error": "out of memory"}]

    def test_an_error_of_ours_too(self):
        told = error_event(UnavailableError("gone"), OLLAMA, b"{}\n", b"application/x-ndjson")
        assert told == b'{"error":"gone"}\n'

    def test_keepalives_are_lines_that_add_nothing(self):
        told = json.loads(OLLAMA.keepalive)
        assert OLLAMA.keepalive.endswith(b"\n")
        assert (told["message"]["content"], told["response"], told["done"]) == ("", "", False)


class TestNames:
    """Clients add a tag to names that have none."""

    @cases(
        ("name", "meant"),
        [("a", "a"), ("a:latest", "a"), ("b:latest", "b:latest"), ("a:7b", "a:7b"), ("c:latest", "c:latest")],
    )
    def test_latest(self, name, meant):
        assert OLLAMA.model_name(name, {"a", "b", "b:latest"}.__contains__) == meant


class TestPaths:
    """Whose paths are whose."""

    @pytest.mark.parametrize("path", ["/api/chat", "/api/tags", "/api/blobs/sha256:0", "/api/delete"])
    def test_its_own(self, path):
        assert dialect_of({"path": path, "headers": ()}) is OLLAMA

    @pytest.mark.parametrize("path", ["/api/v1/config", "/api/", "/api/chat/x", "/v1/chat/completions"])
    def test_others(self, path):
        assert dialect_of({"path": path, "headers": ()}) is OPENAI

    def test_scopes(self):
        assert {OLLAMA.scope_for(path) for path in ("/api/chat", "/api/tags", "/api/show")} == {"inference"}
        assert {OLLAMA.scope_for(path) for path in ("/api/pull", "/api/delete", "/api/blobs/x")} == {"admin"}


async def test_a_large_body_comes_through_whole():
    """Also what was cut out of it within the arguments of a call, which become JSON in a text, and plain pictures."""
    code = 'print("grüß \\ gott")\n' * 9000
    numbers = list(range(400))
    call = {"function": {"name": "write", "arguments": {"code": code, "n": numbers}}}
    turns = [
        {"role": "assistant", "content": code, "tool_calls": [call]},
        {"role": "user", "content": "look", "images": [PNG.rstrip("=") + "A" * 400_000]},
    ]
    raw = json.dumps({"model": "m", "messages": turns}, indent=1).encode()
    body, _ = (await JsonBody.open(raw)).translated(TRANSLATIONS["/api/chat"])
    assert body._condensed is not None
    restored = json.loads(await asyncio.wait_for(body._condensed.restored(msgspec.json.encode(body.fields)), 30))
    first, second = restored["messages"]
    assert first["content"] == code
    assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"code": code, "n": numbers}
    assert second["content"][0]["image_url"]["url"] == f"data:image/png;base64,{turns[1]['images'][0]}"
