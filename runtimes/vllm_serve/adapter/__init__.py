"""Hugging Face models on vLLM's own server, `vllm serve`.

Which program: the configured `binary`, else the one in the runtime's own environment, else `vllm` on PATH. The worker's
key is in VLLM_API_KEY. vLLM is several processes: the API server, an engine core, executors; the shim is the subreaper of
all of them, whatever sessions they open. `/health` answers before `/v1/models` does, so readiness checks both.

Requests reach vLLM unchanged except for the model's name, which is the same for all models; its answers have our name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from pydantic import JsonValue

from runtimes.adapters.options import command_line
from runtimes.adapters.vllm import memory
from runtimes.adapters.vllm.adapter import (
    OWN_VARIABLES,
    VllmAdapter,
    description,
    engine_environment,
    file_problems,
    key_problems,
    template_of,
)
from runtimes.base import (
    CHAT_TEMPLATE,
    Capabilities,
    Contradiction,
    Endpoint,
    HealthCheck,
    LaunchContext,
    LaunchSpec,
    ModelUnusableError,
    RuntimeNotInstalledError,
    Thinking,
    in_order,
)
from runtimes.model_config import Modality
from runtimes.prompt_cache import NO_CACHE, PromptCache
from runtimes.sizing import Room, Sizing
from runtimes.vllm_serve.adapter.config import FLAGS, VllmServeConfig, refused_options, settings

PROGRAM: Final = "vllm"
KEY_VARIABLE: Final = "VLLM_API_KEY"
NAME: Final = "model"  # the name in requests to vLLM, which refuses unknown names
NO_DOMAIN: Final = "none.invalid"  # nobody can own it (RFC 6761); an empty list would allow every domain
TOLD: Final = ("--enable-prompt-tokens-details",)  # else no answer says what was cached
NOT_FOR_ENV: Final = {
    **OWN_VARIABLES,
    KEY_VARIABLE: "is set by llmux",
    "VLLM_SERVER_DEV_MODE": "opens routes that change the worker for everybody",
}

Kind = Literal["text", "embeddings", "classes", "speech"]

_TOKENS = frozenset({Endpoint("/tokenize"), Endpoint("/detokenize")})
_TEXT = frozenset(
    Endpoint(path)
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
    )
)
_SALTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
_SCORES = frozenset(Endpoint(path) for path in ("/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank"))
_EMBEDDINGS = frozenset({Endpoint("/v1/embeddings"), Endpoint("/v2/embed"), Endpoint("/pooling")})
_CLASSES = frozenset({Endpoint("/classify"), Endpoint("/pooling")})
_SPEECH = frozenset({Endpoint("/v1/audio/transcriptions"), Endpoint("/v1/audio/translations")})

_POOLED = ("ForTextEncoding", "EmbeddingModel", "ForRewardModeling", "RewardModel")
_CLASSIFIED = ("Classification", "ClassificationModel")


class VllmServeAdapter(VllmAdapter[VllmServeConfig]):
    """vLLM's server, several processes per model."""

    name = "vllm_serve"
    summary = "Hugging Face models on vLLM's server, `vllm serve`: many requests at once, on large GPUs."
    all_endpoints = _TOKENS | _TEXT | _SCORES | _EMBEDDINGS | _CLASSES | _SPEECH
    requirements = Path(__file__).parents[1] / "requirements.lock"
    config = VllmServeConfig

    def check(self, config: VllmServeConfig, *, runtimes_dir: Path) -> tuple[str, ...]:
        """Files that are missing or unreadable, contradicting keys, options that llmux sets."""
        return (*file_problems(config), *key_problems(config), *_own_problems(config))

    def launch(self, config: VllmServeConfig, context: LaunchContext) -> LaunchSpec:
        """Raises RuntimeNotInstalledError without any program, ModelUnusableError for a missing program or model."""
        program = find(config, context.environment(self.name))
        if context.device.kind.takes_whole:
            config = config.model_copy(update={"gpus": 1})
        plan = memory.plan(config)
        values: dict[str, JsonValue] = {
            **settings(config, context=plan.context, cache_bytes=plan.cache_bytes),
            "served_model_name": [self.answers_as(config, context.model), NAME],
            "host": context.host,
            "port": context.port,
            "allowed_media_domains": [NO_DOMAIN],
        }
        if kind(config) in ("embeddings", "classes"):
            values["runner"] = "pooling"
        return LaunchSpec(
            argv=(
                str(program),
                "serve",
                str(config.path or config.model),
                *command_line(FLAGS, values),
                *(TOLD if kind(config) == "text" else ()),
                *config.extra_args,
            ),
            env={
                "PATH": os.pathsep.join(filter(None, (str(program.parent), os.environ.get("PATH")))),  # its compilers
                **engine_environment(config, context.devices),
                **config.env,
                **context.device_environment(),
                KEY_VARIABLE: context.key,
            },
            library_path=tuple(map(str, config.library_path)),
            health=HealthCheck("/health", then="/v1/models"),
            auth=f"Bearer {context.key}",
            metrics="/metrics",
            host=context.host,
            port=context.port,
        )

    def endpoints(self, config: VllmServeConfig) -> frozenset[Endpoint]:
        """What vLLM serves for this kind of model, except its administration and what keeps state between requests."""
        match kind(config):
            case "text":
                return _TOKENS | _TEXT
            case "speech":
                return _SPEECH
            case "embeddings":
                return _TOKENS | _SCORES | _EMBEDDINGS
            case "classes":
                scores = _SCORES if _labels(config) == 1 else frozenset[Endpoint]()
                return _TOKENS | scores | _CLASSES

    def sized(self, config: VllmServeConfig, room: Room | None) -> tuple[VllmServeConfig, Sizing | None]:
        """`max_model_len` of models that generate text; the cache has room for one request of so many tokens."""
        return super().sized(config, room) if kind(config) == "text" else (config, None)

    def prompt_cache(self, config: VllmServeConfig) -> PromptCache:
        """Of text, unless it is switched off: shared by requests with the same salt."""
        if kind(config) != "text" or config.enable_prefix_caching is False:
            return NO_CACHE
        return PromptCache(is_kept=True, paths=_SALTED, salt_field="cache_salt")

    def thinking(self, config: VllmServeConfig) -> Thinking | None:
        """By a chat template argument, for models that generate text."""
        return CHAT_TEMPLATE if kind(config) == "text" else None

    def upstream_model(self, config: VllmServeConfig) -> str | None:
        """The second of its served names, which is the same for every model."""
        return NAME

    def answers_as(self, config: VllmServeConfig, model: str) -> str:
        """The first of its served names, whichever it was asked by."""
        return config.served_model_name or model

    def inputs(self, config: VllmServeConfig) -> frozenset[Modality] | None:
        """From the model's config.json; the configured modalities while that is missing."""
        found = description(config)
        if found is None:
            return super().inputs(config)
        if kind(config) == "speech":
            return frozenset({"audio"})
        limits = config.limit_mm_per_prompt or {}
        inputs: set[Modality] = {"text"}
        if found.takes_images and limits.get("image") != 0:
            inputs.add("image")
        if found.takes_audio and limits.get("audio") != 0:
            inputs.add("audio")
        return frozenset(inputs)

    def capabilities(self, config: VllmServeConfig) -> Capabilities:
        """From the model's folder; tools and thinking from words in its chat template."""
        found = description(config)
        modalities = in_order(self.inputs(config) or config.modalities)
        if found is None:
            return Capabilities(modalities, context=config.max_model_len)
        template = template_of(config)
        text = kind(config) == "text" and template is not None
        return Capabilities(
            modalities=modalities,
            tools=text and config.tool_call_parser is not None and "tools" in (template or ""),
            thinking=text and "think" in (template or ""),
            multi_turn=text,
            context=memory.context(config, found),
        )


def find(config: VllmServeConfig, environment: Path) -> Path:
    """The vllm program. Raises RuntimeNotInstalledError, or ModelUnusableError for a binary that isn't one."""
    if config.binary is not None:
        if not os.access(config.binary, os.X_OK):
            raise ModelUnusableError(f"binary: {config.binary} is not a program that can be run")
        return config.binary
    own = environment / "bin" / PROGRAM
    if os.access(own, os.X_OK):
        return own
    if (found := shutil.which(PROGRAM)) is not None:
        return Path(found).absolute()
    raise RuntimeNotInstalledError(
        VllmServeAdapter.name,
        f"There is no {PROGRAM} program in {own.parent} nor on PATH.",
        f"llmux runtimes install {VllmServeAdapter.name}",
    )


def kind(config: VllmServeConfig) -> Kind:
    """The kind of answers: as configured, else by the name of the model's architecture."""
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


def _labels(config: VllmServeConfig) -> int:
    """Classes of a classifier; one with a single class gives scores."""
    found = description(config)
    if found is None:
        return 0
    names = found.values.get("id2label")
    return len(names) if isinstance(names, dict) else found.number("num_labels", default=2)


def _own_problems(config: VllmServeConfig) -> Iterator[str]:
    if config.binary is not None and not os.access(config.binary, os.X_OK):
        yield f"binary: {config.binary} is not a program that can be run"
    for variable in sorted(NOT_FOR_ENV.keys() & config.env.keys()):
        yield Contradiction(f"env: {variable} {NOT_FOR_ENV[variable]}")
    for problem in refused_options(config.extra_args):
        yield Contradiction(f"extra_args: {problem}")
