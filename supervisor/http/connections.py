"""How many connections each client's address has."""

from __future__ import annotations

from collections import Counter

from supervisor.errors import RateLimitError

_open: Counter[str] = Counter()


class TooManyConnectionsError(RateLimitError):
    """The client's address has as many connections as it may."""

    code = "too_many_connections"


def opened(address: str, most: int) -> TooManyConnectionsError | None:
    """Count one more, until `closed`. What its client is told if that is above `most`; 0 allows any number."""
    _open[address] += 1
    if not 0 < most < _open[address]:
        return None
    told = f"Your address has {_open[address] - 1} connections (limits.connections_per_client)."
    return TooManyConnectionsError(told, retry_after_s=5.0)


def closed(address: str) -> None:
    """It has ended."""
    _open[address] -= 1
    if not _open[address]:
        del _open[address]
