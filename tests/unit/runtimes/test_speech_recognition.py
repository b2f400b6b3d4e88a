"""The adapters of speech models: facts about a model, without a process."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from runtimes import device_kind
from runtimes.base import Endpoint, LaunchContext, RuntimeNotInstalledError
from runtimes.device_kind import DeviceAssignment
from runtimes.registry import REGISTRY
from tests.support import hearing
from tests.support.cases import cases

FASTER, TRANSFORMERS = REGISTRY.get("faster_whisper"), REGISTRY.get("transformers")


def faster(**keys: object):
    return FASTER.config(runtime="faster_whisper", **{"path": str(hearing.converted()), **keys})


def speech(**keys: object):
    return TRANSFORMERS.config(runtime="transformers", type="asr", **{"path": str(hearing.whisper()), **keys})


def model_file(
    folder: Path, *, size: int, layers: int, inner: int, kind: int, specification: str = "WhisperSpec"
) -> Path:
    """A sparse model.bin of these dimensions: its weights take no disk space."""
    folder.mkdir()
    (folder / "tokenizer.json").touch()
    width = {0: 4, 1: 1, 4: 2}[kind]
    shapes = {"encoder/conv1/weight": (size, 80, 3), "decoder/embeddings/weight": (51865, size)}
    for part, attentions in (("encoder", 1), ("decoder", 2)):
        for layer in range(layers):
            for attention in range(attentions):
                shapes[f"{part}/layer_{layer}/attention_{attention}/weight"] = (4 * size, size)
            shapes[f"{part}/layer_{layer}/ffn/linear_0/weight"] = (inner, size)
            shapes[f"{part}/layer_{layer}/ffn/linear_1/weight"] = (size, inner)
    text = lambda word: struct.pack("<H", len(word) + 1) + word.encode() + b"\0"
    with (folder / "model.bin").open("wb") as file:
        file.write(struct.pack("<I", 6) + text(specification) + struct.pack("<II", 3, len(shapes)))
        for name, shape in shapes.items():
            count = 1
            for number in shape:
                count *= number
            file.write(text(name) + struct.pack(f"<B{len(shape)}I", len(shape), *shape))
            file.write(struct.pack("<BI", kind, count * width))
            file.seek(count * width, 1)
        file.write(struct.pack("<I", 0))
    return folder


class TestConfiguration:
    """Default values, and the problems of wrong configurations."""

    def test_type_and_inputs(self):
        for adapter, config in ((FASTER, faster()), (TRANSFORMERS, speech())):
            assert config.type == "asr"
            assert adapter.inputs(config) == {"audio"}
            found = adapter.capabilities(config)
            assert (found.modalities, found.tools, found.thinking) == (("audio",), False, False)
            assert adapter.endpoints(config) == {
                Endpoint("/v1/audio/transcriptions"),
                Endpoint("/v1/audio/translations"),
            }
            assert adapter.check(config, runtimes_dir=Path("/nowhere")) == ()

    def test_one_request_at_a_time_unless_it_is_said(self):
        for adapter, make in ((FASTER, faster), (TRANSFORMERS, speech)):
            assert adapter.target_inflight(make()) == 1
            assert adapter.target_inflight(make(parallel=3)) == 3

    @cases(
        ("make", "keys", "clue"),
        [
            (faster, {"path": "/no/such"}, "path: /no/such: there is no such folder"),
            (faster, {"path": str(Path(__file__).parent)}, "there is no model.bin in it"),
            (faster, {"default_language": "klingon"}, "default_language: 'klingon' is no language code"),
            (speech, {"path": "/no/such"}, "path: /no/such"),
            (speech, {"default_language": "xx"}, "default_language: 'xx' is no language code"),
            (speech, {"n_ctx": 2048}, "n_ctx: only models of type llm have it"),
        ],
    )
    def test_mistakes(self, make, keys, clue):
        config = make(**keys)
        problems = REGISTRY.get(config.runtime).check(config, runtimes_dir=Path("/nowhere"))
        assert any(clue in problem for problem in problems), problems

    def test_a_hugging_face_folder_is_no_converted_one(self):
        (problem,) = FASTER.check(faster(path=str(hearing.whisper())), runtimes_dir=Path("/nowhere"))
        assert "ct2-transformers-converter" in problem

    def test_a_language_model_hears_nothing(self, tmp_path):
        folder = shutil.copytree(hearing.whisper(), tmp_path / "model")
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**described, "architectures": ["Qwen3ForCausalLM"]}))
        (problem,) = TRANSFORMERS.check(speech(path=str(folder)), runtimes_dir=Path("/nowhere"))
        assert "is a Qwen3ForCausalLM" in problem

    @pytest.mark.parametrize("spoil", ["cut off", "other kind", "no tokenizer", "nonsense"])
    def test_spoilt_models(self, tmp_path, spoil):
        folder = shutil.copytree(hearing.converted(), tmp_path / "model")
        data = (folder / "model.bin").read_bytes()
        if spoil == "no tokenizer":
            (folder / "tokenizer.json").unlink()
        spoilt = {
            "cut off": data[:-5000],
            "other kind": data.replace(b"WhisperSpec", b"Wav2VecSpec"),
            "nonsense": b"x" * 50,
        }
        (folder / "model.bin").write_bytes(spoilt.get(spoil, data))
        (problem,) = FASTER.check(faster(path=str(folder)), runtimes_dir=Path("/nowhere"))
        clue = {"cut off": "is cut off", "other kind": "holds a Wav2Vec model", "no tokenizer": "no tokenizer.json"}
        assert clue.get(spoil, "not a model of CTranslate2") in problem

    def test_overridable(self):
        for adapter, config in ((FASTER, faster()), (TRANSFORMERS, speech())):
            assert {"default_language", "max_audio_s", "threads"} <= set(adapter.overridable(config))
            assert "path" not in adapter.overridable(config)


class TestLaunch:
    """The options and environment of the worker."""

    def context(self, folder: Path, device: DeviceAssignment) -> LaunchContext:
        for name in ("faster_whisper", "transformers"):
            site = folder / name / "lib" / "python3.11" / "site-packages" / "nvidia" / "cublas" / "lib"
            site.mkdir(parents=True)
            (folder / name / "bin").mkdir()
            (folder / name / "bin" / "python").touch()
        return LaunchContext("m", "127.0.0.1", 1234, "k" * 32, (device,), folder)

    @pytest.mark.parametrize("make", [faster, speech])
    def test_devices(self, tmp_path, make):
        config = make(default_language="German", max_audio_s=60)
        adapter = REGISTRY.get(config.runtime)
        host = adapter.launch(config, self.context(tmp_path / "a", DeviceAssignment("host", device_kind.HOST)))
        card = adapter.launch(
            config, self.context(tmp_path / "b", DeviceAssignment("gpu0", device_kind.CUDA, 0, "GPU-1"))
        )
        settings = [json.loads(spec.argv[4]) for spec in (host, card)]
        assert [found["device"] for found in settings] == ["cpu", "cuda"]
        assert (settings[0]["default_language"], settings[0]["max_audio_s"]) == ("de", 60)
        assert (host.env["CUDA_VISIBLE_DEVICES"], card.env["CUDA_VISIBLE_DEVICES"]) == ("", "GPU-1")
        assert host.library_path == ()

    def test_ctranslate2_finds_cuda_in_its_environment(self, tmp_path):
        spec = FASTER.launch(faster(), self.context(tmp_path, DeviceAssignment("gpu0", device_kind.CUDA, 0, "GPU-1")))
        assert spec.library_path[0].endswith("site-packages/nvidia/cublas/lib")

    @pytest.mark.parametrize("make", [faster, speech])
    def test_not_installed(self, tmp_path, make):
        config = make()
        context = LaunchContext("m", "127.0.0.1", 1, "k", (DeviceAssignment("host", device_kind.HOST),), tmp_path)
        with pytest.raises(RuntimeNotInstalledError, match=f"llmux runtimes install {config.runtime}"):
            REGISTRY.get(config.runtime).launch(config, context)


class TestEstimate:
    """Memory estimates from the headers of the files."""

    @pytest.mark.parametrize(
        ("kind", "keys", "weights"),
        [
            (4, {"compute_type": "float16"}, 2928),
            (4, {"compute_type": "int8_float16"}, 1464),
            (4, {"compute_type": "float32"}, 5855),
            (1, {"compute_type": "int8"}, 1464),
            (0, {"compute_type": "bfloat16"}, 2928),
        ],
    )
    def test_large_v3(self, tmp_path, kind, keys, weights):
        """Its 1.54 billion weights, and what a window takes on the way."""
        folder = model_file(tmp_path / "m", size=1280, layers=32, inner=5120, kind=kind)
        estimate = FASTER.estimate(faster(path=str(folder), **keys))
        assert f"weights {weights} " in estimate.detail
        assert weights + 400 < estimate.mib < weights + 1700

    def test_more_at_once_takes_more(self):
        one, four = (FASTER.estimate(faster(parallel=count)).mib for count in (1, 4))
        assert four > one
        one, four = (TRANSFORMERS.estimate(speech(parallel=count)).mib for count in (1, 4))
        assert four > one

    def test_nothing_to_read(self):
        assert FASTER.estimate(faster(path="/no/such")) is None
        assert TRANSFORMERS.estimate(speech(path="/no/such")) is None
