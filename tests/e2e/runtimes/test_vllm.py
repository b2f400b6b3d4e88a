"""A real `vllm serve` on a tiny model, through the daemon: what the fake of the other tests only pretends.

Needs the environment that `make test-vllm` installs; a load takes most of a minute, so there is one for all tests.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from runtimes.vllm_serve.adapter import VllmServeConfig
from tests.support import build_vllm, tiny_language
from tests.support import daemon as daemons
from tests.support.daemon import wait_until
from tests.support.limits import LIMIT_S

pytestmark = pytest.mark.skipif(build_vllm.find() is None, reason="there is no vLLM here; make test-vllm installs one")
LOAD_S = 300.0
CACHE_BYTES = 64 << 20
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    program = build_vllm.find()
    model = {
        "runtime": "vllm_serve",
        "path": str(tiny_language.model()),
        "binary": str(program),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "extra_args": ["--enforce-eager"],
        "reasoning_parser": "qwen3",
        "tool_call_parser": "hermes",
    }
    config = {
        "models": {"qwen": model},
        "virtual_models": {"quick": {"model": "qwen", "enable_thinking": False}},
        "limits": {"backoff_first_s": 60},
    }
    with daemons.running(folder, config) as daemon:
        began = time.monotonic()
        daemon.post("/v1/admin/models/qwen/load")
        daemon.wait_state("qwen", "ready", LOAD_S)
        print(f"\nloaded in {time.monotonic() - began:.1f} s")
        yield daemon


def tree(daemon) -> list[psutil.Process]:
    shim = psutil.Process(daemon.model("qwen")["worker"]["shim_pid"])
    return [shim, *shim.children(recursive=True)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def segments(family: list[psutil.Process]) -> set[Path]:
    """The shared memory that these processes have mapped."""
    lines = [line for process in family for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    return {Path(line.split()[5]) for line in lines if "/dev/shm/" in line}


class TestOptions:
    """The tables of options say what this vLLM says."""

    def test_every_option_is_known(self):
        done = subprocess.run(
            [build_vllm.find(), "serve", "--help=all"], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", done.stdout))
        assert set() == (VllmServeConfig.own_options() | VllmServeConfig.options().keys()) - known


class TestAnswers:
    """Each endpoint answers, and what differs from llama.cpp's is as the documents say."""

    def test_thoughts_are_apart(self, daemon):
        answer = daemon.chat("qwen", max_tokens=64).json()
        message = answer["choices"][0]["message"]
        assert (answer["model"], message["reasoning"].strip()) == ("qwen", "pondering")
        assert message["content"].strip() == "Hello from a tiny model 🙂"

    def test_thinking_is_switched_off(self, daemon):
        message = daemon.chat("quick", max_tokens=64).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"].strip()) == (None, "Hello from a tiny model 🙂")

    def test_a_stream(self, daemon):
        body = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 64}
        body["stream_options"] = {"include_usage": True}
        with daemon.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("reasoning") or "" for delta in deltas).strip() == "pondering"
        assert "".join(delta.get("content") or "" for delta in deltas).strip() == "Hello from a tiny model 🙂"
        assert chunks[-1]["usage"]["completion_tokens"] > 5

    def test_a_tool_call(self, daemon):
        (call,) = daemon.chat("qwen", tools=[WEATHER], max_tokens=64).json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}

    def test_other_endpoints(self, daemon):
        messages = [{"role": "user", "content": "hi"}]
        for path, body in {
            "/v1/completions": {"prompt": "Hello", "max_tokens": 8},
            "/v1/responses": {"input": "hi"},
            "/v1/messages": {"messages": messages, "max_tokens": 64},
            "/v1/messages/count_tokens": {"messages": messages},
            "/tokenize": {"prompt": "hi"},
            "/detokenize": {"tokens": [71, 72]},
        }.items():
            answer = daemon.post(path, json={"model": "qwen", **body})
            assert answer.status_code == 200, f"{path}: {answer.text}"

    @pytest.mark.parametrize("model", ["qwen", "quick"])
    def test_counts_are_the_same_with_and_without_a_path_for_them(self, daemon, model):
        """It has none for responses, which are counted by an answer."""
        messages = [{"role": "user", "content": "hi"}]
        one = daemon.post("/v1/messages/count_tokens", json={"model": model, "messages": messages}).json()
        other = daemon.post("/v1/responses/input_tokens", json={"model": model, "input": "hi"}).json()
        assert other["input_tokens"] == one["input_tokens"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_the_stop_sequence_is_told(self, daemon, stream):
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "quick", "max_tokens": 64, "messages": messages, "stop_sequences": ["zzz", " tiny"]}
        told = daemon.post("/v1/messages", json=body | {"stream": stream}).text.replace(" ", "")
        print(told)
        assert '"stop_reason":"stop_sequence","stop_sequence":"tiny"' in told

    def test_too_much_for_its_context(self, daemon):
        answer = daemon.chat("qwen", text="hi " * 1000)
        assert answer.status_code == 400
        assert "maximum context length" in answer.text

    def test_the_key_is_asked_for(self, daemon):
        port = daemon.model("qwen")["worker"]["port"]
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False).status_code == 401

    def test_metrics(self, daemon):
        lines = lambda: daemon.get("/metrics").text.splitlines()
        wait_until(lambda: any(line.startswith("vllm:") and 'model="qwen"' in line for line in lines()))


class TestMemory:
    """What it takes is what was computed, within 30 %."""

    def test_estimate_and_measurement(self, daemon):
        memory = wait_until(
            lambda: (view := daemon.model("qwen")["memory"])["measured_mib"] and view, 30, "it was measured"
        )
        computed, measured = memory["estimate"]["mib"], memory["measured_mib"]
        print(f"\nestimated {computed} MiB ({memory['estimate']['detail']}), measured {measured} MiB")
        untouched = CACHE_BYTES >> 20  # the cache is pages of zeros until it is written
        assert computed - untouched == pytest.approx(measured, rel=0.3)


class TestEnd:
    """Last: the worker is killed in the middle of a request, and nothing of it is left."""

    def test_killed(self, daemon):
        family = tree(daemon)
        names = [process.name() for process in family]
        assert any("EngineCore" in name or name.startswith("VLLM") for name in names), names
        shared = segments(family)
        print("\n" + ", ".join(f"{p.name()} {p.memory_info().rss >> 20} MiB" for p in family))
        for process in family:
            if process.name().startswith("VLLM"):
                process.suspend()  # its engine: the answer must not be complete before the server is killed
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(daemon.chat("qwen")))
        asking.start()
        wait_until(lambda: daemon.model("qwen")["in_flight"] == 1)
        assert daemon.get("/health").status_code == 200  # by now it has been sent
        os.kill(daemon.model("qwen")["worker"]["pid"], signal.SIGKILL)
        killed = time.monotonic()
        asking.join()
        assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (502, "upstream_error")
        wait_until(lambda: not any(map(is_alive, family)), what="all are gone")
        wait_until(lambda: not daemon.workers(), what="none is left that carries the daemon's mark")
        left = [path for path in shared if path.exists()]
        sizes = {path.name: f"{path.stat().st_size >> 20} MiB, {path.stat().st_blocks // 2} KiB used" for path in left}
        print(f"gone after {time.monotonic() - killed:.2f} s; left in /dev/shm: {sizes}")
        for path in left:
            path.unlink()
        daemon.wait_state("qwen", "backoff")
