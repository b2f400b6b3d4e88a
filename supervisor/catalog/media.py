"""What llmux may load for a prompt that refers to media instead of bringing them, as the configuration says it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Host = Annotated[
    str,
    Field(
        max_length=300,
        pattern=r"^(\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:]+\])(:[1-9][0-9]{0,4})?$",
    ),
]


class MediaConfig(BaseModel):
    """`server.media`. Whatever it allows, it allows every key that may ask a model."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    hosts: tuple[Host, ...] = Field(
        default=(),
        description="Whose https addresses may stand in prompts; `*.NAME` is every name below it, `*` every one. On port 443, or "
        "the one given. Names lead to public addresses only; an IP address that is listed itself may be a private one.",
        examples=[["images.example.com", "*.example.org"]],
    )
    folder: Path | None = Field(
        default=None,
        description="Files below it may stand in prompts, as file:///PATH. Default: none.",
        examples=["/srv/pictures"],
    )
    size_mib: int = Field(default=20, ge=1, le=1024, description="What one request's media may have together, in MiB.")
    timeout_s: float = Field(default=10.0, gt=0, le=600, description="Time to load all media of one request.")
    per_request: int = Field(default=16, ge=1, le=256, description="References in one request.")
    at_once: int = Field(
        default=16,
        ge=1,
        le=256,
        description="What is loaded at once, for all requests; for each of them a quarter of it, or one.",
    )
    ca_file: Path | None = Field(
        default=None,
        description="Certificates of the authorities to trust. Default: the system's.",
        examples=["/etc/ssl/company.pem"],
    )
