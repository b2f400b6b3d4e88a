"""What the data path and the daemon know of an API dialect.

A dialect is one object that says everything that is special about an API: which paths are its own, which key scope each
needs, which headers may carry the key, how an error looks, and what keeps a silent stream alive. `supervisor.dialects`
has them all; the server picks one by the request's path and passes it down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from supervisor.proxy.translation import Translation


class Dialect(Protocol):
    """One API that clients speak."""

    @property
    def name(self) -> str:
        """What a runtime's endpoints call it."""

    @property
    def credential_headers(self) -> frozenset[bytes]:
        """The request headers that may carry the client's key, in lower case."""

    @property
    def keepalive(self) -> bytes:
        """What a stream sends while nothing comes: clients skip it."""

    @property
    def has_openai_errors(self) -> bool:
        """Are its errors OpenAI's, so that a worker's complete ones pass as they are?"""

    def owns(self, path: str) -> bool:
        """Do clients of this path speak it?"""

    def scope_for(self, path: str) -> str | None:
        """The key scope that one of its paths needs; None where the path is open to all."""

    def translation(self, method: str, path: str) -> Translation | None:
        """How this path is mapped to the canonical API; None where workers speak it themselves."""

    def error(self, fields: Mapping[str, object], status: int) -> bytes:
        """The body of an error answer as JSON without a line break. `fields`: message, type, param, code and more."""

    def error_event(self, body: bytes) -> bytes:
        """An error's body as an event of a stream that has begun."""
