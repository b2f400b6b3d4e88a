"""The admission policy: which request is served next, which may overtake, how long a model keeps its place, and every limit.

The queue asks in which order requests of one model are served and whether it is full; `placement` asks in which order
wanted models are planned, and `eviction` when a waiter may claim a victim; the planner asks which model may take another's
place; `requests` and `timers` ask when patience ends. None of them orders or limits anything by itself.

Another policy (batching by model, say) is a subclass of `AdmissionPolicy` that overrides what it decides otherwise. Its name in
`POLICIES` is the one in the configuration; `Scheduler(policy)` takes any other. A policy looks only at its arguments and its
own counts, so that a replay decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from supervisor.core.admission.fair_shares import FairShares
from supervisor.core.admission.limits import Accounts
from supervisor.core.demand import DEFAULT_DEMAND, LOW, MOST_URGENT, NORMAL, Demand
from supervisor.core.types import MODEL_PLACEHOLDER, Eviction, Limits, ModelId, ModelSpec, Policy, WorkerState

if TYPE_CHECKING:
    from supervisor.core.admission.queue import AdmissionQueue, Waiting
    from supervisor.core.model_state import ModelState

Rank = tuple[float, ...]
"""A sort key; the smallest comes first. Ties end in the order of arrival, or in the model's id."""

BACKGROUND_RANK: Rank = (math.inf, math.inf, 0.0)
"""The rank of models that nobody asks for; among them the priority counts."""

MOST_AHEAD_S = 60.0
"""A model whose request comes from a tenant that has had more than others comes at most so many seconds later."""

LINGER_SHARE = 0.02
"""As a fraction of a model's load time: waiting so long for its next request costs less than a needless reload."""

ORDERED_DRAIN_S = 30.0
"""So long running requests may go on before an unload, a change or the shutdown, unless `drain_s` says otherwise."""

LOOK_S = 30.0
LEAST_READ_BPS = 4096
"""A client has stopped reading when, for `LOOK_S`, it holds its answer up and reads fewer bytes per second than this. Far
fewer than any network brings, yet more than one step of a TCP window (64 KiB on loopback) within `LOOK_S`, which is how
even the slowest reader makes room."""


class AdmissionPolicy:
    """The default policy: class with age, then fair shares of the tenants, then arrival; bounded thrash between models."""

    def __init__(self, limits: Limits | None = None, policy: Policy | None = None) -> None:
        self.limits = limits or Limits()
        self.policy = policy or Policy()
        self.accounts = Accounts()  # what limited tenants have taken; `requests` asks and charges them
        self.shares = FairShares()  # what every tenant has had of the workers; queue and dispatch charge them

    def configured(self, limits: Limits, policy: Policy) -> AdmissionPolicy:
        """The policy with new numbers: this one, or the one with the new name, which takes over the counts.

        Queued requests stay, even beyond the new limits; the new one judges their waiting time.
        """
        if policy.admission == self.policy.admission:
            self.limits, self.policy = limits, policy
            return self
        other = policy_of(limits, policy)
        other.accounts, other.shares = self.accounts, self.shares
        return other

    # ---------------------------------------------------------------------------------------------------------- order

    def rank_request(self, waiting: Waiting) -> Rank:
        """The order among one tenant's requests of one class for one model. Asked once for each, on arrival."""
        del waiting
        return ()

    def next_request(self, heads: Iterable[Waiting]) -> Waiting:
        """Which of one model's requests is served next, of the first of each class and tenant.

        In each class the tenant that has had least; of the classes the one whose request comes first with its age.
        """
        by_class: dict[int, tuple[float, int, Waiting]] = {}
        for head in heads:
            candidate = (self.shares.taken_s(head.demand), head.seq, head)
            known = by_class.get(head.demand.priority)
            if known is None or candidate[:2] < known[:2]:
                by_class[head.demand.priority] = candidate
        chosen = (head for _, _, head in by_class.values())
        return min(chosen, key=lambda head: (*self.aged(head.demand.priority, head.arrived_at), head.seq))

    def aged(self, priority: int, since: float) -> Rank:
        """The rank of a class with its age: after `aging_s` more of waiting a request comes before the next higher class."""
        if math.isinf(self.limits.aging_s):
            return (priority, since)
        return (0, since + priority * self.limits.aging_s / (LOW - NORMAL))

    def rank_model(self, model: ModelState, queue: AdmissionQueue) -> Rank:
        """Which wanted model is planned first. A later one gets only what the plans before it leave over."""
        head = queue.peek(model.queue_key)
        ranks = [(*self.aged(priority, since), seq) for priority, since, seq in self._load_requests(model, queue)]
        first, then, seq = min(ranks, default=(math.inf, math.inf, 0))
        ahead_s = 0.0 if head is None else min(MOST_AHEAD_S, head.ahead_s)
        return (first, then + ahead_s, seq, -model.spec.priority)

    def _load_requests(self, model: ModelState, queue: AdmissionQueue) -> Iterator[tuple[int, float, int]]:
        """The requests and orders to load a model: of each the class, since when, and the number in the order of arrival.

        A model that was evicted has had its turn: its backlog, however old, comes after those it was evicted for.
        """
        for each in queue.oldest_of_classes(model.queue_key):
            yield each.demand.priority, max(each.arrived_at, model.stopped_at), each.seq
        if model.asked_at is not None:
            yield NORMAL, max(model.asked_at, model.stopped_at), 0

    # ------------------------------------------------------------------------------------- who keeps its place how long

    def may_overtake(self, priority: float, other: float) -> bool:
        """May a model of `priority` take the place of one of priority `other` within its minimum residency?"""
        return priority > other

    def may_evict_higher(self) -> bool:
        """May a model go for one of lower priority, when nothing lower would do?"""
        return self.policy.eviction is Eviction.LAST_RESORT

    def users(self, uses: Mapping[ModelId, tuple[int, float]]) -> dict[ModelId, int]:
        """By model, the class that used it last, as it counts for eviction: of equal priority the least urgent class goes first.

        `uses`: of each model the class and how long ago that was, in seconds. With its age a use is no more urgent than a
        later one of a lower class; uses of one class alone are alike, however old.
        """
        if math.isinf(self.limits.aging_s):
            return {model: priority for model, (priority, _) in uses.items()}
        point_s = self.limits.aging_s / (LOW - NORMAL)
        by_age = sorted((idle_s + priority * point_s, -priority, model) for model, (priority, idle_s) in uses.items())
        lowest, counted = MOST_URGENT, {}
        for _, priority, model in by_age:
            counted[model] = lowest = max(lowest, -priority)
        return counted

    def value(self, reload_s: float, idle_s: float) -> float:
        """The value of staying loaded: seconds of reload per idle second. Of one class's models the least valuable goes first."""
        return reload_s / max(idle_s, 0.001)

    def keeps_place_until(self, model: ModelState, queue: AdmissionQueue, now: float) -> float:
        """Until when an idle worker that is in demand keeps its place within its minimum residency. `now`: it doesn't."""
        matures_at = self.matures_at(model)
        if now >= matures_at:
            return now
        quiet_at = model.last_used + self.linger_s(model)
        if now < quiet_at:
            return min(quiet_at, matures_at)
        return matures_at if queue.count(model.queue_key) else now

    def matures_at(self, model: ModelState) -> float:
        """When the minimum residency of its worker ends."""
        return model.ready_at + self.limits.min_residency_s

    def protected_until(self, model: ModelState) -> float:
        """Until when an idle worker is protected for the next request of a bulk pass (`hold_s`), in demand or not."""
        return model.last_used + model.spec.hold_s if model.spec.hold_s > 0 else -math.inf

    def as_urgent_at(self, waiter: ModelState, queue: AdmissionQueue, priority: int) -> float | None:
        """When the requests for the waiter become as urgent as this class, by their age; None: nobody asks for it."""
        point_s = self.limits.aging_s / (LOW - NORMAL)
        return min(
            (
                since if requested <= priority else since + (requested - priority) * point_s
                for requested, since, _ in self._load_requests(waiter, queue)
            ),
            default=None,
        )

    def kept_for_user_until(self, model: ModelState) -> float:
        """Until when a worker is protected for the class that uses it, or used it last, against less urgent requests.

        For its hold, or for the keep-alive that its entry or its requests set, which begin anew with each request; without
        any for the minimum residency, in demand or not.
        """
        requested_s = (demand.keep_alive_s or 0.0 for demand in model.in_flight.values())
        kept_s = max(model.spec.hold_s, model.spec.own_keep_alive_s, *requested_s)
        set_until = max(model.last_used + kept_s, model.kept_until)
        if set_until <= model.last_used:
            return self.matures_at(model)
        return math.inf if model.in_flight else set_until

    def yields_at(self, victim: ModelState, waiter: ModelState, queue: AdmissionQueue) -> float:
        """When the protections of a victim by its hold and by its last class end; the waiter's aging ends both."""
        protected_until = self.protected_until(victim)
        if victim.in_flight and victim.spec.hold_s > 0:  # it begins anew with each request
            protected_until = math.inf
        as_urgent_at = self.as_urgent_at(waiter, queue, victim.used_by)
        if as_urgent_at is None:
            return protected_until
        used_until = self.kept_for_user_until(victim)
        return max(min(used_until, as_urgent_at), min(protected_until, as_urgent_at + self.limits.aging_s))

    def linger_s(self, model: ModelState) -> float:
        """How long after a request the model counts as in demand: the same client may send another one."""
        return min(self.limits.linger_s, LINGER_SHARE * model.reload_s)

    def is_urgent(self, waiter: ModelState, priority: int, victim: ModelState) -> bool:
        """Does the victim get no new requests at once, for a waiter whose most urgent request is of this class?

        If its model has a higher priority, or if all that the victim does is of a lower class.
        """
        if self.may_overtake(waiter.spec.priority, victim.spec.priority):
            return True
        return bool(victim.in_flight) and priority < min(demand.priority for demand in victim.in_flight.values())

    def may_claim_at(self, waiter: ModelState, queue: AdmissionQueue, victim: ModelState) -> float:
        """From when on the victim gets no new requests, for this waiter. Infinite: not before its own requests have ended."""
        if self.is_urgent(waiter, queue.most_urgent(waiter.queue_key), victim):
            return -math.inf
        yields_at = self.yields_at(victim, waiter, queue)
        if victim.overtakes >= self.limits.overtakes:  # it has had its batch
            return yields_at
        return max(self.matures_at(victim), yields_at)

    def keep_loaded_until(self, model: ModelState) -> float:
        """Until when an idle worker stays although nobody uses it; infinite: until its memory is needed.

        The longest keep-alive counts: the model's, those of its last requests, its hold. Pinned and default models have none.
        """
        keep_alive_s = model.spec.keep_alive_s
        is_default = model.queue_key in self.policy.default_models and not model.spec.extra
        if keep_alive_s is None or model.pinned or is_default:
            return math.inf
        return max(model.last_used + max(keep_alive_s, model.spec.hold_s), model.kept_until)

    def quiet_at(self, model: ModelState, now: float) -> float:
        """When default models may come back, by the last use of this other model."""
        after_s = self.limits.default_after_s
        if model.in_flight or model.state is WorkerState.STARTING:
            return now + after_s
        quiet_at = model.last_used + after_s
        return max(quiet_at, self.matures_at(model), self.protected_until(model)) if model.has_worker else quiet_at

    # ----------------------------------------------------------------------------------------- how long requests may run

    def drain_s(self, spec: ModelSpec) -> float | None:
        """The configured limit for running requests of a model that has to go; None: nothing is configured."""
        return self.limits.drain_s if spec.drain_s is None else spec.drain_s

    def ordered_drain_s(self, spec: ModelSpec) -> float:
        """How long running requests may go on before an unload, a change or the shutdown. Never without end: it is an order."""
        drain_s = self.drain_s(spec)
        return ORDERED_DRAIN_S if drain_s is None or math.isinf(drain_s) else drain_s

    def drains_until(self, victim: ModelState, since: float) -> float:
        """Until when running requests may go on before an eviction: to their end, unless the configuration has a limit."""
        drain_s = self.drain_s(victim.spec)
        return math.inf if drain_s is None else since + drain_s

    def looks_again_at(self, victim: ModelState, now: float) -> float | None:
        """When to look, again, whether the clients of a worker that drains for another model still read; None: never."""
        return now + LOOK_S if self.drain_s(victim.spec) is None else None

    def has_stopped_reading(self, read: int) -> bool:
        """Has a client stopped reading, which has read so many bytes since the last look although there were more?"""
        return read < LEAST_READ_BPS * LOOK_S

    # --------------------------------------------------------------------------------------------------------- limits

    def queue_is_full(self, queued: int, total: int, most: int | None = None) -> str | None:
        """Why one more request can't be queued, with `queued` of its model and `total` of all waiting; None: it can.

        `most`: so many of its model may wait, if the model says.
        """
        if total >= self.limits.queue_total:
            return f"{total} requests are queued, the limit is {self.limits.queue_total}"
        most = self.limits.queue_per_model if most is None else most
        if queued >= most:
            return f"{queued} requests are queued for {MODEL_PLACEHOLDER}, the limit is {most}"
        return None

    def gives_up_at(self, since: float) -> float:
        """When a request, or a load that an operator asked for, will have waited too long."""
        return since + self.limits.queue_wait_s

    def is_full(self, model: ModelState, demand: Demand = DEFAULT_DEMAND) -> bool:
        """Has the worker as many requests as it gets at once, or too little context left for this one?

        A request that is alone always has a place: whether it is too long is for the worker to say.
        """
        if 0 < model.spec.target_inflight <= len(model.in_flight):
            return True
        if not model.spec.shared_context or not demand.tokens or not model.in_flight:
            return False
        taken = sum(each.tokens for each in model.in_flight.values())
        return taken + demand.tokens > model.spec.shared_context

    def limits_loaded(self) -> bool:
        """Is the number of loaded models limited, for any type?"""
        return bool(self.policy.max_loaded)

    def max_loaded(self, model_type: str) -> int | None:
        """How many models of this type may be loaded at once; None: any number."""
        return self.policy.max_loaded.get(model_type)

    def may_load(self, loading: int) -> bool:
        """May one more worker start on a device where `loading` are starting?"""
        return loading < self.limits.loads_per_device


class FirstCome(AdmissionPolicy):
    """The policy `first_come`: requests in the order of their arrival; the least recently used model goes first."""

    def next_request(self, heads: Iterable[Waiting]) -> Waiting:
        """See AdmissionPolicy."""
        return min(heads, key=lambda head: head.seq)

    def aged(self, priority: int, since: float) -> Rank:
        """See AdmissionPolicy."""
        return (0, since)

    def rank_model(self, model: ModelState, queue: AdmissionQueue) -> Rank:
        """See AdmissionPolicy."""
        first = min(((since, seq) for _, since, seq in self._load_requests(model, queue)), default=(math.inf, math.inf))
        return (0, *first, -model.spec.priority)

    def users(self, uses: Mapping[ModelId, tuple[int, float]]) -> dict[ModelId, int]:
        """See AdmissionPolicy."""
        return dict.fromkeys(uses, MOST_URGENT)

    def value(self, reload_s: float, idle_s: float) -> float:
        """See AdmissionPolicy."""
        return 1 / max(idle_s, 0.001)

    def as_urgent_at(self, waiter: ModelState, queue: AdmissionQueue, priority: int) -> float | None:
        """See AdmissionPolicy."""
        return min((since for _, since, _ in self._load_requests(waiter, queue)), default=None)

    def is_urgent(self, waiter: ModelState, priority: int, victim: ModelState) -> bool:
        """See AdmissionPolicy."""
        return self.may_overtake(waiter.spec.priority, victim.spec.priority)


POLICIES: Final[Mapping[str, type[AdmissionPolicy]]] = {"fair": AdmissionPolicy, "first_come": FirstCome}
"""The policies by their names in the configuration."""


def policy_of(limits: Limits, policy: Policy) -> AdmissionPolicy:
    """The policy that the configuration names."""
    return POLICIES[policy.admission](limits, policy)
