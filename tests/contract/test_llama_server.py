"""The llama_server runtime: every key of its configuration reaches both programs and does what it says."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from runtimes.llama_server.adapter import config
from runtimes.llama_server.adapter.config import FLAGS, KEY_OF_OPTION, OWN_OPTIONS, LlamaServerConfig
from supervisor.host.upstream.upstream import UpstreamPool
from tests.support import tiny
from tests.support.limits import LIMIT_S

MESSAGES = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
NOT_A_SETTING = {"runtime", "program", "binary", "build", "library_path", "extra_args"}
NAMES = {"path": "model"}


def message(worker, **fields):
    answer = worker.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 64, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def png(color: bytes, size: int = 16) -> str:
    """A square picture as a data URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    out = io.BytesIO(b"")
    out.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)))
    out.write(chunk(b"IDAT", zlib.compress((b"\0" + color * size) * size)) + chunk(b"IEND", b""))
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


class TestMapping:
    """Each key of the configuration is an option of the real program and a parameter of the embedded one."""

    def test_every_key_has_an_option(self):
        own = set(LlamaServerConfig.model_fields) - set(LlamaServerConfig.__bases__[0].model_fields) - NOT_A_SETTING
        there = {NAMES.get(key, key) for key in own} | set(LlamaServerConfig.former_keys)
        assert there == set(FLAGS) - {"host", "port", "metrics", "alias", "embeddings"}

    @pytest.mark.binary
    def test_the_program_knows_every_option_we_speak_of(self):
        text = subprocess.run(
            [tiny.llama_server(), "--help"], capture_output=True, text=True, timeout=LIMIT_S, check=True
        ).stdout
        known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text))
        assert set(KEY_OF_OPTION) | OWN_OPTIONS <= known

    def test_the_embedded_server_has_a_parameter_for_every_setting(self):
        launcher = Path(config.__file__).parents[1] / "worker" / "launcher.py"
        code = f"""
import importlib.util, json
spec = importlib.util.spec_from_file_location("launcher", {str(launcher)!r})
launcher = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launcher)
settings = json.loads({SETTINGS!r})
params = launcher.parameters(settings, "the-key")
for name in settings:
    if name in launcher.ATTRIBUTES:
        value = params
        for part in launcher.ATTRIBUTES[name].split("."):
            value = getattr(value, part)
        assert value == settings[name] or abs(value - settings[name]) < 1e-6, (name, value)
assert params.api_keys == ["the-key"]
assert params.hostnames == ["127.0.0.1"] and params.model_alias == {{"other"}}
assert params.cache_type_k.name == "GGML_TYPE_Q8_0" and params.cache_type_v.name == "GGML_TYPE_IQ4_NL"
assert params.flash_attn_type.name.endswith("ENABLED")
assert params.load_mode.name == "LLAMA_LOAD_MODE_MMAP_MLOCK"
assert params.rope_scaling_type.name.endswith("YARN")
assert params.pooling_type.name.endswith("RANK") and params.embedding
assert params.reasoning_format.name.endswith("DEEPSEEK_LEGACY") and params.enable_reasoning == 0
assert [kind.name for kind in params.speculative.types] == ["COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K4V"]
assert [adapter.path for adapter in params.lora_adapters] == ["/a", "/b"]
assert not params.fit_params
print(" ".join(sorted(settings)))
"""
        python = tiny.runtimes_dir() / "llama_server" / "bin" / "python"
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr
        assert set(done.stdout.split()) == set(FLAGS) - {"chat_template_file"}  # it is read, and takes another's place


SETTINGS = """{
 "model": "/m.gguf", "alias": "other", "host": "127.0.0.1", "port": 1, "n_ctx": 7, "n_gpu_layers": 9, "flash_attn": "on",
 "cache_type_k": "q8_0", "cache_type_v": "iq4_nl", "mmproj": "/p.gguf", "mmproj_offload": false, "image_min_tokens": 3,
 "image_max_tokens": 512, "draft_model": "/d.gguf", "spec_type": "ngram-map-k4v", "spec_draft_n_max": 5,
 "spec_draft_p_min": 0.125, "spec_draft_ngl": 4, "reasoning": "off", "reasoning_format": "deepseek-legacy",
 "reasoning_budget": 11, "threads": 1, "threads_batch": 2, "parallel": 3, "kv_unified": true, "batch_size": 256,
 "ubatch_size": 256, "load_mode": "mmap+mlock", "rope_scaling": "yarn", "rope_freq_base": 10000.0,
 "rope_freq_scale": 0.5, "yarn_orig_ctx": 4096, "embeddings": true, "pooling": "mean", "rerank": true, "jinja": false,
 "chat_template": "chatml", "lora": ["/a", "/b"], "cache_ram_mib": 17, "metrics": true}"""


class TestAnswers:
    """Keys whose effect shows in what the worker says."""

    def test_thinks_calls_tools_and_is_named(self, llama_server, start):
        worker = start(llama_server).wait_ready()
        assert message(worker) == {"role": "assistant", "content": tiny.ANSWER, "reasoning_content": tiny.THOUGHT}
        assert worker.get("/v1/models").json()["data"][0]["id"] == "the-model"
        (call,) = message(worker, tools=[WEATHER])["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        spoken = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        assert message(worker, tools=[WEATHER], messages=[*spoken, result])["content"] == tiny.ANSWER

    def test_thinking_fields_switch_it(self, llama_server, start):
        thinking = llama_server.adapter.thinking(llama_server.config())
        worker = start(llama_server).wait_ready()
        assert "reasoning_content" not in message(worker, **thinking.disabled)
        assert message(worker, **thinking.enabled)["reasoning_content"] == tiny.THOUGHT

    def test_reasoning_off_is_the_default_of_every_request(self, llama_server, start):
        worker = start(llama_server, reasoning=False).wait_ready()
        assert message(worker) == {"role": "assistant", "content": tiny.ANSWER}

    def test_reasoning_format_none_leaves_thoughts_in_the_content(self, llama_server, start):
        worker = start(llama_server, extra_args=["--reasoning-format", "none"]).wait_ready()
        assert tiny.THOUGHT in message(worker)["content"]

    def test_slots_context_and_limits(self, llama_server, start):
        keys = {"parallel": 2, "n_ctx": 1024, "kv_unified": False, "batch_size": 256, "ubatch_size": 128}
        worker = start(llama_server, **keys).wait_ready()
        slots = worker.get("/slots").json()
        assert [slot["n_ctx"] for slot in slots] == [512, 512]
        assert llama_server.adapter.target_inflight(llama_server.config(**keys)) == 2

    def test_embeddings(self, llama_server, start):
        config = llama_server.config(type="embedding")
        served = {endpoint.path for endpoint in llama_server.adapter.endpoints(config)}
        assert "/v1/embeddings" in served
        assert "/v1/chat/completions" not in served
        worker = start(llama_server, type="embedding").wait_ready()
        answer = worker.post("/v1/embeddings", {"input": ["one", "two", "one"]}).json()
        first, second, third = (item["embedding"] for item in answer["data"])
        assert len(first) == 256
        assert first == pytest.approx(third, abs=1e-5)
        assert first != pytest.approx(second, abs=1e-3)

    def test_reranking(self, llama_server, start):
        worker = start(llama_server, rerank=True).wait_ready()
        answer = worker.post("/v1/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 2})
        assert answer.status_code == 200, answer.text
        assert {item["index"] for item in answer.json()["results"]} == {0, 1}

    def test_pictures(self, llama_server, start):
        keys = {"mmproj": str(tiny.projector()), "image_max_tokens": 16, "modalities": ["text", "image"]}
        worker = start(llama_server, **keys).wait_ready()
        picture = {"type": "image_url", "image_url": {"url": png(b"\xff\0\0")}}
        text = {"type": "text", "text": "what is it?"}
        plain = worker.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [text]}]}).json()
        seen = worker.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [text, picture]}]}).json()
        assert seen["choices"][0]["message"]["content"] == tiny.ANSWER
        assert seen["usage"]["prompt_tokens"] - plain["usage"]["prompt_tokens"] >= 16

    def test_a_draft_model_drafts(self, llama_server, start):
        keys = {"draft_model": str(tiny.model(name="draft")), "spec_draft_n_max": 4, "spec_draft_p_min": 0.1}
        worker = start(llama_server, **keys).wait_ready()
        body = {"messages": MESSAGES, "max_tokens": 64, "temperature": 0}
        timings = worker.post("/v1/chat/completions", body).json()["timings"]
        assert timings["draft_n"] > 0
        assert timings["draft_n_accepted"] > 0

    def test_a_template_of_ones_own(self, llama_server, start, tmp_path):
        template = tmp_path / "template.jinja"
        template.write_text("{{ messages[0].content }} <<{{ 'x' }}>>")
        worker = start(llama_server, chat_template_file=str(template)).wait_ready()
        assert worker.post("/apply-template", {"messages": MESSAGES}).json()["prompt"] == "hi <<x>>"

    def test_remaining_keys_are_accepted(self, llama_server, start):
        keys = {
            "flash_attn": True,
            "cache_type_k": "q8_0",
            "cache_type_v": "q4_0",
            "spec_type": ["ngram-simple", "ngram-mod"],
            "reasoning": "on",
            "n_gpu_layers": 0,
            "cache_ram_mib": 8,
            "extra_args": [
                *("--load-mode", "none", "-tb", "1", "--rope-scaling", "yarn", "--rope-freq-base", "10000.0"),
                *("--rope-freq-scale", "0.5", "--yarn-orig-ctx", "1024", "--reasoning-budget", "8"),
                *("--image-min-tokens", "4", "--no-mmproj-offload", "--reasoning-format", "deepseek"),
            ],
        }
        worker = start(llama_server, **keys).wait_ready()
        assert message(worker)["content"]


class TestConnections:
    """Our client and llama.cpp's server agree on when a connection can be used again."""

    async def test_streams_right_after_each_other_are_all_answered(self, llama_server, start):
        """It closes a connection as soon as a stream has ended, although it promises to keep it."""
        worker = start(llama_server).wait_ready()
        upstream = UpstreamPool(worker.spec.host, worker.spec.port, worker.spec.auth)

        async def ask(stream: bool) -> int:
            body = json.dumps({"prompt": "hi", "max_tokens": 1, "stream": stream}).encode()
            fields = [(b"content-type", b"application/json")]
            answer = await upstream.request("POST", b"/v1/completions", fields, body)
            await answer.read(1 << 20)
            return answer.status

        async def client() -> set[int]:
            return {await ask(stream=turn % 4 > 0) for turn in range(100)}

        try:
            assert await asyncio.gather(*(client() for _ in range(4))) == [{200}] * 4
        finally:
            upstream.close()
