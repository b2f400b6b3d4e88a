"""The headers that report the rest of a client's limits, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from supervisor.core.admission.limits import Counted, Standing
from supervisor.host.upstream.upstream import Headers

PREFIX: Final = b"x-ratelimit-"
_BY_LIMIT: Final = {
    counted: tuple(PREFIX + part + counted.encode() for part in (b"limit-", b"remaining-", b"reset-"))
    for counted in (Counted.REQUESTS, Counted.TOKENS)
}
NAMES: Final = tuple(name for names in _BY_LIMIT.values() for name in names)


def rate_headers(standings: Iterable[Standing], taking: int = 0) -> Headers:
    """For each limit: the limit, its rest, and the time until it is full again. `taking`: requests that are not charged yet.

    Where several accounts are charged, the headers are those of the account with the smallest rest.
    """
    tightest: dict[Counted, Standing] = {}
    for standing in standings:
        known = tightest.get(standing.counted)
        if known is None or standing.remaining < known.remaining:
            tightest[standing.counted] = standing
    headers: Headers = []
    for counted, names in _BY_LIMIT.items():
        found = tightest.get(counted)
        if found is None:
            continue
        taken = min(taking, found.remaining) if counted is Counted.REQUESTS else 0
        reset_s = found.reset_s + taken * found.period_s / found.limit
        values = (b"%d" % found.limit, b"%d" % (found.remaining - taken), duration(reset_s).encode())
        headers += zip(names, values, strict=True)
    return headers


def duration(count_s: float) -> str:
    """A time in OpenAI's form: "120ms", "8.64s", "6m0s", "1h0m5s"."""
    if count_s < 1:
        return f"{count_s * 1000:.0f}ms"
    if count_s < 60:
        return f"{count_s:.2f}".rstrip("0").rstrip(".") + "s"
    minutes, whole_s = divmod(round(count_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{whole_s}s" if hours else f"{minutes}m{whole_s}s"
