"""Hugging Face models on vLLM's own server, `vllm serve`.

vLLM is several processes: the API server, an engine core, executors; the shim is the subreaper of all of them, whatever
sessions they open. `/health` answers before `/v1/models` does, so readiness checks both.

Requests reach vLLM unchanged except for the model's name, which is the same for all models. vLLM's answers have our name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, JsonValue

from runtimes.adapters.server_program import FilePath, ServerAdapter, endpoints
from runtimes.adapters.vllm import memory
from runtimes.adapters.vllm.adapter import OWN_VARIABLES, VllmAdapter, description, engine_environment, template_of
from runtimes.adapters.vllm.config import CHAT, VllmConfig, engine_settings
from runtimes.base import CHAT_TEMPLATE, Capabilities, Endpoint, HealthCheck, LaunchContext, Thinking, in_order
from runtimes.model_config import ANOTHER_NAME, Modality
from runtimes.prompt_cache import NO_CACHE, PromptCache
from runtimes.sizing import Room, Sizing

Kind = Literal["text", "embeddings", "classes", "speech"]

_TOKENS = endpoints("/tokenize", "/detokenize")
_SALTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
_TEXT = endpoints(*_SALTED, "/v1/messages/count_tokens")
_SCORES = endpoints("/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank")
_EMBEDDINGS = endpoints("/v1/embeddings", "/v2/embed", "/pooling")
_CLASSES = endpoints("/classify", "/pooling")
_SPEECH = endpoints("/v1/audio/transcriptions", "/v1/audio/translations")

_POOLED = ("ForTextEncoding", "EmbeddingModel", "ForRewardModeling", "RewardModel")
_CLASSIFIED = ("Classification", "ClassificationModel")


class VllmServeConfig(VllmConfig):
    """A Hugging Face model served by vLLM's own server."""

    removed_keys: ClassVar = {"served_model_name": ANOTHER_NAME}
    spellings: ClassVar = {
        **VllmConfig.spellings,
        **dict.fromkeys(("--enable-auto-tool-choice", "--no-enable-auto-tool-choice"), "tool_call_parser"),
    }

    binary: FilePath | None = Field(
        default=None, description="The vllm program. Default: the runtime's own environment, else found on PATH."
    )
    library_path: list[FilePath] = Field(
        default_factory=list, description="Folders put before LD_LIBRARY_PATH, for builds with their own CUDA."
    )
    runner: Literal["auto", "generate", "pooling"] = Field(
        default="auto",
        description="Generate text, or pool to embeddings, classes or scores; auto: as the model is made.",
    )
    reasoning_parser: str | None = Field(
        default=None, description="Takes thoughts out of the answer (qwen3, deepseek_r1, openai_gptoss …)."
    )
    tool_call_parser: str | None = Field(
        default=None,
        description="Understands the model's tool calls (hermes, qwen3_coder, openai …); switches them on.",
    )


class VllmServeAdapter(VllmAdapter[VllmServeConfig], ServerAdapter[VllmServeConfig]):
    """vLLM's server, several processes per model."""

    name = "vllm_serve"
    summary = "Hugging Face models on vLLM's server, `vllm serve`: many requests at once, on large GPUs."
    all_endpoints = _TOKENS | _TEXT | _SCORES | _EMBEDDINGS | _CLASSES | _SPEECH
    requirements = Path(__file__).parent / "requirements.lock"
    config = VllmServeConfig
    places = ("{environment}/bin/vllm", "vllm")
    missing = "There is no vllm program in {environment}/bin nor on PATH."
    remedy = "llmux runtimes install vllm_serve"
    key_variable = "VLLM_API_KEY"
    refused_variables = OWN_VARIABLES | {"VLLM_SERVER_DEV_MODE": "opens routes that change the worker for everybody"}
    health = HealthCheck("/health", then="/v1/models")
    served_name = "model"  # the second of its names, which is the same for every model
    media = ("image", "audio")

    def command_prefix(self, config: VllmServeConfig, program: Path) -> tuple[str, ...]:
        """The command `serve`, and the model."""
        return (str(program), "serve", str(config.path or config.model))

    def settings(self, config: VllmServeConfig, context: LaunchContext) -> dict[str, JsonValue]:
        """The values of vLLM's options. Raises ModelUnusableError for a missing model, or if vram_mib leaves no room."""
        plan, answers = memory.plan(config), kind(config)
        own = {*CHAT, "runner", "reasoning_parser", "tool_call_parser"}
        return {
            **engine_settings(config, context=plan.context, cache_bytes=plan.cache_bytes),
            **config.model_dump(mode="json", include=own, exclude_defaults=True),
            "enable_auto_tool_choice": True if config.tool_call_parser else None,
            "served_model_name": [context.model, self.served_name],
            "host": context.host,
            "port": context.port,
            "allowed_media_domains": ["none.invalid"],  # which nobody can own (RFC 6761); an empty list would allow all
            **({"runner": "pooling"} if answers in {"embeddings", "classes"} else {}),
            "enable_prompt_tokens_details": answers == "text",  # else no answer says what was cached
        }

    def variables(self, config: VllmServeConfig, context: LaunchContext) -> Mapping[str, str]:
        """The variables of vLLM's engine."""
        return engine_environment(config, context.devices)

    def problems(self, config: VllmServeConfig) -> Iterator[str]:
        """The problems of every vLLM model, and that of a program that can't run."""
        yield from super().problems(config)
        yield from self.program_problems(config)

    def endpoints(self, config: VllmServeConfig) -> frozenset[Endpoint]:
        """The endpoints of vLLM for this kind of model, except administration and those that keep state between requests."""
        match kind(config):
            case "text":
                return _TOKENS | _TEXT
            case "speech":
                return _SPEECH
            case "embeddings":
                return _TOKENS | _SCORES | _EMBEDDINGS
            case "classes":
                scores = _SCORES if _class_count(config) == 1 else frozenset[Endpoint]()
                return _TOKENS | scores | _CLASSES

    def sized(self, config: VllmServeConfig, room: Room | None) -> tuple[VllmServeConfig, Sizing | None]:
        """Chooses `max_model_len` of models that generate text. The cache has room for one request of this many tokens."""
        return super().sized(config, room) if kind(config) == "text" else (config, None)

    def prompt_cache(self, config: VllmServeConfig) -> PromptCache:
        """For text models: a cache that requests with the same salt share, unless it is switched off."""
        if kind(config) != "text" or config.enable_prefix_caching is False:
            return NO_CACHE
        return PromptCache(is_kept=True, paths=_SALTED, salt_field="cache_salt")

    def thinking(self, config: VllmServeConfig) -> Thinking | None:
        """By an argument of the chat template, for models that generate text."""
        return CHAT_TEMPLATE if kind(config) == "text" else None

    def answers_as(self, config: VllmServeConfig, model: str) -> str:
        """The first of the served names, whatever name the request has."""
        return model

    def inputs(self, config: VllmServeConfig) -> frozenset[Modality] | None:
        """Audio only for speech recognition; otherwise as for every vLLM model."""
        found = super().inputs(config)
        return found if kind(config) != "speech" or description(config) is None else frozenset({"audio"})

    def capabilities(self, config: VllmServeConfig) -> Capabilities:
        """From the model's folder; tools and thinking from words in its chat template."""
        found = description(config)
        modalities = in_order(self.inputs(config) or config.modalities)
        if found is None:
            return Capabilities(modalities, context=config.max_model_len)
        template = template_of(config) if kind(config) == "text" else None
        return Capabilities(
            modalities=modalities,
            tools=config.tool_call_parser is not None and "tools" in (template or ""),
            thinking="think" in (template or ""),
            multi_turn=template is not None,
            context=memory.context(config, found),
        )


def kind(config: VllmServeConfig) -> Kind:
    """The kind of the model's answers: configured, or else shown by the name of the architecture."""
    if config.type == "asr":
        return "speech"
    found = description(config)
    architectures = found.architectures if found is not None else ()
    if config.runner != "generate":
        if any(name.endswith(_CLASSIFIED) for name in architectures):
            return "classes"
        if config.type in {"embedding", "vision"} or config.runner == "pooling":
            return "embeddings"
        if any(name.endswith(_POOLED) or name.endswith("Model") for name in architectures):
            return "embeddings" if not any(name.endswith("LMHeadModel") for name in architectures) else "text"
    return "text"


def _class_count(config: VllmServeConfig) -> int:
    """The number of a classifier's classes. A classifier with a single class gives scores."""
    found = description(config)
    if found is None:
        return 0
    names = found.values.get("id2label")
    return len(names) if isinstance(names, dict) else found.number("num_labels", default=2)
