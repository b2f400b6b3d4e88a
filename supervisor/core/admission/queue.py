"""The admission queue: requests that wait for a worker of their model.

The requests of one class and tenant form a group, ordered by the policy's rank, then first in, first out. The policy chooses
the next request among the heads of these groups. A long queue makes no decision slower: each group is a heap, and entries of
removed requests are skipped when they reach its top.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from typing import Final

from supervisor.core.admission.admission import AdmissionPolicy, Rank
from supervisor.core.demand import NORMAL, Demand
from supervisor.core.effects import QueueLoad
from supervisor.core.types import ModelId, TicketId

MOST_WAITS: Final = 512
LATELY_S: Final = 300.0
"""Maximum number and age of the waits that `RecentWaits` remembers."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued request. `seq` counts arrivals."""

    ticket: TicketId
    model: ModelId
    demand: Demand
    arrived_at: float
    seq: int
    ahead_s: float  # `FairShares.ahead_s` of its tenant at arrival

    @property
    def until(self) -> float:
        """When the request's own budget is over; infinity without a budget."""
        return math.inf if self.demand.budget_s is None else self.arrived_at + self.demand.budget_s


Group = tuple[int, str]
"""A class and a tenant."""


@dataclass(slots=True)
class _ModelQueue:
    """One model's queue."""

    classes: dict[int, OrderedDict[TicketId, Waiting]] = field(
        default_factory=dict
    )  # in order of arrival; none is empty
    groups: dict[Group, list[tuple[Rank, int, TicketId]]] = field(default_factory=dict)  # heaps; each has a live entry
    counts: dict[Group, int] = field(default_factory=dict)  # live entries
    head: TicketId | None = None  # the next request; set iff nothing has changed since it was chosen
    version: int = -1  # of the fair shares at that time

    def __len__(self) -> int:
        return sum(len(arrivals) for arrivals in self.classes.values())

    def tickets(self) -> list[TicketId]:
        """All queued tickets, in order of arrival."""
        everybody = [waiting for arrivals in self.classes.values() for waiting in arrivals.values()]
        return [waiting.ticket for waiting in sorted(everybody, key=lambda waiting: waiting.seq)]

    def add(self, waiting: Waiting, rank: Rank) -> None:
        group = _group_of(waiting)
        self.classes.setdefault(waiting.demand.priority, OrderedDict())[waiting.ticket] = waiting
        heap = self.groups.setdefault(group, [])
        heapq.heappush(heap, (rank, waiting.seq, waiting.ticket))
        self.counts[group] = self.counts.get(group, 0) + 1
        if heap[0][2] == waiting.ticket:
            self.head = None

    def remove(self, waiting: Waiting) -> None:
        group = _group_of(waiting)
        arrivals = self.classes[waiting.demand.priority]
        del arrivals[waiting.ticket]
        if not arrivals:
            del self.classes[waiting.demand.priority]
        self.counts[group] -= 1
        if not self.counts[group]:
            del self.counts[group], self.groups[group]
        else:
            self._drop_dead_entries(group)
        if self.head == waiting.ticket:
            self.head = None

    def heads(self) -> Iterator[Waiting]:
        """The first of each group."""
        return (self.classes[group[0]][heap[0][2]] for group, heap in self.groups.items())

    def _drop_dead_entries(self, group: Group) -> None:
        """Drop dead entries from the top of the heap, and all dead entries when they accumulate."""
        heap, arrivals = self.groups[group], self.classes[group[0]]
        if len(heap) > 2 * self.counts[group] + 8:
            heap[:] = [entry for entry in heap if self._is_live(entry, arrivals)]
            heapq.heapify(heap)
        while not self._is_live(heap[0], arrivals):
            heapq.heappop(heap)

    @staticmethod
    def _is_live(entry: tuple[Rank, int, TicketId], arrivals: Mapping[TicketId, Waiting]) -> bool:
        waiting = arrivals.get(entry[2])
        return waiting is not None and waiting.seq == entry[1]


class AdmissionQueue:
    """Tickets waiting for their models. A ticket is in it at most once."""

    def __init__(self, admission: AdmissionPolicy | None = None) -> None:
        self._admission = admission or AdmissionPolicy()
        self._arrivals: OrderedDict[TicketId, Waiting] = OrderedDict()
        self._queues: dict[ModelId, _ModelQueue] = {}
        self._budgets: list[
            tuple[float, int, TicketId]
        ] = []  # a heap of requests with a budget; may contain removed ones
        self._seq = 0
        self.recent = RecentWaits()

    def use_policy(self, admission: AdmissionPolicy) -> None:
        """Put all waiting requests into the order of this policy."""
        self._admission = admission
        self._queues = {}
        for waiting in self._arrivals.values():
            self._queues.setdefault(waiting.model, _ModelQueue()).add(waiting, admission.rank_request(waiting))

    def __len__(self) -> int:
        return len(self._arrivals)

    def __contains__(self, ticket: TicketId) -> bool:
        return ticket in self._arrivals

    def push(
        self, ticket: TicketId, model_id: ModelId, demand: Demand, now: float, most: int | None = None
    ) -> str | None:
        """Queue the request and return None, or return why the queue is full. `now` must not go backwards between calls.

        `most`: the model's own limit of waiting requests; None: the general limit.
        """
        assert ticket not in self._arrivals, f"{ticket} is queued already"
        full = self._admission.queue_is_full(self.count(model_id), len(self._arrivals), most)
        if full is not None:
            return full
        self._seq += 1
        waiting = Waiting(ticket, model_id, demand, now, self._seq, self._admission.shares.ahead_s(demand))
        self._arrivals[ticket] = waiting
        self._queues.setdefault(model_id, _ModelQueue()).add(waiting, self._admission.rank_request(waiting))
        self._admission.shares.arrived(demand)
        if demand.budget_s is not None:
            heapq.heappush(self._budgets, (waiting.until, waiting.seq, ticket))
        return None

    def pop(self, model_id: ModelId) -> Waiting | None:
        """Take the model's next request, for a worker; None when no request waits."""
        waiting = self.peek(model_id)
        if waiting is not None:
            self._take_out(waiting)
        return waiting

    def peek(self, model_id: ModelId) -> Waiting | None:
        """The model's next request, without removing it; None when no request waits."""
        line = self._queues.get(model_id)
        if line is None:
            return None
        if line.head is None or line.version != self._admission.shares.version:
            line.head = self._admission.next_request(line.heads()).ticket
            line.version = self._admission.shares.version
        return self._arrivals[line.head]

    def remove(self, ticket: TicketId) -> Waiting | None:
        """Remove this request from any position in the queue; None when it isn't queued."""
        waiting = self._arrivals.get(ticket)
        if waiting is not None:
            self._take_out(waiting)
            self._admission.shares.left(waiting.demand)
        return waiting

    def _take_out(self, waiting: Waiting) -> None:
        del self._arrivals[waiting.ticket]
        line = self._queues[waiting.model]
        line.remove(waiting)
        if not line.counts:
            del self._queues[waiting.model]
        if waiting.demand.budget_s is not None:
            self._compact_budgets()

    def clear(self, model_id: ModelId) -> list[Waiting]:
        """Take out all requests that wait for the model, in order of arrival."""
        line = self._queues.get(model_id)
        tickets = [] if line is None else line.tickets()
        return [waiting for ticket in tickets if (waiting := self.remove(ticket)) is not None]

    def count(self, model_id: ModelId) -> int:
        """How many requests wait for the model."""
        line = self._queues.get(model_id)
        return 0 if line is None else len(line)

    def ahead(self, model_id: ModelId, demand: Demand) -> int:
        """How many requests of the same or a higher class than `demand` wait for the model."""
        line = self._queues.get(model_id)
        if line is None:
            return 0
        return sum(len(arrivals) for priority, arrivals in line.classes.items() if priority <= demand.priority)

    def load(self, model_id: ModelId, now: float) -> QueueLoad:
        """The queue load for a refused client: of the whole queue if that is full, else of the model's queue."""
        if len(self._arrivals) >= self._admission.limits.queue_total:
            return QueueLoad(len(self._arrivals), self.recent.mean_s(now))
        return QueueLoad(self.count(model_id), self.recent.mean_s(now, model_id))

    def models(self) -> KeysView[ModelId]:
        """The models for which requests wait."""
        return self._queues.keys()

    def oldest(self, model_id: ModelId) -> float | None:
        """Arrival time of the model's longest waiting request, whatever its rank; None when no request waits."""
        return min((waiting.arrived_at for waiting in self.oldest_of_classes(model_id)), default=None)

    def oldest_of_classes(self, model_id: ModelId) -> list[Waiting]:
        """The requests that wait for the model: of each class the one that arrived first."""
        line = self._queues.get(model_id)
        return [] if line is None else [next(iter(arrivals.values())) for arrivals in line.classes.values()]

    def most_urgent(self, model_id: ModelId) -> int:
        """The highest class in which a request waits for the model, as a number; NORMAL when none does."""
        line = self._queues.get(model_id)
        return NORMAL if line is None else min(line.classes)

    def deadline(self) -> float:
        """When the next request will have waited too long, or its budget will be over; infinity when no request waits."""
        return min(self._next_timeout(), self._next_budget())

    def expired(self, now: float) -> list[Waiting]:
        """Take out the requests that have waited too long, oldest first; then those whose budget is over."""
        overdue: list[Waiting] = []
        while self._next_timeout() <= now:
            overdue.append(self._remove_ticket(next(iter(self._arrivals))))
        while self._next_budget() <= now:
            overdue.append(self._remove_ticket(self._budgets[0][2]))
        return overdue

    def _remove_ticket(self, ticket: TicketId) -> Waiting:
        waiting = self.remove(ticket)
        assert waiting is not None
        return waiting

    def _next_timeout(self) -> float:
        if not self._arrivals:
            return math.inf
        return self._admission.gives_up_at(next(iter(self._arrivals.values())).arrived_at)

    def _next_budget(self) -> float:
        """When the next budget is over. Drops removed requests from the top of the heap."""
        while self._budgets:
            until, seq, ticket = self._budgets[0]
            waiting = self._arrivals.get(ticket)
            if waiting is not None and waiting.seq == seq:
                return until
            heapq.heappop(self._budgets)
        return math.inf

    def _compact_budgets(self) -> None:
        """Drop entries of removed requests, which would otherwise accumulate below a live entry."""
        if len(self._budgets) > 2 * len(self._arrivals) + 8:
            live = {waiting.seq for waiting in self._arrivals.values()}
            self._budgets = [entry for entry in self._budgets if entry[1] in live]
            heapq.heapify(self._budgets)

    def check(self) -> None:
        """Assert the invariants: both views hold the same tickets, orders agree, heaps are bounded."""
        in_lines = {ticket for line in self._queues.values() for ticket in line.tickets()}
        assert in_lines == set(self._arrivals)
        for line in self._queues.values():
            groups = Counter(map(_group_of, self._waiting_in(line)))
            assert groups == line.counts
            assert groups.keys() == line.groups.keys()
            assert all(len(heap) <= 2 * groups[group] + 8 for group, heap in line.groups.items())
            for head in line.heads():
                mine = [waiting for waiting in self._waiting_in(line) if _group_of(waiting) == _group_of(head)]
                assert head == min(mine, key=lambda waiting: (self._admission.rank_request(waiting), waiting.seq))
            assert line.head is None or line.head in line.tickets()
            assert len(line) == len(self._waiting_in(line))
        arrivals = [waiting.seq for waiting in self._arrivals.values()]
        assert arrivals == sorted(arrivals)
        assert len(self._budgets) <= 2 * len(self._arrivals) + 8
        assert self._next_budget() == min((waiting.until for waiting in self._arrivals.values()), default=math.inf)

    def _waiting_in(self, line: _ModelQueue) -> list[Waiting]:
        return [self._arrivals[ticket] for ticket in line.tickets()]


class RecentWaits:
    """How long the recently dispatched requests had waited, including those that found a free worker.

    For people and clients: the error of a full queue, and the admin API.
    """

    def __init__(self) -> None:
        self._waits: deque[tuple[float, ModelId, float]] = deque(maxlen=MOST_WAITS)

    def note(self, model: ModelId, waited_s: float, now: float) -> None:
        """Remember the wait of a request that is dispatched now."""
        self._waits.append((now, model, waited_s))

    def mean_s(self, now: float, model: ModelId | None = None) -> float | None:
        """The mean wait of one model's requests, or of all; None: none was dispatched recently."""
        waits = self._recent_waits(now, model)
        return sum(waits) / len(waits) if waits else None

    def p95_s(self, now: float, model: ModelId | None = None) -> float | None:
        """The 95th percentile of the waits of one model's requests, or of all; None: none was dispatched recently."""
        waits = sorted(self._recent_waits(now, model))
        return waits[math.ceil(0.95 * len(waits)) - 1] if waits else None

    def _recent_waits(self, now: float, model: ModelId | None) -> list[float]:
        since = now - LATELY_S
        return [waited for at, name, waited in self._waits if at >= since and model in {None, name}]


def _group_of(waiting: Waiting) -> Group:
    return (waiting.demand.priority, waiting.demand.tenant)
