"""Who is served next, who may overtake whom, who keeps its place for how long, and every limit.

The queue asks in which order requests of one model are served and whether it is full; `placement` asks in which order
wanted models are planned and when a waiter may claim a victim; the planner asks who may take whose place; `requests`
and `timers` ask when patience ends. None of them orders or limits anything by itself.

Another policy (aging, batching by model, shares for tenants) is a subclass of `AdmissionPolicy` that overrides what it
decides otherwise; `Scheduler(policy)` takes it. A policy looks only at its arguments, so that a replay decides the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from supervisor.core.demand import NORMAL
from supervisor.core.types import ASKED, Eviction, Limits, ModelSpec, Policy

if TYPE_CHECKING:
    from supervisor.core.model_state import ModelState
    from supervisor.core.queue import AdmissionQueue, Waiting

Rank = tuple[float, ...]
"""A sort key; the smallest comes first. Ties end in the order of arrival, or in the model's id."""

ORDERED_DRAIN_S = 30.0
"""For running requests before an unload, a change or the shutdown, unless `drain_s` says otherwise."""

LONGEST_DRAIN_S, URGENT_DRAIN_S = 300.0, 5.0
"""For running requests before an eviction, unless `drain_s` says otherwise: at all, and since a model of higher priority
waits. The first lets an honest long answer end."""

LOOK_S = 30.0
LEAST_READ_BPS = 4096
"""A client has stopped reading when, for `LOOK_S`, it holds its answer up and reads fewer bytes per second than this. Far
fewer than any network brings, yet more than one step of a TCP window (64 KiB on loopback) within `LOOK_S`, which is how
even the slowest reader makes room."""


class AdmissionPolicy:
    """First come, first served within a request priority; bounded thrash between models."""

    def __init__(self, limits: Limits | None = None, policy: Policy | None = None) -> None:
        self.limits = limits or Limits()
        self.policy = policy or Policy()

    def configure(self, limits: Limits, policy: Policy) -> None:
        """New numbers. Queued requests stay, even beyond the new limits; the new one judges their waiting time."""
        self.limits, self.policy = limits, policy

    # ---------------------------------------------------------------------------------------------------------- order

    def rank_request(self, waiting: Waiting) -> Rank:
        """Who of one model's requests is served first. Asked once, on arrival."""
        return (waiting.demand.priority,)

    def rank_model(self, model: ModelState, queue: AdmissionQueue) -> Rank:
        """Which wanted model is planned first. A later one gets only what the plans before it leave over."""
        head, oldest, asked_at = queue.peek(model.id), queue.oldest(model.id), model.asked_at
        since = min(math.inf if oldest is None else oldest, math.inf if asked_at is None else asked_at)
        priority, seq = (head.demand.priority, head.seq) if head is not None else (NORMAL, 0)
        # A model that was evicted has had its turn: its backlog, however old, comes after those it was evicted for.
        return (priority, max(since, model.stopped_at), seq, -model.spec.priority)

    # ------------------------------------------------------------------------------------- who keeps its place how long

    def may_overtake(self, priority: int, other: int) -> bool:
        """May a model of `priority` take the place of one of priority `other` within its minimum residency?"""
        return priority > other

    def may_evict_higher(self) -> bool:
        """May a model go for one of lower priority, when nothing lower would do?"""
        return self.policy.eviction is Eviction.LAST_RESORT

    def keeps_place_until(self, model: ModelState, queued: int, now: float) -> float:
        """Until when an idle worker keeps its place: within its minimum residency, while in demand. Returns `now` if it doesn't."""
        matures_at, quiet_at = model.ready_at + self.limits.min_residency_s, model.last_used + self.limits.linger_s
        if now >= matures_at:
            return now
        if now < quiet_at:
            return min(quiet_at, matures_at)
        return matures_at if queued else now

    def may_claim_at(self, waiter: ModelState, victim: ModelState) -> float:
        """When a busy victim gets no new requests because of this waiter."""
        if self.may_overtake(waiter.spec.priority, victim.spec.priority):
            return -math.inf
        return victim.ready_at + self.limits.min_residency_s

    # ----------------------------------------------------------------------------------------- how long requests may run

    def drain_s(self, spec: ModelSpec) -> float | None:
        """What the configuration says about its running requests; None: nothing."""
        return self.limits.drain_s if spec.drain_s is None else spec.drain_s

    def ordered_drain_s(self, spec: ModelSpec) -> float:
        """How long they may run before an unload, a change or the shutdown. Never without end: somebody ordered it."""
        drain_s = self.drain_s(spec)
        return ORDERED_DRAIN_S if drain_s is None or math.isinf(drain_s) else drain_s

    def drains_until(self, victim: ModelState, since: float, urgent_since: float | None) -> float:
        """Until when they may run before an eviction; `urgent_since`: since when a model of higher priority waits."""
        drain_s = self.drain_s(victim.spec)
        if drain_s is not None:
            return since + drain_s
        longest = since + LONGEST_DRAIN_S
        return longest if urgent_since is None else min(longest, urgent_since + URGENT_DRAIN_S)

    def looks_again_at(self, victim: ModelState, now: float) -> float | None:
        """When to look (again) whether the clients of a worker that drains for another model still read; None: never."""
        return now + LOOK_S if self.drain_s(victim.spec) is None else None

    def has_stopped_reading(self, read: int) -> bool:
        """Is so little all that a client has read since the last look, although more was there for it?"""
        return read < LEAST_READ_BPS * LOOK_S

    # --------------------------------------------------------------------------------------------------------- limits

    def queue_is_full(self, queued: int, total: int) -> str | None:
        """Why one more request can't be queued, with `queued` of its model and `total` of all waiting; None: it can."""
        if total >= self.limits.queue_total:
            return f"{total} requests are queued, the limit is {self.limits.queue_total}"
        if queued >= self.limits.queue_per_model:
            return f"{queued} requests are queued for {ASKED}, the limit is {self.limits.queue_per_model}"
        return None

    def gives_up_at(self, since: float) -> float:
        """When a request, or a load that an operator asked for, has waited too long."""
        return since + self.limits.queue_wait_s

    def is_full(self, model: ModelState) -> bool:
        """Has the worker all the requests it gets at once?"""
        return 0 < model.spec.target_inflight <= len(model.in_flight)

    def limits_loaded(self) -> bool:
        """Is the number of loaded models limited, for any type?"""
        return bool(self.policy.max_loaded)

    def max_loaded(self, model_type: str) -> int | None:
        """How many models of this type may be loaded at once; None: any number."""
        return self.policy.max_loaded.get(model_type)

    def may_load(self, loading: int) -> bool:
        """May one more worker start on a device where `loading` are starting?"""
        return loading < self.limits.loads_per_device
