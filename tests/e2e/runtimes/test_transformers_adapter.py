"""What the transformers runtime knows of a language model before it is started, and what it refuses to start."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from runtimes import device_kind
from runtimes.base import LaunchContext, ModelUnusableError, RuntimeNotInstalledError
from runtimes.device_kind import DeviceAssignment
from runtimes.sdk.chat.parameters import CHAT, COMPLETIONS
from runtimes.transformers.adapter import TransformersAdapter
from runtimes.transformers.adapter.speech import Speech
from tests.support import environments, tiny_language
from tests.support.limits import LIMIT_S

ADAPTER = TransformersAdapter()
HOST = DeviceAssignment("host", device_kind.HOST)
GPU = DeviceAssignment("gpu0", device_kind.CUDA, 0, "GPU-1")


def config(path: Path | None = None, **keys: object):
    return ADAPTER.config(runtime="transformers", path=path or tiny_language.model(), **keys)


def problems(path: Path | None = None, **keys: object) -> tuple[str, ...]:
    return ADAPTER.check(config(path, **keys), runtimes_dir=Path())


def context(device: DeviceAssignment = HOST, runtimes_dir: Path | None = None) -> LaunchContext:
    folder = environments.installed("transformers") if runtimes_dir is None else runtimes_dir
    return LaunchContext("m", "127.0.0.1", 4000, "key", (device,), folder)


def settings(device: DeviceAssignment = HOST, path: Path | None = None, **keys: object) -> dict[str, object]:
    return json.loads(ADAPTER.launch(config(path, **keys), context(device)).argv[-1])


@pytest.fixture
def changed(tmp_path):
    """A model's folder with other values in its config.json."""

    def change(kind: str = "qwen3", **values: object) -> Path:
        folder = shutil.copytree(tiny_language.model(kind), tmp_path / "model")
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**described, **values}))
        return folder

    return change


class TestCheck:
    """What can't work is said before it is tried, by the key that has to change."""

    @pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "gpt_oss", "qwen3_vl", "qwen3_5_vision"])
    def test_good(self, kind):
        assert problems(tiny_language.model(kind)) == ()

    def test_no_folder(self, tmp_path):
        (problem,) = problems(tmp_path / "none")
        assert problem == f"path: {tmp_path / 'none'}: there is no such folder"

    @pytest.mark.parametrize(
        ("architecture", "clue"),
        [
            ("BertForMaskedLM", "BertForMaskedLM is no language model"),
            ("T5ForConditionalGeneration", "T5ForConditionalGeneration is no language model"),
            ("WhisperForConditionalGeneration", "set type: asr"),
        ],
    )
    def test_other_models(self, changed, architecture, clue):
        hears = {"num_mel_bins": 80} if "Whisper" in architecture else {}
        (problem,) = problems(changed(architectures=[architecture], is_encoder_decoder=True, **hears))
        assert clue in problem

    def test_no_architecture(self, changed):
        (problem,) = problems(changed(architectures=[]))
        assert "names no architectures" in problem

    def test_no_tokenizer(self, changed):
        folder = changed()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink()
        assert "no tokenizer" in problems(folder)[0]

    def test_keys(self):
        assert "made for 4096 tokens at most" in problems(n_ctx=5000)[0]
        assert "there is no such file" in problems(chat_template_file="/none.jinja")[0]

    def test_keys_of_speech(self):
        key = min(Speech.keys - {"parallel"})
        assert f"{key}: only models of type asr have it" in problems(**{key: {"max_audio_s": 5.0}.get(key, "en")})[0]

    def test_quantised_twice(self, changed):
        folder = changed(quantization_config={"quant_method": "fp8"})
        assert "quantised by fp8 already" in problems(folder, quantization="bitsandbytes-4bit")[0]
        assert problems(folder, quantization="none") == ()

    def test_what_cant_be_undone(self, changed):
        folder = changed(quantization_config={"quant_method": "gptq"})
        assert "gptq can't be made plain again" in problems(folder, quantization="none")[0]


class TestLaunch:
    """The worker is told all it needs, and what the device can't do isn't started."""

    def test_settings(self):
        found = settings(dtype="bfloat16", parallel=3, prefill_tokens=64)
        assert (found["device"], found["dtype"], found["parallel"]) == ("cpu", "bfloat16", 3)
        assert (found["n_ctx"], found["prefill_tokens"]) == (4096, 64)  # as far as the model goes
        assert settings(n_ctx=1000)["n_ctx"] == 1000

    def test_devices(self):
        assert settings(GPU)["device"] == "cuda"
        assert settings(GPU, device_map="cpu")["device"] == "cpu"
        assert settings(GPU)["device_map"] == {"": 0}
        assert settings(GPU, device_map={"model": 0, "lm_head": "cpu"})["device_map"] == {"model": 0, "lm_head": "cpu"}

    def test_several_gpus(self):
        """The layers are divided so that each has as much as the others: that is what is leased on each."""
        second = replace(GPU, id="gpu1", index=1, uuid="GPU-2")
        two = replace(context(GPU), devices=(GPU, second))
        spec = ADAPTER.launch(config(gpus=2), two)
        assert json.loads(spec.argv[-1])["device_map"] == "balanced"
        assert spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
        by_hand = {"model": 1, "lm_head": 0}
        assert json.loads(ADAPTER.launch(config(gpus=2, device_map=by_hand), two).argv[-1])["device_map"] == by_hand

    def test_several_gpus_by_their_parts(self):
        """Filled in order: the first gets its part of the weights at most, beside what accelerate keeps free there."""
        second = replace(GPU, id="gpu1", index=1, uuid="GPU-2")
        two = replace(context(GPU), devices=(GPU, second), parts_mib=(3000, 9000))
        told = json.loads(ADAPTER.launch(config(gpus="auto"), two).argv[-1])
        assert told["device_map"] == "sequential"
        first, last = told["max_memory"]
        weights = sum(path.stat().st_size for path in tiny_language.model().glob("*.safetensors"))
        assert weights / 4 < first < weights
        assert last == 9000 * 2**20
        one = json.loads(ADAPTER.launch(config(gpus="auto"), replace(context(GPU), parts_mib=(3000,))).argv[-1])
        assert (one["device_map"], one["max_memory"]) == ({"": 0}, None)

    def test_gpus_that_are_not_there(self):
        assert problems(device_map={"model": 0}, gpus="auto") == (
            "gpus: auto, but device_map says where the model goes; remove one of the two",
        )
        assert problems(device_map={"model": 0, "lm_head": 1}) == (
            "device_map: lm_head is put on GPU 1, and the worker has 1, from 0 on; set gpus",
        )
        assert problems(device_map={"model": 0, "lm_head": 1}, gpus=2) == ()
        assert problems(device_map="cpu", gpus=2) == (
            "gpus: 2 GPUs, but device_map puts the model on the processor; remove one of the two",
        )
        assert problems(type="asr", gpus=2)[0] == "gpus: only models of type llm have it, and this one's is asr"

    def test_each_gpu_has_its_own_program(self):
        one, two = ADAPTER.estimate(config()), ADAPTER.estimate(config(gpus=2))
        assert one is not None
        assert two is not None
        assert two.mib - one.mib >= 370

    def test_a_template_of_ones_own(self, tmp_path):
        (tmp_path / "own.jinja").write_text("{{ messages }}")
        assert settings(chat_template_file=str(tmp_path / "own.jinja"))["chat_template"] == "{{ messages }}"

    def test_not_installed(self, tmp_path):
        with pytest.raises(RuntimeNotInstalledError, match="llmux runtimes install transformers"):
            ADAPTER.launch(config(), context(runtimes_dir=tmp_path))

    @pytest.mark.parametrize("quantization", ["fp8", "mxfp4", "bitsandbytes-8bit", "bitsandbytes-4bit"])
    def test_quantising_needs_a_gpu(self, quantization):
        with pytest.raises(ModelUnusableError, match=f"quantization: {quantization} needs a GPU"):
            settings(quantization=quantization)
        assert settings(GPU, quantization=quantization)["quantization"] == quantization

    @pytest.mark.parametrize(("method", "remedy"), [("mxfp4", True), ("fp8", True), ("awq", False)])
    def test_quantised_files_need_a_gpu(self, changed, method, remedy):
        folder = changed(quantization_config={"quant_method": method})
        with pytest.raises(ModelUnusableError, match=f"quantised by {method} need a GPU") as told:
            settings(path=folder)
        assert ("quantization: none" in str(told.value)) == remedy
        assert settings(GPU, folder)["quantization"] == "auto"

    def test_flash_attention_needs_a_gpu(self):
        with pytest.raises(ModelUnusableError, match="flash_attention_2 needs a GPU"):
            settings(attention="flash_attention_2")


class TestKnowledge:
    """Capabilities come from the model."""

    @pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "gpt_oss", "qwen3_vl", "qwen3_5_vision"])
    def test_eyes(self, kind):
        eyes = kind in {"qwen3_vl", "qwen3_5_vision"}
        assert ADAPTER.inputs(config(tiny_language.model(kind))) == ({"text", "image"} if eyes else {"text"})

    def test_eyes_without_a_processor(self, changed):
        folder = changed("qwen3_vl")
        (folder / "preprocessor_config.json").unlink()
        assert ADAPTER.inputs(config(folder)) == {"text"}

    def test_capabilities(self):
        found = ADAPTER.capabilities(config(n_ctx=500))
        assert (found.tools, found.thinking, found.multi_turn, found.context) == (True, True, True, 500)

    def test_calls_in_a_form_that_nobody_here_reads(self, changed):
        folder = changed()
        (folder / "chat_template.jinja").write_text("{% if tools %}<|python_tag|>{% endif %}{{ messages }}")
        assert ADAPTER.capabilities(config(folder)).tools is False
        assert ADAPTER.capabilities(config(folder, tool_format="qwen")).tools is True

    def test_without_a_template(self, changed):
        folder = changed()
        (folder / "chat_template.jinja").unlink()
        found = ADAPTER.capabilities(config(folder))
        assert (found.tools, found.thinking, found.multi_turn) == (False, False, False)

    def test_answers_that_a_folder_describes(self):
        folder = tiny_language.model("turns")
        found = ADAPTER.capabilities(config(folder))
        assert (found.tools, found.thinking) == (True, True)
        found = ADAPTER.capabilities(config(folder, tool_format="none"))
        assert (found.tools, found.thinking) == (False, False)

    def test_answers_that_transformers_knows(self, tmp_path):
        folder = shutil.copytree(tiny_language.model("turns"), tmp_path / "model")
        for name, changed in (
            ("tokenizer_config.json", {"response_template": None}),
            ("config.json", {"model_type": "gemma4"}),
        ):
            found = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**found, **changed}))
        assert ADAPTER.capabilities(config(folder)).tools

    def test_the_switch_of_thinking(self, tmp_path):
        assert ADAPTER.thinking(config()).disabled == {"chat_template_kwargs": {"enable_thinking": False}}
        assert ADAPTER.thinking(config(tiny_language.model("gpt_oss"))) is None  # it thinks always
        assert ADAPTER.thinking(config(tmp_path / "not there yet")) is not None

    def test_parameters_are_documented_and_told_apart(self):
        assert {name for name in CHAT if CHAT[name].fate == "refused"} >= {"n", "verbosity", "audio"}
        assert set(COMPLETIONS) >= {"prompt", "echo", "suffix", "best_of"}


class TestKernels:
    """A worker that lacks what computes quantised weights says so and ends, before it loads them.

    The environment here is the one for the processor; that for CUDA is in tests/e2e/cli/pull/test_kernels_loaded.py.
    """

    @pytest.mark.parametrize(("kind", "method"), [("qwen3", "fp8"), ("gpt_oss", "mxfp4")])
    def test_missing(self, kind, method):
        folder = tiny_language.model(kind, dtype="bfloat16", quantised=method)
        spec = ADAPTER.launch(config(folder, quantization="none"), context())
        options = {**json.loads(spec.argv[-1]), "quantization": "auto", "port": 0}
        done = subprocess.run([*spec.argv[:-1], json.dumps(options)], capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 1
        assert f"quantization: {method} needs the package kernels>=" in done.stderr
        assert "llmux runtimes install transformers --accelerator cuda" in done.stderr

    def test_missing_for_bitsandbytes(self):
        spec = ADAPTER.launch(config(), context())
        options = {**json.loads(spec.argv[-1]), "quantization": "bitsandbytes-4bit", "port": 0}
        done = subprocess.run([*spec.argv[:-1], json.dumps(options)], capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 1
        assert "llmux runtimes install transformers --accelerator cuda" in done.stderr


class TestEstimate:
    """Memory follows from the files' heads and the configuration."""

    def test_more_of_anything_takes_more(self):
        plain = ADAPTER.estimate(config(n_ctx=1024)).mib
        for keys in ({"n_ctx": 4096}, {"n_ctx": 1024, "parallel": 16}, {"n_ctx": 1024, "prefill_tokens": 8192}):
            assert ADAPTER.estimate(config(**keys)).mib > plain

    def test_a_cache_is_for_each_request(self):
        """Two layers and two more, two heads of 64 values for keys and as many for values, in float32."""
        one = 4 * 2 * 64 * 2 * 4 * 4096 >> 20
        found = ADAPTER.estimate(config(parallel=8)).detail
        assert f"KV cache {8 * one}" in found
        assert f"KV cache {8 * one // 2}" in ADAPTER.estimate(config(parallel=8, dtype="bfloat16")).detail

    def test_quantised_weights_are_smaller_and_plain_ones_larger(self, changed):
        large = tiny_language.model(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, dtype="bfloat16")
        whole, half, four = (
            ADAPTER.estimate(config(large, quantization=kind)).mib
            for kind in ("auto", "bitsandbytes-8bit", "bitsandbytes-4bit")
        )
        assert whole > half > four
        folder = changed(quantization_config={"quant_method": "mxfp4"})
        assert ADAPTER.estimate(config(folder, quantization="none")).mib > ADAPTER.estimate(config(folder)).mib

    def test_nothing_to_go_by(self, tmp_path):
        assert ADAPTER.estimate(config(tmp_path)) is None
