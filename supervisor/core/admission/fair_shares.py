"""Fair shares between the tenants of one class, counted in worker-seconds.

Each tenant has a counter for each class. It grows by the worker time of the tenant's requests: one second of a worker with
three running requests counts a third for each. The tenant with the smallest counter is served first. At dispatch a request
is charged the usual time of its model's requests, and at its end the difference. A tenant that returns after a pause starts
at least at the counter of the tenant served last: so nobody saves credit, and nobody pays for an idle machine.

Source: virtual token counters (Sheng et al., Fairness in Serving Large Language Models, 2024), with worker-seconds as the
service, because models of very different speed share one machine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from supervisor.core.demand import Demand
from supervisor.core.types import ModelId, TicketId

FIRST_GUESS_S: Final = 1.0
"""Expected worker-seconds of a model's request before the first one has ended."""

LEARN: Final = 0.1
"""Weight of the last request in the moving average."""

MOST_KEPT: Final = 1024
"""Minimum number of kept counters of tenants that are ahead of others without open requests."""

Share = tuple[int, str]
"""A class and a tenant of it."""


@dataclass(slots=True)
class _Clock:
    """A worker's clock: the worker-seconds of a request that has run since the clock began."""

    share_s: float = 0.0
    at: float = 0.0
    running: int = 0

    def run(self, now: float, change: int) -> float:
        """Advance to `now`; from then on `change` more requests run. Returns the share."""
        if self.running:
            self.share_s += (now - self.at) / self.running
        self.at = now
        self.running += change
        return self.share_s


@dataclass(frozen=True, slots=True)
class _Charge:
    share: Share
    model: ModelId
    weight: float
    charged_s: float
    began_at_s: float  # of its worker's clock


class FairShares:
    """The counters of all tenants. A request has `arrived`, then it `left`, or `began` and `ended`."""

    def __init__(self) -> None:
        self._taken: dict[Share, float] = {}
        self._open: dict[int, dict[str, int]] = {}  # by class and tenant: queued and running requests; no zeros
        self._last: dict[int, float] = {}  # by class: the counter of the tenant served last
        self._running: dict[TicketId, _Charge] = {}
        self._clocks: dict[ModelId, _Clock] = {}
        self._usual_s: dict[ModelId, float] = {}
        self._room = MOST_KEPT
        self.version = 0  # grows whenever a counter changes

    def taken_s(self, demand: Demand) -> float:
        """The counter of the demand's tenant, in worker-seconds divided by weight."""
        return self._taken.get((demand.priority, demand.tenant), 0.0)

    def ahead_s(self, demand: Demand) -> float:
        """How far the tenant's counter exceeds the smallest one of its class, among tenants with open requests."""
        open_ = self._open.get(demand.priority)
        if not open_ or (len(open_) == 1 and demand.tenant in open_):
            return 0.0
        least_s = min(self._taken[demand.priority, tenant] for tenant in open_)
        return max(0.0, self.taken_s(demand) - least_s)

    def arrived(self, demand: Demand) -> None:
        """A request is queued, or is dispatched at once."""
        share = (demand.priority, demand.tenant)
        open_ = self._open.setdefault(demand.priority, {})
        count = open_.get(demand.tenant, 0)
        open_[demand.tenant] = count + 1
        if not count:
            last = self._last.get(demand.priority, 0.0)
            self._taken[share] = max(last, self._taken.get(share, last))
            self.version += 1

    def left(self, demand: Demand) -> None:
        """A queued request has ended without a worker."""
        self._close_request((demand.priority, demand.tenant))

    def began(self, ticket: TicketId, model: ModelId, demand: Demand, now: float) -> None:
        """A worker gets the request."""
        share = (demand.priority, demand.tenant)
        clock = self._clocks.get(model)
        if clock is None:
            clock = self._clocks[model] = _Clock()
        charged_s = self._usual_s.get(model, FIRST_GUESS_S)
        self._running[ticket] = _Charge(share, model, demand.weight, charged_s, clock.run(now, 1))
        taken = self._taken[share]
        self._last[demand.priority] = max(taken, self._last.get(demand.priority, 0.0))
        self._taken[share] = taken + charged_s / demand.weight
        self.version += 1

    def ended(self, ticket: TicketId, now: float) -> None:
        """A running request has ended, with or without success."""
        charge = self._running.pop(ticket)
        clock = self._clocks[charge.model]
        took_s = clock.run(now, -1) - charge.began_at_s
        if not clock.running:
            del self._clocks[charge.model]
        usual_s = self._usual_s.get(charge.model)
        self._usual_s[charge.model] = took_s if usual_s is None else usual_s + LEARN * (took_s - usual_s)
        self._taken[charge.share] += (took_s - charge.charged_s) / charge.weight
        self.version += 1
        self._close_request(charge.share)

    def forget(self, model: ModelId) -> None:
        """Forget a model that is no longer configured."""
        self._usual_s.pop(model, None)

    def _close_request(self, share: Share) -> None:
        priority, tenant = share
        open_ = self._open[priority]
        open_[tenant] -= 1
        if open_[tenant]:
            return
        del open_[tenant]
        if not open_:
            del self._open[priority]
        if self._taken[share] <= self._last.get(share[0], 0.0):
            del self._taken[share]  # a new counter would start there as well
        elif len(self._taken) > self._room:
            idle = sorted(
                (taken, key) for key, taken in self._taken.items() if key[1] not in self._open.get(key[0], ())
            )
            for _, key in idle[: len(idle) // 2]:
                del self._taken[key]
            self._room = max(MOST_KEPT, 2 * len(self._taken))

    def check(self) -> None:
        """Assert the invariants: tenants with open requests have a counter, and workers' clocks count their requests."""
        open_ = {(priority, tenant): count for priority, by in self._open.items() for tenant, count in by.items()}
        assert open_.keys() <= self._taken.keys()
        assert all(count > 0 for count in open_.values())
        assert all(self._open.values())
        assert Counter(charge.model for charge in self._running.values()) == {
            model: clock.running for model, clock in self._clocks.items()
        }

    def running(self) -> set[TicketId]:
        """The tickets of the requests that workers have."""
        return set(self._running)
