"""What a request asks for besides its model: how urgent it is, and for whom it comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

HIGH, NORMAL, LOW = 20, 50, 80

PRIORITIES: Final[Mapping[str, int]] = {"high": HIGH, "normal": NORMAL, "low": LOW}
"""The numbers behind the words that clients say. A lower number is more urgent."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the admission policy knows of a request."""

    priority: int = NORMAL  # lower is more urgent
    tenant: str = ""  # who asks; empty: nobody in particular
    keep_alive_s: float | None = None  # its model stays at least this long after it; None: it doesn't say


ANY: Final = Demand()
"""Of a request that says nothing."""
