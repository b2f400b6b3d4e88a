"""Limits of tenants: requests and tokens over time, and requests at once.

Each rate is a bucket: it holds `count` and fills evenly, all of it in `period_s`. A request takes one from the first when
it is admitted; its tokens are taken from the second when it ends, because nobody knows them before, and may leave that one
in debt. So within any time T no more than `count + T * count / period_s` requests are admitted, and a tenant that asks no
faster than that is never refused.

A request that is refused, for whatever reason, takes nothing, and gets back what it took if it is refused later. A bucket
that is full again is forgotten, and so are the fullest ones when clients make up names: memory is bounded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from supervisor.core.types import TicketId

MOST_KEPT: Final = 1024
"""So many accounts are remembered, and those with open requests. Beyond, the ones that have taken most are kept."""

PLACE_S: Final = 1.0
"""When to try again where too many requests are open: nobody knows when one ends."""

REFUSAL_LOG_INTERVAL_S: Final = 60.0
"""How often a refusal is a decision for `llmux why`, for each account."""

_ROUNDING: Final = 1e-6  # of one unit: sums of fractions
_PERIODS: Final = {1.0: "second", 60.0: "minute", 3600.0: "hour"}
_UNITS: Final = {1.0: "s", 60.0: "min", 3600.0: "h"}


@dataclass(frozen=True, slots=True)
class Rate:
    """So many in so many seconds; all of them may come at once."""

    count: int
    period_s: float = 60.0

    @property
    def per_s(self) -> float:
        return self.count / self.period_s

    def __str__(self) -> str:
        return f"{self.count}/{_UNITS.get(self.period_s, f'{self.period_s:g}s')}"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of one tenant, client or key; None: no limit."""

    requests: Rate | None = None
    tokens: Rate | None = None
    concurrency: int | None = None  # requests that are queued or running

    def __bool__(self) -> bool:
        return self.requests is not None or self.tokens is not None or self.concurrency is not None


NO_LIMITS: Final = TenantLimits()


@dataclass(frozen=True, slots=True)
class Account:
    """An account that is charged for a request, and its limits. Equal names are one account, whatever the limits."""

    name: str  # for people as well: "tenant alice"
    limits: TenantLimits


class Counted(StrEnum):
    """The quantity that a limit counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class Standing:
    """One limit of an account, and how much of it is left."""

    account: str
    counted: Counted
    limit: int
    period_s: float  # 0: the limit is no rate
    remaining: int
    next_s: float  # until one more is admitted, if nothing is asked until then; 0: at once
    reset_s: float  # until all of it is there again, as well; 0 of a limit that is no rate, since nobody knows

    @property
    def is_reached(self) -> bool:
        return self.remaining < 1

    def description(self) -> str:
        """Which limit it is: "100 requests per minute"."""
        what = "tokens" if self.counted is Counted.TOKENS else "requests"
        counted = f"{self.limit} {what[:-1] if self.limit == 1 else what}"
        if self.counted is Counted.CONCURRENCY:
            return f"{counted} at once"
        return f"{counted} per {_PERIODS.get(self.period_s, f'{self.period_s:g} s')}"


@dataclass(slots=True)
class _Usage:
    """The use of an account. `requests` and `tokens` are as of `at`, and shrink as their buckets fill."""

    limits: TenantLimits  # as they were at its last request
    at: float
    requests: float = 0.0
    tokens: float = 0.0
    open: int = 0  # requests that are queued or running
    logged_at: float = -math.inf

    def settle(self, now: float) -> None:
        """Let its buckets fill until `now`."""
        passed_s, self.at = max(0.0, now - self.at), now
        self.requests = _use_after(self.requests, self.limits.requests, passed_s)
        self.tokens = _use_after(self.tokens, self.limits.tokens, passed_s)

    @property
    def full_at(self) -> float:
        """When both buckets are full again."""
        taken = ((self.requests, self.limits.requests), (self.tokens, self.limits.tokens))
        return self.at + max((used / rate.per_s for used, rate in taken if rate is not None), default=0.0)


def _use_after(used: float, rate: Rate | None, passed_s: float) -> float:
    return 0.0 if rate is None else max(0.0, used - passed_s * rate.per_s)


class Accounts:
    """The use of every limited account. Requests without limits are not counted here."""

    def __init__(self) -> None:
        self._usages: dict[str, _Usage] = {}
        self._open: dict[TicketId, tuple[str, ...]] = {}  # the admitted tickets, until they end: who pays
        self._room = MOST_KEPT

    def __len__(self) -> int:
        return len(self._usages)

    def reached(self, accounts: Sequence[Account], now: float) -> Standing | None:
        """The limit that one more request would exceed, of several the one that lasts longest; None: it may come."""
        reached = [standing for standing in self.standings(accounts, now) if standing.is_reached]
        return max(reached, key=lambda standing: standing.next_s, default=None)

    def standings(self, accounts: Sequence[Account], now: float) -> list[Standing]:
        """Every limit of these accounts. Changes nothing."""
        return [standing for account in accounts for standing in self._account_standings(account, now)]

    def taken(self, now: float) -> list[Standing]:
        """Every limit of which a part is used, by account."""
        known = (Account(name, usage.limits) for name, usage in sorted(self._usages.items()))
        return [standing for standing in self.standings([*known], now) if standing.remaining < standing.limit]

    def _account_standings(self, account: Account, now: float) -> Iterator[Standing]:
        name, limits = account.name, account.limits
        usage = self._usages.get(name) or _Usage(limits, now)
        passed_s = max(0.0, now - usage.at)
        if limits.requests is not None:
            used = _use_after(usage.requests, limits.requests, passed_s)
            yield _rate_standing(name, Counted.REQUESTS, limits.requests, used)
        if limits.tokens is not None:
            used = _use_after(usage.tokens, limits.tokens, passed_s)
            yield _rate_standing(name, Counted.TOKENS, limits.tokens, used)
        if limits.concurrency is not None:
            remaining = max(0, limits.concurrency - usage.open)
            next_s = 0.0 if remaining else PLACE_S
            yield Standing(name, Counted.CONCURRENCY, limits.concurrency, 0.0, remaining, next_s, 0.0)

    def admit(self, ticket: TicketId, accounts: Sequence[Account], now: float) -> None:
        """Charge the accounts of a ticket that is queued or dispatched. It must be `finished` or `refused` later."""
        assert ticket not in self._open, f"{ticket} is charged already"
        for account in accounts:
            usage = self._usages.get(account.name)
            if usage is None:
                self._forget_idle_accounts(now)
                usage = self._usages[account.name] = _Usage(account.limits, now)
            usage.settle(now)
            usage.limits = account.limits
            usage.requests += 1
            usage.open += 1
        self._open[ticket] = tuple(account.name for account in accounts)

    def finished(self, ticket: TicketId, tokens: int, now: float) -> None:
        """End a ticket that took so many tokens."""
        for usage in self._close_ticket(ticket, now):
            usage.tokens += tokens

    def refused(self, ticket: TicketId, now: float) -> None:
        """End a ticket that got no answer from a worker, and give back its charge. Harmless for one that was never admitted."""
        for usage in self._close_ticket(ticket, now):
            usage.requests = max(0.0, usage.requests - 1)

    def may_log(self, name: str, now: float) -> bool:
        """Is a refusal of this account worth a decision? Not each, or a client in a loop would crowd out all others."""
        usage = self._usages.get(name)
        if usage is None or now < usage.logged_at + REFUSAL_LOG_INTERVAL_S:
            return False
        usage.logged_at = now
        return True

    def _close_ticket(self, ticket: TicketId, now: float) -> list[_Usage]:
        usages = [self._usages[name] for name in self._open.pop(ticket, ())]
        for usage in usages:
            usage.settle(now)
            usage.open -= 1
        return usages

    def _forget_idle_accounts(self, now: float) -> None:
        """Make room for one more. Rare: at least half of what is kept goes, unless it has open requests."""
        if len(self._usages) < self._room:
            return
        idle = sorted((usage.full_at, name) for name, usage in self._usages.items() if not usage.open)
        surplus = len(idle) - MOST_KEPT // 2
        for index, (full_at, name) in enumerate(idle):
            if index < surplus or full_at <= now:
                del self._usages[name]
        self._room = max(MOST_KEPT, 2 * len(self._usages))

    def check(self) -> None:
        """Assert the laws: requests are counted where they were charged, and nothing is negative."""
        charged = Counter(name for names in self._open.values() for name in names)
        assert charged.keys() <= self._usages.keys()
        for name, usage in self._usages.items():
            assert usage.requests >= 0, f"{name} has more requests than its limit"
            assert usage.tokens >= 0, f"{name} has more tokens than its limit"
            assert usage.open == charged[name], f"{name} is miscounted"


def _rate_standing(name: str, counted: Counted, rate: Rate, used: float) -> Standing:
    left = rate.count - used
    remaining = max(0, math.floor(left + _ROUNDING))
    next_s = 0.0 if remaining else (1 - left) / rate.per_s
    return Standing(name, counted, rate.count, rate.period_s, remaining, next_s, used / rate.per_s)
