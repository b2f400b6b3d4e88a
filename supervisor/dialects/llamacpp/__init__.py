"""The model management of llama.cpp's server, at the root, for its clients: Open WebUI's load and eject buttons.

A model is unloaded, loading, loaded or failed (llmux has no `sleeping`). The response to a load or unload comes at once;
the list and the event stream show the result, as with llama.cpp. Clients use public names: virtual models of one model share
its state.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qs

from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.dialects.llamacpp.operations import GROUP
from supervisor.dialects.openai import OpenAI

_SCOPES: Final = {endpoint.path: endpoint.scope for endpoint in GROUP.endpoints if endpoint.run is not None}


class LlamaCpp(OpenAI):
    """llama.cpp's paths at the root. Errors and API keys work as with OpenAI's API, as with llama.cpp itself."""

    name = "llamacpp"

    def owns(self, path: str) -> bool:
        """The paths that the daemon answers."""
        return path in _SCOPES

    def scope_for(self, path: str) -> str | None:
        """Loads and unloads need the admin scope."""
        return _SCOPES[path]

    def is_for_daemon(self, method: str, path: str, query: bytes) -> bool:
        """The router answers `/props` without a model."""
        return path == "/props" and not parse_qs(query.decode("latin-1")).get("model")

    def routes(self, daemon: Daemon) -> list[Route]:
        """The routes that the daemon answers itself."""
        return GROUP.routes(daemon)


LLAMACPP: Final = LlamaCpp()
