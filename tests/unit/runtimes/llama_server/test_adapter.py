"""The llama_server adapter without a process: which program, which arguments, which complaints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from runtimes import device_kind
from runtimes.base import Endpoint, LaunchContext, ModelUnusableError, RuntimeNotInstalledError
from runtimes.device_kind import DeviceAssignment
from runtimes.llama_server.adapter import LlamaServerAdapter
from runtimes.llama_server.adapter.config import LlamaServerConfig
from tests.support import tiny
from tests.support.cases import cases

ADAPTER = LlamaServerAdapter()
HOST = DeviceAssignment("host", device_kind.HOST)
CARD = DeviceAssignment("gpu1", device_kind.CUDA, index=1, uuid="GPU-1234")


@pytest.fixture
def path_with(tmp_path, monkeypatch):
    """A PATH with nothing on it but the programs named."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name):
        program = folder / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        return program

    return add


@pytest.fixture
def installed(tmp_path):
    """A runtimes folder that looks as if the embedded server were installed."""
    python = tmp_path / "runtimes" / "llama_server" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    return tmp_path / "runtimes"


def config(**keys):
    return ADAPTER.config(runtime="llama_server", **{"path": str(tiny.model()), **keys})


def launch(runtimes_dir, device=HOST, **keys):
    context = LaunchContext("qwen", "127.0.0.1", 18100, "secret", (device,), runtimes_dir)
    return ADAPTER.launch(config(**keys), context)


def check(**keys):
    return ADAPTER.check(config(**keys), runtimes_dir=Path("/nonexistent"))


def option(spec, name):
    return spec.argv[spec.argv.index(name) + 1]


class TestProgram:
    """The configured binary, else one compiled for a GPU, else the one on PATH, else the embedded server."""

    def test_the_configured_binary_comes_first(self, path_with, installed):
        path_with("llama-server")
        mine = path_with("my-llama")
        assert launch(installed, binary=str(mine)).argv[0] == str(mine)

    def test_then_the_one_on_path(self, path_with, installed):
        found = path_with("llama-server")
        assert launch(installed).argv[0] == str(found)

    def test_one_compiled_for_a_gpu_goes_before_that_on_path(self, path_with, installed):
        path_with("llama-server")
        compiled = installed / "llama_server" / "bin" / "llama-server"
        compiled.write_text("")
        compiled.chmod(0o755)
        assert launch(installed).argv[0] == str(compiled)
        assert launch(installed, binary="/bin/true").argv[0] == "/bin/true"
        assert launch(installed, program="embedded").argv[0].endswith("python")

    def test_then_the_embedded_one(self, path_with, installed):
        spec = launch(installed)
        assert spec.argv[:2] == (str(installed / "llama_server/bin/python"), "-I")
        assert Path(spec.argv[2]).name == "launcher.py"
        assert json.loads(spec.argv[3])["port"] == 18100

    def test_program_embedded_passes_the_one_on_path_over(self, path_with, installed):
        path_with("llama-server")
        assert launch(installed, program="embedded").argv[0].endswith("python")

    def test_without_any_the_error_names_its_remedy(self, path_with, tmp_path):
        with pytest.raises(RuntimeNotInstalledError) as error:
            launch(tmp_path)
        assert error.value.remedy == "llmux runtimes install llama_server"

    def test_a_binary_that_is_gone_is_said(self, path_with, installed):
        with pytest.raises(ModelUnusableError, match=r"binary: /no/such"):
            launch(installed, binary="/no/such")


class TestArguments:
    """Settings become options; devices become environment."""

    def test_the_seed_of_a_real_configuration(self, path_with, installed):
        model = str(tiny.model())
        spec = launch(
            installed,
            device=CARD,
            binary=str(path_with("llama-server")),
            library_path=["/opt/llama/lib", "/opt/cuda/lib64"],
            n_ctx=4096,
            n_gpu_layers=-1,
            flash_attn="on",
            mmproj=model,
            image_max_tokens=512,
            draft_model=model,
            spec_type="draft-mtp",
            spec_draft_n_max=5,
            spec_draft_p_min=0.1,
            spec_draft_ngl=-1,
            extra_args=["--reasoning-format", "none"],
        )
        assert spec.library_path == ("/opt/llama/lib", "/opt/cuda/lib64")
        assert option(spec, "--ctx-size") == "4096"
        assert option(spec, "--n-gpu-layers") == option(spec, "--spec-draft-ngl") == "999"
        assert option(spec, "--image-max-tokens") == "512"
        assert option(spec, "--spec-type") == "draft-mtp"
        assert option(spec, "--spec-draft-n-max") == "5"
        assert option(spec, "--spec-draft-p-min") == "0.1"
        assert option(spec, "--reasoning-format") == "none"

    def test_several_kinds_of_speculative_decoding(self, path_with, installed):
        path_with("llama-server")
        assert option(launch(installed, spec_type=["draft-mtp", "ngram-mod"]), "--spec-type") == "draft-mtp,ngram-mod"
        assert ADAPTER.overridable(config())["spec_type"]["enum"][:2] == ["none", "draft-simple"]

    def test_a_card_is_given_by_its_uuid_and_nothing_else_is_seen(self, path_with, installed):
        env = launch(installed, device=CARD).env
        assert env["CUDA_VISIBLE_DEVICES"] == "GPU-1234"
        assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        nameless = DeviceAssignment("gpu1", device_kind.CUDA, index=1)
        assert launch(installed, device=nameless).env["CUDA_VISIBLE_DEVICES"] == "1"

    def test_several_cards_share_the_layers_evenly(self, path_with, installed):
        path_with("llama-server")
        second = replace(CARD, id="gpu2", index=2, uuid="GPU-5678")
        context = LaunchContext("qwen", "127.0.0.1", 18100, "secret", (CARD, second), installed)
        spec = ADAPTER.launch(config(gpus=2, extra_args=["--split-mode", "row"]), context)
        assert spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-1234,GPU-5678"
        assert option(spec, "--tensor-split") == "1,1"
        assert "--tensor-split" not in launch(installed, device=CARD).argv

    def test_several_cards_share_them_by_their_parts(self, path_with, installed):
        path_with("llama-server")
        second = replace(CARD, id="gpu2", index=2, uuid="GPU-5678")
        context = LaunchContext("qwen", "127.0.0.1", 18100, "secret", (CARD, second), installed, (5576, 8760))
        assert option(ADAPTER.launch(config(gpus="auto"), context), "--tensor-split") == "5576,8760"
        assert option(ADAPTER.launch(config(gpus=2), context), "--tensor-split") == "1,1"

    def test_what_each_further_card_takes_besides(self):
        """As much as a second equal share adds."""
        one, auto, two = (ADAPTER.estimate(config(gpus=gpus)) for gpus in (1, "auto", 2))
        assert auto.mib == one.mib
        assert auto.each_mib > 0
        assert abs(one.mib + auto.each_mib - two.mib) <= 1

    def test_no_layers_or_no_card_means_no_gpu_at_all(self, path_with, installed):
        path_with("llama-server")
        for spec in (launch(installed, device=CARD, n_gpu_layers=0), launch(installed, n_gpu_layers=12)):
            assert spec.env["CUDA_VISIBLE_DEVICES"] == ""
            assert option(spec, "--n-gpu-layers") == "0"

    def test_a_draft_model_alone_means_plain_drafting(self, path_with, installed):
        path_with("llama-server")
        assert option(launch(installed, draft_model=str(tiny.model())), "--spec-type") == "draft-simple"

    def test_a_comma_in_the_name_of_an_adapter_survives(self, path_with, installed):
        path_with("llama-server")
        assert option(launch(installed, lora=["/a,b.gguf", "/c.gguf"]), "--lora") == '"/a,b.gguf",/c.gguf'

    def test_the_users_environment_can_not_take_the_key_away(self, path_with, installed):
        assert launch(installed, env={"LLAMA_API_KEY": "mine", "A": "1"}).env["LLAMA_API_KEY"] == "secret"

    def test_an_embedding_file_that_says_its_pooling_keeps_it(self, path_with, installed, tmp_path):
        path_with("llama-server")
        assert option(launch(installed, type="embedding"), "--pooling") == "mean"
        assert option(launch(installed, type="embedding", pooling="last"), "--pooling") == "last"


class TestCheck:
    """Problems are known before anything starts, each named by its key."""

    def test_missing_and_broken_files(self, tmp_path):
        text = tmp_path / "model.gguf"
        text.write_text("this is no model at all")
        problems = check(path="/no/model.gguf", mmproj=str(text), lora=["/no/lora"], chat_template_file="/no/template")
        assert [problem.partition(":")[0] for problem in problems] == ["path", "mmproj", "chat_template_file", "lora"]
        assert "there is no such file" in problems[0]
        assert "not a readable GGUF file (it doesn't begin with GGUF)" in problems[1]

    def test_options_that_are_llmuxs_are_refused_by_name(self, path_with):
        path_with("llama-server")
        assert check(extra_args=["--host", "0.0.0.0", "--api-key=x", "-m", "other.gguf", "--media-path", "/"]) == (
            "extra_args: --host is set by llmux",
            "extra_args: --api-key is set by llmux",
            "extra_args: -m is set by llmux",
            "extra_args: --media-path is set by llmux",
        )

    def test_options_that_have_a_key_are_pointed_to_it(self, path_with):
        path_with("llama-server")
        assert check(extra_args=["-c", "4096", "--no-jinja", "--verbose"]) == (
            "extra_args: -c has a key of its own, n_ctx",
            "extra_args: --no-jinja has a key of its own, jinja",
        )

    def test_what_the_embedded_server_cant_do_is_refused_by_name(self, path_with):
        expected = ("extra_args: the embedded server can't do --numa; set binary to a llama-server program",)
        assert check(extra_args=["--numa", "distribute"]) == expected
        path_with("llama-server")
        assert check(extra_args=["--numa", "distribute"]) == ()
        assert check(extra_args=["--numa", "distribute"], program="embedded") == expected
        assert check(extra_args=["-tb", "four"], program="embedded")[0].startswith(
            "extra_args: the embedded server can't"
        )

    def test_the_embedded_server_takes_options_that_were_keys(self, path_with, installed):
        words = [
            "--load-mode",
            "none",
            "-tb",
            "2",
            "--no-mmproj-offload",
            "--rope-freq-base",
            "10000.0",
            "--reasoning-budget",
            "-1",
            "--reasoning-format",
            "none",
        ]
        assert check(extra_args=words) == ()
        settings = json.loads(launch(installed, extra_args=words).argv[-1])
        assert {key: settings.get(key) for key in LlamaServerConfig.former_keys if key in settings} == {
            "load_mode": "none",
            "threads_batch": 2,
            "mmproj_offload": False,
            "rope_freq_base": 10000.0,
            "reasoning_budget": -1,
            "reasoning_format": "none",
        }
        path_with("llama-server")
        assert launch(installed, extra_args=words).argv[-len(words) :] == tuple(words)

    @cases(
        ("keys", "named"),
        [
            ({"chat_template": "chatml", "chat_template_file": __file__}, "chat_template_file"),
            ({"cache_type_v": "q8_0", "flash_attn": False}, "cache_type_v"),
            ({"spec_type": "draft-simple"}, "spec_type"),
            ({"spec_type": ["ngram-mod", "draft-simple"]}, "spec_type"),
            ({"program": "embedded", "binary": "/bin/true"}, "binary"),
            ({"env": {"LLAMA_API_KEY": "x"}}, "env"),
        ],
    )
    def test_contradictions(self, keys, named):
        (problem,) = check(**keys)
        assert problem.startswith(f"{named}: ")

    @cases(
        ("key", "value"),
        [
            ("spec_draft_n_max", -1),
            ("spec_draft_p_min", -0.1),
            ("spec_draft_p_min", 1.1),
            ("spec_type", "draft"),
            ("spec_type", []),
            ("n_gpu_layers", -2),
            ("n_gpu_layers", "some"),
            ("cache_type_k", "q3"),
            ("parallel", 0),
            ("image_max_tokens", 0),
            ("n_ctx", "4096"),
            ("ctx", 4096),
        ],
    )
    def test_values_out_of_range(self, key, value):
        with pytest.raises(ValidationError, match=key):
            config(**{key: value})


class TestServes:
    """A worker does text, embeddings or reranking."""

    def test_endpoints_follow_the_kind(self):
        text = ADAPTER.endpoints(config())
        assert {Endpoint("/v1/messages"), Endpoint("/infill"), Endpoint("/slots", "GET")} <= text
        assert Endpoint("/v1/responses") not in text, "its own leave out what OpenAI's clients look for"
        assert Endpoint("/v1/embeddings") not in text
        assert Endpoint("/v1/audio/transcriptions") not in text
        assert Endpoint("/v1/audio/transcriptions") in ADAPTER.endpoints(config(modalities=["text", "audio"]))
        assert Endpoint("/v1/rerank") in ADAPTER.endpoints(config(rerank=True))

    def test_only_text_can_think(self):
        assert ADAPTER.thinking(config()) is not None
        assert ADAPTER.thinking(config(type="embedding")) is None

    def test_a_replaced_file_is_another_memory_definition(self, tmp_path):
        path = tmp_path / "model.gguf"
        path.write_bytes(tiny.model().read_bytes())
        before = ADAPTER.memory_definition(config(path=str(path)))
        path.write_bytes(tiny.model(size_mib=10).read_bytes())
        assert ADAPTER.memory_definition(config(path=str(path))) != before
