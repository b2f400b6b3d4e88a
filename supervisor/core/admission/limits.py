"""Limits of tenants: requests and tokens over time, and requests at once.

Each rate is a token bucket: it holds `count` and refills evenly within `period_s`. An admitted request takes one from the
request bucket; at its end its tokens are taken from the token bucket, since their number is unknown before, and may leave
this bucket in debt. So within any time T at most `count + T * count / period_s` requests are admitted, and a tenant that
sends no faster is never rejected.

A rejected request takes nothing; if it is rejected after admission, its charge is returned. Full buckets are forgotten, and
when clients invent names, the fullest buckets too: memory is bounded.
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
"""Number of remembered accounts besides those with open requests. Accounts with the most use are kept."""

PLACE_S: Final = 1.0
"""Retry time when too many requests are open: the end of a request is unknown."""

REFUSAL_LOG_INTERVAL_S: Final = 60.0
"""Minimum time between recorded refusals (for `llmux why`) of an account."""

_ROUNDING: Final = 1e-6  # of one unit: sums of fractions
_PERIODS: Final = {1.0: "second", 60.0: "minute", 3600.0: "hour"}
_UNITS: Final = {1.0: "s", 60.0: "min", 3600.0: "h"}


@dataclass(frozen=True, slots=True)
class Rate:
    """`count` per `period_s` seconds; all may come at once."""

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

    name: str  # also shown to people: "tenant alice"
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
    period_s: float  # 0: the limit isn't a rate
    remaining: int
    next_s: float  # until one more is admitted, without other requests until then; 0: at once
    reset_s: float  # until the limit is fully available, likewise; 0 for a limit that isn't a rate: unknown

    @property
    def is_reached(self) -> bool:
        return self.remaining < 1

    def description(self) -> str:
        """The limit as text: "100 requests per minute"."""
        what = "tokens" if self.counted is Counted.TOKENS else "requests"
        counted = f"{self.limit} {what[:-1] if self.limit == 1 else what}"
        if self.counted is Counted.CONCURRENCY:
            return f"{counted} at once"
        return f"{counted} per {_PERIODS.get(self.period_s, f'{self.period_s:g} s')}"


@dataclass(slots=True)
class _Usage:
    """The use of an account. `requests` and `tokens` are as of `at`, and shrink as their buckets refill."""

    limits: TenantLimits  # as they were at its last request
    at: float
    requests: float = 0.0
    tokens: float = 0.0
    open: int = 0  # requests that are queued or running
    logged_at: float = -math.inf

    def settle(self, now: float) -> None:
        """Refill the account's buckets until `now`."""
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
        self._open: dict[TicketId, tuple[str, ...]] = {}  # admitted tickets, until they end → charged accounts
        self._room = MOST_KEPT

    def __len__(self) -> int:
        return len(self._usages)

    def reached(self, accounts: Sequence[Account], now: float) -> Standing | None:
        """The limit that one more request would exceed; of several, the one with the longest wait. None: no limit."""
        reached = [standing for standing in self.standings(accounts, now) if standing.is_reached]
        return max(reached, key=lambda standing: standing.next_s, default=None)

    def standings(self, accounts: Sequence[Account], now: float) -> list[Standing]:
        """The standing of every limit of these accounts. Changes nothing."""
        return [standing for account in accounts for standing in self._account_standings(account, now)]

    def used_limits(self, now: float) -> list[Standing]:
        """The standing of every partly used limit, by account."""
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
        """End a ticket whose answer took `tokens`."""
        for usage in self._close_ticket(ticket, now):
            usage.tokens += tokens

    def refused(self, ticket: TicketId, now: float) -> None:
        """End a ticket without an answer from a worker, and return its charge. Does nothing for a ticket never admitted."""
        for usage in self._close_ticket(ticket, now):
            usage.requests = max(0.0, usage.requests - 1)

    def may_log(self, name: str, now: float) -> bool:
        """Whether to record a refusal of this account. Not each one: a client in a loop would displace all other decisions."""
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
        """Make room for one more account. Rare: at least half of the accounts without open requests are dropped."""
        if len(self._usages) < self._room:
            return
        idle = sorted((usage.full_at, name) for name, usage in self._usages.items() if not usage.open)
        surplus = len(idle) - MOST_KEPT // 2
        for index, (full_at, name) in enumerate(idle):
            if index < surplus or full_at <= now:
                del self._usages[name]
        self._room = max(MOST_KEPT, 2 * len(self._usages))

    def check(self) -> None:
        """Assert the invariants: requests are counted where they were charged, and no count is negative."""
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
