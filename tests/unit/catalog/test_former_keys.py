"""Keys that became options in `extra_args`: what is said of a configuration that still has one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from runtimes.adapters.server_program import ServerConfig, option_problems
from runtimes.registry import REGISTRY
from supervisor.cli.importers.draft import Draft
from tests.support import fake_servers
from tests.support.cases import cases

PLACE = {"path": "/m", "folder": "/tabby", "vram_mib": 1000}
FORMER = [(name, key) for name in REGISTRY.names() for key in REGISTRY.get(name).config.former_keys]
SAID = "llmux has no key for this option; "
GONE = [(name, key) for name in REGISTRY.names() for key in REGISTRY.get(name).config.removed_keys]


@pytest.fixture
def told(folder):
    """What is said of a model's keys, by key."""

    def problems(runtime, **keys):
        place = {key: PLACE[key] for key in PLACE if key in REGISTRY.get(runtime).config.model_fields}
        document = yaml.safe_dump({"models": {"m": {"runtime": runtime, **place, **keys}}}, sort_keys=False)
        lines = folder.problems(document, registry=REGISTRY, check_files=False)
        return dict(line.partition(" models.m.")[2].split(": ", 1) for line in lines)

    return problems


class TestMessage:
    """The line to write stands in the error, which has the key's place."""

    @cases(
        ("runtime", "keys", "written"),
        [
            ("sglang", {"attention_backend": "triton"}, ["--attention-backend", "triton"]),
            ("sglang", {"disable_cuda_graph": True}, ["--disable-cuda-graph"]),
            ("sglang", {"tool-call-parser": "qwen25"}, ["--tool-call-parser", "qwen25"]),
            (
                "sglang",
                {"extra_args": ["--x", "1"], "chunked_prefill_size": -1},
                ["--x", "1", "--chunked-prefill-size", "-1"],
            ),
            ("tabbyapi", {"vision": True, "reasoning": False}, ["--vision", "true"]),
            ("vllm_serve", {"enable_chunked_prefill": False}, ["--no-enable-chunked-prefill"]),
            ("llama_server", {"rope_freq_scale": 0.5, "load_mode": "auto"}, ["--rope-freq-scale", "0.5"]),
            ("llama_server", {"mmproj_offload": False}, ["--no-mmproj-offload"]),
            ("tgi", {"quantize": "awq", "speculate": 2}, ["--quantize", "awq", "--speculate", "2"]),
            (
                "tgi",
                {"cuda_memory_fraction": 0.5, "max_input_tokens": 9},
                ["--cuda-memory-fraction", "0.5", "--max-input-tokens", "9"],
            ),
            ("vllm", {"enforce_eager": True, "enable_chunked_prefill": None}, ["--enforce-eager"]),
        ],
    )
    def test_a_line_for_all_of_the_model(self, told, runtime, keys, written):
        for said in told(runtime, **keys).values():
            assert yaml.safe_load(said.removeprefix(f"{SAID}write ")) == {"extra_args": written}

    @cases(
        ("runtime", "keys"),
        [
            ("llama_server", {"load_mode": "auto"}),
            ("sglang", {"trust_remote_code": False}),
            ("tgi", {"speculate": None}),
        ],
    )
    def test_a_default_needs_none(self, told, runtime, keys):
        assert [*told(runtime, **keys).values()] == [f"{SAID}remove it"]

    def test_at_its_place(self, folder):
        text = "models:\n  m:\n    path: /m.gguf\n    load_mode: none\n"
        (line,) = folder.problems(text, registry=REGISTRY, check_files=False)
        assert line == f'llmux.yaml:4:5 models.m.load_mode: {SAID}write extra_args: ["--load-mode", "none"]'

    @pytest.mark.parametrize(("runtime", "key"), FORMER)
    def test_what_it_says_to_write_is_taken(self, told, runtime, key):
        adapter = REGISTRY.get(runtime)
        option = adapter.config.former_keys[key]
        (said,) = told(runtime, **{key: bool(option[0]) if isinstance(option, tuple) else 7}).values()
        line = yaml.safe_load(said.removeprefix(f"{SAID}write "))
        place = {field: PLACE[field] for field in PLACE if field in adapter.config.model_fields}
        config = adapter.config(runtime=runtime, **place, **line)
        if issubclass(adapter.config, ServerConfig):
            assert [*option_problems(config)] == []
        assert not any(said.startswith("extra_args") for said in adapter.check(config, runtimes_dir=Path("/nowhere")))
        options = fake_servers.OPTIONS / f"{runtime}.txt"
        assert not options.exists() or line["extra_args"][0] in options.read_text().split()

    @cases(
        ("runtime", "keys", "said"),
        [
            ("llama_server", {"embeddings": True}, "write type: embedding"),
            ("llama_server", {"alias": "a"}, "remove it: another name for a model is a virtual model"),
            ("vllm_serve", {"served-model-name": "a"}, "remove it: another name for a model is a virtual model"),
            ("diffusers", {"parallel": 1}, "remove it: this runtime works on one request at a time"),
            ("llama_cpp", {"parallel": 4}, "remove it: the library has one context"),
        ],
    )
    def test_what_is_no_option_either(self, told, runtime, keys, said):
        (message,) = told(runtime, **keys).values()
        assert message.startswith(f"llmux has no such key any more; {said}")

    @pytest.mark.parametrize(("runtime", "key"), FORMER + GONE)
    def test_none_is_a_key_as_well(self, runtime, key):
        assert key not in REGISTRY.get(runtime).config.model_fields


class TestElsewhere:
    """What is imported, and what is learned, follow the options."""

    def test_imports_write_options(self):
        draft = Draft()
        draft.models["m"] = {
            "path": "/m.gguf",
            "load_mode": "none",
            "extra_args": ["--no-warmup"],
            "reasoning_budget": "5",
        }
        draft.settle()
        options = ["--no-warmup", "--load-mode", "none", "--reasoning-budget", "5"]
        assert (draft.models["m"], draft.notes) == ({"path": "/m.gguf", "extra_args": options}, [])

    @pytest.mark.parametrize("runtime", dict(FORMER))
    def test_other_options_are_another_footprint(self, runtime):
        adapter = REGISTRY.get(runtime)
        place = {key: PLACE[key] for key in PLACE if key in adapter.config.model_fields}
        with_words = [adapter.config(runtime=runtime, **place, extra_args=words) for words in ([], ["--some", "1"])]
        assert len({*map(adapter.memory_definition, with_words)}) == 2
