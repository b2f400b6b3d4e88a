"""The configuration keys of a model on vLLM's engine in a worker of ours, beside those of every model on vLLM."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from runtimes.adapters.vllm.config import VllmConfig


class VllmWorkerConfig(VllmConfig):
    """A Hugging Face model on vLLM's engine, in a worker of llmux's own: a language model, also with vision."""

    reserved = f"""
    {VllmConfig.reserved} --structured-outputs-config --runner --convert --task --tool-call-parser --enable-auto-tool-choice
    --no-enable-auto-tool-choice --tool-parser-plugin
    """  # the worker serves one kind of model, and reads tool calls itself
    no_options = (*VllmConfig.no_options, "tool_format")

    type: Literal["llm"] = Field(default="llm", description="A language model; there are no others here.")
    tool_format: Literal["auto", "qwen", "harmony", "none"] = Field(
        default="auto", description="How the model writes tool calls and thoughts; auto: as its chat template shows."
    )
