"""The trace of a request, from the header `traceparent` of W3C's Trace Context."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Final

_VALUE: Final = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A trace, and the client's span in it. Ids are hexadecimal."""

    trace_id: str
    parent_id: str | None  # the client's span; None: the trace begins here
    is_sampled: bool

    def header(self, span_id: str) -> bytes:
        """The header's value for a request that the span `span_id` sends."""
        return f"00-{self.trace_id}-{span_id}-{self.is_sampled:02x}".encode()


def trace_of(value: bytes) -> TraceContext | None:
    """The trace in a header's value; None for an invalid value, which counts as missing."""
    found = _VALUE.fullmatch(value.strip())
    if found is None:
        return None
    trace_id, parent_id, flags = (group.decode() for group in found.groups())
    return TraceContext(trace_id, parent_id, bool(int(flags, 16) & 1))


def new_trace() -> TraceContext:
    """A new trace, which begins at llmux."""
    return TraceContext(secrets.token_hex(16), None, is_sampled=True)
