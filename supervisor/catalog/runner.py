"""How the daemon presents itself to clients that take it for a model runner."""

from __future__ import annotations

from pathlib import Path
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
        description="What `/health` answers. llmux: 200 while the daemon serves; runner: as a model runner does, also 503 when a "
        "device is out of memory, all models have failed, or the queue is full. Every answer of inference then says what came "
        "from the cache of prompts, too.",
        examples=["runner"],
    )
    multi_tenant: bool = Field(
        default=True,
        description="Requests may name the tenant for whom they come (`X-Tenant-ID`, `x_client_id`). false: those without a key "
        "are one client, those with a key the key's.",
        examples=[False],
    )
    metrics: bool = Field(default=True, description="Serve `/metrics`.", examples=[False])
    model_base_path: Path | None = Field(
        default=None,
        description="The files of all models must lie below this folder, links followed. What lies there and is no model of this "
        "file is one, too, under its path: GGUF files, and folders of safetensors. Where it is set, it is also the default of "
        "`models_dir`.",
        examples=["/models"],
    )
    allow_pull: bool = Field(
        default=False,
        description="A client with the scope `admin` that loads a model whose files are missing has them fetched from its "
        "`source` first.",
        examples=[True],
    )

    @property
    def tells_of_caches(self) -> bool:
        """Has every answer of inference headers about the cache of prompts? A model runner's clients look for them."""
        return self.health == "runner"
