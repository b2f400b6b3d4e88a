"""The vllm_serve adapter without a process: which program, which arguments, which complaints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from runtimes import device_kind
from runtimes.base import (
    DeviceAssignment,
    Endpoint,
    HealthCheck,
    LaunchContext,
    ModelUnusableError,
    RuntimeNotInstalledError,
)
from runtimes.model_config import ModelConfig
from runtimes.vllm_serve.adapter import VllmServeAdapter, VllmServeConfig
from tests.support import fake_servers, hf_folder
from tests.support.cases import cases

ADAPTER = VllmServeAdapter()
HOST = DeviceAssignment("host", device_kind.HOST)
CARD = DeviceAssignment("gpu1", device_kind.CUDA, index=1, uuid="GPU-1234")
VISION = {"text_config": hf_folder.TINY, "vision_config": {"hidden_size": 64, "num_heads": 2, "patch_size": 16}}


@pytest.fixture
def folder(tmp_path) -> Path:
    return hf_folder.write(tmp_path / "model")


@pytest.fixture
def binary(tmp_path) -> Path:
    return fake_servers.vllm(tmp_path / "env" / "bin")


@pytest.fixture
def config(folder, binary):
    return lambda **keys: ADAPTER.config(
        **{"runtime": "vllm_serve", "path": str(folder), "binary": str(binary), **keys}
    )


@pytest.fixture
def launch(config):
    def launched(*devices, **keys):
        context = LaunchContext("gemma", "127.0.0.1", 18100, "secret", devices or (HOST,), Path("/nonexistent"))
        return ADAPTER.launch(config(**keys), context)

    return launched


@pytest.fixture
def check(config):
    return lambda **keys: ADAPTER.check(config(**keys), runtimes_dir=Path("/nonexistent"))


def option(spec, name, count=1):
    at = spec.argv.index(name) + 1
    return spec.argv[at] if count == 1 else spec.argv[at : at + count]


class TestProgram:
    """The configured binary, else the runtime's own environment, else the one on PATH."""

    def test_in_that_order(self, config, tmp_path, monkeypatch):
        on_path = fake_servers.vllm(tmp_path / "path")
        own = fake_servers.vllm(tmp_path / "runtimes" / "vllm_serve" / "bin")
        monkeypatch.setenv("PATH", str(on_path.parent))

        def found(runtimes_dir, **keys):
            context = LaunchContext("gemma", "127.0.0.1", 18100, "secret", (HOST,), runtimes_dir)
            return Path(ADAPTER.launch(config(**keys), context).argv[0])

        assert found(tmp_path / "runtimes").parent == tmp_path / "env" / "bin"
        assert found(tmp_path / "runtimes", binary=None) == own
        assert found(tmp_path / "elsewhere", binary=None) == on_path

    def test_nowhere(self, launch, monkeypatch):
        monkeypatch.setenv("PATH", "/nonexistent")
        with pytest.raises(RuntimeNotInstalledError, match="no vllm program"):
            launch(binary=None)

    def test_one_that_cant_be_run(self, launch, check, folder):
        with pytest.raises(ModelUnusableError, match="not a program that can be run"):
            launch(binary=str(folder / "config.json"))
        assert check(binary=str(folder / "config.json"))[0].startswith("binary: ")


class TestLaunch:
    """Every key reaches the program; secrets don't reach its argv."""

    def test_its_answers_carry_the_first_of_its_names(self, launch, config):
        first, _ = option(launch(), "--served-model-name", 2)
        assert first == ADAPTER.answers_as(config(), "gemma")

    def test_what_every_worker_gets(self, launch, folder, binary):
        spec = launch()
        assert spec.argv[:3] == (str(binary), "serve", str(folder))
        assert (option(spec, "--host"), option(spec, "--port")) == ("127.0.0.1", "18100")
        assert option(spec, "--served-model-name", 2) == ("gemma", "model")
        assert ADAPTER.upstream_model(None) == "model"
        assert "secret" not in " ".join(spec.argv)
        assert (spec.env["VLLM_API_KEY"], spec.auth) == ("secret", "Bearer secret")
        assert (spec.health, spec.metrics) == (HealthCheck("/health", then="/v1/models"), "/metrics")
        assert (spec.env["CUDA_VISIBLE_DEVICES"], spec.env["HF_HUB_OFFLINE"]) == ("", "1")
        assert spec.env["PATH"].split(":")[0] == str(binary.parent)

    def test_it_may_fetch_and_read_nothing_that_a_request_names(self, launch, check):
        argv = launch().argv
        assert argv[argv.index("--allowed-media-domains") + 1 :][:1] == ("none.invalid",)
        assert "--allowed-local-media-path" not in argv
        for option in ("--allowed-media-domains", "--allowed-local-media-path", "--allowed-media", "--allowed_local"):
            (problem,) = check(extra_args=[option, "/"])
            assert problem.endswith("is set by llmux")

    def test_its_cache_is_always_given_in_bytes_and_needs_no_free_share(self, launch):
        spec = launch()
        assert int(option(spec, "--kv-cache-memory-bytes")) > 0
        assert option(spec, "--gpu-memory-utilization") == "0.01"

    def test_on_a_card(self, launch):
        assert launch(CARD).env["CUDA_VISIBLE_DEVICES"] == "GPU-1234"

    def test_the_two_keys_contradict_each_other(self, check):
        assert check(tensor_parallel_size=4, gpus=2) == (
            "gpus: 2, but tensor_parallel_size is 4; remove one of the two",
        )

    @pytest.mark.parametrize("keys", [{"tensor_parallel_size": 2}, {"gpus": 2}])
    def test_on_several_cards(self, launch, config, keys):
        """An executor for each, whichever of the two keys says so."""
        second = replace(CARD, id="gpu1", index=1, uuid="GPU-5678")
        spec = launch(CARD, second, **keys)
        assert spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-1234,GPU-5678"
        assert option(spec, "--tensor-parallel-size") == "2"
        assert ADAPTER.gpus(config(**keys)) == 2

    def test_on_the_processor_only_what_it_was_told_itself(self, launch):
        """`gpus` has no meaning there: one process, with the whole cache."""
        plain, spread = launch(), launch(gpus=2)
        assert "--tensor-parallel-size" not in spread.argv
        assert option(spread, "--kv-cache-memory-bytes") == option(plain, "--kv-cache-memory-bytes")
        assert option(launch(tensor_parallel_size=2), "--tensor-parallel-size") == "2"

    @cases(
        ("keys", "words"),
        [
            ({"dtype": "bfloat16"}, ["--dtype", "bfloat16"]),
            ({"quantization": "modelopt"}, ["--quantization", "modelopt"]),
            ({"load_format": "fastsafetensors"}, ["--load-format", "fastsafetensors"]),
            ({"revision": "v1"}, ["--revision", "v1"]),
            ({"trust_remote_code": True}, ["--trust-remote-code"]),
            ({"runner": "generate"}, ["--runner", "generate"]),
            ({"max_model_len": 1024}, ["--max-model-len", "1024"]),
            ({"max_num_seqs": 1}, ["--max-num-seqs", "1"]),
            ({"max_num_batched_tokens": 4096}, ["--max-num-batched-tokens", "4096"]),
            ({"kv_cache_memory_bytes": 1 << 30}, ["--kv-cache-memory-bytes", "1073741824"]),
            ({"kv_cache_dtype": "fp8"}, ["--kv-cache-dtype", "fp8"]),
            (
                {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 30},
                ["--gpu-memory-utilization", "0.02"],
            ),
            ({"cpu_offload_gb": 2.0}, ["--cpu-offload-gb", "2.0"]),
            ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
            ({"limit_mm_per_prompt": {"image": 1}}, ["--limit-mm-per-prompt", '{"image": 1}']),
            (
                {"mm_processor_kwargs": {"fps": 1, "max_pixels": 1}, "max_pixels": 4014080},
                ["--mm-processor-kwargs", '{"fps": 1, "max_pixels": 4014080}'],
            ),
            ({"reasoning_parser": "qwen3"}, ["--reasoning-parser", "qwen3"]),
            ({"tool_call_parser": "hermes"}, ["--tool-call-parser", "hermes", "--enable-auto-tool-choice"]),
            (
                {"default_chat_template_kwargs": {"enable_thinking": False}},
                ["--default-chat-template-kwargs", '{"enable_thinking": false}'],
            ),
            ({"extra_args": ["--attention-backend", "triton_attn"]}, ["--attention-backend", "triton_attn"]),
            ({"type": "embedding"}, ["--runner", "pooling"]),
        ],
    )
    def test_keys(self, launch, keys, words):
        argv = list(launch(**keys).argv)
        for word in words:
            assert word in argv
        at = argv.index(words[0])
        assert argv[at : at + min(len(words), 2)] == words[:2]

    def test_every_key_is_an_option_or_has_a_place(self):
        elsewhere = {"path", "model", "binary", "library_path", "extra_args", "max_pixels"}
        speculative = {key for key in VllmServeConfig.model_fields if "speculative" in key}
        own = set(VllmServeConfig.model_fields) - set(ModelConfig.model_fields)
        assert own - elsewhere - speculative == set(VllmServeConfig.flags())

    def test_speculation_is_one_json(self, launch):
        spec = launch(
            speculative_method="mtp",
            speculative_model="google/gemma-assistant",
            speculative_moe_backend="triton",
            speculative_attention_backend="triton_attn",
            num_speculative_tokens=8,
        )
        assert json.loads(option(spec, "--speculative-config")) == {
            "method": "mtp",
            "model": "google/gemma-assistant",
            "moe_backend": "triton",
            "attention_backend": "triton_attn",
            "num_speculative_tokens": 8,
        }
        assert "--speculative-config" not in launch().argv

    @pytest.mark.parametrize("capability", [(10, 0), (10, 3), (11, 0), (12, 0), (12, 1)])
    def test_flashinfers_sampler_is_off_on_blackwell(self, launch, capability):
        """A CUDA toolkit older than these GPUs can't compile it for them."""
        card = replace(CARD, capability=capability)
        assert launch(card).env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
        assert launch(CARD, card, gpus=2).env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
        own = launch(card, env={"VLLM_USE_FLASHINFER_SAMPLER": "1"})
        assert own.env["VLLM_USE_FLASHINFER_SAMPLER"] == "1"

    @pytest.mark.parametrize("device", [HOST, replace(CARD, capability=(12, 0))])
    def test_what_the_daemon_was_started_with_goes_before(self, launch, device, monkeypatch):
        monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
        assert launch(device).env["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
        own = launch(device, env={"VLLM_USE_FLASHINFER_SAMPLER": "0"})
        assert own.env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"

    @pytest.mark.parametrize("device", [HOST, CARD, replace(CARD, capability=(9, 0)), replace(CARD, capability=(8, 9))])
    def test_elsewhere_vllm_chooses_its_sampler(self, launch, device):
        assert "VLLM_USE_FLASHINFER_SAMPLER" not in launch(device).env

    def test_environment_and_libraries(self, launch):
        spec = launch(env={"VLLM_USE_FLASHINFER_SAMPLER": "0"}, library_path=["/opt/cuda/lib64", "/opt/other"])
        assert spec.env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
        assert spec.library_path == ("/opt/cuda/lib64", "/opt/other")

    def test_a_template(self, launch, folder):
        file = str(folder / "chat_template.jinja")
        assert option(launch(chat_template=file), "--chat-template") == file

    def test_a_name_of_the_hub(self, launch, folder, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        keys = {"path": None, "model": "org/name"}
        with pytest.raises(ModelUnusableError, match=r"kv_cache_memory_bytes: .*org/name"):
            launch(**keys)
        spec = launch(**keys, kv_cache_memory_bytes=1 << 30)
        assert (spec.argv[2], "HF_HUB_OFFLINE" in spec.env, "--max-model-len" in spec.argv) == (
            "org/name",
            False,
            False,
        )
        place = tmp_path / "hub" / "models--org--name"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("abc")
        hf_folder.write(place / "snapshots" / "abc")
        assert option(launch(**keys), "--max-model-len") == "2048"


class TestRanges:
    """Types and ranges are checked when the configuration is read."""

    @cases(
        "keys",
        [
            {"gpu_memory_utilization": 0.0},
            {"gpu_memory_utilization": 1.5},
            {"kv_cache_memory_bytes": 1000},
            {"kv_cache_dtype": "q8_0"},
            {"dtype": "int8"},
            {"max_model_len": 0},
            {"max_num_seqs": 0},
            {"num_speculative_tokens": 0},
            {"speculative_method": "mtp; rm"},
            {"tensor_parallel_size": 0},
            {"limit_mm_per_prompt": [1]},
            {"trust_remote_code": "yes"},
            {"max_pixels": 0},
            {"cpu_offload_gb": -1.0},
            {"no_such_key": 1},
        ],
    )
    def test_refused(self, config, keys):
        with pytest.raises(ValidationError):
            config(**keys)


class TestComplaints:
    """`check` reports problems that are visible without a start, with the key to change."""

    def test_none(self, check):
        assert check() == ()

    @cases(
        ("keys", "said"),
        [
            ({"path": "/no/such/model"}, "path: /no/such/model: there is no such folder"),
            ({"path": None}, "path: set it to the model's folder, or model"),
            ({"model": "a/b"}, "path: set it to the model's folder, or model"),
            ({"chat_template": "/nonexistent"}, "chat_template: /nonexistent: there is no such file"),
            ({"modalities": ["text", "image"]}, "modalities: the model in"),
            ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization: a share sizes no memory here"),
            ({"max_num_seqs": 4096}, "max_num_batched_tokens: must be at least max_num_seqs, 4096"),
            ({"num_speculative_tokens": 2}, "num_speculative_tokens: needs speculative_method"),
            (
                {"speculative_method": "draft_model", "num_speculative_tokens": 2},
                "speculative_method: draft_model needs speculative_model",
            ),
            ({"speculative_model": "org/gone"}, "speculative_model: org/gone: isn't in "),
            ({"speculative_model": "/gone"}, "speculative_model: /gone: there is no such folder"),
            ({"vram_mib": 1000}, "vram_mib: 1000 leaves 0 MiB for the KV cache"),
            ({"env": {"VLLM_API_KEY": "x"}}, "env: VLLM_API_KEY is set by llmux"),
            ({"env": {"VLLM_SERVER_DEV_MODE": "1"}}, "env: VLLM_SERVER_DEV_MODE opens routes"),
            ({"env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}, "env: VLLM_CPU_KVCACHE_SPACE has a key of its own"),
        ],
    )
    def test_keys(self, check, keys, said):
        (problem,) = check(**keys)
        assert problem.startswith(said)

    def test_a_draft_that_its_worker_may_fetch(self, check):
        assert check(speculative_model="org/gone", env={"HF_HUB_OFFLINE": "0"}) == ()

    def test_a_share_beside_a_size_is_a_check_at_the_start(self, check):
        assert check(gpu_memory_utilization=0.01, kv_cache_memory_bytes=1 << 30) == ()

    @cases(
        ("words", "said"),
        [
            (["--api-key", "x"], "--api-key is set by llmux"),
            (["--api_key=x"], "--api-key is set by llmux"),
            (["--api-k", "x"], "--api-k is set by llmux"),
            (["--port=1"], "--port is set by llmux"),
            (["-tp", "2"], "-tp has a key of its own, tensor_parallel_size"),
            (["--quantization", "fp8"], "--quantization has a key of its own, quantization"),
            (["--max_num_seqs", "1"], "--max-num-seqs has a key of its own, max_num_seqs"),
            (["--speculative-config.method", "mtp"], "--speculative-config has a key of its own, speculative_method"),
            (["--num-gpu-blocks-override=9"], "--num-gpu-blocks-override has a key of its own, kv_cache_memory_bytes"),
            (["--middleware", "x"], "--middleware is set by llmux"),
            (["--served-model-name", "x"], "--served-model-name is set by llmux"),
        ],
    )
    def test_options_that_arent_for_extra_args(self, check, words, said):
        assert check(extra_args=words) == (f"extra_args: {said}",)

    def test_options_that_are(self, check):
        words = ["--attention-backend", "triton_attn", "--reasoning-parser-plugin=/p.py", "--model-impl", "vllm", "-O3"]
        assert check(extra_args=[*words, "--seed", "-1", "--quantization-config", "{}"]) == ()

    def test_no_option_is_both(self):
        assert set() == VllmServeConfig.own_options() & VllmServeConfig.options().keys()


class TestKinds:
    """What a worker serves follows from the type, the runner and the model's architecture."""

    def served(self, config):
        return {endpoint.path for endpoint in ADAPTER.endpoints(config)}

    def test_text(self, config):
        served = self.served(config())
        assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"} <= served
        assert not {"/v1/embeddings", "/v1/audio/transcriptions", "/v1/rerank"} & served
        assert not {"/invocations", "/v1/load_lora_adapter", "/sleep", "/v1/responses/{response_id}"} & served

    def test_embeddings(self, config, folder):
        for keys in ({"type": "embedding"}, {"runner": "pooling"}):
            assert {"/v1/embeddings", "/v1/score", "/v1/rerank", "/pooling"} <= self.served(config(**keys))
        hf_folder.write(folder, {"architectures": ["BertModel"], "model_type": "bert"})
        assert "/v1/embeddings" in self.served(config())
        assert "/v1/chat/completions" not in self.served(config())
        assert ADAPTER.thinking(config()) is None

    @pytest.mark.parametrize(("labels", "scores"), [({"0": "LABEL_0"}, True), ({"0": "a", "1": "b"}, False)])
    def test_classes_and_scores(self, config, folder, labels, scores):
        hf_folder.write(folder, {"architectures": ["BertForSequenceClassification"], "id2label": labels})
        served = self.served(config(type="embedding"))
        assert "/classify" in served
        assert "/v1/embeddings" not in served
        assert ("/v1/rerank" in served) is scores

    def test_speech(self, config):
        spoken = config(type="asr")
        assert ADAPTER.endpoints(spoken) == {
            Endpoint("/v1/audio/transcriptions"),
            Endpoint("/v1/audio/translations"),
        }
        assert ADAPTER.inputs(spoken) == {"audio"}


class TestCapabilities:
    """They come from the model's folder, not from wishes."""

    def test_of_a_text_model(self, config):
        capabilities = ADAPTER.capabilities(config(tool_call_parser="hermes"))
        assert capabilities.modalities == ("text",)
        assert (capabilities.tools, capabilities.thinking, capabilities.multi_turn) == (True, True, True)
        assert capabilities.context == 2048
        assert ADAPTER.capabilities(config()).tools is False

    def test_without_a_chat_template(self, config, folder):
        (folder / "chat_template.jinja").unlink()
        capabilities = ADAPTER.capabilities(config())
        assert (capabilities.tools, capabilities.thinking, capabilities.multi_turn) == (False, False, False)

    def test_eyes(self, config, folder):
        hf_folder.write(folder, VISION)
        assert ADAPTER.inputs(config()) == {"text", "image"}
        assert ADAPTER.capabilities(config()).modalities == ("text", "image")
        assert ADAPTER.inputs(config(limit_mm_per_prompt={"image": 0})) == {"text"}

    def test_not_there_yet(self, config):
        there = config(path=None, model="org/none", modalities=["text", "image"], max_model_len=99)
        assert ADAPTER.capabilities(there).modalities == ("text", "image")
        assert ADAPTER.capabilities(there).context == 99

    def test_context(self, config):
        assert ADAPTER.capabilities(config(max_model_len=100)).context == 100

    def test_requests_at_once(self, config):
        assert ADAPTER.target_inflight(config()) == 8
        assert ADAPTER.target_inflight(config(max_num_seqs=3)) == 3
        assert ADAPTER.target_inflight(config(target_inflight=1)) == 1

    def test_what_an_operator_may_set(self, config):
        offered = ADAPTER.overridable(config())
        assert {"max_model_len", "kv_cache_dtype", "kv_cache_memory_bytes", "max_pixels"} <= offered.keys()
        assert {key for key in VllmServeConfig.model_fields if "speculative" in key} - offered.keys() == {
            "speculative_model",
            "speculative_models",
        }
        assert not {"path", "binary", "extra_args", "env"} & offered.keys()

    def test_a_draft_model_is_one_of_those_that_the_file_lists(self, config):
        offered = ADAPTER.overridable(config(speculative_model="org/a", speculative_models=["org/b", "org/a"]))
        assert offered["speculative_model"] == {"type": "string", "enum": ["org/a", "org/b"]}

    def test_every_field_that_llm_pool_sets_for_a_load_may_be_set_for_one(self, config):
        theirs = {"max_model_len", "kv_cache_dtype", "kv_cache_memory_bytes", "max_pixels", "num_speculative_tokens"}
        theirs |= {f"speculative_{name}" for name in ("method", "model", "moe_backend", "attention_backend")}
        assert theirs <= ADAPTER.overridable(config(speculative_model="org/a")).keys()
