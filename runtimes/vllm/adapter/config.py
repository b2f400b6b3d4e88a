"""The configuration keys of a model on vLLM's engine in a worker of ours, beside those of every model on vLLM."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from runtimes.adapters.vllm.config import VllmConfig


class VllmWorkerConfig(VllmConfig):
    """A Hugging Face model on vLLM's engine, in a worker of llmux's own: a language model, also with vision."""

    type: Literal["llm"] = Field(default="llm", description="A language model; there are no others here.")
    tool_format: Literal["auto", "qwen", "harmony", "none"] = Field(
        default="auto", description="How the model writes tool calls and thoughts; auto: as its chat template shows."
    )
    tokenizer: str | None = Field(default=None, description="Folder or name of another tokenizer.")
    enforce_eager: bool = Field(
        default=False, description="No compilation, no CUDA graphs: starts sooner, runs slower, takes less."
    )
    enable_chunked_prefill: bool | None = Field(
        default=None, description="Compute long prompts in pieces. Default: where the model allows it."
    )


ENGINE: Final = frozenset({"tokenizer", "enforce_eager", "enable_chunked_prefill"})
"""The keys that are engine arguments under their own names, beside those of every model on vLLM."""
