"""Hugging Face models on vLLM's engine, which runs in our own worker instead of behind vLLM's server.

The worker has vLLM's client in its own process; the engine core and its executors are further processes, whose subreaper
is the shim. Requests, answers and refusals are those of our other workers for language models (runtimes/sdk/chat).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from runtimes.adapters import chat_workers
from runtimes.adapters.server_program import option_problems
from runtimes.adapters.vllm import memory
from runtimes.adapters.vllm.adapter import OWN_VARIABLES, VllmAdapter, description, engine_environment, template_of
from runtimes.adapters.vllm.config import engine_settings
from runtimes.adapters.worker_adapter import KEY_VARIABLE, interpreter, worker_spec
from runtimes.base import (
    Capabilities,
    Contradiction,
    LaunchContext,
    LaunchSpec,
    Thinking,
    in_order,
)
from runtimes.prompt_cache import NO_CACHE, PromptCache
from runtimes.vllm.adapter.config import VllmWorkerConfig

PROGRAM: Final = "runtimes.vllm.worker"
GENERATING: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
BITSANDBYTES: Final = "bitsandbytes"
START_METHOD: Final = "VLLM_WORKER_MULTIPROCESSING_METHOD"  # of the engine's processes: the worker has threads already
NOT_FOR_ENV: Final = {**OWN_VARIABLES, KEY_VARIABLE: "is set by llmux", START_METHOD: "is set by llmux"}


class VllmWorkerAdapter(VllmAdapter[VllmWorkerConfig]):
    """vLLM's engine in our worker, several processes per model."""

    name = "vllm"
    summary = (
        "Hugging Face models on vLLM's engine in llmux's own worker: thoughts and tool calls need no further keys."
    )
    all_endpoints = chat_workers.ENDPOINTS
    requirements = Path(__file__).parents[1] / "requirements.lock"
    config = VllmWorkerConfig

    def check(self, config: VllmWorkerConfig, *, runtimes_dir: Path) -> tuple[str, ...]:
        """Problems: missing or unreadable files, contradicting keys, a model that doesn't generate text, options that only llmux sets."""
        return (*self.problems(config), *_own_problems(config), *option_problems(config))

    def launch(self, config: VllmWorkerConfig, context: LaunchContext) -> LaunchSpec:
        """How to start the worker. Raises RuntimeNotInstalledError, or ModelUnusableError for a missing or unreadable model."""
        python = interpreter(self.name, context)
        if context.device.kind.takes_whole:
            config = config.model_copy(update={"gpus": 1})
        plan = memory.plan(config)
        engine: dict[str, JsonValue] = {
            **engine_settings(config, context=plan.context, cache_bytes=plan.cache_bytes),
            "model": str(config.path or config.model),
            "served_model_name": context.model,  # in the engine's metrics
        }
        options: dict[str, JsonValue] = {
            "engine": engine,
            "extra_args": [*config.extra_args],
            "tool_format": config.tool_format,
            "chat_template": template_of(config) if config.chat_template is not None else None,
            "chat_template_kwargs": config.default_chat_template_kwargs or {},
        }
        return worker_spec(
            python,
            PROGRAM,
            context,
            parallel=config.max_num_seqs,
            options=options,
            env={
                **engine_environment(config, context.devices),
                **config.env,
                START_METHOD: "spawn",
            },
            offline=config.path is not None,
        )

    def prompt_cache(self, config: VllmWorkerConfig) -> PromptCache:
        """A cache that requests with the same salt share, unless it is switched off."""
        if config.enable_prefix_caching is False:
            return NO_CACHE
        return PromptCache(is_kept=True, paths=chat_workers.ANSWERS, salt_field="cache_salt")

    def thinking(self, config: VllmWorkerConfig) -> Thinking | None:
        """Thinking is switched by an argument of the chat template, if the template has it."""
        return chat_workers.thinking(self.chat_template(config))

    def capabilities(self, config: VllmWorkerConfig) -> Capabilities:
        """From the model's folder."""
        found = description(config)
        modalities = in_order(self.inputs(config) or config.modalities)
        if found is None:
            return Capabilities(modalities, context=config.max_model_len)
        template = template_of(config) or ""
        marked = chat_workers.writes_calls(template)
        calls = config.tool_format != "none" and (marked or config.tool_format != "auto")
        return Capabilities(
            modalities=modalities,
            tools="tools" in template and calls,
            thinking=chat_workers.thinks(template),
            multi_turn=bool(template),
            context=memory.context(config, found),
        )


def _own_problems(config: VllmWorkerConfig) -> Iterator[str]:
    found = description(config)
    names = found.architectures if found is not None else ()
    if names and not names[0].endswith(GENERATING):
        yield f"path: {names[0]} is no language model that generates text; vllm_serve has the other kinds"
    if BITSANDBYTES in (config.quantization, found.quantization if found is not None else None):
        key = "path" if config.quantization is None else "quantization"
        yield f"{key}: vLLM has no {BITSANDBYTES} any more; runtime transformers has it"
    for variable in sorted(NOT_FOR_ENV.keys() & config.env.keys()):
        yield Contradiction(f"env: {variable} {NOT_FOR_ENV[variable]}")
