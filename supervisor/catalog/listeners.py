"""Further ports of the daemon, and what is served there, as the configuration says it."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ListenersConfig(BaseModel):
    """The part of `server` that says so."""

    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="A port for `/metrics`, besides `port`. Default: none.",
        examples=[9090],
    )
    ollama_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="A port for Ollama's clients, besides `port`. Default: none.",
        examples=[11434],
    )
