"""The demand of a request, besides its model: its priority, its tenant, and its time budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from supervisor.core.admission.limits import Account

HIGH, NORMAL, LOW = 20, 50, 80

PRIORITIES: Final[Mapping[str, int]] = {"high": HIGH, "normal": NORMAL, "low": LOW}
"""The numbers of the priority words that clients send. A lower number is more urgent."""

MOST_URGENT, LEAST_URGENT = 0, 100


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """How long recent requests of this kind took, from dispatch to the end of the answer. In seconds."""

    mean_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Expected:
    """How long a request is expected to take, part by part, in seconds. An unknown part is 0."""

    load_s: float = 0.0
    queue_s: float = 0.0
    answer_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return self.load_s + self.queue_s + self.answer_s


@dataclass(frozen=True, slots=True)
class Demand:
    """All properties of a request that the admission policy uses."""

    priority: int = NORMAL  # lower is more urgent
    tenant: str = ""  # empty: the request names no tenant
    accounts: tuple[Account, ...] = ()  # charged for the request; empty: no limits apply
    keep_alive_s: float | None = None  # the model stays loaded at least this long afterwards; None: not given
    budget_s: float | None = None  # from arrival to the end of the answer; None: no limit
    answers: AnswerTimes | None = None  # set iff any was measured; only used for a request with a budget
    prefix: int | None = (
        None  # fingerprint of the start of the conversation; None: unknown, or the model has one replica
    )
    tokens: int = 0  # its part of a context that all requests of a worker share; 0: none, or unknown
    weight: float = 1.0  # of its tenant within the class: twice the weight gets twice the worker-seconds


DEFAULT_DEMAND: Final = Demand()
"""The demand of a request that sets no field."""


def priority_of(value: object) -> int:
    """The priority as a number, from a word, a number, or a number written as text. Raises ValueError."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in PRIORITIES:
            return PRIORITIES[word]
        value = int(word) if word.isascii() and word.isdecimal() and len(word) <= len(str(LEAST_URGENT)) else None
    if type(value) is int and MOST_URGENT <= value <= LEAST_URGENT:  # excludes true and false
        return value
    words = ", ".join(f"{word} ({number})" for word, number in PRIORITIES.items())
    raise ValueError(f"expected {words}, or a whole number from {MOST_URGENT} (goes first) to {LEAST_URGENT}")
