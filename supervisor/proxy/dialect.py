"""What the data path and the daemon know about an API dialect.

A dialect is one object with everything that is special about an API: its paths, the key scope that each needs, the headers
that may carry the key, the format of errors, and the bytes that keep a silent stream alive. `supervisor.dialects` has all
dialects; the server picks one by the request's path and passes it down.
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
        """Bytes that a silent stream sends: clients skip them."""

    @property
    def has_openai_errors(self) -> bool:
        """Are its errors OpenAI's, so that a worker's complete errors pass unchanged?"""

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
