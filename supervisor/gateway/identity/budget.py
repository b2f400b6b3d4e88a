"""How long a request may take, by its own words: `x_timeout_s` in its body, or `X-Timeout`, both in seconds.

Field and header are llmux's own and are never forwarded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.body import BUDGET
from supervisor.gateway.head import TIMEOUT as HEADER

MOST_S: Final = 86_400.0


def budget_s(headers: Iterable[tuple[bytes, bytes]], said: object) -> float | None:
    """The least that it says, in seconds; None where it says nothing. `said`: what the body does.

    Raises InvalidRequestError for what is no such time.
    """
    times = []
    for name, value in headers:  # each request comes here: a comprehension is a call
        if name == HEADER:
            times.append(_seconds(value.decode("latin-1"), "X-Timeout"))
    if said is not None:
        times.append(_seconds(said, BUDGET))
    return min(times) if times else None


def _seconds(said: object, where: str) -> float:
    try:
        value = float(said) if isinstance(said, str | float) or type(said) is int else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    if not 0 < value <= MOST_S:
        raise InvalidRequestError(
            f"{where} must be a number of seconds, above 0 and at most {MOST_S:.0f}.", param=BUDGET
        )
    return value
