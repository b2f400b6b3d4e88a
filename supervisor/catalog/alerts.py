"""The key `server.alerts`: who hears of alerts besides the log."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Word = Annotated[str, Field(min_length=1, max_length=4096)]


class AlertsConfig(BaseModel):
    """Where alerts go. Each is sent once a minute at most, however often it is raised."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    webhook: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s]+$",
        description="Address that gets each alert by POST, as JSON: `at`, `code`, `message`, `device`, `model`, `host`.",
        examples=["https://ntfy.example.org/llmux"],
    )
    command: list[Word] = Field(
        default_factory=list,
        max_length=100,
        description="Program and arguments that are run for each alert, without a shell: `LLMUX_ALERT` has the same JSON, "
        "`LLMUX_ALERT_CODE`, `…_MESSAGE`, `…_DEVICE` and `…_MODEL` its parts. It has ten seconds.",
        examples=[["/usr/local/bin/notify-me"]],
    )
