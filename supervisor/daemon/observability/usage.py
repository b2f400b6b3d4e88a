"""Each key's usage by day: requests, tokens, GPU seconds. A request counts once it has ended, on the day of its end.

A GPU second is one second of one GPU during which a worker had the request, from its admission to the end of the answer.
Requests that a worker computes together each count as if alone.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable
from datetime import date, datetime
from functools import lru_cache
from typing import Final, NamedTuple

from runtimes.device_kind import HOST
from supervisor.core.types import REMOTE
from supervisor.gateway.record import RequestRecord
from supervisor.schema.daemon import UsageRow

NO_KEY: Final = "(no key)"
_NO_GPU: Final = frozenset({HOST.device_id(), *REMOTE})
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""The characters that begin a formula in a spreadsheet."""


class Used(NamedTuple):
    """The usage of one request, or the sum for a day, key and model."""

    day: str
    key_id: str
    key: str
    model: str
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    gpu_s: float


def today() -> date:
    """Today in this machine's time zone, as all days of usage."""
    return datetime.now().astimezone().date()


@lru_cache(maxsize=8)
def _day(minute: int) -> str:
    """The day of a minute since the epoch."""
    return time.strftime("%Y-%m-%d", time.localtime(minute * 60))


def used(ended: RequestRecord, epoch: float) -> Used:
    """The usage of a finished request. `epoch`: the zero of the engine's clock, in Unix seconds."""
    gpus = sum(device not in _NO_GPU for device in ended.devices)
    busy_s = 0.0 if ended.admitted_at is None else max(0.0, ended.ended_at - ended.admitted_at)
    return Used(
        _day(int(ended.ended_at + epoch) // 60),
        ended.key_id,
        ended.key or NO_KEY,
        ended.model_id or "",
        1,
        int(ended.has_failed),
        ended.prompt_tokens or 0,
        ended.cached_tokens or 0,
        ended.completion_tokens or 0,
        gpus * busy_s,
    )


def summed(all_used: Iterable[Used], *, by_model: bool = True) -> list[Used]:
    """One sum for each day, key and model; `by_model=False`: for each day and key."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    gpu_s: dict[tuple[str, str, str], float] = {}
    names: dict[tuple[str, str, str], str] = {}
    for one in all_used:
        at = one.day, one.key_id, one.model if by_model else ""
        names[at] = one.key
        amounts = sums.setdefault(at, [0, 0, 0, 0, 0])
        amounts[0] += one.requests
        amounts[1] += one.failed
        amounts[2] += one.prompt_tokens
        amounts[3] += one.cached_tokens
        amounts[4] += one.completion_tokens
        gpu_s[at] = gpu_s.get(at, 0.0) + one.gpu_s
    return [Used._make((at[0], at[1], names[at], at[2], *sums[at], gpu_s[at])) for at in sorted(sums)]


def rows(all_used: Iterable[Used], *, by_model: bool) -> list[UsageRow]:
    """The rows for the API."""
    return [
        UsageRow(
            one.day,
            one.key,
            one.key_id,
            *one[4:9],
            round(one.gpu_s, 3),
            (one.model or None) if by_model else None,
        )
        for one in summed(all_used, by_model=by_model)
    ]


def as_csv(found: Iterable[UsageRow], *, by_model: bool) -> str:
    """The rows as CSV (RFC 4180). An apostrophe precedes names that a spreadsheet would treat as a formula."""
    names = [field for field in UsageRow.__struct_fields__ if by_model or field != "model"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(names)
    for row in found:
        writer.writerow([_cell(getattr(row, name)) for name in names])
    return text.getvalue()


def _cell(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
