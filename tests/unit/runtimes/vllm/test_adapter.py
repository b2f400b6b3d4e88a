"""The adapter of our worker on vLLM's engine, without a process: settings, environment, problems, abilities of a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runtimes import device_kind
from runtimes.base import CHAT_TEMPLATE, DeviceAssignment, LaunchContext, RuntimeNotInstalledError
from runtimes.vllm.adapter import VllmWorkerAdapter
from runtimes.vllm.adapter.config import VllmWorkerConfig
from runtimes.vllm_serve.adapter import VllmServeConfig
from tests.support import hf_folder

ADAPTER = VllmWorkerAdapter()
HOST = DeviceAssignment("host", device_kind.HOST)
CARD = DeviceAssignment("gpu1", device_kind.CUDA, index=1, uuid="GPU-1234")
VISION = {"text_config": hf_folder.TINY, "vision_config": {"hidden_size": 64, "num_heads": 2, "patch_size": 16}}


@pytest.fixture
def folder(tmp_path) -> Path:
    return hf_folder.write(tmp_path / "model")


@pytest.fixture
def config(folder):
    return lambda **keys: ADAPTER.config(**{"runtime": "vllm", "path": str(folder), **keys})


@pytest.fixture
def launch(config, tmp_path):
    python = tmp_path / "runtimes" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()

    def launched(*devices, **keys):
        context = LaunchContext("gemma", "127.0.0.1", 18100, "secret", devices or (HOST,), tmp_path / "runtimes")
        return ADAPTER.launch(config(**keys), context)

    return launched


def options(spec) -> dict:
    return json.loads(spec.argv[-1])


class TestLaunch:
    """The engine's settings are those of vllm_serve, as arguments instead of options."""

    def test_settings(self, launch, folder):
        given = options(launch(max_num_seqs=3, max_pixels=99, speculative_method="ngram", num_speculative_tokens=2))
        engine = given["engine"]
        assert (given["model"], given["port"], given["parallel"]) == ("gemma", 18100, 3)
        assert (engine["model"], engine["served_model_name"], engine["max_num_seqs"]) == (str(folder), "gemma", 3)
        assert engine["mm_processor_kwargs"] == {"max_pixels": 99}
        assert engine["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 2}
        assert engine["kv_cache_memory_bytes"] > 0
        assert "max_pixels" not in engine

    def test_further_options_are_the_workers_to_read(self, launch):
        given = options(launch(extra_args=["--enforce-eager"]))
        assert given["extra_args"] == ["--enforce-eager"]
        assert "extra_args" not in given["engine"]

    def test_what_the_engine_does_not_know_is_the_workers(self, launch, tmp_path):
        template = tmp_path / "template"
        template.write_text("{{ messages }}")
        given = options(launch(chat_template=str(template), default_chat_template_kwargs={"enable_thinking": False}))
        assert given["chat_template"] == "{{ messages }}"
        assert given["chat_template_kwargs"] == {"enable_thinking": False}
        assert not {"chat_template", "default_chat_template_kwargs", "tool_format"} & given["engine"].keys()

    def test_environment(self, launch):
        env = launch(CARD, env={"A": "1"}).env
        assert (env["CUDA_VISIBLE_DEVICES"], env["LLMUX_WORKER_KEY"], env["A"]) == ("GPU-1234", "secret", "1")
        assert (env["VLLM_WORKER_MULTIPROCESSING_METHOD"], env["HF_HUB_OFFLINE"]) == ("spawn", "1")
        assert launch(replace(CARD, capability=(12, 0))).env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"

    def test_a_name_may_be_downloaded(self, launch):
        spec = launch(path=None, model="org/none", kv_cache_memory_bytes=1 << 30)
        assert "HF_HUB_OFFLINE" not in spec.env
        assert options(spec)["engine"]["model"] == "org/none"

    def test_on_the_processor_gpus_have_no_meaning(self, launch):
        assert "tensor_parallel_size" not in options(launch(gpus=2))["engine"]
        assert options(launch(CARD, CARD, gpus=2))["engine"]["tensor_parallel_size"] == 2

    def test_not_installed(self, config, tmp_path):
        context = LaunchContext("gemma", "127.0.0.1", 18100, "secret", (HOST,), tmp_path / "none")
        with pytest.raises(RuntimeNotInstalledError, match="llmux runtimes install vllm"):
            ADAPTER.launch(config(), context)


class TestKeys:
    """Those of vllm_serve, but for what only its server or another process has."""

    def test_which(self):
        assert VllmServeConfig.model_fields.keys() - VllmWorkerConfig.model_fields.keys() == {
            *("binary", "library_path", "runner", "reasoning_parser", "tool_call_parser"),
        }
        beside = VllmWorkerConfig.model_fields.keys() - VllmServeConfig.model_fields.keys()
        assert beside == {"tool_format"}

    @pytest.mark.parametrize(
        ("keys", "said"),
        [
            ({"path": "/no/such/model"}, "path: /no/such/model: there is no such folder"),
            ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization: a share sizes no memory here"),
            ({"num_speculative_tokens": 2}, "num_speculative_tokens: needs speculative_method"),
            (
                {"quantization": "bitsandbytes"},
                "quantization: vLLM has no bitsandbytes any more; runtime transformers has it",
            ),
            ({"env": {"LLMUX_WORKER_KEY": "x"}}, "env: LLMUX_WORKER_KEY is set by llmux"),
            ({"env": {"VLLM_WORKER_MULTIPROCESSING_METHOD": "fork"}}, "env: VLLM_WORKER_MULTIPROCESSING_METHOD is set"),
            ({"extra_args": ["--runner", "pooling"]}, "extra_args: --runner is set by llmux"),
            (
                {"extra_args": ["--structured-outputs-config.backend", "x"]},
                "extra_args: --structured-outputs-config is set",
            ),
            ({"extra_args": ["--dtype=half"]}, "extra_args: --dtype has a key of its own, dtype"),
        ],
    )
    def test_complaints(self, config, keys, said):
        (problem,) = ADAPTER.check(config(**keys), runtimes_dir=Path("/nonexistent"))
        assert problem.startswith(said)

    def test_a_model_that_generates_nothing(self, config, folder):
        hf_folder.write(folder, {"architectures": ["BertModel"], "model_type": "bert"})
        (problem,) = ADAPTER.check(config(), runtimes_dir=Path("/nonexistent"))
        assert problem == "path: BertModel is no language model that generates text; vllm_serve has the other kinds"

    def test_weights_that_vllm_cannot_read(self, config, folder):
        hf_folder.write(folder, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
        (problem,) = ADAPTER.check(config(), runtimes_dir=Path("/nonexistent"))
        assert problem == "path: vLLM has no bitsandbytes any more; runtime transformers has it"


class TestCapabilities:
    """They come from the model's folder."""

    def test_of_a_text_model(self, config):
        found = ADAPTER.capabilities(config(tool_format="qwen"))
        assert (found.modalities, found.tools, found.thinking, found.context) == (("text",), True, True, 2048)
        assert ADAPTER.capabilities(config()).tools is False, "its template shows tools, but no format that is known"

    def test_eyes(self, config, folder):
        hf_folder.write(folder, VISION)
        assert ADAPTER.inputs(config()) == {"text", "image"}
        assert ADAPTER.inputs(config(limit_mm_per_prompt={"image": 0})) == {"text"}

    def test_thinking_is_switched_where_the_template_can(self, config, folder):
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        assert ADAPTER.thinking(config()) is None
        (folder / "chat_template.jinja").write_text("{{ enable_thinking }}")
        assert ADAPTER.thinking(config()) == CHAT_TEMPLATE

    def test_prompts_are_kept_apart_by_a_salt(self, config):
        assert ADAPTER.prompt_cache(config()).salt_field == "cache_salt"
        assert not ADAPTER.prompt_cache(config(enable_prefix_caching=False)).is_kept
