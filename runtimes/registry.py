"""The table of runtimes: name → adapter class, imported when a model first needs it.

A daemon with one kind of model doesn't import the other adapters. A new runtime is one line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

from runtimes.base import Adapter

AnyAdapter = Adapter[Any]
"""An adapter whose configuration class the caller doesn't know: only `Registry` pairs it with its configs."""


class Registry:
    """Name → adapter. An entry is `module:Class`, imported once, or a ready instance."""

    def __init__(self, entries: Mapping[str, str | AnyAdapter]) -> None:
        self._entries = dict(entries)

    def names(self) -> tuple[str, ...]:
        """All runtimes, in the order of the table."""
        return tuple(self._entries)

    def get(self, name: str) -> AnyAdapter:
        """The one adapter of that name. Raises KeyError."""
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            adapter_class = cast("type[AnyAdapter]", getattr(importlib.import_module(module), attribute))
            entry = self._entries[name] = adapter_class()
        return entry

    def infer(self, model: Mapping[str, object]) -> str | None:
        """The runtime of a model that doesn't name one, inferred from its keys; None: the keys don't determine it."""
        path = model.get("path")
        if isinstance(path, str) and path.lower().endswith(".gguf"):
            return "llama_server"
        if "cmd" in model:
            return "command"
        return None


REGISTRY = Registry(
    {
        "llama_server": "runtimes.llama_server.adapter:LlamaServerAdapter",
        "command": "runtimes.command.adapter:CommandAdapter",
        "transformers": "runtimes.transformers.adapter:TransformersAdapter",
        "faster_whisper": "runtimes.faster_whisper.adapter:FasterWhisperAdapter",
        "llama_cpp": "runtimes.llama_cpp.adapter:LlamaCppAdapter",
        "exllamav3": "runtimes.exllamav3.adapter:ExLlamaV3Adapter",
        "ctranslate2": "runtimes.ctranslate2.adapter:CTranslate2Adapter",
        "whisper_cpp": "runtimes.whisper_cpp.adapter:WhisperCppAdapter",
        "vllm_serve": "runtimes.vllm_serve.adapter:VllmServeAdapter",
        "vllm": "runtimes.vllm.adapter:VllmWorkerAdapter",
        "sglang": "runtimes.sglang.adapter:SglangAdapter",
        "tgi": "runtimes.tgi.adapter:TgiAdapter",
        "tabbyapi": "runtimes.tabbyapi.adapter:TabbyAdapter",
        "embeddings": "runtimes.embeddings.adapter:EmbeddingsAdapter",
        "comfyui": "runtimes.comfyui.adapter:ComfyAdapter",
        "chatterbox": "runtimes.chatterbox.adapter:ChatterboxAdapter",
        "diffusers": "runtimes.diffusers.adapter:DiffusersAdapter",
        "openai_remote": "runtimes.openai_remote.adapter:OpenAIRemoteAdapter",
        "claude_cli": "runtimes.claude_cli.adapter:ClaudeCliAdapter",
    }
)
