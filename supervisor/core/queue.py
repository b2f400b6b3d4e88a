"""The admission queue: requests that wait for a worker of their model.

Within a model the order is (higher priority, earlier arrival); with equal priorities that is first in, first out.
Models come in the order of their first tickets. Everything but `models` costs O(log n) at most, so a long queue makes
no decision slower: a heap per model gives the order, and entries that left in between are skipped when they surface.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field

from supervisor.core.types import Limits, ModelId, TicketId


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued request. `seq` counts arrivals."""

    ticket: TicketId
    model: ModelId
    priority: int
    arrived_at: float
    seq: int

    def order(self) -> tuple[int, int]:
        """Sort key: who is served first."""
        return -self.priority, self.seq


@dataclass(slots=True)
class _Line:
    """One model's queue: `heap` for the order of service, `arrivals` for who has waited longest."""

    heap: list[tuple[int, int, TicketId]] = field(default_factory=list)
    arrivals: OrderedDict[TicketId, Waiting] = field(default_factory=OrderedDict)

    def first(self) -> Waiting | None:
        """Who is served next. Drops those that left from the top of the heap."""
        while self.heap:
            waiting = self.arrivals.get(self.heap[0][2])
            if waiting is not None and waiting.seq == self.heap[0][1]:
                return waiting
            heapq.heappop(self.heap)
        return None

    def compact(self) -> None:
        """Keep the heap within twice the live entries, or cancelled requests would pile up behind a stuck model."""
        if len(self.heap) > 2 * len(self.arrivals) + 8:
            self.heap = [(*waiting.order(), ticket) for ticket, waiting in self.arrivals.items()]
            heapq.heapify(self.heap)


class AdmissionQueue:
    """Tickets waiting for their models. A ticket is in it at most once."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._arrivals: OrderedDict[TicketId, Waiting] = OrderedDict()
        self._lines: dict[ModelId, _Line] = {}
        self._models: list[tuple[int, int, ModelId]] = []  # (*order of its first ticket, model), sorted
        self._seq = 0

    def __len__(self) -> int:
        return len(self._arrivals)

    def __contains__(self, ticket: TicketId) -> bool:
        return ticket in self._arrivals

    def configure(self, limits: Limits) -> None:
        """New limits. Those already queued stay, also beyond them; their waiting time is judged by the new one."""
        self._limits = limits

    def push(self, ticket: TicketId, model: ModelId, priority: int, now: float) -> str | None:
        """Queue it and return None, or return why the queue is full. `now` must not go backwards between calls."""
        assert ticket not in self._arrivals, f"{ticket} is queued already"
        if len(self._arrivals) >= self._limits.queue_total:
            return f"{len(self._arrivals)} requests are queued, the limit is {self._limits.queue_total}"
        queued = self.count(model)
        if queued >= self._limits.queue_per_model:
            return f"{queued} requests are queued for {model}, the limit is {self._limits.queue_per_model}"
        self._seq += 1
        waiting = Waiting(ticket, model, priority, now, self._seq)
        line = self._lines.setdefault(model, _Line())
        before = line.first()
        self._arrivals[ticket] = line.arrivals[ticket] = waiting
        heapq.heappush(line.heap, (*waiting.order(), ticket))
        self._reorder(model, before, line.first())
        return None

    def pop(self, model: ModelId) -> Waiting | None:
        """Take the model's next request; None when nobody waits for it."""
        waiting = self.peek(model)
        return None if waiting is None else self.remove(waiting.ticket)

    def peek(self, model: ModelId) -> Waiting | None:
        """The model's next request, left where it is."""
        line = self._lines.get(model)
        return None if line is None else line.first()

    def remove(self, ticket: TicketId) -> Waiting | None:
        """Take this request out, wherever it stands; None when it isn't queued."""
        waiting = self._arrivals.pop(ticket, None)
        if waiting is None:
            return None
        line = self._lines[waiting.model]
        before = line.first()
        del line.arrivals[ticket]
        if line.arrivals:
            line.compact()
        else:
            del self._lines[waiting.model]
        self._reorder(waiting.model, before, line.first())
        return waiting

    def clear(self, model: ModelId) -> list[Waiting]:
        """Take out everybody who waits for the model, in order of arrival."""
        line = self._lines.get(model)
        tickets = [] if line is None else list(line.arrivals)
        return [waiting for ticket in tickets if (waiting := self.remove(ticket)) is not None]

    def count(self, model: ModelId) -> int:
        """How many wait for the model."""
        line = self._lines.get(model)
        return 0 if line is None else len(line.arrivals)

    def oldest(self, model: ModelId) -> float | None:
        """When the one arrived who has waited longest for the model, whatever its priority; None when nobody waits."""
        line = self._lines.get(model)
        return None if line is None else next(iter(line.arrivals.values())).arrived_at

    def models(self) -> list[ModelId]:
        """Models somebody waits for, in the order of their next requests. O(models)."""
        return [model for _, _, model in self._models]

    def deadline(self) -> float:
        """When the next request will have waited too long; infinity when nobody waits."""
        if not self._arrivals:
            return math.inf
        return next(iter(self._arrivals.values())).arrived_at + self._limits.queue_wait_s

    def expired(self, now: float) -> list[Waiting]:
        """Take out those that have waited `queue_wait_s` or longer, oldest first."""
        gone: list[Waiting] = []
        while self.deadline() <= now:
            oldest = self.remove(next(iter(self._arrivals)))
            assert oldest is not None
            gone.append(oldest)
        return gone

    def _reorder(self, model: ModelId, before: Waiting | None, after: Waiting | None) -> None:
        if before is after:
            return
        if before is not None:
            del self._models[bisect_left(self._models, (*before.order(), model))]
        if after is not None:
            insort(self._models, (*after.order(), model))

    def check(self) -> None:
        """Assert the laws: both views hold the same tickets, orders agree, heaps are bounded."""
        in_lines = {ticket for line in self._lines.values() for ticket in line.arrivals}
        assert in_lines == set(self._arrivals)
        assert all(line.arrivals for line in self._lines.values())
        firsts = []
        for model, line in self._lines.items():
            assert len(line.heap) <= 2 * len(line.arrivals) + 8
            best = min(line.arrivals.values(), key=Waiting.order)
            assert line.first() is best
            firsts.append((*best.order(), model))
        assert sorted(firsts) == self._models
        arrivals = [waiting.seq for waiting in self._arrivals.values()]
        assert arrivals == sorted(arrivals)
