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

    @property
    def until(self) -> float:
        """When its own budget is over; infinity when it has none."""
        return math.inf if self.demand.budget_s is None else self.arrived_at + self.demand.budget_s


@dataclass(slots=True)
class _Line:
    """One model's queue: `heap` for the order of service, `arrivals` for who has waited longest, `classes` for how many."""

    heap: list[tuple[Rank, int, TicketId]] = field(default_factory=list)
    arrivals: OrderedDict[TicketId, Waiting] = field(default_factory=OrderedDict)
    classes: dict[int, int] = field(default_factory=dict)  # by priority

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
        self._budgets: list[tuple[float, int, TicketId]] = []  # a heap of those with a budget, and some that left
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
        line.classes[demand.priority] = line.classes.get(demand.priority, 0) + 1
        heapq.heappush(line.heap, (self._admission.rank_request(waiting), waiting.seq, ticket))
        if demand.budget_s is not None:
            heapq.heappush(self._budgets, (waiting.until, waiting.seq, ticket))
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
        line.classes[waiting.demand.priority] -= 1
        if not line.classes[waiting.demand.priority]:
            del line.classes[waiting.demand.priority]
        if waiting.demand.budget_s is not None:
            self._compact_budgets()
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

    def ahead(self, model_id: ModelId, demand: Demand) -> int:
        """How many wait for the model whose class is no lower than this one's."""
        line = self._lines.get(model_id)
        if line is None:
            return 0
        return sum(count for priority, count in line.classes.items() if priority <= demand.priority)

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
        """When the next request will have waited too long, for all or for its budget; infinity when nobody waits."""
        return min(self._patience(), self._next_budget())

    def expired(self, now: float) -> list[Waiting]:
        """Take out those that have waited too long, oldest first; then those whose budget is over."""
        gone: list[Waiting] = []
        while self._patience() <= now:
            gone.append(self._taken(next(iter(self._arrivals))))
        while self._next_budget() <= now:
            gone.append(self._taken(self._budgets[0][2]))
        return gone

    def _taken(self, ticket: TicketId) -> Waiting:
        waiting = self.remove(ticket)
        assert waiting is not None
        return waiting

    def _patience(self) -> float:
        if not self._arrivals:
            return math.inf
        return self._admission.gives_up_at(next(iter(self._arrivals.values())).arrived_at)

    def _next_budget(self) -> float:
        """When the next budget is over. Drops from the top of the heap those that left."""
        while self._budgets:
            until, seq, ticket = self._budgets[0]
            waiting = self._arrivals.get(ticket)
            if waiting is not None and waiting.seq == seq:
                return until
            heapq.heappop(self._budgets)
        return math.inf

    def _compact_budgets(self) -> None:
        """As a line's heap: entries that left must not pile up behind a distant one."""
        if len(self._budgets) > 2 * len(self._arrivals) + 8:
            live = {waiting.seq for waiting in self._arrivals.values()}
            self._budgets = [entry for entry in self._budgets if entry[1] in live]
            heapq.heapify(self._budgets)

    def check(self) -> None:
        """Assert the laws: both views hold the same tickets, orders agree, heaps are bounded."""
        in_lines = {ticket for line in self._lines.values() for ticket in line.arrivals}
        assert in_lines == set(self._arrivals)
        for line in self._lines.values():
            assert line.arrivals
            assert len(line.heap) <= 2 * len(line.arrivals) + 8
            best = min(line.arrivals.values(), key=lambda waiting: (self._admission.rank_request(waiting), waiting.seq))
            assert line.first() is best
            priorities = [waiting.demand.priority for waiting in line.arrivals.values()]
            assert line.classes == {priority: priorities.count(priority) for priority in priorities}
        arrivals = [waiting.seq for waiting in self._arrivals.values()]
        assert arrivals == sorted(arrivals)
        assert len(self._budgets) <= 2 * len(self._arrivals) + 8
        assert self._next_budget() == min((waiting.until for waiting in self._arrivals.values()), default=math.inf)
