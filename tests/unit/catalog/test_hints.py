"""What is said of the words of other programs, and of names and characters that only look right."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from runtimes.registry import REGISTRY
from supervisor.catalog import hints
from supervisor.catalog.sections.clients import ClientConfig
from supervisor.catalog.sections.sections import LimitsConfig, ServerConfig, VirtualModelConfig
from tests.support.cases import cases

LLAMA = {"runtime": "llama_server", "path": "/m.gguf"}
VLLM = {"runtime": "vllm_serve", "model": "org/model"}
COMMAND = {"cmd": ["cat", "${port}"]}


@pytest.fixture
def told(folder):
    """What is said of one more key of a model: without its place."""

    def problem(model, key):
        document = {"models": {"m": {**model, key: 1}}}
        (line,) = folder.problems(yaml.safe_dump(document), registry=REGISTRY, check_files=False)
        return line.partition(f"models.m.{key}: unknown key")[2]

    return problem


class TestForeignKeys:
    """An unknown key that another program knows is named as it is called here."""

    @pytest.mark.parametrize(
        ("model", "words"),
        [
            (
                LLAMA,
                (
                    "ctx_size ctx-size c num_ctx max_model_len=n_ctx ngl n-gpu-layers num_gpu=n_gpu_layers np num_parallel=parallel"
                    " fa=flash_attn ctk=cache_type_k ctv=cache_type_v t num_thread=threads ub=ubatch_size md=draft_model"
                    " ttl keep_alive=keep_alive_s model_path=path --jnja=jinja"
                ),
            ),
            (
                VLLM,
                (
                    "max-model-len num_ctx ctx_size=max_model_len gpu-memory-utilization=gpu_memory_utilization"
                    " tensor-parallel-size tp=tensor_parallel_size np=max_num_seqs"
                ),
            ),
            (
                COMMAND,
                (
                    "ttl=keep_alive_s checkEndpoint=health_path cmdStop=stop_cmd useModelName=upstream_model"
                    " concurrencyLimit=target_inflight healthCheckTimeout=startup_limit_s"
                ),
            ),
        ],
    )
    def test_key(self, told, model, words):
        foreign = []
        for word in words.split():
            last, _, ours = word.partition("=")
            foreign.append(last)
            if ours:
                assert {key: told(model, key) for key in foreign} == dict.fromkeys(foreign, f'; did you mean "{ours}"?')
                foreign = []
        assert not foreign

    @cases(
        ("model", "key", "instead"),
        [
            (COMMAND, "aliases", "another name for a model is a virtual model"),
            (COMMAND, "proxy", "llmux chooses address and port of each worker"),
            (COMMAND, "unlisted", "write public: false"),
            (COMMAND, "filters", "its strip and force"),
            (COMMAND, "ctx_size", "options of the program stand in cmd"),
            (COMMAND, "path", "options of the program stand in cmd"),
            (VLLM, "pipeline_parallel_size", "llmux gives each worker its devices"),
            (LLAMA, "temp", "request fields stand under defaults of a virtual model"),
            (LLAMA, "checkEndpoint", "llmux knows where to ask this runtime for its health"),
            (LLAMA, "gpu_memory_utilization", "llmux counts memory in MiB: vram_mib of a model"),
            (LLAMA, "hf", "files from a hub are named by source: {repo: OWNER/NAME, files: [FILE.gguf]}"),
            (LLAMA, "n_cpu_moe", "options without a key go into extra_args"),
            (VLLM, "swap_space", "options without a key go into extra_args"),
        ],
    )
    def test_what_is_done_in_another_way(self, told, model, key, instead):
        assert told(model, key).startswith(f"; {instead}") or instead in told(model, key)

    def test_no_hint_names_a_key_that_nobody_has(self):
        configs = [REGISTRY.get(name).config for name in REGISTRY.names()] + [
            ServerConfig,
            LimitsConfig,
            VirtualModelConfig,
            ClientConfig,
        ]
        there = {key for config in configs for key in config.model_fields}
        assert {key for keys in hints._KEYS for key in keys.split()} <= there

    @pytest.mark.parametrize(
        ("section", "key", "meant"),
        [
            ("virtual_models: {v: {model: m, %s: 1}}", "num_ctx", "that belongs to a model: n_ctx"),
            ("virtual_models: {v: {model: m, %s: 1}}", "ttl", "that belongs to a model: keep_alive_s"),
            ("virtual_models: {v: {model: m, %s: 1}}", "keep_alive_s", "that belongs to a model: keep_alive_s"),
            ("limits: {%s: 1}", "ttl", "that belongs to a model: keep_alive_s"),
            ("limits: {%s: 1}", "max_queue", 'did you mean "queue_total"?'),
            ("limits: {%s: 1}", "max_wait_s", 'did you mean "queue_wait_s"?'),
            ("clients: {c: {%s: 1}}", "rpm", 'did you mean "request_rate"?'),
            ("clients: {c: {%s: 1}}", "tokens_per_minute", 'did you mean "token_rate"?'),
            ("clients: {c: {%s: 1}}", "max_concurrency", 'did you mean "concurrency"?'),
            ("server: {%s: 1}", "listen", 'did you mean "host"?'),
            ("server: {%s: 1}", "cors", 'did you mean "allowed_origins"?'),
        ],
    )
    def test_in_another_section(self, folder, section, key, meant):
        document = f"models: {{m: {{cmd: 'cat ${{port}}'}}}}\n{section % key}\n"
        (problem,) = folder.problems(document, registry=REGISTRY, check_files=False)
        assert problem.endswith(f"{key}: unknown key; {meant}")

    @pytest.mark.parametrize(
        ("section", "meant"),
        [
            ("groups", "limits.max_loaded"),
            ("macros", "llmux config import FILE"),
            ("physical_models", "llmux config import FILE"),
            ("port", 'did you mean "server.port"?'),
            ("queue_total", 'did you mean "limits.queue_total"?'),
            ("path", "the keys of a model stand under its name"),
            ("model", 'did you mean "models"?'),
        ],
    )
    def test_section(self, folder, section, meant):
        (problem,) = folder.problems(f"{section}: 1\n")
        assert problem.startswith(f"llmux.yaml:1:1 {section}: unknown section; ")
        assert meant in problem


class TestHubNames:
    """A name on the hub where a path is expected hints at `source`."""

    @pytest.mark.parametrize(
        ("model", "source"),
        [
            ("path: Qwen/Qwen3-8B", "{repo: Qwen/Qwen3-8B}"),
            ("path: Qwen/Qwen3-8B, runtime: transformers", "{repo: Qwen/Qwen3-8B}"),
            ("path: 'https://huggingface.co/Qwen/Qwen3-8B', runtime: transformers", "{repo: Qwen/Qwen3-8B}"),
            ("path: 'org/m-GGUF:Q4_K_M', runtime: llama_server", "{repo: org/m-GGUF, files: [FILE.gguf]}"),
            ("path: org/m-GGUF/m.q4.gguf", "{repo: org/m-GGUF, files: [m.q4.gguf]}"),
        ],
    )
    def test_hint(self, folder, model, source):
        told = folder.troubles if "runtime" in model or model.endswith(".gguf") else folder.problems
        (problem,) = told(f"models: {{m: {{{model}}}}}\n", registry=REGISTRY)
        assert problem.endswith(f"; if that is a name on the model hub, write source: {source}")

    @pytest.mark.parametrize("path", ["models/gone.gguf", "gone.gguf", "/a/b", "there/gone"])
    def test_paths(self, folder, path):
        Path("there").mkdir()
        (problem,) = folder.troubles(f"models: {{m: {{path: {path}, runtime: llama_server}}}}\n", registry=REGISTRY)
        assert "hub" not in problem


class TestRemedies:
    """What to write instead of a value that almost says it."""

    @pytest.mark.parametrize(
        ("document", "told"),
        [
            ({"clients": {"ann": {"request_rate": 30}}}, "expected a rate such as 30/min, 30/s or 30/h, got 30"),
            ({"models": {"m": {**LLAMA, "keep_alive_s": "15m"}}}, 'got "15m"; write 900, in seconds'),
            ({"limits": {"keep_alive": {"llm": "1.5 h"}}}, 'got "1.5 h"; write 5400, in seconds'),
            ({"models": {"m": {**LLAMA, "vram_mib": "8GB"}}}, 'got "8GB"; write 8192, in MiB'),
            ({"models": {"m": {**LLAMA, "n_ctx": "32k"}}}, 'got "32k"; write 32768'),
            (
                {"server": {"api_keys": ["sk-abc"]}},
                "got a list; keys of clients are in a file of their own: llmux keys add NAME",
            ),
            ({"models": {"m": {**LLAMA, "runtime": "llamacpp"}}}, 'no such runtime; did you mean "llama_server"?'),
            ({"models": {"m": {**LLAMA, "runtime": "llama_cp"}}}, 'no such runtime; did you mean "llama_cpp"?'),
        ],
    )
    def test_value(self, folder, document, told):
        (line,) = folder.problems(yaml.safe_dump(document), registry=REGISTRY, check_files=False)
        assert told in line

    def test_nor_behind_a_runtime_that_is_none(self, folder):
        """Of its own keys nobody knows; those that every runtime has are checked."""
        model = {"runtime": "zzzz", "path": "/m.gguf", "n_ctxx": 1, "keep_alive_s": "15m", "pin": 3}
        found = folder.problems(yaml.safe_dump({"models": {"m": model}}), registry=REGISTRY, check_files=False)
        assert [line.partition("models.m.")[2].partition(":")[0] for line in found] == [
            "keep_alive_s",
            "pin",
            "runtime",
        ]
        assert "llmux runtimes list shows which there are" in found[-1]

    def test_nothing_hides_behind_the_first_mistake(self, folder):
        model = {"runtime": "lama_server", "path": "/m.gguf", "n_ctxx": 1, "keep_alive_s": "15m"}
        document = {"models": {"m": model}, "clients": {"ann": {"request_rate": 30, "model": "nobody"}}}
        found = folder.problems(yaml.safe_dump(document), registry=REGISTRY, check_files=False)
        keys = {"m.runtime:", "m.n_ctxx:", "m.keep_alive_s:", "ann.request_rate:", "ann.model:"}
        assert {key for line in found for key in keys if key in line} == keys

    @pytest.mark.parametrize("runtime", [{"runtime": 5}, {}])
    def test_nor_behind_none_at_all(self, folder, runtime):
        model = {**runtime, "path": "/models/m", "pin": "yes", "keep_alive_s": "15m", "its_own_key": 1}
        found = folder.problems(yaml.safe_dump({"models": {"m": model}}), registry=REGISTRY, check_files=False)
        at = [line.split()[1].rstrip(":") for line in found]
        assert set(at) == {f"models.m{'.runtime' * bool(runtime)}", "models.m.pin", "models.m.keep_alive_s"}

    def test_a_gguf_file_for_a_runtime_of_folders(self, folder):
        (folder.path / "m.gguf").write_bytes(b"GGUF")
        catalog = folder.load("models: {m: {runtime: transformers, path: m.gguf}}", registry=REGISTRY)
        (trouble,) = map(str, catalog.models["m"].troubles)
        assert "transformers loads folders; llama_server runs it: leave out runtime" in trouble
