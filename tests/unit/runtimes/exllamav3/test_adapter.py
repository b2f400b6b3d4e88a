"""The exllamav3 runtime: facts about a folder, the start of its worker, and calls that match the library's signatures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtimes import device_kind
from runtimes.base import LaunchContext, ModelUnusableError
from runtimes.device_kind import DeviceAssignment
from runtimes.exllamav3.adapter import ExLlamaV3Adapter
from tests.support import fake_exllamav3, hf_folder, package_sources, signatures
from tests.support.cases import cases

ADAPTER = ExLlamaV3Adapter()
HOST = DeviceAssignment("host", device_kind.HOST)
GPUS = tuple(DeviceAssignment(f"gpu{at}", device_kind.CUDA, at, f"GPU-{at}") for at in range(2))
WORKER = Path(__file__).parents[4] / "runtimes" / "exllamav3" / "worker"


@pytest.fixture
def config(tmp_path):
    folder = hf_folder.write(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")

    def made(**keys):
        return ADAPTER.config(runtime="exllamav3", **{"path": str(folder), **keys})

    return made


@pytest.fixture
def options(tmp_path, config):
    def told(*devices: DeviceAssignment, parts=(), **keys):
        python = tmp_path / "exllamav3" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()
        context = LaunchContext("m", "127.0.0.1", 4000, "key", devices or (GPUS[0],), tmp_path, parts)
        return json.loads(ADAPTER.launch(config(**keys), context).argv[-1])

    return told


def problems(config) -> tuple[str, ...]:
    return ADAPTER.check(config, runtimes_dir=Path())


class TestConfiguration:
    """Unusable folders, and contradicting keys."""

    def test_good(self, config):
        assert problems(config()) == ()
        assert problems(config(gpus=2, tensor_parallel=True, gpu_split=[16, 8], cache_quant=[8, 4])) == ()

    def test_problems(self, config, tmp_path):
        assert "there is no such folder" in problems(config(path=str(tmp_path / "none")))[0]
        assert "set gpus" in problems(config(tensor_parallel=True))[0]
        assert "2 GPUs, and the worker has 1" in problems(config(gpu_split=[1, 2]))[0]
        assert "remove one of the two" in problems(config(gpu_split=[1], gpus="auto"))[0]
        assert "two: of keys and of values" in problems(config(cache_quant=[4, 4, 4]))[0]
        (Path(config().path) / "tokenizer.json").unlink()
        assert "there is no tokenizer.json" in problems(config())[0]

    def test_another_quantisation(self, config):
        described = Path(config().path) / "config.json"
        described.write_text(
            json.dumps({**json.loads(described.read_text()), "quantization_config": {"quant_method": "awq"}})
        )
        assert "quantised by awq" in problems(config())[0]

    @pytest.mark.parametrize("keys", [{"cache_size": 1000}, {"cache_quant": 9}, {"max_chunk_size": 300}])
    def test_whole_pages_and_bits(self, config, keys):
        with pytest.raises(ValueError, match=next(iter(keys))):
            config(**keys)

    def test_capabilities(self, config):
        known = ADAPTER.capabilities(config(cache_size=1024))
        assert (known.modalities, known.multi_turn, known.tools, known.context) == (("text",), False, False, 1024)

    def test_a_quantised_cache_takes_less(self, config):
        whole, less, least = (
            ADAPTER.estimate(config(cache_size=1 << 20, cache_quant=bits)) for bits in (None, 8, [4, 4])
        )
        assert whole.cache_mib > less.cache_mib > least.cache_mib
        assert less.cache_mib == pytest.approx(whole.cache_mib * 8.5 / 16, rel=0.02)


class TestLaunch:
    """The worker's options are complete. Without an NVIDIA GPU the worker isn't started."""

    def test_one_gpu(self, options):
        told = options(cache_size=2048, cache_quant=6, max_rq_tokens=512, parallel=3)
        assert (told["cache_size"], told["cache_quant"], told["max_rq_tokens"]) == (2048, [6, 6], 512)
        assert (told["max_batch_size"], told["max_q_size"], told["use_per_device"]) == (3, 8, None)

    def test_several_gpus(self, options):
        told = options(*GPUS, gpus=2, gpu_split=[16, 8], tensor_parallel=True, tp_backend="nccl")
        assert (told["use_per_device"], told["tensor_parallel"], told["tp_backend"]) == ([16, 8], True, "nccl")

    def test_in_proportion_to_what_is_free(self, options):
        assert options(*GPUS, parts=(3072, 1024), gpus="auto")["use_per_device"] == [3, 1]

    def test_no_gpu(self, options):
        with pytest.raises(ModelUnusableError, match="NVIDIA GPUs alone"):
            options(HOST)


CALLS = {  # what the worker calls → where it is in the library
    "from_directory": ("exllamav3.model.config", "Config.from_directory"),
    "Cache": ("exllamav3.cache.cache", "Cache"),
    "Generator": ("exllamav3.generator.generator", "Generator"),
    "Job": ("exllamav3.generator.job", "Job"),
    "ComboSampler": ("exllamav3.generator.sampler.presets", "ComboSampler"),
    "encode": ("exllamav3.tokenizer.tokenizer", "Tokenizer.encode"),
    "decode": ("exllamav3.tokenizer.tokenizer", "Tokenizer.decode"),
    "enqueue": ("exllamav3.generator.generator", "Generator.enqueue"),
    "iterate": ("exllamav3.generator.generator", "Generator.iterate"),
    "cancel": ("exllamav3.generator.generator", "Generator.cancel"),
    "clear_queue": ("exllamav3.generator.generator", "Generator.clear_queue"),
}
BITS = {"k_bits", "v_bits"}  # a cache hands these on to its layers


@pytest.fixture(scope="module")
def library():
    return package_sources.source("exllamav3", "exllamav3")


class TestLibrary:
    """The sources of the locked ExLlamaV3 have what the worker uses, and the stand-in of the other tests is like them."""

    @cases("call", CALLS)
    def test_it_is_called_as_it_is_written(self, library, call):
        signature = signatures.function(library, *CALLS[call])
        found = [*signatures.calls(WORKER, call)]
        assert found
        for places, keywords in found:
            signature.bind(*[None] * places, **dict.fromkeys(keywords - BITS if call == "Cache" else keywords))

    def test_loading(self, library):
        signature = signatures.function(library, "exllamav3.model.model", "Model.load_gen")
        loads = [keywords for _, keywords in signatures.calls(WORKER, "load") if "tensor_p" in keywords]
        (keywords,) = loads
        signature.bind(**dict.fromkeys(keywords))
        for module, name in (("model.model", "Model.from_config"), ("tokenizer.tokenizer", "Tokenizer.from_config")):
            signatures.function(library, f"exllamav3.{module}", name).bind(None)

    def test_bits_of_the_cache(self, library):
        layer = signatures.function(library, "exllamav3.cache.quant", "CacheLayer_quant")
        assert set(layer.parameters) >= BITS

    def test_all_is_offered_at_the_top(self, library):
        text = (library / "exllamav3" / "__init__.py").read_text()
        for name in ("Config", "Model", "Tokenizer", "Cache", "CacheLayer_quant", "Generator", "Job"):
            assert name in text
        assert "from .generator.sampler import *" in text

    def test_what_it_tells_of_a_job(self, library):
        told = (library / "exllamav3" / "generator" / "job.py").read_text()
        told += (library / "exllamav3" / "generator" / "generator.py").read_text()
        for word in ("streaming", "error", "token_ids", "eos_reason", "eos_triggering_token_id", "max_new_tokens"):
            assert f'"{word}"' in told
        tokenizer = (library / "exllamav3" / "tokenizer" / "tokenizer.py").read_text()
        for name in ("generation_config_dict", "extended_id_to_piece", "actual_vocab_size", "bos_token", "eos_token"):
            assert f"self.{name} = " in tokenizer
        assert "self.eos_token_id_list = " in (library / "exllamav3" / "model" / "config.py").read_text()

    @cases(
        ("name", "where"),
        [
            *((where[1], where) for where in CALLS.values()),
            ("Model.load_gen", ("exllamav3.model.model", "Model.load_gen")),
            ("Model.from_config", ("exllamav3.model.model", "Model.from_config")),
            ("CacheLayer_quant", ("exllamav3.cache.quant", "CacheLayer_quant")),
        ],
    )
    def test_the_stand_in_has_the_same_parameters(self, library, name, where):
        real = [*signatures.function(library, *where).parameters]
        folder = Path(fake_exllamav3.__file__).parent
        fake = [*signatures.function(folder, "fake_exllamav3", name).parameters]
        assert fake == real[: len(fake)]
