"""Anthropic's API: `/v1/messages` and what is below it. Workers speak it themselves; errors are what differs here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.dialects.openai import OpenAI
from supervisor.proxy.dialect import after

_PATH: Final = "/v1/messages"
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class Anthropic(OpenAI):
    """Errors as `{"type": "error", "error": {"type", "message", …}}` with Anthropic's types, our other fields inside."""

    name = "anthropic"
    has_openai_errors = False

    def owns(self, path: str) -> bool:
        """`/v1/messages` and below."""
        return path.startswith(_PATH) and path[len(_PATH) :][:1] in {"", "/"}

    def scope_for(self, path: str) -> str | None:
        """Inference."""
        return "inference"

    def error(self, fields: Mapping[str, object], status: int) -> bytes:
        """See Dialect."""
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {**fields, "type": kind}})

    def error_event(self, body: bytes, sent: bytes) -> bytes:
        """See Dialect."""
        return after(sent, b"event: error\ndata: " + body + b"\n\n")

    def routes(self, daemon: Daemon) -> list[Route]:
        """None: workers serve all of it."""
        return []


ANTHROPIC: Final = Anthropic()
