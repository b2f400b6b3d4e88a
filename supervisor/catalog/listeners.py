"""Ports besides the main one, for programs that look for a server at a port of its own."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, Field

Port = Annotated[int, Field(ge=1, le=65535)]


def _one_address(value: object) -> object:
    """Raises ValueError for what is not one address of the network."""
    if isinstance(value, list) or (isinstance(value, str) and ("," in value or len(value.split()) > 1)):
        raise ValueError(
            "llmux listens on one address; 0.0.0.0 is all of IPv4, and :: all there are, and both need keys"
        )
    if not isinstance(value, str):
        return value
    if "/" in value or value.startswith(("unix:", "@")):
        raise ValueError(
            "llmux listens on an address and a port; a proxy such as nginx or socat can offer it as a Unix socket"
        )
    return value.removeprefix("[").removesuffix("]")


Address = Annotated[str, BeforeValidator(_one_address), Field(min_length=1)]

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
