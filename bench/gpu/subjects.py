"""The models of each runtime that are tried on a GPU: tiny ones, generated, so that nothing is downloaded.

What a subject needs beside a GPU is its runtime's environment for `cuda`, or its program; without it the subject is left out,
with the reason that its adapter gives. Models are written by these same environments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args
from unittest import mock

from runtimes.base import LaunchContext, ModelUnusableError, RuntimeNotInstalledError
from runtimes.device_kind import CUDA, DeviceAssignment
from runtimes.model_config import ModelType
from runtimes.registry import REGISTRY
from supervisor.io import venvs
from tests.support import environments, hearing, minilm, tiny, tiny_ctranslate2, tiny_language, tiny_pictures

ONE_OF_EACH: Final = dict.fromkeys(get_args(ModelType), 1)  # limits.max_loaded, so that models take turns
CHAT: Final = "/v1/chat/completions"
HELLO: Final = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
FP8_SIZES: Final = {"hidden_size": 256, "intermediate_size": 256}  # FP8's scales are for tiles of 128 by 128

Body = Callable[[], Mapping[str, Any]]
"""The arguments of httpx for a request."""


@dataclass(frozen=True)
class Subject:
    """A model. `model` makes its files and returns their place; `request` is one that it answers, at `path`."""

    runtime: str
    model: Callable[[], Path]
    keys: Mapping[str, object] = field(default_factory=dict)
    path: str = CHAT
    request: Body = lambda: {"json": HELLO}

    def config(self, card: str) -> dict[str, object]:
        """Its configuration. Writes its files."""
        return {"runtime": self.runtime, "path": str(self.model()), "devices": [card], **self.keys}


def _language(kind: str = "qwen3", **options: Any) -> Callable[[], Path]:
    return lambda: tiny_language.model(kind, dtype="bfloat16", **options)


def _sound() -> Mapping[str, Any]:
    sound = (hearing.sounds() / "speech.wav").read_bytes()
    return {"data": {}, "files": {"file": ("speech.wav", sound)}}


def _texts() -> Mapping[str, Any]:
    return {"json": {"input": ["a text", "another"]}}


def _picture() -> Mapping[str, Any]:
    return {"json": {"prompt": "a lighthouse", "size": "64x64", "response_format": "b64_json"}}


_VLLM: Final = {"max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}

SUBJECTS: Final[Mapping[str, Subject]] = {
    "llama_server": Subject("llama_server", tiny.model, {"program": "binary", "n_ctx": 2048}),
    "transformers": Subject("transformers", _language(), {"n_ctx": 1024}),
    "transformers-fp8": Subject("transformers", _language(quantised="fp8"), {"n_ctx": 1024}),
    "transformers-mxfp4": Subject("transformers", _language("gpt_oss", quantised="mxfp4"), {"n_ctx": 1024}),
    "transformers-bnb4": Subject("transformers", _language(), {"n_ctx": 1024, "quantization": "bitsandbytes-4bit"}),
    "vllm": Subject("vllm", _language(), _VLLM),
    "vllm-fp8": Subject("vllm", _language(quantised="fp8"), _VLLM),
    "vllm_serve": Subject("vllm_serve", _language(), _VLLM),
    "sglang": Subject("sglang", _language()),
    "tgi": Subject("tgi", _language()),
    "ctranslate2": Subject("ctranslate2", tiny_ctranslate2.language),
    "faster_whisper": Subject("faster_whisper", hearing.converted, path="/v1/audio/transcriptions", request=_sound),
    "embeddings": Subject("embeddings", minilm.folder, path="/v1/embeddings", request=_texts),
    "diffusers": Subject("diffusers", tiny_pictures.model, path="/v1/images/generations", request=_picture),
}
"""By name: its runtime, and after a hyphen what is special about it."""

ELSEWHERE: Final[Mapping[str, str]] = {
    "chatterbox": "its smallest model has a GiB of weights; `make test-chatterbox` writes one",
    "tabbyapi": "takes EXL3 models, which can't be written without a GPU",
    "exllamav3": "takes EXL3 models, which can't be written without a GPU",
    "llama_cpp": "its package for CUDA has to be compiled; llama_server runs the same engine",
    "whisper_cpp": "its program for CUDA has to be compiled",
    "comfyui": "its nodes and checkpoints are the user's",
    "command": "anybody's program",
    "openai_remote": "others run its models",
    "claude_cli": "others run its models",
}
"""Runtimes without a subject here, and why."""


def missing(name: str, card: str, runtimes_dir: Path) -> str | None:
    """What this machine lacks for it; None: nothing. Writes its files where they can be written."""
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
    return None


@contextlib.contextmanager
def written_by(runtimes_dir: Path) -> Iterator[None]:
    """Models are written by the environments in this folder, and none is installed for that."""

    def there(name: str) -> Path:
        if not (runtimes_dir / name / "bin" / "python").exists():
            raise RuntimeNotInstalledError(
                name, f"The runtime {name} is not installed.", f"llmux runtimes install {name}"
            )
        return runtimes_dir

    with mock.patch.object(environments, "installed", there):
        yield
