"""The llama_cpp runtime: facts about a file, the start of its worker, and calls that match the library's signatures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from runtimes import device_kind
from runtimes.base import LaunchContext, ModelUnusableError, RuntimeNotInstalledError
from runtimes.device_kind import DeviceAssignment
from runtimes.llama_cpp.adapter import ChatFormat, LlamaCppAdapter
from runtimes.llama_cpp.shared.formats import CACHE_TYPES, CHAT_FORMATS
from runtimes.llama_server.adapter.config import CacheType
from runtimes.sizing import Room
from tests.support import package_sources, signatures, tiny
from tests.support.cases import cases

ADAPTER = LlamaCppAdapter()
HOST = DeviceAssignment("host", device_kind.HOST)
GPUS = tuple(DeviceAssignment(f"gpu{at}", device_kind.CUDA, at, f"GPU-{at}") for at in range(2))
WORKER = Path(__file__).parents[4] / "runtimes" / "llama_cpp" / "worker"


def config(**keys):
    return ADAPTER.config(runtime="llama_cpp", **{"path": str(tiny.model()), **keys})


def options(tmp_path: Path, *devices: DeviceAssignment, parts=(), **keys):
    (tmp_path / "llama_cpp" / "bin").mkdir(parents=True)
    (tmp_path / "llama_cpp" / "bin" / "python").touch()
    context = LaunchContext("m", "127.0.0.1", 4000, "key", devices or (HOST,), tmp_path, parts)
    return json.loads(ADAPTER.launch(config(**keys), context).argv[-1])


class TestConfiguration:
    """Unusable files, and contradicting keys."""

    def test_good(self):
        assert ADAPTER.check(config(), runtimes_dir=Path()) == ()

    def test_problems(self, tmp_path):
        (gone,) = ADAPTER.check(config(path=str(tmp_path / "none.gguf")), runtimes_dir=Path())
        assert gone.startswith("path: ")
        (quantised,) = ADAPTER.check(config(type_v="q8_0", flash_attn=False), runtimes_dir=Path())
        assert "needs flash_attn on or auto" in quantised
        (twice,) = ADAPTER.check(config(chat_format="chatml", prompt_format="chatml"), runtimes_dir=Path())
        assert "keep one" in twice

    def test_one_request_at_a_time(self):
        assert ADAPTER.target_inflight(config()) == 1

    def test_capabilities(self):
        known = ADAPTER.capabilities(config(n_ctx=2048))
        assert (known.modalities, known.multi_turn, known.tools, known.thinking) == (("text",), True, True, True)
        assert (known.context, known.architecture) == (2048, "llama")
        assert ADAPTER.capabilities(config(chat_format="chatml")).multi_turn is True

    def test_the_context_is_chosen_by_the_device(self):
        large, small = (ADAPTER.sized(config(), Room(mib, "host", accelerates=False))[0].n_ctx for mib in (24_000, 90))
        assert large > small

    def test_it_takes_more_than_a_server_with_one_slot(self):
        short, long = (ADAPTER.estimate(config(n_ctx=context)) for context in (512, 4096))
        assert short.mib < long.mib
        assert "Python" in short.detail
        assert ADAPTER.estimate(config(path="/none.gguf")) is None


class TestLaunch:
    """The worker's options are complete."""

    def test_on_the_host(self, tmp_path):
        told = options(tmp_path, n_ctx=512, type_k="q8_0", threads=2)
        assert (told["n_gpu_layers"], told["n_ctx"], told["type_k"], told["threads"]) == (0, 512, "q8_0", 2)
        assert (told["parallel"], told["flash_attn"], told["tensor_split"]) == (1, "auto", None)

    def test_on_a_gpu(self, tmp_path):
        assert options(tmp_path, GPUS[0])["n_gpu_layers"] == -1

    def test_on_several_gpus(self, tmp_path):
        assert options(tmp_path, *GPUS, gpus=2)["tensor_split"] == [1, 1]

    def test_in_proportion_to_what_is_free(self, tmp_path):
        assert options(tmp_path, *GPUS, parts=(300, 100), gpus="auto")["tensor_split"] == [300, 100]

    def test_without_its_environment_or_its_file(self, tmp_path):
        context = LaunchContext("m", "127.0.0.1", 4000, "key", (HOST,), tmp_path)
        with pytest.raises(RuntimeNotInstalledError, match="llmux runtimes install llama_cpp"):
            ADAPTER.launch(config(), context)
        with pytest.raises(ModelUnusableError):
            options(tmp_path, path="/none.gguf")


@pytest.fixture(scope="module")
def library():
    return package_sources.source("llama_cpp", "llama-cpp-python")


class TestLibrary:
    """The sources of the locked llama-cpp-python have what the worker uses."""

    @cases(
        ("call", "function"),
        [("Engine", "Llama"), ("generate", "Llama.generate"), ("tokenize", "Llama.tokenize"), ("eval", "Llama.eval")]
        + [(name, f"Llama.{name}") for name in ("set_seed", "reset", "n_ctx", "n_vocab", "token_bos", "token_eos")],
    )
    def test_its_model_is_called_as_it_is_written(self, library, call, function):
        if call == "generate":
            wanted = signatures.function(library, "llama_cpp.llama", function)
            own = [(places, keywords) for places, keywords in signatures.calls(WORKER, call) if keywords]
            assert len(own) == 2
            for _, keywords in own:
                wanted.bind(None, **dict.fromkeys(keywords))
            return
        assert signatures.check(WORKER, call, signatures.function(library, "llama_cpp.llama", function)) > 0

    @pytest.mark.parametrize(
        "name",
        [
            "llama_model_get_vocab",
            "llama_vocab_is_control",
            "llama_vocab_is_eog",
            "llama_token_to_piece",
            "llama_get_logits_ith",
        ],
    )
    def test_llama_cpps_own_functions(self, library, name):
        assert signatures.check(WORKER, name, signatures.function(library, "llama_cpp.llama_cpp", name)) > 0

    def test_flash_attention_has_three_positions_there(self, library):
        text = (library / "llama_cpp" / "llama_cpp.py").read_text()
        assert "\nLLAMA_FLASH_ATTN_TYPE_AUTO = -1\n" in text
        assert "llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED\n" in (library / "llama_cpp" / "llama.py").read_text()

    @pytest.mark.parametrize("module", ["llama", "_internals"])
    def test_output_is_suppressed_by_a_name_of_its_modules(self, library, module):
        text = (library / "llama_cpp" / f"{module}.py").read_text()
        assert "from ._utils import suppress_stdout_stderr\n" in text
        assert {*re.findall(r"suppress_stdout_stderr\((.*?)\)", text)} == {"disable=verbose"}

    def test_chat_formats(self, library):
        assert {*get_args(ChatFormat)} == {*CHAT_FORMATS}
        text = (library / "llama_cpp" / "llama_chat_format.py").read_text()
        written = dict(re.findall(r'@register_chat_format\("([\w.-]+)"\)\ndef (\w+)\(', text))
        assert written == CHAT_FORMATS

    def test_cache_types(self, library):
        assert {*CACHE_TYPES} == {*get_args(CacheType)}
        text = (library / "llama_cpp" / "llama_cpp.py").read_text()
        numbers = {
            name.lower(): int(number) for name, number in re.findall(r"^GGML_TYPE_(\w+) = (\d+)$", text, re.MULTILINE)
        }
        assert {name: numbers.get(name, 30) for name in CACHE_TYPES} == CACHE_TYPES
