"""The demand of a request, besides its model: how urgent it is, whose it is, and how long it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from supervisor.core.admission.limits import Account

HIGH, NORMAL, LOW = 20, 50, 80

PRIORITIES: Final[Mapping[str, int]] = {"high": HIGH, "normal": NORMAL, "low": LOW}
"""The numbers behind the words that clients say. A lower number is more urgent."""

MOST_URGENT, LEAST_URGENT = 0, 100


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """How long requests of this kind lately took, from a worker's taking one to the end of its answer. In seconds."""

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
    """Everything that the admission policy knows of a request."""

    priority: int = NORMAL  # lower is more urgent
    tenant: str = ""  # who asks; empty: nobody in particular
    accounts: tuple[Account, ...] = ()  # who is charged for it; nobody: it has no limits
    keep_alive_s: float | None = None  # its model stays at least this long after it; None: it doesn't say
    budget_s: float | None = None  # from now until its answer has ended; None: as long as it takes
    answers: AnswerTimes | None = None  # set iff any was measured; only looked at where there is a budget
    prefix: int | None = (
        None  # fingerprint of how its conversation begins; None: its model has one replica, or nobody knows
    )
    tokens: int = 0  # of a context that its worker's requests share; 0: none, or nobody knows
    weight: float = 1.0  # of its tenant among others of its class: twice as much gets twice the worker-seconds


DEFAULT_DEMAND: Final = Demand()
"""The demand of a request without any of its own."""


def priority_of(value: object) -> int:
    """The priority as a number, from a word, a number, or a number written as text. Raises ValueError."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in PRIORITIES:
            return PRIORITIES[word]
        value = int(word) if word.isascii() and word.isdecimal() and len(word) <= len(str(LEAST_URGENT)) else None
    if type(value) is int and MOST_URGENT <= value <= LEAST_URGENT:  # true and false are none
        return value
    words = ", ".join(f"{word} ({number})" for word, number in PRIORITIES.items())
    raise ValueError(f"expected {words}, or a whole number from {MOST_URGENT} (goes first) to {LEAST_URGENT}")
