"""Our worker on vLLM's engine, through the daemon: with a stand-in for vLLM, and with a real one where it is installed.

`make test-vllm` installs a real vLLM for the processor; a load of it takes most of a minute, so there is one for all tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support import build_vllm, fake_vllm_engine, tiny_language
from tests.support import daemon as daemons
from tests.support.asking import WEATHER, looking, picture
from tests.support.daemon import wait_until

LOAD_S = 300.0
CACHE_BYTES = 64 << 20
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
INTERFACE = """
import importlib, inspect, json, sys
found = {}
for path in json.load(sys.stdin):
    module, _, name = path.partition(":")
    target = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    found[path] = list(inspect.signature(target).parameters)
print(json.dumps(found))
"""
USED = {  # what the worker calls, and with which arguments
    "vllm.v1.engine.async_llm:AsyncLLM.generate": {"prompt", "sampling_params", "request_id"},
    "vllm.v1.engine.async_llm:AsyncLLM.from_engine_args": {"engine_args"},
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown": set(),
    "vllm.v1.engine.async_llm:AsyncLLM.get_tokenizer": set(),
    "vllm.config:StructuredOutputsConfig": {"backend"},
    "vllm.engine.arg_utils:AsyncEngineArgs.add_cli_args": {"parser"},
    "vllm.engine.arg_utils:AsyncEngineArgs.from_cli_args": {"args"},
    "vllm.utils.argparse_utils:FlexibleArgumentParser.parse_args": {"args"},
    "vllm.sampling_params:StructuredOutputsParams": {"grammar"},
    "vllm.sampling_params:SamplingParams": {
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "seed", "logprobs", "max_tokens", "stop_token_ids", "structured_outputs", "detokenize"),
        "output_kind",
    },
    "vllm.outputs:CompletionOutput": {"token_ids", "logprobs", "finish_reason"},
    "vllm.outputs:RequestOutput": {"outputs", "num_cached_tokens"},
}


@pytest.fixture(scope="module", params=["stand-in", "real"])
def daemon(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    runtimes = build_vllm.FOLDER
    if request.param == "stand-in":
        runtimes = folder / "runtimes"
        fake_vllm_engine.environment(runtimes / "vllm")
    elif not build_vllm.python().exists():
        pytest.skip("there is no vLLM for our worker here; make test-vllm installs one")
    model = {
        "runtime": "vllm",
        "path": str(tiny_language.model()),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "extra_args": ["--enforce-eager"],
    }
    endless = model | {"path": str(tiny_language.model(endless=True)), "max_model_len": 2048}
    config = {
        "server": {"runtimes_dir": str(runtimes)},
        "models": {"qwen": model, "endless": endless},
        "virtual_models": {"quick": {"model": "qwen", "enable_thinking": False}},
        "limits": {"backoff_first_s": 60},
    }
    with daemons.running(folder, config) as daemon:
        daemon.kind = request.param
        began = time.monotonic()
        daemon.post("/v1/admin/models/qwen/load")
        daemon.wait_state("qwen", "ready", LOAD_S)
        print(f"\n{request.param}: loaded in {time.monotonic() - began:.1f} s")
        yield daemon


def message(answer: httpx.Response) -> dict:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


class TestInterface:
    """The worker's calls, and the stand-in, have the names that vLLM has."""

    @pytest.fixture
    def parameters(self):
        return lambda python: json.loads(
            subprocess.run(
                [python, "-I", "-c", INTERFACE], input=json.dumps([*USED]), capture_output=True, text=True, check=True
            ).stdout.splitlines()[-1]
        )

    def test_of_the_stand_in(self, parameters, tmp_path):
        found = parameters(fake_vllm_engine.environment(tmp_path / "vllm"))
        assert {path: names - set(found[path]) for path, names in USED.items()} == {path: set() for path in USED}

    @pytest.mark.skipif(
        not build_vllm.python().exists(), reason="there is no real vLLM here; make test-vllm installs one"
    )
    def test_of_the_real_one(self, parameters, tmp_path):
        real, fake = (
            parameters(build_vllm.python()),
            parameters(fake_vllm_engine.environment(tmp_path / "vllm")),
        )
        assert {path: names - set(real[path]) for path, names in USED.items()} == {path: set() for path in USED}
        assert {path: set(names) - set(real[path]) for path, names in fake.items()} == {path: set() for path in USED}


class TestAnswers:
    """As our other workers for language models answer."""

    def test_thoughts_are_apart(self, daemon):
        said = message(daemon.chat("qwen", max_tokens=64))
        assert (said["reasoning_content"], said["content"]) == (tiny_language.THOUGHT, tiny_language.ANSWER)

    def test_thinking_is_switched_off(self, daemon):
        said = message(daemon.chat("quick", max_tokens=64))
        assert ("reasoning_content" in said, said["content"]) == (False, tiny_language.ANSWER)

    def test_a_stream(self, daemon):
        body = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 64}
        body["stream_options"] = {"include_usage": True}
        with daemon.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == tiny_language.ANSWER
        assert chunks[-1]["usage"]["completion_tokens"] > 5

    def test_a_tool_call(self, daemon):
        (call,) = message(daemon.chat("qwen", tools=[WEATHER], max_tokens=64))["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}

    def test_a_call_that_the_model_would_not_make(self, daemon):
        asked = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200, "text": "steps"}
        (call,) = message(daemon.chat("qwen", **asked))["tool_calls"]
        assert call["function"]["name"] == "get_weather"

    def test_a_schema(self, daemon):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string", "enum": ["yes"]}}}
        said = message(daemon.chat("qwen", response_format=form, max_tokens=64))
        assert (said["reasoning_content"], json.loads(said["content"])) == (tiny_language.THOUGHT, "yes")

    def test_a_schema_that_can_not_be_followed(self, daemon):
        schema = {"type": "array", "uniqueItems": True}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        answer = daemon.chat("qwen", response_format=form)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
        assert "uniqueItems" in answer.json()["error"]["message"]

    def test_log_probabilities(self, daemon):
        body = {"model": "quick", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
        answer = daemon.post("/v1/chat/completions", json=body | {"logprobs": True, "top_logprobs": 2}).json()
        first = answer["choices"][0]["logprobs"]["content"][0]
        assert (first["token"], len(first["top_logprobs"])) == ("Hello", 2)
        assert first["top_logprobs"][0]["token"] == "Hello"

    def test_sampling(self, daemon):
        """Each parameter reaches the engine in a form that it takes."""
        body = {"model": "qwen", "prompt": "Hello", "max_tokens": 4, "logit_bias": {"5": 100}, "seed": -3, "top_p": 0}
        body |= {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 1}
        answer = daemon.post("/v1/completions", json=body | {"cache_salt": "mine", "temperature": 0.7})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert (len(set(choice["text"])), choice["finish_reason"]) == (1, "length")

    def test_prompts_are_kept_for_those_with_the_same_salt(self, daemon):
        """A prompt of more than two of its blocks, which have 128 tokens on a processor."""

        def cached(salt: str) -> int:
            body = {
                "model": "qwen",
                "prompt": f"{'x' * 300}{tiny_language.ANSWER}",
                "max_tokens": 1,
                "cache_salt": salt,
            }
            return daemon.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert (cached("one"), cached("other")) == (0, 0)
        assert cached("one") > 100

    def test_a_count(self, daemon):
        messages = [{"role": "user", "content": "hi"}]
        path = "/v1/chat/completions/input_tokens"
        counted = daemon.post(path, json={"model": "qwen", "messages": messages}).json()["input_tokens"]
        assert counted == daemon.chat("qwen", text="hi", max_tokens=1).json()["usage"]["prompt_tokens"]

    def test_other_endpoints_are_translated(self, daemon):
        for path, body in {
            "/v1/responses": {"input": "hi"},
            "/v1/messages": {"messages": [], "max_tokens": 64},
        }.items():
            body = body if "input" in body else body | {"messages": [{"role": "user", "content": "hi"}]}
            answer = daemon.post(path, json={"model": "quick", **body})
            assert tiny_language.ANSWER in answer.json().__str__(), answer.text

    def test_too_much_for_its_context(self, daemon):
        answer = daemon.chat("qwen", text="hi " * 1000)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "raise max_model_len" in answer.json()["error"]["message"]

    def test_no_picture(self, daemon):
        answer = daemon.post("/v1/chat/completions", json={"model": "qwen", "messages": looking(picture())})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "modality_unsupported")

    def test_the_key_is_asked_for(self, daemon):
        port = daemon.model("qwen")["worker"]["port"]
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False).status_code == 401


class TestMemory:
    """What it takes is what was computed, within 30 %."""

    def test_estimate_and_measurement(self, daemon):
        if daemon.kind != "real":
            pytest.skip("the stand-in takes what transformers takes")
        memory = wait_until(lambda: (view := daemon.model("qwen")["memory"])["measured_mib"] and view, 30, "measured")
        computed, measured = memory["estimate"]["mib"], memory["measured_mib"]
        print(f"\nestimated {computed} MiB ({memory['estimate']['detail']}), measured {measured} MiB")
        untouched = CACHE_BYTES >> 20  # the cache is pages of zeros until it is written
        assert computed - untouched == pytest.approx(measured, rel=0.3)


class TestEnd:
    """What is no longer wanted ends: a request whose client has left, a worker whose engine is dead."""

    def test_a_client_that_leaves(self, daemon):
        """Its thread is free again, and its answer, which would take all of the context, was not counted as one."""

        def told(name: str) -> list[str]:
            lines = daemon.get("/metrics").text.splitlines()
            return [line.split()[-1] for line in lines if line.startswith(f'{name}{{model="endless"}}')]

        body = {"model": "endless", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 1900}
        with (
            daemon.client() as client,
            client.stream("POST", "/v1/chat/completions", json=body, timeout=LOAD_S) as answer,
        ):
            assert any('"content":"Hello' in line for line in answer.iter_lines())
        wait_until(lambda: told("llmux_worker_running") == ["0.0"], what="its thread is free")
        assert told("llmux_worker_generated_tokens_total") == ["0.0"]

    def test_the_engine_dies(self, daemon):
        worker = psutil.Process(daemon.model("endless")["worker"]["pid"])
        family = [worker, *worker.children(recursive=True)]
        core = next(child for child in worker.children() if _is_core(child))
        core.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(_is_alive(process) for process in family), what="all are gone")
        daemon.wait_state("endless", "backoff")
        assert "the engine of vLLM has ended" in Path(_log(daemon)).read_text(errors="replace")


def _is_core(process: psutil.Process) -> bool:
    words = " ".join(process.cmdline())
    return "EngineCore" in process.name() or "EngineCore" in words or "signal.pause" in words


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _log(daemon) -> str:
    return max(map(str, daemon.folder.rglob("endless*.log")), key=os.path.getmtime)
