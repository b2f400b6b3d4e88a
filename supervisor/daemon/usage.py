"""What each key used on each day: requests, tokens, seconds of GPUs. Counted once a request has ended, on the day of that.

A GPU second is one second of one GPU during which a worker had the request, from its admission to the end of the answer. Requests that a
worker computes together count each as if alone.
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
"""What a spreadsheet takes for the beginning of a formula."""


class Used(NamedTuple):
    """What one request used, and what is summed for its day, key and model."""

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
    """By this machine's time zone, as all days of usage are."""
    return datetime.now().astimezone().date()


@lru_cache(maxsize=8)
def _day(minute: int) -> str:
    """Of a minute since the epoch: each begins on one day."""
    return time.strftime("%Y-%m-%d", time.localtime(minute * 60))


def used(ended: RequestRecord, epoch: float) -> Used:
    """By a request that has ended. `epoch`: when the engine's clock was zero, in Unix seconds."""
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
    """One for each day, key and model; `by_model=False`: of all models together."""
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
    """For the API."""
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
    """By RFC 4180. A name that a spreadsheet would take for a formula gets an apostrophe before it."""
    names = [field for field in UsageRow.__struct_fields__ if by_model or field != "model"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(names)
    for row in found:
        writer.writerow([_cell(getattr(row, name)) for name in names])
    return text.getvalue()


def _cell(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
