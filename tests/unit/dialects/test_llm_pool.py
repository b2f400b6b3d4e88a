"""llm-pool's requests as chat completions, and those as its answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.base import CHAT_TEMPLATE, Thinking
from supervisor.dialects.llm_pool import LLM_POOL, LlmPool, is_llm_pool
from supervisor.dialects.responses import RESPONSES
from supervisor.errors import InvalidRequestError, UpstreamError
from supervisor.gateway.filters.translation import TargetModel
from tests.support.cases import cases
from tests.support.stream_ends import ended

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
LLAMA = {"top_k": ("top_k",), "repetition_penalty": ("repeat_penalty",)}
TIMERS = [
    "backend_inference_wall_ms",
    "engine_total_wall_ms",
    "engine_outside_backend_wall_ms",
    "pool_total_wall_ms",
    "engine_queue_wait_ms",
    "engine_tokenize_ms",
    "gpu_time_to_first_token_ms",
    "gpu_generate_total_ms",
    "gpu_decode_after_first_token_ms",
    "engine_prompt_tokens",
    "engine_output_tokens",
    "engine_tokens_per_second",
]


@dataclass
class Course:
    """Arrived at 10 s, in the queue at 10.5 s, at the worker at 12 s; `now` goes on."""

    arrived_at: float = 10.0
    entered_at: float | None = 10.5
    admitted_at: float | None = 12.0
    now: list[float] = field(default_factory=lambda: [14.0])

    def clock(self):
        return self.now.pop(0) if len(self.now) > 1 else self.now[0]


def raw(fields):
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}


def translated(course=None, **known):
    course = course or Course()
    return LlmPool(clock=course.clock).of(TargetModel(**{"name": "chat", "decoding": LLAMA, **known}), course)


def asked(known=None, **fields):
    """The canonical request, and what is ignored."""
    canonical, answers = translated(**(known or {})).request(raw({"model": "chat", **fields}))
    return {name: msgspec.json.decode(value) for name, value in canonical.items()}, list(answers.ignored)


def refused(known=None, **fields):
    with pytest.raises(InvalidRequestError) as caught:
        asked(known, **fields)
    return caught.value


class TestClaims:
    """What tells its requests from OpenAI's on the same path."""

    @cases(
        "fields",
        [
            {"messages": []},
            {"input": "Hi", "decoding": {}},
            {"input": "Hi", "thinking": "disabled"},
            {"input": "Hi", "source_lang_code": "nl"},
            {"input": "Hi", "target_lang_code": "en"},
            {"input": [{"type": "text", "text": "Hi"}, IMAGE]},
        ],
    )
    def test_its_own(self, fields):
        assert is_llm_pool(raw(fields))
        assert RESPONSES.required_translation("POST", "/v1/responses", raw(fields)) is LLM_POOL
        assert RESPONSES.required_translation("POST", "/responses", raw(fields)) is LLM_POOL
        assert RESPONSES.required_translation("POST", "/v1/more/responses", raw(fields)) is None

    @cases(
        "fields",
        [
            {"model": "chat", "input": "Hi", "instructions": "i", "temperature": 0, "thinking": None},
            {"input": [{"role": "user", "content": "Hi"}]},
            {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]},
            {"input": [{"type": "text", "text": "Hi"}, {"type": "message", "role": "user", "content": "Hi"}]},
            {"input": []},
            {"input": ["Hi"]},
            {"prompt": {"id": "p"}},
        ],
    )
    def test_openais(self, fields):
        assert not is_llm_pool(raw(fields))
        assert RESPONSES.required_translation("POST", "/v1/responses", raw(fields)) is None


class TestPrompt:
    """`input` or `messages`, and `instructions`."""

    def test_one_turn(self):
        assert asked(input="Hi", instructions="Be brief.", stream=False) == (
            {
                "model": "chat",
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
                "stream": False,
            },
            [],
        )

    def test_texts_become_one(self):
        parts = [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]
        assert asked(input=parts)[0]["messages"] == [{"role": "user", "content": "one, two"}]

    def test_an_image_stays_among_its_texts(self):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}
        parts = [{"type": "text", "text": "What is it?"}, image]
        assert asked(input=parts)[0]["messages"] == [{"role": "user", "content": parts}]

    def test_nulls_within_parts_are_nothing(self):
        part = {"type": "image_url", "image_url": {"url": "data:,", "detail": None}, "text": None}
        content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        assert asked(input=[part])[0]["messages"] == [{"role": "user", "content": content}]

    def test_several_turns(self):
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": [IMAGE]},
        ]
        assert asked(messages=messages, instructions="i")[0]["messages"] == [
            {"role": "system", "content": "i"},
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": [IMAGE]},
        ]

    @cases(
        ("fields", "param"),
        [
            ({}, "input"),
            ({"input": None}, "input"),
            ({"input": 5}, "input"),
            ({"input": []}, "input"),
            ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
            ({"messages": []}, "messages"),
            ({"messages": "a"}, "messages"),
            ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages"),
            ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
            ({"messages": [{"content": "a"}]}, "messages[0].role"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name"),
            ({"input": [{"type": "video", "text": "a"}]}, "input[0].type"),
            ({"input": [{"text": "a"}]}, "input[0].type"),
            ({"input": [{"type": "text", "text": 1}]}, "input[0].text"),
            ({"input": [{"type": "text", "text": "a", "image_url": {"url": "b"}}]}, "input[0].image_url"),
            ({"input": [{"type": "image_url", "image_url": "data:,"}]}, "input[0].image_url"),
            ({"input": [{"type": "image_url", "image_url": {}}]}, "input[0].image_url.url"),
            (
                {"input": [{"type": "image_url", "image_url": {"url": "data:,", "detail": "much"}}]},
                "input[0].image_url.detail",
            ),
            ({"input": "a", "instructions": ["b"]}, "instructions"),
            ({"input": "a", "stream": "yes"}, "stream"),
        ],
    )
    def test_what_is_wrong_is_refused_by_its_name(self, fields, param):
        error = refused(**fields)
        assert param == error.param
        assert param in error.message

    def test_what_a_worker_finds_wrong_has_the_clients_name(self):
        for fields, name in (({"input": "a"}, "input"), ({"messages": [{"role": "user", "content": "a"}]}, "messages")):
            _, answers = translated().request(raw({"model": "chat", **fields}))
            assert answers.names.get("messages", "messages") == name
            assert answers.names["top_k"] == "decoding.top_k"

    def test_several_turns_for_a_model_that_takes_one(self):
        error = refused({"multi_turn": False}, messages=[{"role": "user", "content": "a"}])
        assert (error.param, error.code) == ("messages", "multi_turn_unsupported")
        assert error.message.startswith("chat takes single turns only")
        assert asked({"multi_turn": False}, input="a")[0]["messages"] == [{"role": "user", "content": "a"}]

    @pytest.mark.parametrize("name", ["source_lang_code", "target_lang_code"])
    def test_languages_for_a_model_that_does_not_translate(self, name):
        error = refused(input="a", **{name: "nl"})
        assert error.param == name
        assert error.message.startswith("chat can't be told a language")
        assert asked(input="a", **{name: None}) == asked(input="a")


class TestThinking:
    """Switched as the model's runtime does it, or refused: never without effect."""

    OWN = Thinking({"reasoning": {"enabled": True}}, {"reasoning": {"enabled": False}})

    @cases(
        ("switch", "mode", "fields"),
        [
            (CHAT_TEMPLATE, "disabled", {"chat_template_kwargs": {"enable_thinking": False}}),
            (CHAT_TEMPLATE, "enabled", {"chat_template_kwargs": {"enable_thinking": True}}),
            (OWN, "disabled", {"reasoning": {"enabled": False}}),
            (CHAT_TEMPLATE, "default", {}),
            (CHAT_TEMPLATE, None, {}),
        ],
    )
    @cases("modes", [("default", "enabled", "disabled"), ("default",)])
    def test_switched(self, switch, mode, fields, modes):
        canonical, _ = asked({"thinking": switch, "thinking_modes": modes}, input="a", thinking=mode)
        assert {"model", "messages"} | fields.keys() == canonical.keys()
        assert fields.items() <= canonical.items()

    @pytest.mark.parametrize(
        ("switch", "modes", "mode"),
        [
            (CHAT_TEMPLATE, ("disabled",), "enabled"),
            (CHAT_TEMPLATE, ("enabled",), "disabled"),
            (None, ("enabled",), "disabled"),
            (None, ("default",), "disabled"),
        ],
    )
    def test_what_the_model_can_not_do(self, switch, modes, mode):
        error = refused({"thinking": switch, "thinking_modes": modes}, input="a", thinking=mode)
        assert (error.param, error.code) == ("thinking", "thinking_unsupported")

    @pytest.mark.parametrize("switch", [CHAT_TEMPLATE, None])
    @pytest.mark.parametrize("mode", ["enabled", "disabled"])
    def test_what_the_model_does_anyway(self, switch, mode):
        canonical, _ = asked({"thinking": switch, "thinking_modes": (mode,)}, input="a", thinking=mode)
        assert canonical.keys() == {"model", "messages"}

    @pytest.mark.parametrize("mode", ["off", False, ["disabled"]])
    def test_other_words(self, mode):
        error = refused(input="a", thinking=mode)
        assert error.param == "thinking"
        assert "default" in error.message


ALL = {
    "top_k": 1,
    "top_p": 1.0,
    "temperature": 0.1,
    "repetition_penalty": 1.1,
    "max_tokens": 256,
    "stop": ["END", "\n\n"],
}


class TestDecoding:
    """Each parameter under the name that the worker knows it by."""

    def test_of_llama_cpp(self):
        canonical, ignored = asked(input="a", decoding={**ALL, "beam_size": 4})
        expected = {**ALL, "repeat_penalty": 1.1}
        del expected["repetition_penalty"]
        assert {name: canonical[name] for name in canonical.keys() - {"model", "messages"}} == expected
        assert ignored == ["decoding.beam_size"]

    def test_of_a_worker_that_searches_in_beams(self):
        canonical, ignored = asked({"decoding": {"beam_size": ("beam_size",)}}, input="a", decoding={"beam_size": 4})
        assert (canonical["beam_size"], ignored) == (4, [])

    def test_of_one_that_knows_openais_only(self):
        canonical, ignored = asked({"decoding": {}}, input="a", decoding=ALL)
        assert canonical.keys() == {"model", "messages", "top_p", "temperature", "max_tokens", "stop"}
        assert ignored == ["decoding.top_k", "decoding.repetition_penalty"]

    def test_omitted_ones_are_left_to_the_defaults(self):
        assert asked(input="a", decoding={"temperature": None}) == asked(input="a", decoding={}) == asked(input="a")

    @cases(
        ("decoding", "param"),
        [
            ([], "decoding"),
            ({"min_p": 0.1, "top_p": None}, "decoding.min_p"),
            ({"top_k": "1"}, "decoding.top_k"),
            ({"top_k": 1.5}, "decoding.top_k"),
            ({"temperature": True}, "decoding.temperature"),
            ({"top_p": "1"}, "decoding.top_p"),
            ({"repetition_penalty": []}, "decoding.repetition_penalty"),
            ({"max_tokens": 0}, "decoding.max_tokens"),
            ({"beam_size": 0}, "decoding.beam_size"),
            ({"stop": "END"}, "decoding.stop"),
            ({"stop": [1]}, "decoding.stop[0]"),
        ],
    )
    def test_what_is_wrong_is_refused_by_its_name(self, decoding, param):
        error = refused(input="a", decoding=decoding)
        assert param == error.param
        assert param in error.message


NAMES = [
    "input",
    "messages",
    "instructions",
    "stream",
    "thinking",
    "decoding",
    "source_lang_code",
    "tools",
    "store",
    "x",
]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.text(max_size=5),
    st.sampled_from(["enabled", "disabled", "default"]),
    st.just([{"role": "user", "content": "unmistakable"}]),
    st.just({"temperature": 0.5}),
)


MAPPED = {
    "input": "messages",
    "messages": "messages",
    "instructions": "messages",
    "stream": "stream",
    "thinking": "chat_template_kwargs",
    "decoding": "temperature",
}


class TestNothingIsLost:
    """Each field of a request is mapped, refused or named."""

    @given(st.dictionaries(st.sampled_from(NAMES), VALUES))
    def test_by_any_request(self, fields):
        refusal = None
        try:
            canonical, ignored = asked(None, **fields)
        except InvalidRequestError as error:
            refusal = error.param
        if refusal is not None:
            assert refusal.partition(".")[0].partition("[")[0] in {*fields, "input", "messages"}
            return
        for name, value in fields.items():
            says_nothing = value is None or (name, value) == ("thinking", "default") or value == {}
            assert says_nothing or name in ignored or MAPPED[name] in canonical
            assert (name in ignored) == (name not in MAPPED and name != "source_lang_code")
        text = json.dumps(canonical["messages"])
        for name in ("input", "instructions"):
            assert fields.get(name) is None or json.dumps(fields[name]) in text


def completion(**more):
    return {
        "id": "chatcmpl-1",
        "model": "theirs",
        "choices": [{"message": {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}}],
        **more,
    }


USAGE = {"prompt_tokens": 47, "completion_tokens": 23, "total_tokens": 70}


def answered(body, course=None, **fields):
    _, answers = translated(course).request(raw({"model": "chat", "input": "a", **fields}))
    return json.loads(answers.answer(json.dumps(body).encode()))


class TestAnswer:
    """A whole one."""

    def test_its_shape(self):
        told = answered(completion(usage=USAGE))
        assert told.pop("id").startswith("resp_")
        assert list(told.pop("metrics")) == TIMERS
        assert told == {
            "object": "response",
            "model": "chat",
            "output": [{"type": "output_text", "text": "Hello"}],
            "output_text": "Hello",
        }

    def test_times_of_any_worker(self):
        metrics = answered(completion(usage=USAGE))["metrics"]
        known = {
            "backend_inference_wall_ms": 2000,
            "engine_total_wall_ms": 3500,
            "engine_outside_backend_wall_ms": 1500,
            "pool_total_wall_ms": 4000,
            "engine_queue_wait_ms": 1500,
            "engine_prompt_tokens": 47,
            "engine_output_tokens": 23,
            "engine_tokens_per_second": 11.5,
        }
        assert metrics == dict.fromkeys(TIMERS) | known

    def test_times_of_llama_cpp(self):
        timings = {"prompt_ms": 100.04, "predicted_ms": 400, "predicted_per_second": 57.5}
        metrics = answered(completion(usage=USAGE, timings=timings))["metrics"]
        assert (metrics["gpu_time_to_first_token_ms"], metrics["gpu_decode_after_first_token_ms"]) == (100.0, 400)
        assert (metrics["gpu_generate_total_ms"], metrics["engine_tokens_per_second"]) == (500.0, 46.0)

    def test_nothing_is_known(self):
        _, answers = LLM_POOL.request(raw({"model": "chat", "input": "a"}))
        told = json.loads(answers.answer(json.dumps(completion()).encode()))
        assert told["metrics"] == dict.fromkeys(TIMERS)
        assert told["model"] == "chat"

    def test_ids_differ(self):
        assert answered(completion())["id"] != answered(completion())["id"]

    def test_no_chat_completion(self):
        with pytest.raises(UpstreamError):
            answered({"choices": []})


def streamed(*chunks):
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def delta(**fields):
    return {"id": "c", "choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def read(output):
    frames = output.decode().split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def stream(course=None):
    _, answers = translated(course).request(raw({"model": "chat", "input": "a", "stream": True}))
    return answers.stream()


PIECES = streamed(
    delta(role="assistant", content=None),
    delta(reasoning_content="hm"),
    delta(content="Grüße"),
    delta(content=" all"),
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": USAGE, "timings": {"prompt_ms": 100, "predicted_ms": 400}},
)
KINDS = [
    "response.created",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.metrics",
    "response.completed",
]


class TestStream:
    """Four kinds of events in their order."""

    def test_asks_for_its_usage(self):
        canonical, _ = asked(input="a", stream=True)
        assert (canonical["stream"], canonical["stream_options"]) == (True, {"include_usage": True})

    @pytest.mark.parametrize("end", [b"\n", b"\r\n"])
    def test_cut_anywhere(self, end):
        pieces = PIECES.replace(b"\n", end)
        for at in range(len(pieces) + 1):
            told = stream()
            events = read(told.feed(pieces[:at]) + told.feed(pieces[at:]) + told.end())
            assert [event["type"] for event in events] == KINDS
            assert [event.get("delta") for event in events] == [None, "Grüße", " all", None, None]

    def test_its_ends(self):
        told = stream()
        begun, *_, metrics, completed = read(told.feed(PIECES) + told.end())
        name = begun["response"]["id"]
        assert begun["response"] == {"id": name, "object": "response", "model": "chat", "output": []}
        assert completed["response"] == {
            "id": name,
            "object": "response",
            "model": "chat",
            "output": [{"type": "output_text", "text": "Grüße all"}],
            "output_text": "Grüße all",
            "metrics": metrics["metrics"],
        }
        assert metrics["metrics"]["engine_output_tokens"] == 23
        assert metrics["metrics"]["gpu_generate_total_ms"] == 500

    def test_a_piece_goes_out_at_once(self):
        told = stream()
        events = read(told.feed(streamed(delta(content="a"))))
        assert [event["type"] for event in events] == KINDS[:2]

    def test_times_by_the_first_piece(self):
        """Also where that is a thought."""
        told = stream(Course(now=[12.5, 14.0]))
        told.feed(
            streamed(
                delta(role="assistant"),
                delta(reasoning="hm"),
                {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]},
            )
        )
        metrics = read(told.end())[0]["metrics"]
        assert metrics["gpu_time_to_first_token_ms"] == 500
        assert metrics["gpu_decode_after_first_token_ms"] == 1500
        assert metrics["gpu_generate_total_ms"] == metrics["backend_inference_wall_ms"] == 2000
        assert metrics["engine_tokens_per_second"] is None

    def test_one_without_anything(self):
        told = stream()
        events = read(told.feed(streamed({"choices": [{"delta": {}, "finish_reason": "stop"}]})) + told.end())
        assert [event["type"] for event in events] == [KINDS[0], *KINDS[-2:]]
        assert events[-1]["response"]["output_text"] == ""

    @pytest.mark.parametrize("error", [{"message": "It broke.", "code": "gone"}, "It broke."])
    def test_an_error_ends_it(self, error):
        told = stream()
        events = read(told.feed(streamed(delta(content="a"), {"error": error}, delta(content="b"))) + ended(told))
        assert [event["type"] for event in events] == [*KINDS[:2], "error"]
        assert events[-1]["message"] == "It broke."

    def test_no_chat_completion(self):
        with pytest.raises(UpstreamError):
            stream().feed(b"data: {\n\n")


class TestTranslations:
    """Requests for a model that translates, and for others."""

    KNOWN = {"translates": True, "multi_turn": False}  # noqa: RUF012

    def test_the_structured_request(self):
        canonical, ignored = asked(self.KNOWN, input="Hallo", source_lang_code="nl", target_lang_code="en")
        part = {"type": "text", "source_lang_code": "nl", "target_lang_code": "en", "text": "Hallo"}
        assert canonical["messages"] == [{"role": "user", "content": [part]}]
        assert ignored == []

    def test_without_a_source(self):
        content = [{"type": "text", "text": "Hal"}, {"type": "text", "text": "lo"}]
        canonical, _ = asked(self.KNOWN, input=content, target_lang_code="en")
        part = {"type": "text", "target_lang_code": "en", "text": "Hallo"}
        assert canonical["messages"] == [{"role": "user", "content": [part]}]

    @cases(
        ("fields", "param"),
        [
            ({"input": "a"}, "target_lang_code"),
            ({"input": "a", "target_lang_code": None}, "target_lang_code"),
            ({"input": "a", "target_lang_code": "en", "instructions": "b"}, "instructions"),
            ({"input": "a", "target_lang_code": 1}, "target_lang_code"),
            ({"messages": [{"role": "user", "content": "a"}], "target_lang_code": "en"}, "messages"),
        ],
    )
    def test_what_is_refused(self, fields, param):
        assert refused(self.KNOWN, **fields).param == param

    @pytest.mark.parametrize("name", ["source_lang_code", "target_lang_code"])
    def test_other_models_are_no_translators(self, name):
        assert refused(input="a", **{name: "en"}).param == name
