"""Ports besides the main one, for programs that look for a server at a port of its own."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, Field

Port = Annotated[int, Field(ge=1, le=65535)]

OLLAMA: Final = "ollama_port"
METRICS: Final = "metrics_port"


class ListenersConfig(BaseModel):
    """The part of `server` that names them. They are bound on `host`, and keys count there as on the main port."""

    ollama_port: Port | None = Field(
        default=None,
        description="Port that answers Ollama's API and all of inference as well, without the admin API and the dashboard.",
        examples=[11434],
    )
    metrics_port: Port | None = Field(
        default=None,
        description="Port that answers `/metrics`, `/health` and `/livez` as well, and nothing else.",
        examples=[9090],
    )

    @property
    def extra_ports(self) -> dict[str, int]:
        """Those that are set, by the key that sets them."""
        found = {OLLAMA: self.ollama_port, METRICS: self.metrics_port}
        return {key: port for key, port in found.items() if port is not None}
