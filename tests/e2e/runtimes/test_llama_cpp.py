"""A real llama-cpp-python through the daemon: loaded, asked, cancelled, unloaded. `make test-llama-cpp` compiles it."""

from __future__ import annotations

import itertools

import openai
import pytest

from tests.support import build_llama_cpp, tiny
from tests.support.daemon import running

pytestmark = pytest.mark.skipif(build_llama_cpp.find() is None, reason=build_llama_cpp.MISSING)
LONG = " ".join(f"word{number}" for number in range(8000))
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    keys = {"runtime": "llama_cpp", "path": str(tiny.model()), "threads": 1}
    models = {
        "own": {**keys, "n_ctx": 2048, "type_k": "q8_0", "type_v": "q8_0"},
        "long": {**keys, "path": str(tiny.model(answer=LONG, name="tiny-long")), "n_ctx": 32768},
        "chatml": {**keys, "chat_format": "chatml", "n_ctx": 1024},
    }
    with running(tmp_path_factory.mktemp("llama_cpp"), {"models": models}) as started:
        yield started


@pytest.fixture
def sdk(daemon):
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(*texts: str) -> dict[str, object]:
    said = zip(itertools.cycle(("user", "assistant")), texts or ("hi",), strict=False)
    return {"messages": [{"role": role, "content": text} for role, text in said]}


class TestAnswers:
    """By the file's own chat template."""

    def test_a_conversation(self, sdk):
        (choice,) = sdk.chat.completions.create(model="own", **asked("hi", "hello", "and?")).choices
        assert (choice.message.content, choice.message.reasoning_content) == (tiny.ANSWER, tiny.THOUGHT)
        assert choice.finish_reason == "stop"

    def test_a_stream(self, sdk):
        said = [
            event.choices[0].delta.content or ""
            for event in sdk.chat.completions.create(model="own", stream=True, **asked())
        ]
        assert "".join(said) == tiny.ANSWER
        assert sum(map(bool, said)) > 2, "it comes as it is generated"

    def test_a_tool_call(self, sdk):
        answer = sdk.chat.completions.create(model="own", tools=[{"type": "function", "function": WEATHER}], **asked())
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.tool_calls[0].function.name) == ("tool_calls", "get_weather")

    def test_log_probabilities_and_bias(self, sdk):
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        first = sdk.chat.completions.create(
            model="own", temperature=0, logprobs=True, top_logprobs=2, max_tokens=1, extra_body=off, **asked()
        )
        (token,) = first.choices[0].logprobs.content
        assert (token.token, token.logprob, len(token.top_logprobs)) == ("Hello", pytest.approx(0, abs=0.01), 2)
        biased = {**off, "logit_bias": {"5": -100}}
        again = sdk.chat.completions.create(model="own", temperature=0, extra_body=biased, **asked())
        assert again.choices[0].message.content == tiny.ANSWER

    def test_the_same_prompt_again_with_and_without_what_was_kept(self, daemon):
        for keep in (True, True, False):
            answer = daemon.chat("own", cache_prompt=keep, seed=1)
            assert answer.json()["choices"][0]["message"]["content"] == tiny.ANSWER

    def test_a_chat_format_takes_no_arguments_of_the_files_template(self, daemon):
        answer = daemon.chat("chatml", chat_template_kwargs={"enable_thinking": False})
        assert (answer.status_code, answer.headers["x-llmux-ignored"]) == (200, "chat_template_kwargs.enable_thinking")
        assert daemon.chat("chatml", chat_template_kwargs={"date": "today"}).status_code == 400

    def test_a_schema_is_refused(self, sdk):
        with pytest.raises(openai.BadRequestError, match="llama_server can"):
            sdk.chat.completions.create(model="own", response_format={"type": "json_object"}, **asked())

    def test_a_prompt_too_long(self, sdk):
        with pytest.raises(openai.BadRequestError) as told:
            sdk.completions.create(model="own", prompt="x" * 4000)
        assert told.value.code == "context_length_exceeded"

    def test_a_chat_format_of_the_librarys(self, sdk):
        (choice,) = sdk.chat.completions.create(model="chatml", max_tokens=16, **asked()).choices
        assert tiny.ANSWER in choice.message.content

    def test_one_who_leaves_is_not_answered_any_longer(self, daemon):
        body = {"model": "long", "stream": True, **asked()}
        with daemon.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(6):
                next(lines)
        answer = daemon.post("/v1/chat/completions", json={"model": "long", "max_tokens": 4, **asked()})
        assert answer.json()["usage"]["completion_tokens"] == 4, "the only slot is free again"


def test_it_is_unloaded(daemon):
    daemon.chat("chatml", max_tokens=1)
    assert daemon.post("/v1/admin/models/chatml/unload").status_code < 300
    daemon.wait_state("chatml", "stopped")
