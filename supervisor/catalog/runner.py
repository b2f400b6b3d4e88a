"""How the daemon presents itself to clients that take it for a model runner."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class RunnerConfig(BaseModel):
    """The part of `server` that says so."""

    runner_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="`runnerId` in `GET /v1/capabilities`. Default: the machine's host name.",
        examples=["llm-1"],
    )
    runner_type: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="`runnerType` in `GET /v1/capabilities`. Default: `llmux-VERSION`.",
        examples=["vllm-0.6.0"],
    )
    health: Literal["llmux", "runner"] = Field(
        default="llmux",
        description="What `/health` answers. llmux: 200 while the daemon serves; runner: also 503 when a device is out of memory, "
        "all models have failed, or the queue is full.",
        examples=["runner"],
    )
