"""OpenAI's API: what every client speaks unless its path says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.dialects.openai import models, speech
from supervisor.proxy.translation import Translation


class OpenAI:
    """Errors as `{"error": {"message", "type", "param", "code"}}`, keys as `Authorization: Bearer` or `x-api-key`."""

    name: str = "openai"
    credential_headers: frozenset[bytes] = frozenset({b"authorization", b"x-api-key"})
    has_openai_errors: bool = True
    keepalive: bytes = b": keepalive\n\n"

    def owns(self, path: str) -> bool:
        """Every path that no other dialect owns."""
        return True

    def scope_for(self, path: str) -> str | None:
        """Inference, except the lists that Open WebUI requests without a key."""
        return None if path in speech.PATHS else "inference"

    def translation(self, method: str, path: str) -> Translation | None:
        """None: workers speak it."""
        return None

    def error(self, fields: Mapping[str, object], status: int) -> bytes:
        """See Dialect."""
        return msgspec.json.encode({"error": fields})

    def error_event(self, body: bytes) -> bytes:
        """See Dialect."""
        return b"data: " + body + b"\n\n"

    def routes(self, daemon: Daemon) -> list[Route]:
        """What the daemon answers itself."""
        return [*models.routes(daemon), *speech.routes(daemon)]


OPENAI: Final = OpenAI()
