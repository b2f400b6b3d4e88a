"""Language models of the transformers runtime: real workers on tiny real models, through the daemon, as clients see them."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from typing import Annotated, Literal

import httpx
import openai
import psutil
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.support import environments, tiny_language
from tests.support.asking import WEATHER, function, looking, picture
from tests.support.daemon import running, wait_until
from tests.support.limits import LIMIT_S
from tests.support.tiny_language import ANSWER, THOUGHT

HELLO = [{"role": "user", "content": "Hello"}]
KINDS = ["qwen3", "qwen3_5", "gpt_oss", "qwen3_vl", "qwen3_5_vision"]
DESCRIBED = "turns"  # in no format of ours: its folder has a response template
QUANTISED = {"qwen3": "fp8", "gpt_oss": "mxfp4"}
EYES = ["qwen3_vl", "qwen3_5_vision"]


TIME = function("get_time")
QUOTE, A, F, OPEN, CLOSE, END = (
    1,
    64,
    69,
    90,
    92,
    279,
)  # places of ", a, f, {, } and gpt_oss's <|end|> in the vocabulary
pytestmark = pytest.mark.timeout(1800)  # the first test makes ten models, maybe while programs are compiled beside it
STEPS = [{"role": "user", "content": "think in steps"}]  # the models' templates take it as: don't rush to a tool


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    common = {"runtime": "transformers", "threads": 1, "n_ctx": 2048}
    models = {kind: {**common, "path": str(tiny_language.model(kind))} for kind in (*KINDS, DESCRIBED)}
    models["endless"] = {**common, "path": str(tiny_language.model(endless=True))}
    tireless = tiny_language.model(endless=True, max_position_embeddings=32768)  # it goes on for a minute
    models["tireless"] = {**common, "path": str(tireless), "n_ctx": 32768, "parallel": 1}
    models["random"] = {**common, "path": str(tiny_language.model(random=True))}
    large = tiny_language.model(dtype="bfloat16", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    models["large"] = {**common, "path": str(large)}
    for kind, method in QUANTISED.items():
        folder = tiny_language.model(kind, dtype="bfloat16", quantised=method)
        models[method] = {**common, "path": str(folder), "quantization": "none"}
    config = {
        "models": models,
        "virtual_models": {
            "quick": {"model": "qwen3_5", "enable_thinking": False},
            "hard": {"model": "gpt_oss", "system_prompt_prefix": "Reasoning: high"},
        },
        "server": {"runtimes_dir": str(environments.installed("transformers"))},
    }
    with running(tmp_path_factory.mktemp("transformers"), config) as started:
        yield started


@pytest.fixture(scope="module")
def sdk(daemon):
    with openai.OpenAI(
        base_url=f"{daemon.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        yield client


def streamed(sdk, **body):
    """What a stream adds up to, in the shape of a whole answer: content, thoughts, calls, finish, usage."""
    said, thought, calls, finish, usage = "", "", [], None, None
    for chunk in sdk.chat.completions.create(stream=True, stream_options={"include_usage": True}, **body):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            said += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(calls):
                    assert call.id.startswith("call_")
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments
    return said, thought, calls, finish, usage


def whole(sdk, **body):
    answer = sdk.chat.completions.create(**body)
    (choice,) = answer.choices
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]
    thought = getattr(choice.message, "reasoning_content", None) or ""
    return choice.message.content or "", thought, calls, choice.finish_reason, answer.usage


@pytest.fixture(params=[whole, streamed], ids=["whole", "streamed"])
def ask(request, sdk):
    """A chat, by the SDK, in one piece and as a stream."""
    return lambda **body: request.param(sdk, **{"messages": HELLO, **body})


class TestChat:
    """Every family thinks, answers and stops, whole and streamed."""

    @pytest.mark.parametrize("kind", [*KINDS, DESCRIBED])
    def test_thoughts_and_answer(self, ask, kind):
        said, thought, calls, finish, usage = ask(model=kind)
        assert (said, thought, calls, finish) == (ANSWER, THOUGHT, [], "stop")
        assert usage.prompt_tokens > 10
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert 2 <= usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens

    @pytest.mark.parametrize("method", QUANTISED.values())
    def test_plain_weights_from_quantised_files(self, ask, method):
        assert ask(model=method)[:2] == (ANSWER, THOUGHT)

    def test_without_thinking(self, ask):
        said, thought, _, _, usage = ask(model="quick")
        assert (said, thought, usage.completion_tokens_details.reasoning_tokens) == (ANSWER, "", 0)

    def test_no_usage_unless_asked_for(self, sdk):
        chunks = list(sdk.chat.completions.create(model="qwen3", messages=HELLO, stream=True))
        assert all(chunk.usage is None for chunk in chunks)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert {chunk.id for chunk in chunks} == {chunks[0].id}

    def test_a_conversation_goes_on(self, ask):
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        }
        messages = [
            {"role": "system", "content": "Be brief."},
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ]
        for kind in ("qwen3", "qwen3_5", "gpt_oss", DESCRIBED):
            assert ask(model=kind, messages=messages, tools=[WEATHER])[0] == ANSWER

    def test_length(self, ask):
        assert ask(model="qwen3", max_tokens=6)[3] == "length"
        said, _, _, finish, usage = ask(model="qwen3", max_tokens=100, max_completion_tokens=8)
        assert (said, finish, usage.completion_tokens) == ("Hello from a", "length", 8)

    @pytest.mark.parametrize("kind", KINDS)
    def test_prompts_are_counted(self, sdk, daemon, kind):
        """The count is that of the answer's usage, with tools, and of other APIs too."""
        body = {"model": kind, "messages": HELLO, "tools": [WEATHER]}
        used = sdk.chat.completions.create(**body, max_tokens=1).usage.prompt_tokens
        assert daemon.post("/v1/chat/completions/input_tokens", json=body).json()["input_tokens"] == used
        tool = WEATHER["function"]
        tools = [{"name": tool["name"], "input_schema": tool["parameters"]}]
        told = daemon.post("/v1/messages/count_tokens", json=body | {"tools": tools})
        assert told.json() == {"input_tokens": used}

    @pytest.mark.parametrize(("kind", "ignored"), [("gpt_oss", "thinking"), ("qwen3", None)])
    def test_thinking_that_can_not_be_switched(self, daemon, kind, ignored):
        body = {"model": kind, "max_tokens": 99, "messages": HELLO, "thinking": {"type": "adaptive"}}
        told = daemon.post("/v1/messages", json=body)
        assert (told.status_code, told.headers.get("x-llmux-ignored")) == (200, ignored)

    def test_what_has_no_effect_is_named_whoever_notices(self, daemon):
        told = daemon.chat("qwen3", max_tokens=1, x_more=1, brand_new=1, user="me", unset=None)
        assert (told.status_code, told.headers["x-llmux-ignored"]) == (200, "x_more, brand_new, user")
        wait_until(lambda: daemon.events("request.finished")[-1].get("ignored") == ["x_more", "brand_new", "user"])
        body = {"model": "qwen3", "max_tokens": 1, "messages": HELLO, "metadata": {"user_id": "me"}}
        assert daemon.post("/v1/messages", json=body).headers["x-llmux-ignored"] == "metadata.user_id"

    @pytest.mark.parametrize("kind", ["gpt_oss", "qwen3"])
    def test_levels_of_ollama(self, daemon, kind):
        body = {"model": kind, "messages": HELLO, "think": "high", "stream": False}
        told = daemon.post("/api/chat", json=body)
        assert told.json()["message"]["thinking"] == THOUGHT, told.text

    def test_reasoning_effort(self, sdk, daemon):
        def prompt_tokens(model, **body):
            return sdk.chat.completions.create(model=model, messages=HELLO, **body).usage.prompt_tokens

        medium, high = prompt_tokens("gpt_oss"), prompt_tokens("gpt_oss", reasoning_effort="high")
        assert medium - high == len("medium") - len("high")
        assert prompt_tokens("hard") == high
        refused = daemon.chat("gpt_oss", reasoning_effort="none")
        assert "knows low, medium and high" in refused.json()["error"]["message"]
        assert prompt_tokens("qwen3", reasoning_effort="none") > prompt_tokens("qwen3")  # an empty thought

    def test_an_effort_and_a_switch_mean_the_same(self, daemon):
        """Responses ask so for reasoning: each chat template knows one of the two."""
        for kind, effort in (("gpt_oss", "high"), ("qwen3", "high"), ("gpt_oss", "minimal"), ("qwen3", "none")):
            body = {"model": kind, "input": "Hello", "reasoning": {"effort": effort}}
            told = daemon.post("/v1/responses", json=body)
            assert (told.status_code, told.json().get("status")) == (200, "completed"), told.text


class TestTools:
    """Calls in the form of each family, chosen by the model or asked of it."""

    PARIS = ("get_weather", {"city": "Paris"})

    @staticmethod
    def read(calls):
        return [(name, json.loads(arguments)) for name, arguments in calls]

    @pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "gpt_oss", DESCRIBED])
    def test_auto(self, ask, kind):
        said, _, calls, finish, _ = ask(model=kind, tools=[WEATHER])
        assert (said, self.read(calls), finish) == ("", [self.PARIS], "tool_calls")

    @pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", DESCRIBED])
    def test_parallel(self, ask, kind):
        assert self.read(ask(model=kind, tools=[WEATHER, TIME])[2]) == [self.PARIS, ("get_time", {})]
        _, _, calls, finish, _ = ask(model=kind, tools=[WEATHER, TIME], parallel_tool_calls=False)
        assert (self.read(calls), finish) == ([self.PARIS], "tool_calls")

    @pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "gpt_oss", DESCRIBED])
    def test_none(self, ask, kind):
        assert ask(model=kind, tools=[WEATHER], tool_choice="none")[0] == ANSWER
        assert ask(model=kind, tools=[WEATHER], messages=STEPS)[0] == ANSWER

    @pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "gpt_oss"])
    def test_required(self, ask, kind):
        _, thought, calls, finish, _ = ask(model=kind, tools=[WEATHER], tool_choice="required", messages=STEPS)
        assert (self.read(calls), finish) == ([self.PARIS], "tool_calls")
        assert thought == ("" if kind == "gpt_oss" else THOUGHT)

    @pytest.mark.parametrize("more", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}])
    def test_calls_that_can_only_be_read(self, daemon, more):
        refused = daemon.chat(DESCRIBED, messages=STEPS, tools=[WEATHER], **more)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", *more)

    @pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "gpt_oss"])
    def test_one_that_is_named(self, ask, kind):
        choice = {"type": "function", "function": {"name": "get_weather"}}
        calls = ask(model=kind, tools=[TIME, WEATHER], tool_choice=choice, messages=STEPS)[2]
        assert self.read(calls) == [self.PARIS]

    def test_arguments_are_streamed(self, sdk):
        stream = sdk.chat.completions.create(model="qwen3_5", messages=HELLO, tools=[WEATHER], stream=True)
        deltas = [chunk.choices[0].delta.tool_calls for chunk in stream]
        pieces = [delta[0].function.arguments for delta in deltas if delta]
        assert len(pieces) > 3
        assert "".join(pieces) == '{"city": "Paris"}'

    @pytest.mark.parametrize(
        ("body", "clue"),
        [
            (
                {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
                "not among the tools",
            ),
            ({"tool_choice": "required"}, "there are no tools"),
            ({"tools": [{"type": "web_search"}]}, "only"),
            ({"tools": [function("no name!")]}, "no name of a function"),
            ({"tools": [TIME], "tool_choice": "perhaps"}, "tool_choice is 'perhaps'"),
            ({"tools": "all"}, "a list of tools"),
        ],
    )
    def test_nonsense(self, daemon, body, clue):
        refused = daemon.chat("qwen3", **body)
        assert refused.status_code == 400, refused.text
        assert clue in refused.json()["error"]["message"]


class Lamp(BaseModel):
    """What a home is told to do: of every kind of value one, all of them bounded, for the models have no sense."""

    model_config = ConfigDict(extra="forbid", strict=True)

    action: Literal["on", "off", "dim the lights \U0001f642"]
    level: Annotated[int, Field(ge=0, le=100)]
    rooms: Annotated[list[Annotated[str, Field(min_length=1, max_length=6)]], Field(min_length=1, max_length=2)]
    soft: bool
    address: IPv4Address | None


SILENT = {"chat_template_kwargs": {"enable_thinking": False}}


def lamp(**further: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "lamp", "schema": {**Lamp.model_json_schema(), **further}}}


def _chained(count: int) -> dict[str, object]:
    links = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    return {"$defs": {**links, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


HOSTILE = {
    "stack": _chained(9_000),
    "making": {"allOf": [{"type": "string", "pattern": f".*{i}"} for i in range(30)]},
    "a step": {"anyOf": [{"type": "array", "items": {"$ref": "#"}} for _ in range(1500)]},
}


class TestEarlierCalls:
    """Arguments of calls are texts of the client's own, and may hold what no body may."""

    @pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
    @pytest.mark.parametrize(
        ("arguments", "clue"),
        [
            ("[" * 100_000, "context is 2048 tokens"),
            ("[" * 900 + "]" * 900, "refuses these messages: maximum recursion depth"),
            ('{"city": "\\ud800"}', "half a character"),
        ],
    )
    def test_odd_arguments(self, daemon, kind, arguments, clue):
        call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        turns = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        turns += [{"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]
        refused = daemon.chat(kind, messages=[*HELLO, *turns])
        assert refused.status_code == 400, refused.text
        assert clue in refused.json()["error"]["message"]


class TestFormats:
    """Whatever the model would say: what it says can be read, and follows the schema."""

    def test_any_seed(self, sdk):
        def said(seed: int) -> str:
            body = {"model": "random", "messages": HELLO, "temperature": 1.5, "seed": seed, "extra_body": SILENT}
            text, _, _, finish, _ = (whole, streamed)[seed % 2](sdk, response_format=lamp(), **body)
            assert finish == "stop"
            Lamp.model_validate_json(text)
            return text

        with ThreadPoolExecutor(6) as pool:
            assert len(set(pool.map(said, range(18)))) == 18

    @pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
    def test_thoughts_are_free(self, ask, kind):
        said, thought, _, finish, usage = ask(model=kind, response_format=lamp())
        assert (thought, finish) == (THOUGHT, "stop")
        Lamp.model_validate_json(said)
        assert usage.completion_tokens_details.reasoning_tokens >= 2

    @pytest.mark.parametrize(("wishes", "thoughts"), [({F: 60}, ""), ({A: 60, END: 100}, '{"city": "Paris"}')])
    def test_harmony(self, ask, wishes, thoughts):
        """In the channel `final`, at once or after the channel `analysis`: the model has no wish of its own which."""
        bias = {str(token): weight for token, weight in wishes.items()}
        said, thought, _, finish, _ = ask(model="gpt_oss", response_format=lamp(), logit_bias=bias, seed=1)
        assert (thought[: len(thoughts) or None], finish) == (thoughts, "stop")
        Lamp.model_validate_json(said)

    def test_without_thoughts(self, ask):
        said, thought, *_ = ask(model="quick", response_format=lamp())
        assert thought == ""
        Lamp.model_validate_json(said)

    def test_any_object(self, ask):
        ids = {str(code): weight for code, weight in ((QUOTE, 60), (CLOSE, 40))}  # it would go on for long
        said, *_ = ask(model="random", response_format={"type": "json_object"}, logit_bias=ids, extra_body=SILENT)
        assert isinstance(json.loads(said), dict)
        assert len(said) > len("{}")

    def test_pydantic_models_of_the_sdk(self, sdk):
        parsed = (
            sdk.chat.completions.parse(model="quick", messages=HELLO, response_format=Lamp).choices[0].message.parsed
        )
        assert isinstance(parsed, Lamp)

    @pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "gpt_oss"])
    def test_a_call_or_an_answer(self, ask, kind):
        calls = ask(model=kind, response_format=lamp(), tools=[WEATHER])[2]
        assert TestTools.read(calls) == [TestTools.PARIS]
        if kind == "gpt_oss":  # nothing could keep this one from its call
            return
        opens = {"logit_bias": {str(OPEN): 60}}  # it has no wish of its own there
        said, _, calls, *_ = ask(model=kind, response_format=lamp(), tools=[WEATHER], messages=STEPS, **opens)
        assert calls == []
        Lamp.model_validate_json(said)

    @pytest.mark.parametrize("seed", range(4))
    def test_arguments_that_are_asked_for(self, ask, seed):
        tool = {"name": "set_lamp", "strict": True, "parameters": Lamp.model_json_schema()}
        body = {
            "tools": [{"type": "function", "function": tool}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        ((name, arguments),) = ask(model="random", seed=seed, extra_body=SILENT, **body)[2]
        assert name == "set_lamp"
        Lamp.model_validate_json(arguments)

    def test_nobody_else_is_held_to_it(self, sdk):
        def ask(number: int) -> str:
            extra = {"response_format": lamp()} if number % 2 else {}
            body = {"model": "random", "messages": HELLO, "seed": number, "max_tokens": 60, "extra_body": SILENT}
            return whole(sdk, **body, **extra)[0]

        alone = [ask(number) for number in range(4)]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ask, range(4))) == alone

    @pytest.mark.parametrize(
        ("given", "clue"),
        [
            ("json", "response_format is 'json', but must be an object with a type"),
            ({"type": "json_schema"}, "but must be"),
            ({"type": "json_schema", "json_schema": {"schema": "x"}}, "but must be"),
            (lamp(type="obiect"), "Invalid type: obiect"),
            (lamp(required="action"), "Expected array for 'required'"),
            (lamp(properties={"a": {"$ref": "#/$defs/none"}}), "'/$defs/none' does not exist"),
            (lamp(properties={"a": {"$ref": "http://127.0.0.1/x"}}), "does not fetch"),
            (lamp(properties={"a": {"type": "string", "pattern": "("}}), "unclosed group"),
            (lamp(properties={"a": {"type": "string", "format": "colour"}}), "Unknown format: colour"),
            (lamp(properties={"action": {"type": "integer", "minimum": 3, "maximum": 2}}), "Unsatisfiable schema"),
            (lamp(properties={"a": {"type": "array", "uniqueItems": True}}), 'Unimplemented keys: ["uniqueItems"]'),
            (lamp(**{"not": {}}), 'Unimplemented keys: ["not"]'),
            (lamp(properties={"a": {"items": [{"minLenght": 3}]}}), "no keyword 'minLenght'; did you mean minLength?"),
            (lamp(properties={"a": {"nullable": True}}), "no keyword 'nullable'"),
        ],
    )
    def test_what_cant_be_kept(self, daemon, given, clue):
        for stream in (False, True):
            refused = daemon.chat("qwen3", response_format=given, stream=stream)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == "response_format"
            assert clue in refused.json()["error"]["message"]

    def test_a_schema_that_never_begins(self, daemon):
        given = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}
        refused = daemon.chat("qwen3", response_format=given, chat_template_kwargs={"enable_thinking": False})
        assert refused.status_code == 400, refused.text
        assert "Nothing that the format allows can follow" in refused.json()["error"]["message"]

    @pytest.mark.parametrize("kind", HOSTILE)
    def test_what_would_take_for_ever(self, daemon, sdk, kind):
        """It is ended, and meanwhile the others are answered by the same worker."""
        before = whole(sdk, model="qwen3", messages=HELLO)
        pid = daemon.model("qwen3")["worker"]["pid"]
        given = {"type": "json_schema", "json_schema": {"schema": HOSTILE[kind]}}
        with ThreadPoolExecutor(1) as pool:
            hostile = pool.submit(daemon.chat, "qwen3", response_format=given, **SILENT)
            answered = 0
            while not hostile.done() and answered < 3:  # more would only take its time
                assert whole(sdk, model="qwen3", messages=HELLO) == before
                answered += not hostile.done()
        if kind == "making":  # for seconds of the processor's time, while an answer takes tenths
            assert answered > 1
        refused = hostile.result()
        assert refused.status_code == 400, refused.text
        assert "takes more time or memory than there is" in refused.json()["error"]["message"]
        assert daemon.model("qwen3")["worker"]["pid"] == pid

    def test_nothing_is_left_of_a_grammar(self, daemon):
        """However its answer ends: whole, cut off, left, or refused."""
        daemon.chat("random", response_format=lamp(), **SILENT)
        worker = psutil.Process(daemon.model("random")["worker"]["pid"])
        (program,) = worker.children()
        daemon.chat("random", response_format=lamp(), max_tokens=3, **SILENT)
        daemon.chat("random", response_format=lamp(required=1), **SILENT)
        body = {
            "model": "random",
            "messages": HELLO,
            "response_format": {"type": "json_object"},
            "stream": True,
            **SILENT,
        }
        with daemon.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            next(answer.iter_lines())
        wait_until(lambda: not program.children())
        assert worker.children() == [program]

    def test_tools_that_cant_be_kept(self, daemon):
        tool = function("odd", thing={"not": {"type": "string"}})
        assert daemon.chat("qwen3", tools=[tool], tool_choice="required", max_tokens=3).status_code == 200
        tool["function"]["strict"] = True
        refused = daemon.chat("qwen3", tools=[tool], tool_choice="required")
        assert refused.status_code == 400, refused.text
        assert "the arguments of odd can't be held to this schema" in refused.json()["error"]["message"]


class TestPictures:
    """Models with eyes take pictures as data URLs, and nothing else."""

    @pytest.mark.parametrize("kind", EYES)
    def test_a_picture(self, ask, kind):
        plain, seen = ask(model=kind), ask(model=kind, messages=looking(picture(), picture(64, 64, kind="JPEG")))
        assert seen[:2] == (ANSWER, THOUGHT)
        assert seen[4].prompt_tokens - plain[4].prompt_tokens > 10

    @pytest.mark.parametrize("kind", EYES)
    def test_larger_pictures_are_more_tokens(self, sdk, kind):
        sizes = [
            sdk.chat.completions.create(model=kind, messages=looking(picture(size, size))).usage.prompt_tokens
            for size in (32, 128, 2000)
        ]
        assert sizes == sorted(set(sizes))
        assert sizes[2] - sizes[0] < 100  # made smaller, as the model says

    @pytest.mark.parametrize(
        ("url", "clue"),
        [
            ("data:image/png;base64,AAAA", "can't be read"),
            ("data:image/png;base64,???", "can't be read"),
            ("data:image/png,abc", "must be a data URL"),
            (picture()[:120], "can't be read"),
            (picture(kind="PPM"), "can't be read"),
        ],
    )
    def test_no_picture(self, daemon, url, clue):
        refused = daemon.post("/v1/chat/completions", json={"model": "qwen3_vl", "messages": looking(url)})
        assert refused.status_code == 400, refused.text
        assert clue in refused.json()["error"]["message"]

    def test_a_picture_that_unfolds(self, daemon):
        body = {"model": "qwen3_vl", "messages": looking(picture(20_000, 3_000))}
        refused = daemon.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400, refused.text
        assert "are the most" in refused.json()["error"]["message"]

    def test_many_pictures_that_unfold(self, daemon):
        body = {"model": "qwen3_vl", "messages": looking(*[picture(5_000, 4_000)] * 3)}
        refused = daemon.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400, refused.text
        assert "are the most in a request" in refused.json()["error"]["message"]

    def test_addresses_are_not_fetched(self, daemon):
        for url in (f"{daemon.url}/health", "file:///etc/passwd"):
            refused = daemon.post("/v1/chat/completions", json={"model": "qwen3_vl", "messages": looking(url)})
            assert refused.status_code == 400, refused.text

    def test_a_model_without_eyes(self, daemon):
        refused = daemon.post("/v1/chat/completions", json={"model": "qwen3", "messages": looking(picture())})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "modality_unsupported")


class TestParameters:
    """What is asked for happens, or is refused by name."""

    @pytest.mark.parametrize("stop", ["y mod", [" tiny", "zzz"], ["el 🙂"]])
    def test_stop_strings(self, ask, stop):
        said, thought, _, finish, _ = ask(model="qwen3", stop=stop)
        first = min(ANSWER.find(text) for text in ([stop] if isinstance(stop, str) else stop) if text in ANSWER)
        assert (said, thought, finish) == (ANSWER[:first], THOUGHT, "stop")

    @pytest.mark.parametrize("stream", [False, True])
    def test_the_stop_string_is_told(self, daemon, stream):
        body = {
            "model": "qwen3",
            "max_tokens": 99,
            "messages": HELLO,
            "stop_sequences": ["zzz", " tiny"],
            "stream": stream,
        }
        told = daemon.post("/v1/messages", json=body).text
        assert '"stop_reason":"stop_sequence","stop_sequence":" tiny"' in told

    def test_a_stop_string_among_the_thoughts_doesnt_count(self, ask):
        assert ask(model="qwen3", stop=["pond"])[0] == ANSWER

    def test_next_to_no_temperature(self, ask):
        assert ask(model="qwen3", temperature=1e-300)[0] == ANSWER

    def test_seeds(self, ask):
        body = {"model": "random", "temperature": 1.5, "max_tokens": 30}
        one, same, other = (ask(**body, seed=seed)[0] for seed in (7, 7, 8))
        assert one == same != other
        assert (
            ask(model="random", temperature=0, max_tokens=30)[0] == ask(model="random", temperature=0, max_tokens=30)[0]
        )

    def test_garbage_is_no_broken_text(self, sdk):
        body = {"model": "random", "messages": HELLO, "temperature": 2, "seed": 3, "max_tokens": 300}
        said = streamed(sdk, **body)[0]
        assert said == whole(sdk, **body)[0]
        assert "\ufffd" in said  # bytes that are no text

    def test_logprobs(self, sdk):
        body = {"model": "qwen3", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
        found = sdk.chat.completions.create(**body).choices[0].logprobs.content
        assert "".join(token.token for token in found).startswith("Hello from a tiny model ")
        assert [token.bytes for token in found[:2]] == [list(b"Hello"), list(b" from")]
        for token in found:
            assert token.logprob == pytest.approx(0, abs=1e-3)
            assert token.top_logprobs[0].token == token.token
            assert len(token.top_logprobs) == 2
        chunks = list(sdk.chat.completions.create(**body, stream=True))
        lists = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
        assert [token.token for tokens in lists for token in tokens] == [token.token for token in found]

    def test_logit_bias(self, ask):
        ids = {str(number): -100 for number in range(256)}
        said = ask(model="random", logit_bias=ids, temperature=0, max_tokens=20)[0]
        assert said != ask(model="random", temperature=0, max_tokens=20)[0]

    def test_penalties_and_cuts_change_what_is_said(self, ask):
        plain = ask(model="random", temperature=0, max_tokens=60)[0]
        for name, value in {"frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 3}.items():
            extra = {"extra_body": {name: value}} if name == "repetition_penalty" else {name: value}
            assert ask(model="random", temperature=0, max_tokens=60, **extra)[0] != plain
        for cut in ({"top_p": 0.0001}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1}}):
            assert ask(model="random", temperature=1.5, max_tokens=60, **cut)[0] == plain

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"n": 2}, "n"),
            ({"response_format": {"type": "grammar"}}, "response_format"),
            ({"grammar": "root ::= x"}, "grammar"),
            ({"reasoning_effort": "high"}, "reasoning_effort"),
            ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs"),
            ({"functions": []}, "functions"),
        ],
    )
    def test_what_cant_be_done_is_refused(self, daemon, body, param):
        error = daemon.chat("qwen3", **body).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", param)

    @pytest.mark.parametrize(
        "body",
        [
            {"temperature": -1},
            {"temperature": "hot"},
            {"top_p": 2},
            {"max_tokens": 0},
            {"stop": [""]},
            {"stop": ["a"] * 17},
            {"logit_bias": {"x": 1}},
            {"logit_bias": {"999999": 1}},
            {"top_logprobs": 3},
            {"logprobs": True, "top_logprobs": 21},
            {"seed": 1.5},
            {"stream_options": 7},
            {"messages": []},
            {"messages": "hi"},
            {"messages": [{"role": "robot", "content": "hi"}]},
            {"messages": [{"role": "user", "content": 7}]},
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            {"messages": [{"role": "assistant", "tool_calls": [7]}]},
        ],
    )
    def test_nonsense_is_refused(self, daemon, body):
        refused = daemon.post("/v1/chat/completions", json={"model": "qwen3", "messages": HELLO, **body})
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error"), refused.text

    def test_a_seed_that_is_too_large(self, daemon):
        assert "must be at most 9223372036854775807." in daemon.chat("qwen3", seed=1 << 63).json()["error"]["message"]

    def test_what_asks_for_nothing_special_is_taken(self, ask):
        harmless = {"n": 1, "response_format": {"type": "text"}, "user": "me", "store": False, "logprobs": False}
        assert ask(model="qwen3", **harmless)[0] == ANSWER

    def test_a_full_context(self, daemon, sdk):
        error = daemon.chat("qwen3", text="x" * 3000).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert re.search(r"context is 2048 tokens, and the prompt has 30\d\d", error["message"])
        _, _, _, finish, usage = whole(sdk, model="endless", messages=HELLO, max_tokens=32000)
        assert (finish, usage.total_tokens) == ("length", 2048)


class TestCompletions:
    """Plain texts are continued."""

    def test_a_text(self, sdk):
        answer = sdk.completions.create(model="qwen3", prompt="Say:\n\n", logprobs=1)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (ANSWER, "stop")
        assert choice.logprobs.tokens[:3] == ["Hello", " from", " a"]
        assert answer.usage.prompt_tokens == 5

    def test_streamed(self, sdk):
        stream = sdk.completions.create(
            model="qwen3", prompt="Say:\n\n", stream=True, stop="tiny", extra_body={"top_k": 5}
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello from a "
        assert chunks[-1].choices[0].finish_reason == "stop"

    @pytest.mark.parametrize("streams", [False, True])
    def test_offsets_of_tokens(self, sdk, streams):
        """A token is where its text is; one that ends a character begins where the character does."""
        body = {"model": "qwen3", "prompt": "Say:\n\n", "logprobs": 0, "max_tokens": 20}
        answers = list(sdk.completions.create(**body, stream=True)) if streams else [sdk.completions.create(**body)]
        choices = [answer.choices[0] for answer in answers]
        told = [choice.logprobs for choice in choices if choice.logprobs]
        tokens, offsets = ([item for one in told for item in getattr(one, key)] for key in ("tokens", "text_offset"))
        assert offsets == [0, 5, 10, 12, 17, 23, 24, 24, 24, 24]
        text = "".join(choice.text for choice in choices)
        for token, offset in zip(tokens[:6], offsets[:6], strict=True):
            assert text[offset:].startswith(token)

    def test_special_tokens(self, sdk):
        """They belong to no text, unless a request says so."""
        vocabulary = json.loads((tiny_language.model() / "tokenizer.json").read_text())["added_tokens"]
        plan = next(token["id"] for token in vocabulary if token["content"] == "<|plan|>")
        body = {"model": "qwen3", "prompt": "Say!", "max_tokens": 1, "temperature": 0, "logit_bias": {str(plan): 100}}
        texts = [
            sdk.completions.create(**body, extra_body=more).choices[0].text
            for more in ({}, {"skip_special_tokens": True}, {"skip_special_tokens": False})
        ]
        assert texts == ["", "", "<|plan|>"]

    def test_tokens(self, sdk):
        assert sdk.completions.create(model="qwen3", prompt=[72, 73, 74], max_tokens=1).usage.prompt_tokens == 3

    @pytest.mark.parametrize("body", [{"prompt": ["a", "b"]}, {"prompt": ""}, {"prompt": [10**9]}, {}, {"echo": True}])
    def test_nonsense(self, daemon, body):
        refused = daemon.post(
            "/v1/completions", json={"model": "qwen3", "prompt": "x", **body} if body else {"model": "qwen3"}
        )
        assert refused.status_code == 400, refused.text


class TestAtOnce:
    """Several clients are served together, and one that leaves ends only its own answer."""

    def test_nobody_waits_for_the_others_end(self, sdk):
        began, ended = threading.Barrier(4, timeout=LIMIT_S), []

        def ask(number: int) -> None:
            body = {"model": "endless", "messages": HELLO, "max_tokens": 100 + number}
            stream = sdk.chat.completions.create(stream=True, stream_options={"include_usage": True}, **body)
            next(stream)
            began.wait()  # all four have their first token before any goes on
            *_, last = stream
            ended.append((number, last.usage.completion_tokens))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(4)))
        assert sorted(ended) == [(number, 100 + number) for number in range(4)]

    def test_together_as_alone(self, sdk):
        def ask(number: int) -> str:
            messages = [{"role": "user", "content": "long " * (40 * number) + "end"}]
            return whole(sdk, model="random", messages=messages, temperature=1, seed=number, max_tokens=40)[0]

        alone = [ask(number) for number in range(6)]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, range(6))) == alone

    def test_a_client_that_leaves(self, daemon):
        def working() -> float | None:
            """None: the worker didn't tell in time."""
            line = r'^llmux_worker_running\{.*model="tireless".*\} (.+)$'
            found = re.search(line, daemon.get("/metrics").text, re.MULTILINE)
            return float(found[1]) if found else None

        body = {"model": "tireless", "messages": HELLO, "stream": True}
        with daemon.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            wait_until(lambda: working() == 1)
            next(pieces)
        wait_until(lambda: working() == 0)


class TestDeath:
    """kill -9 in the middle of an answer."""

    def test_the_stream_says_so_and_the_model_comes_back(self, daemon):
        daemon.chat("tireless", max_tokens=1)
        pid = daemon.model("tireless")["worker"]["pid"]
        body = {"model": "tireless", "messages": HELLO, "stream": True}
        with daemon.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(pid, signal.SIGKILL)
            rest = []
            try:
                rest += list(lines)
            except httpx.TransportError:
                rest.append("broken off")
        assert "data: [DONE]" not in rest
        assert any("error" in line for line in rest) or rest[-1] == "broken off"
        daemon.wait_gone("tireless", pid)
        assert daemon.chat("tireless", max_tokens=1).status_code == 200
        assert daemon.model("tireless")["worker"]["pid"] != pid


class TestMemory:
    """What a worker takes is known before it is started."""

    @pytest.mark.parametrize("kind", [*KINDS, "large"])
    def test_estimate_and_measurement(self, daemon, kind, record_property):
        for _ in range(2):
            daemon.chat(kind, text="x" * 1500)

        memory = daemon.wait_foretold(kind)
        estimate, measured = memory["estimate"]["mib"], memory["measured_mib"]
        record_property("estimate_mib", estimate)
        record_property("measured_mib", measured)
        print(f"{kind}: estimate {estimate} MiB, measured {measured} MiB")
        assert memory["estimate"]["source"] == "computed"

    def test_what_large_pictures_took_is_given_back(self, daemon):
        def look(url: str) -> None:
            body = {"model": "qwen3_vl", "messages": looking(url), "max_tokens": 1}
            assert daemon.post("/v1/chat/completions", json=body).is_success

        def taken_mib() -> int:
            return worker.memory_info().rss >> 20

        look(picture())
        worker = psutil.Process(daemon.model("qwen3_vl")["worker"]["pid"])
        most = before = taken_mib()
        with ThreadPoolExecutor(4) as pool:
            looks = [pool.submit(look, picture(2_000, 2_000)) for _ in range(8)]
            while not all(each.done() for each in looks):
                most = max(most, taken_mib())
                time.sleep(0.01)
        for each in looks:
            each.result()
        allowed = max(most - 60, before + 60)  # on a busy machine they may never have been there at once
        wait_until(lambda: taken_mib() < allowed, what=f"less than {allowed} MiB, after {before} and at most {most}")

    def test_capabilities(self, daemon):
        listed = {model["id"]: model for model in daemon.get("/v1/models").json()["data"]}
        assert "qwen3_vl" in listed
        found = daemon.model("qwen3_vl")["capabilities"]
        assert (found["modalities"], found["tools"], found["thinking"], found["context"]) == (
            ["text", "image"],
            True,
            True,
            2048,
        )
        assert daemon.model("gpt_oss")["capabilities"]["modalities"] == ["text"]
