"""The admission policy: the order of requests, overtaking, how long a model keeps its place, and every limit.

The queue asks for the order of one model's requests and whether the queue is full; `placement` asks for the order of plans;
`eviction` asks when a waiter may claim a victim; the planner asks which model may evict which; `requests` and `timers` ask
for timeouts. These modules contain no order or limit of their own.

Another policy (e.g. batching by model) is a subclass of `AdmissionPolicy` that overrides some decisions. The configuration
selects a policy by its name in `POLICIES`; `Scheduler(policy)` accepts any other. A policy depends only on its arguments and
its own counts, so that a replay decides the same.
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
"""A sort key; the smallest comes first. Ties are broken by the order of arrival, or by the model's id."""

BACKGROUND_RANK: Rank = (math.inf, math.inf, 0.0)
"""The rank of models without requests; the model's priority is appended."""

MOST_AHEAD_S = 60.0
"""Maximum delay of a model's rank, in seconds, because its tenant has used more worker time than others."""

LINGER_SHARE = 0.02
"""As a fraction of a model's load time: waiting this long for its next request costs less than an unnecessary reload."""

ORDERED_DRAIN_S = 30.0
"""Time for running requests before an unload, a change or the shutdown, unless `drain_s` is configured."""

LOOK_S = 30.0
LEAST_READ_BPS = 4096
"""A client has stopped reading if for `LOOK_S` it blocks its answer and reads fewer bytes per second than this. Far below
the speed of any network, yet within `LOOK_S` more than one step of a TCP window (64 KiB on loopback), the smallest
progress of a slow reader."""


class AdmissionPolicy:
    """The default policy: class with age, then fair shares of the tenants, then arrival; bounded thrash between models."""

    def __init__(self, limits: Limits | None = None, policy: Policy | None = None) -> None:
        self.limits = limits or Limits()
        self.policy = policy or Policy()
        self.accounts = Accounts()  # use of limited tenants; `requests` checks and charges them
        self.shares = FairShares()  # worker time of every tenant; queue and dispatch charge it

    def configured(self, limits: Limits, policy: Policy) -> AdmissionPolicy:
        """The policy with new numbers: this one or, if the name changed, a new one that takes over the counts.

        Queued requests stay, even beyond the new limits; the new policy limits their waiting time.
        """
        if policy.admission == self.policy.admission:
            self.limits, self.policy = limits, policy
            return self
        other = policy_of(limits, policy)
        other.accounts, other.shares = self.accounts, self.shares
        return other

    # ---------------------------------------------------------------------------------------------------------- order

    def rank_request(self, waiting: Waiting) -> Rank:
        """The order among one tenant's requests of one class for one model. Called once per request, on arrival."""
        del waiting
        return ()

    def next_request(self, heads: Iterable[Waiting]) -> Waiting:
        """The next request of one model to serve. `heads`: the first request of each class and tenant.

        Within a class, the tenant with the least use; among classes, the request with the best rank by class and age.
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
        """The rank by class and age: after an extra wait of `aging_s` a request precedes the next higher class."""
        if math.isinf(self.limits.aging_s):
            return (priority, since)
        return (0, since + priority * self.limits.aging_s / (LOW - NORMAL))

    def rank_model(self, model: ModelState, queue: AdmissionQueue) -> Rank:
        """The order in which wanted models are planned. A later model gets only memory that earlier plans leave."""
        head = queue.peek(model.queue_key)
        ranks = [(*self.aged(priority, since), seq) for priority, since, seq in self._load_requests(model, queue)]
        first, then, seq = min(ranks, default=(math.inf, math.inf, 0))
        ahead_s = 0.0 if head is None else min(MOST_AHEAD_S, head.ahead_s)
        return (first, then + ahead_s, seq, -model.spec.priority)

    def _load_requests(self, model: ModelState, queue: AdmissionQueue) -> Iterator[tuple[int, float, int]]:
        """The requests and load orders for a model, as (class, waiting since, arrival number).

        After an eviction, the model's backlog counts from the eviction: the model that evicted it comes first.
        """
        for each in queue.oldest_of_classes(model.queue_key):
            yield each.demand.priority, max(each.arrived_at, model.stopped_at), each.seq
        if model.asked_at is not None:
            yield NORMAL, max(model.asked_at, model.stopped_at), 0

    # -------------------------------------------------------------------------------------- how long models keep places

    def may_overtake(self, priority: float, other: float) -> bool:
        """Whether a model of `priority` may evict one of priority `other` within its minimum residency."""
        return priority > other

    def may_evict_higher(self) -> bool:
        """Whether a model may be evicted for one of lower priority, if evicting lower ones is not enough."""
        return self.policy.eviction is Eviction.LAST_RESORT

    def users(self, uses: Mapping[ModelId, tuple[int, float]]) -> dict[ModelId, int]:
        """By model, the effective class of its last use, for eviction: of equal priority the least urgent class is evicted first.

        `uses`: by model, the class and the age of the last use, in seconds. By aging, a use becomes no more urgent than a
        later use of a lower class; uses of one class are equal, however old.
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
        """The value of keeping a model: seconds of reload per idle second. Within a class the least valuable is evicted first."""
        return reload_s / max(idle_s, 0.001)

    def keeps_place_until(self, model: ModelState, queue: AdmissionQueue, now: float) -> float:
        """Until when an idle worker in demand keeps its place within its minimum residency; `now` if it has no protection."""
        matures_at = self.matures_at(model)
        if now >= matures_at:
            return now
        quiet_at = model.last_used + self.linger_s(model)
        if now < quiet_at:
            return min(quiet_at, matures_at)
        return matures_at if queue.count(model.queue_key) else now

    def matures_at(self, model: ModelState) -> float:
        """When the minimum residency of the model's worker ends."""
        return model.ready_at + self.limits.min_residency_s

    def protected_until(self, model: ModelState) -> float:
        """Until when an idle worker is protected for its next request by `hold_s`, in demand or not."""
        return model.last_used + model.spec.hold_s if model.spec.hold_s > 0 else -math.inf

    def as_urgent_at(self, waiter: ModelState, queue: AdmissionQueue, priority: int) -> float | None:
        """When the waiter's requests become, by aging, as urgent as this class; None: it has no requests."""
        point_s = self.limits.aging_s / (LOW - NORMAL)
        return min(
            (
                since if requested <= priority else since + (requested - priority) * point_s
                for requested, since, _ in self._load_requests(waiter, queue)
            ),
            default=None,
        )

    def kept_for_user_until(self, model: ModelState) -> float:
        """Until when the class of a worker's current or last use protects the worker against less urgent requests.

        For its hold, or for the keep-alive of its entry or its requests, which restart with each request; without any of
        these, for the minimum residency, in demand or not.
        """
        requested_s = (demand.keep_alive_s or 0.0 for demand in model.in_flight.values())
        kept_s = max(model.spec.hold_s, model.spec.own_keep_alive_s, *requested_s)
        set_until = max(model.last_used + kept_s, model.kept_until)
        if set_until <= model.last_used:
            return self.matures_at(model)
        return math.inf if model.in_flight else set_until

    def yields_at(self, victim: ModelState, waiter: ModelState, queue: AdmissionQueue) -> float:
        """When a victim's protections by its hold and by its last class end. The waiter's aging limits both."""
        protected_until = self.protected_until(victim)
        if victim.in_flight and victim.spec.hold_s > 0:  # the hold restarts with each request
            protected_until = math.inf
        as_urgent_at = self.as_urgent_at(waiter, queue, victim.used_by)
        if as_urgent_at is None:
            return protected_until
        used_until = self.kept_for_user_until(victim)
        return max(min(used_until, as_urgent_at), min(protected_until, as_urgent_at + self.limits.aging_s))

    def linger_s(self, model: ModelState) -> float:
        """How long after a request the model counts as in demand: the same client may send another request."""
        return min(self.limits.linger_s, LINGER_SHARE * model.reload_s)

    def is_urgent(self, waiter: ModelState, priority: int, victim: ModelState) -> bool:
        """Whether the victim gets no new requests from now on, for a waiter with most urgent class `priority`.

        True if the waiter has a higher model priority, or if all running requests of the victim are of a lower class.
        """
        if self.may_overtake(waiter.spec.priority, victim.spec.priority):
            return True
        return bool(victim.in_flight) and priority < min(demand.priority for demand in victim.in_flight.values())

    def may_claim_at(self, waiter: ModelState, queue: AdmissionQueue, victim: ModelState) -> float:
        """When this waiter's claim begins: the victim then gets no new requests. Infinite: not before its own requests have ended."""
        if self.is_urgent(waiter, queue.most_urgent(waiter.queue_key), victim):
            return -math.inf
        yields_at = self.yields_at(victim, waiter, queue)
        if victim.overtakes >= self.limits.overtakes:  # it has used up its overtakes
            return yields_at
        return max(self.matures_at(victim), yields_at)

    def keep_loaded_until(self, model: ModelState) -> float:
        """Until when an idle worker stays loaded; infinite: until its memory is needed.

        The longest counts: the model's keep-alive, those of its last requests, its hold. Infinite for pinned and default models.
        """
        keep_alive_s = model.spec.keep_alive_s
        is_default = model.queue_key in self.policy.default_models and not model.spec.extra
        if keep_alive_s is None or model.pinned or is_default:
            return math.inf
        return max(model.last_used + max(keep_alive_s, model.spec.hold_s), model.kept_until)

    def quiet_at(self, model: ModelState, now: float) -> float:
        """When default models may return, by the last use of this other model."""
        after_s = self.limits.default_after_s
        if model.in_flight or model.state is WorkerState.STARTING:
            return now + after_s
        quiet_at = model.last_used + after_s
        return max(quiet_at, self.matures_at(model), self.protected_until(model)) if model.has_worker else quiet_at

    # ----------------------------------------------------------------------------------------- how long requests may run

    def drain_s(self, spec: ModelSpec) -> float | None:
        """The configured time limit for running requests of a model to evict; None: not configured."""
        return self.limits.drain_s if spec.drain_s is None else spec.drain_s

    def ordered_drain_s(self, spec: ModelSpec) -> float:
        """How long running requests may continue before an unload, a change or the shutdown. Always finite: it is an order."""
        drain_s = self.drain_s(spec)
        return ORDERED_DRAIN_S if drain_s is None or math.isinf(drain_s) else drain_s

    def drains_until(self, victim: ModelState, since: float) -> float:
        """Until when running requests may continue before an eviction: to their end, unless a limit is configured."""
        drain_s = self.drain_s(victim.spec)
        return math.inf if drain_s is None else since + drain_s

    def looks_again_at(self, victim: ModelState, now: float) -> float | None:
        """When to check next whether the clients of a worker that drains for another model still read; None: never."""
        return now + LOOK_S if self.drain_s(victim.spec) is None else None

    def has_stopped_reading(self, read: int) -> bool:
        """Whether a client has stopped reading. `read`: bytes read since the last check, although more were available."""
        return read < LEAST_READ_BPS * LOOK_S

    # --------------------------------------------------------------------------------------------------------- limits

    def queue_is_full(self, queued: int, total: int, most: int | None = None) -> str | None:
        """Why one more request can't be queued, with `queued` of its model and `total` of all waiting; None: it can.

        `most`: the model's own limit of waiting requests; None: the general limit.
        """
        if total >= self.limits.queue_total:
            return f"{total} requests are queued, the limit is {self.limits.queue_total}"
        most = self.limits.queue_per_model if most is None else most
        if queued >= most:
            return f"{queued} requests are queued for {MODEL_PLACEHOLDER}, the limit is {most}"
        return None

    def gives_up_at(self, since: float) -> float:
        """When a request, or a load that an operator ordered, will have waited too long."""
        return since + self.limits.queue_wait_s

    def is_full(self, model: ModelState, demand: Demand = DEFAULT_DEMAND) -> bool:
        """Whether the worker has its maximum of concurrent requests, or too little context left for this one.

        A single request always has a place: the worker itself rejects one that is too long.
        """
        if 0 < model.spec.target_inflight <= len(model.in_flight):
            return True
        if not model.spec.shared_context or not demand.tokens or not model.in_flight:
            return False
        taken = sum(each.tokens for each in model.in_flight.values())
        return taken + demand.tokens > model.spec.shared_context

    def limits_loaded(self) -> bool:
        """Whether the number of loaded models is limited, for any type."""
        return bool(self.policy.max_loaded)

    def max_loaded(self, model_type: str) -> int | None:
        """How many models of this type may be loaded at once; None: any number."""
        return self.policy.max_loaded.get(model_type)

    def may_load(self, loading: int) -> bool:
        """Whether one more worker may start on a device where `loading` are starting."""
        return loading < self.limits.loads_per_device


class FirstCome(AdmissionPolicy):
    """The policy `first_come`: requests in order of arrival; the least recently used model is evicted first."""

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
