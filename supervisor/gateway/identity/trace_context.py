"""The trace that a request belongs to, as W3C's Trace Context says it in the header `traceparent`."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Final

_VALUE: Final = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Ids are hexadecimal."""

    trace_id: str
    parent_id: str | None  # the client's span; None: the trace begins here
    is_sampled: bool

    def header(self, span_id: str) -> bytes:
        """For whoever this span asks."""
        return f"00-{self.trace_id}-{span_id}-{self.is_sampled:02x}".encode()


def trace_of(value: bytes) -> TraceContext | None:
    """None for what isn't valid, which counts as nothing."""
    found = _VALUE.fullmatch(value.strip())
    if found is None:
        return None
    trace_id, parent_id, flags = (group.decode() for group in found.groups())
    return TraceContext(trace_id, parent_id, bool(int(flags, 16) & 1))


def begun() -> TraceContext:
    """A trace of its own."""
    return TraceContext(secrets.token_hex(16), None, is_sampled=True)
