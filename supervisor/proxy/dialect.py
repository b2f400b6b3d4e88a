"""What the data path and the daemon know about an API dialect.

A dialect is one object with everything that is special about an API: its paths, the key scope that each needs, the headers
that may carry the key, the format of errors, and the bytes that keep a silent stream alive. `supervisor.dialects` has all
dialects; the server picks one by the request's path and passes it down.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping

import msgspec

from supervisor.proxy.translation import Translation


class Dialect(abc.ABC):
    """One API that clients speak. What it doesn't say otherwise is as in OpenAI's, which workers speak."""

    name: str  # what a runtime's endpoints call it
    credential_headers: frozenset[bytes] = frozenset({b"authorization", b"x-api-key"})  # in lower case
    keepalive: bytes = b": keepalive\n\n"  # what a stream sends while nothing comes: clients skip it
    has_openai_errors: bool = True  # so that a worker's complete ones pass as they are

    @abc.abstractmethod
    def owns(self, path: str) -> bool:
        """Do clients of this path speak it?"""

    def scope_for(self, path: str) -> str | None:
        """The key scope that one of its paths needs; None where the path is open to all."""
        return "inference"

    def is_for_daemon(self, method: str, path: str, query: bytes) -> bool:
        """Does the daemon answer this request itself, though workers serve its path as well?"""
        return False

    def translation(self, method: str, path: str) -> Translation | None:
        """How this path is mapped to the canonical API; None where workers speak it themselves."""
        return None

    def error(self, fields: Mapping[str, object], status: int) -> bytes:
        """The body of an error answer as JSON without a line break. `fields`: message, type, param, code and more."""
        return msgspec.json.encode({"error": fields})

    def error_event(self, body: bytes) -> bytes:
        """An error's body as an event of a stream that has begun."""
        return b"data: " + body + b"\n\n"
