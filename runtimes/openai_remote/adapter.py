"""A remote model: an OpenAI-compatible API that somebody else runs.

It has no process and no memory here; a request needs an address, a key and the model's name there. The configuration names
the environment variable of the daemon that holds the key, which is read when the model connects. Requests leave this machine
and may cost money, so each must set `allow_remote`, unless the model's configuration allows all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, model_validator

from runtimes.adapters.remote_adapter import RemoteAdapter, checked_variable, nothing_for_workers
from runtimes.base import CHAT_TEMPLATE, Endpoint, ModelUnusableError, RemoteSpec, Thinking
from runtimes.model_config import ModelConfig

DEFAULT_ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/images/variations",
)

_KEY: Final = re.compile(r"[\x21-\x7e]+")

ThinkingField = Literal["thinking", "enable_thinking", "chat_template_kwargs", "reasoning", "reasoning_effort"]

SWITCHES: Final[Mapping[ThinkingField, Thinking]] = {
    "thinking": Thinking({"thinking": {"type": "enabled"}}, {"thinking": {"type": "disabled"}}),
    "enable_thinking": Thinking({"enable_thinking": True}, {"enable_thinking": False}),
    "chat_template_kwargs": CHAT_TEMPLATE,
    "reasoning": Thinking({"reasoning": {"enabled": True}}, {"reasoning": {"enabled": False}}),
    "reasoning_effort": Thinking({"reasoning_effort": "medium"}, {"reasoning_effort": "none"}),
}
"""Name of a field → how the field switches reasoning."""


def _checked_base(text: str) -> str:
    """`http(s)://host[:port]/prefix` without a slash at the end. Raises ValueError, which repeats no secret."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError("it is not an address like https://api.example.com/v1") from error
    if parts.scheme not in {"https", "http"} or not parts.hostname or port == 0 or not text.isascii():
        raise ValueError("it is not an address like https://api.example.com/v1")
    if "@" in parts.netloc:
        raise ValueError("it holds credentials; name the variable that has the key in api_key_env")
    if parts.query or parts.fragment or "?" in text or "#" in text:
        raise ValueError("it must end with its path: no ? and no #")
    if not text.isprintable() or " " in text:
        raise ValueError("it holds a blank or a control character")
    return text.rstrip("/")


def _checked_path(text: str) -> str:
    if re.fullmatch(r"/v1/[^\s?#]+", text) is None:
        raise ValueError(f"{text!r} is not a path like /v1/embeddings")
    return text


class OpenAIRemoteConfig(ModelConfig):
    """A model behind somebody else's OpenAI-compatible API."""

    base_url: Annotated[str, AfterValidator(_checked_base)] = Field(
        description="Where the API begins, as its own clients are told: with /v1, where it has that.",
        examples=["https://api.example.com/v1"],
    )
    upstream_model: str = Field(min_length=1, description="The model's name there.", examples=["provider-model"])
    api_key_env: Annotated[str, AfterValidator(checked_variable)] | None = Field(
        default=None,
        description="Environment variable of the daemon that holds the key. Default: no key is sent.",
        examples=["EXAMPLE_API_KEY"],
    )
    allow_remote: bool = Field(
        default=False, description="Serve every request. Default: only those that say `allow_remote` themselves."
    )
    ca_file: Annotated[Path, Field(strict=False)] | None = Field(
        default=None,
        description="Certificates (PEM) to trust instead of the system's. There is no way not to check them.",
        examples=["/etc/ssl/company-ca.pem"],
    )
    connect_s: float = Field(default=10.0, gt=0, le=600, description="Time to connect, TLS included.")
    first_byte_s: float | None = Field(
        default=None, gt=0, le=86_400, description="Time it has to begin its answer. Default: limits.first_byte_s."
    )
    stream_idle_s: float | None = Field(
        default=None, gt=0, le=86_400, description="Longest silence within an answer. Default: limits.stream_idle_s."
    )
    max_retries: int = Field(
        default=0,
        ge=0,
        le=10,
        description="Repetitions when it can't be connected to, or answers 429 or 503; never once an answer has begun.",
    )
    retry_wait_s: float = Field(
        default=5.0, ge=0, le=120, description="Longest pause before a repetition; if Retry-After asks for more, none."
    )
    health: Literal["config_only", "probe"] = Field(
        default="config_only",
        description="probe: GET base_url/models every probe_interval_s; while that fails, requests are refused at once.",
    )
    probe_interval_s: float = Field(default=30.0, ge=0.1, le=86_400, description="Interval of probes.")
    thinking_field: ThinkingField | None = Field(
        default=None,
        description="The request field that switches reasoning there. Default: it has no switch.",
    )
    thinking: Literal["default", "enabled", "disabled"] = Field(
        default="default",
        description="Switch reasoning on or off for all requests; needs thinking_field. A virtual model may say otherwise.",
    )
    endpoints: list[Annotated[str, AfterValidator(_checked_path)]] = Field(
        default_factory=lambda: list(DEFAULT_ENDPOINTS),
        description="Paths it serves. Default: text, embeddings, audio and images of OpenAI's API.",
    )

    @model_validator(mode="after")
    def _checked(self) -> Self:
        nothing_for_workers(self)
        if self.thinking != "default" and self.thinking_field is None:
            raise ValueError('"thinking" needs a "thinking_field": remotes differ in how reasoning is switched')
        return self


class OpenAIRemoteAdapter(RemoteAdapter[OpenAIRemoteConfig]):
    """The adapter of somebody else's OpenAI-compatible APIs."""

    name = "openai_remote"
    summary = "A model that another OpenAI-compatible API runs; requests must allow it."
    all_endpoints = frozenset(map(Endpoint, DEFAULT_ENDPOINTS))
    decoding: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # some refuse fields that they don't know
    config = OpenAIRemoteConfig

    def check(self, config: OpenAIRemoteConfig, *, runtimes_dir: Path) -> tuple[str, ...]:
        """The problem of a missing certificate file. The key isn't checked: only the daemon's environment counts."""
        if config.ca_file is not None and not config.ca_file.is_file():
            return (f"ca_file: {config.ca_file}: there is no such file",)
        return ()

    def connect(self, config: OpenAIRemoteConfig, environment: Mapping[str, str]) -> RemoteSpec:
        """How to reach the API. Raises ModelUnusableError if the key's variable isn't set or its value can't be a key."""
        return RemoteSpec(
            base_url=config.base_url,
            key=_read_key(config.api_key_env, environment),
            key_env=config.api_key_env,
            ca_file=config.ca_file,
            connect_s=config.connect_s,
            first_byte_s=config.first_byte_s,
            stream_idle_s=config.stream_idle_s,
            max_retries=config.max_retries,
            retry_wait_s=config.retry_wait_s,
            probe_interval_s=config.probe_interval_s if config.health == "probe" else None,
        )

    def needs_permission(self, config: OpenAIRemoteConfig) -> bool:
        """The configured value."""
        return not config.allow_remote

    def endpoints(self, config: OpenAIRemoteConfig) -> frozenset[Endpoint]:
        """The endpoints that the configuration lists."""
        return frozenset(map(Endpoint, config.endpoints))

    def prompt_cache(self, config: OpenAIRemoteConfig) -> None:
        """None: the cache belongs to the remote API."""

    def thinking(self, config: OpenAIRemoteConfig) -> Thinking | None:
        """The field that the configuration names switches thinking."""
        return SWITCHES[config.thinking_field] if config.thinking_field is not None else None

    def fields(self, config: OpenAIRemoteConfig) -> Mapping[str, JsonValue]:
        """The thinking switch, where the configuration sets it for all requests."""
        switch = self.thinking(config)
        if switch is None or config.thinking == "default":
            return {}
        return switch.enabled if config.thinking == "enabled" else switch.disabled

    def upstream_model(self, config: OpenAIRemoteConfig) -> str:
        """The configured value."""
        return config.upstream_model


def _read_key(variable: str | None, environment: Mapping[str, str]) -> str | None:
    if variable is None:
        return None
    key = environment.get(variable, "").strip()
    if not key:
        raise ModelUnusableError(f"the environment variable {variable}, which is to hold its key, is not set for llmux")
    if _KEY.fullmatch(key) is None:
        raise ModelUnusableError(f"the environment variable {variable} holds characters that no key has")
    return key
