"""The admission queue: requests that wait for a worker of their model.

The admission policy ranks the requests of a model; those of equal rank are served first in, first out. Everything costs
O(log n) at most, so a long queue makes no decision slower: a heap per model gives the order, and entries that left in
between are skipped when they surface.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import KeysView
from dataclasses import dataclass, field

from supervisor.core.admission import AdmissionPolicy, Rank
from supervisor.core.demand import Demand
from supervisor.core.recent_waits import QueueLoad, RecentWaits
from supervisor.core.types import ModelId, TicketId


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued request. `seq` counts arrivals."""

    ticket: TicketId
    model: ModelId
    demand: Demand
    arrived_at: float
    seq: int


@dataclass(slots=True)
class _Line:
    """One model's queue: `heap` for the order of service, `arrivals` for who has waited longest."""

    heap: list[tuple[Rank, int, TicketId]] = field(default_factory=list)
    arrivals: OrderedDict[TicketId, Waiting] = field(default_factory=OrderedDict)

    def first(self) -> Waiting | None:
        """Who is served next. Drops from the top of the heap those that left."""
        while self.heap:
            waiting = self.arrivals.get(self.heap[0][2])
            if waiting is not None and waiting.seq == self.heap[0][1]:
                return waiting
            heapq.heappop(self.heap)
        return None

    def compact(self) -> None:
        """Keep the heap within twice the live entries, or cancelled requests would pile up behind a stuck model."""
        if len(self.heap) > 2 * len(self.arrivals) + 8:
            live = {waiting.seq for waiting in self.arrivals.values()}
            self.heap = [entry for entry in self.heap if entry[1] in live]
            heapq.heapify(self.heap)


class AdmissionQueue:
    """Tickets waiting for their models. A ticket is in it at most once."""

    def __init__(self, admission: AdmissionPolicy | None = None) -> None:
        self._admission = admission or AdmissionPolicy()
        self._arrivals: OrderedDict[TicketId, Waiting] = OrderedDict()
        self._lines: dict[ModelId, _Line] = {}
        self._seq = 0
        self.recent = RecentWaits()

    def __len__(self) -> int:
        return len(self._arrivals)

    def __contains__(self, ticket: TicketId) -> bool:
        return ticket in self._arrivals

    def push(
        self, ticket: TicketId, model_id: ModelId, demand: Demand, now: float, most: int | None = None
    ) -> str | None:
        """Queue it and return None, or return why the queue is full. `now` must not go backwards between calls.

        `most`: so many may wait for the model, if it says.
        """
        assert ticket not in self._arrivals, f"{ticket} is queued already"
        full = self._admission.queue_is_full(self.count(model_id), len(self._arrivals), most)
        if full is not None:
            return full
        self._seq += 1
        waiting = Waiting(ticket, model_id, demand, now, self._seq)
        line = self._lines.setdefault(model_id, _Line())
        self._arrivals[ticket] = line.arrivals[ticket] = waiting
        heapq.heappush(line.heap, (self._admission.rank_request(waiting), waiting.seq, ticket))
        return None

    def pop(self, model_id: ModelId) -> Waiting | None:
        """Take the model's next request; None when nobody waits for it."""
        waiting = self.peek(model_id)
        return None if waiting is None else self.remove(waiting.ticket)

    def peek(self, model_id: ModelId) -> Waiting | None:
        """The model's next request, left where it is."""
        line = self._lines.get(model_id)
        return None if line is None else line.first()

    def remove(self, ticket: TicketId) -> Waiting | None:
        """Take this request out, wherever it stands; None when it isn't queued."""
        waiting = self._arrivals.pop(ticket, None)
        if waiting is None:
            return None
        line = self._lines[waiting.model]
        del line.arrivals[ticket]
        if line.arrivals:
            line.compact()
        else:
            del self._lines[waiting.model]
        return waiting

    def clear(self, model_id: ModelId) -> list[Waiting]:
        """Take out everybody who waits for the model, in order of arrival."""
        line = self._lines.get(model_id)
        tickets = [] if line is None else list(line.arrivals)
        return [waiting for ticket in tickets if (waiting := self.remove(ticket)) is not None]

    def count(self, model_id: ModelId) -> int:
        """How many wait for the model."""
        line = self._lines.get(model_id)
        return 0 if line is None else len(line.arrivals)

    def load(self, model_id: ModelId, now: float) -> QueueLoad:
        """What a client is told whom it has no room for: of the model, or of all if that many may not wait in all."""
        if len(self._arrivals) >= self._admission.limits.queue_total:
            return QueueLoad(len(self._arrivals), self.recent.mean_s(now))
        return QueueLoad(self.count(model_id), self.recent.mean_s(now, model_id))

    def models(self) -> KeysView[ModelId]:
        """The models that somebody waits for."""
        return self._lines.keys()

    def oldest(self, model_id: ModelId) -> float | None:
        """When the one arrived who has waited longest for the model, whatever its rank; None when nobody waits."""
        line = self._lines.get(model_id)
        return None if line is None else next(iter(line.arrivals.values())).arrived_at

    def deadline(self) -> float:
        """When the next request will have waited too long; infinity when nobody waits."""
        if not self._arrivals:
            return math.inf
        return self._admission.gives_up_at(next(iter(self._arrivals.values())).arrived_at)

    def expired(self, now: float) -> list[Waiting]:
        """Take out those that have waited too long, oldest first."""
        gone: list[Waiting] = []
        while self.deadline() <= now:
            oldest = self.remove(next(iter(self._arrivals)))
            assert oldest is not None
            gone.append(oldest)
        return gone

    def check(self) -> None:
        """Assert the laws: both views hold the same tickets, orders agree, heaps are bounded."""
        in_lines = {ticket for line in self._lines.values() for ticket in line.arrivals}
        assert in_lines == set(self._arrivals)
        for line in self._lines.values():
            assert line.arrivals
            assert len(line.heap) <= 2 * len(line.arrivals) + 8
            best = min(line.arrivals.values(), key=lambda waiting: (self._admission.rank_request(waiting), waiting.seq))
            assert line.first() is best
        arrivals = [waiting.seq for waiting in self._arrivals.values()]
        assert arrivals == sorted(arrivals)
