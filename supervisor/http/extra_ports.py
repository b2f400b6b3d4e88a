"""What is answered at the ports besides the main one: a part of what that one answers, under the same rules for keys."""

from __future__ import annotations

from typing import Final

from supervisor.catalog.listeners import METRICS, OLLAMA
from supervisor.dialects.ollama import AT_OWN_PORT, Ollama
from supervisor.errors import NotFoundError
from supervisor.gateway.dialect import Dialect
from supervisor.gateway.disconnect import Scope
from supervisor.http.auth import scope_for

_HEALTH: Final = frozenset({"/health", "/v1/health", "/livez"})


def restrict(key: str, scope: Scope, dialect: Dialect) -> None:
    """Raises NotFoundError for what the port that `key` names does not answer."""
    path = scope["path"]
    if key == OLLAMA:
        scope["state"][AT_OWN_PORT] = True
        if isinstance(dialect, Ollama) or path == "/" or path in _HEALTH or scope_for(path, dialect) == "inference":
            return
        answers = "Ollama's API and inference"
    else:
        assert key == METRICS
        if path == "/metrics" or path in _HEALTH:
            return
        answers = "/metrics, /health and /livez"
    raise NotFoundError(f"This port (server.{key}) answers {answers} alone: ask for {path[:200]} at the main port.")
