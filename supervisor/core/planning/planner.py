"""The planner: which models to evict so that another can be loaded, and why.

`plan` is a pure function of a demand and a snapshot; equal inputs give equal plans, and every tie is broken by an id. It
follows one numbered decision tree, whose numbers are repeated in the code:

0. Loaded already → Admit, needing 0. The candidates are the demand's device sets whose devices are all large enough.
   None → Refuse. Sets with a device out of service don't count; no others → Refuse as well.
1. The model fits in the free memory of an unblocked device set, and `max_loaded` of its type is not exceeded → Admit.
2. It fits after evicting residents without a block and of no higher priority → Evict them.
3. It would fit after evicting temporarily blocked residents too, or on a temporarily blocked device set → Wait.
4. `last_resort` only: like 2, with residents of higher priority too → Evict.
5. `last_resort` only: like 3, with residents of higher priority too → Wait.
6. Refuse, naming the obstacles.

The memory of a STOPPING resident returns anyway, so nothing is evicted in its place: in 2 to 5 it counts as coming, and a
plan that needs nothing else is a Wait for it. MIN_RESIDENCY, PROTECTED and LAST_USED do not block a demand
that may overtake the resident. A PINNED resident is never evicted.

Victims are chosen in one order: lowest priority, draining, last used by the least urgent class (with its age), least valuable
(cheap to reload for its idle time), id. First the victims that `max_loaded` requires, on any device; memory that they free
on this device set counts. Then, for space, whole priorities from the lowest up, and of the last priority the smallest set
that fits, of models that the least urgent classes used last (docs/adr/0002-eviction-order.md, 0025-answers-and-users.md). Among
device sets: lowest priority touched, least urgent class touched, fewest victims, least value, ids.

A demand with a `spread` is first planned without it. If that is a refusal, the tree is followed again for parts on several
devices, which depend on the possible victims: `multi_device`.

A device set is one device, or several over which a model is split. Space is made device by device; victims for one device
count for the next, and at the end superfluous victims stay. A resident that is split over several devices returns its
memory on each of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from supervisor.core.demand import LEAST_URGENT, NORMAL
from supervisor.core.memory.device_sets import Spread
from supervisor.core.messages import listed, outages_listed, reserved_text, residents_listed
from supervisor.core.planning.device_set_fit import SHOWN_DEVICES, DeviceSet, too_large
from supervisor.core.planning.multi_device import SplitPlan
from supervisor.core.planning.plans import (
    PASSING,
    Admit,
    DeviceView,
    Evict,
    EvictionBlock,
    EvictionRank,
    LoadDemand,
    Plan,
    Refuse,
    Resident,
    Snapshot,
    Wait,
)
from supervisor.core.types import PARTNER, DeviceId, Devices, ModelId

NEVER_EVICTED = frozenset({EvictionBlock.PINNED, EvictionBlock.STOPPING})
"""Never victims: PINNED stays, STOPPING ends already."""


def plan(demand: LoadDemand, snapshot: Snapshot) -> Plan:
    """The plan by which `demand` can be loaded.

    An Evict may also rely on memory that STOPPING residents are about to return: when the victims have ended, plan again
    instead of loading at once.
    """
    # 0.
    for resident in snapshot.residents:
        if resident.model == demand.model and resident.block is not EvictionBlock.STOPPING:
            return Admit(resident.devices, (), f"already loaded on {listed(resident.devices)}")
    views = {view.id: view for view in snapshot.devices}
    answer = _plan_options(demand, snapshot, views)
    if demand.spread is None or not isinstance(answer, Refuse):
        return answer
    apart = _plan_spread(demand, demand.spread, snapshot, views)
    return answer if isinstance(apart, Refuse) and apart.fits_nowhere and not answer.fits_nowhere else apart


def _plan_options(demand: LoadDemand, snapshot: Snapshot, views: Mapping[DeviceId, DeviceView]) -> Plan:
    known = sorted(
        (
            DeviceSet(option, tuple(views[device] for device in option.devices))
            for option in demand.options
            if views.keys() >= set(option.devices)
        ),
        key=lambda device_set: device_set.option.devices,
    )
    candidates = [device_set for device_set in known if device_set.is_large_enough]
    if not candidates:
        return Refuse(too_large(known), fits_nowhere=True)
    out = {view.id: view for device_set in candidates for view in device_set.views if view.outage is not None}
    candidates = [device_set for device_set in candidates if out.keys().isdisjoint(device_set.option.devices)]
    if not candidates:
        return _refuse_outage(out)

    # 1.
    excess = _excess_of_type(demand, snapshot)
    if excess == 0:
        for device_set in candidates:
            if not device_set.blocked and all(short <= 0 for short in device_set.short().values()):
                return Admit(device_set.option.devices, device_set.option.need_mib, device_set.needs())
    return _Case(demand, snapshot, candidates, excess).plan()


def _plan_spread(demand: LoadDemand, spread: Spread, snapshot: Snapshot, views: Mapping[DeviceId, DeviceView]) -> Plan:
    known = [views[device] for device in spread.devices if device in views]
    if SplitPlan(spread, known).parts_when_empty() is None:
        return Refuse(SplitPlan(spread, known).too_large(), fits_nowhere=True)
    apart = SplitPlan(spread, [view for view in known if view.outage is None])
    at_most = apart.parts_when_empty()
    if at_most is None:
        return _refuse_outage({view.id: view for view in known if view.outage is not None})

    # 1.
    excess = _excess_of_type(demand, snapshot)
    if excess == 0 and (now := apart.parts_now()) is not None:
        return Admit(now.option.devices, now.option.need_mib, now.needs())
    return _Case(demand, snapshot, [at_most], excess, apart).plan()


def _refuse_outage(out: Mapping[DeviceId, DeviceView]) -> Refuse:
    return Refuse(outages_listed([*out.values()][:SHOWN_DEVICES], len(out)), next(iter(out.values())).outage)


@dataclass(frozen=True, slots=True)
class Fit:
    """A way to fit the model on `device_set`: evict `victims`, and wait for the memory of `coming` (STOPPING) residents."""

    device_set: DeviceSet
    victims: tuple[Resident, ...]
    coming: tuple[Resident, ...]
    standing: EvictionRank  # the highest of the victims
    value: float  # of all victims

    def cost(self) -> tuple[bool, EvictionRank, int, float, Devices]:
        """Sort key among device sets; less is better."""
        return (
            bool(self.device_set.blocked),
            self.standing,
            len(self.victims),
            self.value,
            self.device_set.option.devices,
        )


class _Case:
    """One demand against one snapshot, after rule 1."""

    def __init__(
        self,
        demand: LoadDemand,
        snapshot: Snapshot,
        candidates: Sequence[DeviceSet],
        excess: int,
        apart: SplitPlan | None = None,
    ) -> None:
        self.demand = demand
        self.admission = snapshot.admission
        self.candidates = candidates
        self.excess = excess
        self.apart = (
            apart  # set iff the model is split over several devices: then `candidates` only serve to list the obstacles
        )
        devices = {view.id for device_set in candidates for view in device_set.views}
        if apart is not None:
            devices = set(apart.views)
        concerned = [
            resident
            for resident in snapshot.residents
            if not devices.isdisjoint(resident.devices) or (excess and resident.type == demand.type)
        ]
        self.users = self.admission.users(
            {each.model: (each.used_by, each.idle_s) for each in concerned if each.block not in NEVER_EVICTED}
        )
        self.residents = sorted(concerned, key=self._eviction_order)
        self.coming = _by_device(resident for resident in self.residents if resident.block is EvictionBlock.STOPPING)

    def _eviction_order(self, resident: Resident) -> tuple[EvictionRank, float, str]:
        """Sort key of victims; the smallest is evicted first."""
        return self._eviction_rank(resident), self._value_loaded(resident), resident.model

    def _eviction_rank(self, resident: Resident) -> EvictionRank:
        if resident.block is EvictionBlock.DRAINING:  # draining ones first: else two drain for one waiter
            return resident.priority, -LEAST_URGENT - 1
        return resident.priority, -self.users.get(resident.model, NORMAL)

    def _value_loaded(self, resident: Resident) -> float:
        if resident.block is EvictionBlock.DRAINING:
            return 0.0
        return self.admission.value(resident.reload_s, resident.idle_s)

    def plan(self) -> Plan:
        for spare_higher in [True, False] if self.admission.may_evict_higher() else [True]:
            # 2. and 4.
            fit = self.best(spare_higher=spare_higher, blocked=False)
            if fit is not None:
                return self.wait(fit) if not fit.victims else self.evict(fit)
            # 3. and 5.
            fit = self.best(spare_higher=spare_higher, blocked=True)
            if fit is not None:
                return self.wait(fit)
        # 6.
        return Refuse(self.refusal())

    def best(self, *, spare_higher: bool, blocked: bool) -> Fit | None:
        """The cheapest fit over all device sets; None when there is none.

        `blocked`: residents and device sets that are blocked only for now count too.
        """
        pool = self._possible_victims(spare_higher=spare_higher, blocked=blocked)
        typed = tuple(resident for resident in pool if resident.type == self.demand.type)[: self.excess]
        if len(typed) < self.excess:
            return None
        here = _by_device(pool)
        if self.apart is not None:
            open_sets = self.apart.parts_after_evicting(pool, typed, self.coming, blocked=blocked)
        else:
            open_sets = [device_set for device_set in self.candidates if blocked or not device_set.blocked]
        fits = [self._fit_on(device_set, typed, here) for device_set in open_sets]
        return min((fit for fit in fits if fit is not None), key=Fit.cost, default=None)

    def _possible_victims(self, *, spare_higher: bool, blocked: bool) -> list[Resident]:
        """The residents that may be victims, in eviction order."""
        return [
            resident
            for resident in self.residents
            if resident.block not in NEVER_EVICTED
            and (blocked or not self._is_blocked(resident))
            and not (spare_higher and resident.priority > self.demand.priority)
        ]

    def _fit_on(
        self, device_set: DeviceSet, typed: tuple[Resident, ...], here: Mapping[DeviceId, list[Resident]]
    ) -> Fit | None:
        short = device_set.short()
        evicted = list(typed)
        for device, mib in short.items():
            going = {resident.model for resident in evicted}
            candidates = [r for r in here.get(device, ()) if r.model not in going and r.reserved_on(device) > 0]
            space = self._victims_for_space(
                candidates,
                device,
                mib - _reserved_mib(evicted, device) - _reserved_mib(self.coming.get(device, ()), device),
            )
            if space is None:
                return None
            evicted += space
        if len(short) > 1:
            evicted = self._without_superfluous(short, evicted, typed)
        coming = {
            resident.model: resident
            for device, mib in short.items()
            if mib > _reserved_mib(evicted, device)
            for resident in self.coming.get(device, ())
        }
        victims = tuple(sorted(evicted, key=self._eviction_order))
        standing = max(map(self._eviction_rank, victims), default=(-math.inf, 0))
        return Fit(device_set, victims, tuple(coming.values()), standing, math.fsum(map(self._value_loaded, victims)))

    def _victims_for_space(
        self, ordered: Sequence[Resident], device: DeviceId, short_mib: int
    ) -> list[Resident] | None:
        """All residents of the lowest priorities, then the smallest set that completes the space, of the least urgent classes."""
        space: list[Resident] = []
        if short_mib <= 0:
            return space
        for _, members in groupby(ordered, key=lambda resident: resident.priority):
            some: list[Resident] = []
            for _, alike in groupby(members, key=self._eviction_rank):
                some += alike
                if _reserved_mib(some, device) >= short_mib:
                    return space + _smallest_victim_set(some, device, short_mib)
            space += some
            short_mib -= _reserved_mib(some, device)
        return None

    def _without_superfluous(
        self, short: Mapping[DeviceId, int], evicted: list[Resident], typed: tuple[Resident, ...]
    ) -> list[Resident]:
        """Remove victims that can stay after all; the last in eviction order is spared first."""
        spare = {
            device: _reserved_mib(evicted, device) + _reserved_mib(self.coming.get(device, ()), device) - mib
            for device, mib in short.items()
        }
        spared: set[ModelId] = set()
        for resident in sorted(evicted, key=self._eviction_order, reverse=True):
            if resident not in typed and all(resident.reserved_on(device) <= mib for device, mib in spare.items()):
                spared.add(resident.model)
                for device in spare:
                    spare[device] -= resident.reserved_on(device)
        return [resident for resident in evicted if resident.model not in spared]

    def _is_blocked(self, resident: Resident) -> bool:
        if resident.block in PASSING:
            return not self.admission.may_overtake(self.demand.priority, resident.priority)
        return resident.block is not EvictionBlock.NONE

    def evict(self, fit: Fit) -> Evict:
        last_resort = any(victim.priority > self.demand.priority for victim in fit.victims)
        reason = f"{self._shortage_text(fit)}; {'as a last resort ' if last_resort else ''}evicting {residents_listed(fit.victims)}"
        if fit.coming:
            reason += f", after {residents_listed(fit.coming)}"
        return Evict(fit.device_set.option.devices, fit.device_set.option.need_mib, _model_ids(fit.victims), reason)

    def wait(self, fit: Fit) -> Wait:
        waits_for = (*fit.coming, *(victim for victim in fit.victims if self._is_blocked(victim)))
        others = [victim for victim in fit.victims if not self._is_blocked(victim)]
        parts = []
        if blocked := [f"{view.label} ({view.blocked})" for view in fit.device_set.blocked]:
            parts.append(f"waiting for {listed(blocked)}")
        if waits_for:
            parts.append(f"waiting for {residents_listed(waits_for)}")
        if others:
            parts.append(f"then evicting {residents_listed(others)}")
        reason = "; ".join((self._shortage_text(fit), *parts))
        return Wait(fit.device_set.option.devices, fit.device_set.option.need_mib, _model_ids(waits_for), reason)

    def _shortage_text(self, fit: Fit) -> str:
        return fit.device_set.needs() + (f", {self._limit_text()}" if self.excess else "")

    def _limit_text(self) -> str:
        return f"max_loaded allows {self.admission.max_loaded(self.demand.type)} {self.demand.type}"

    def refusal(self) -> str:
        """The obstacles on each device set, for people."""
        shown = [self._obstacles_text(device_set) for device_set in self.candidates[:SHOWN_DEVICES]]
        hidden = len(self.candidates) - len(shown)
        if hidden:
            kind = "place" if any(len(device_set.views) > 1 for device_set in self.candidates) else "device"
            shown.append(f"{hidden} more {kind if hidden == 1 else f'{kind}s'} can't take it either")
        return "; ".join(shown)

    def _obstacles_text(self, device_set: DeviceSet) -> str:
        """The obstacles on one device set: the limit by type if it can't be met, memory if it would not suffice."""
        pool = self._possible_victims(spare_higher=not self.admission.may_evict_higher(), blocked=True)
        limited = sum(r.type == self.demand.type for r in pool) < self.excess
        going = {*pool, *(r for r in self.residents if r.block is EvictionBlock.STOPPING)}
        scarce = {device for device, mib in device_set.short().items() if mib > _reserved_mib(going, device)}
        remaining = [
            r
            for r in self.residents
            if r not in going and (not scarce.isdisjoint(r.devices) or (limited and r.type == self.demand.type))
        ]
        ways = [self._limit_text()] if limited else []
        ways += [
            f"{'' if r.type == PARTNER else 'pinned '}{r.model} holds {reserved_text(r)}"
            for r in remaining
            if r.block is EvictionBlock.PINNED
        ]
        protected = [
            f"{r.model} ({r.type}, priority {r.priority}, {reserved_text(r)})"
            for r in remaining
            if r.block is not EvictionBlock.PINNED
        ]
        if protected:
            ways.append(f"the strict policy protects {' and '.join(protected)}")
        for view in device_set.views:
            outside = view.usable_mib - view.free_mib - _reserved_mib(self.residents, view.id)
            if view.id in scarce and outside > 0:
                where = f" on {view.label}" if len(device_set.views) > 1 else ""
                ways.append(f"{outside} MiB are used outside or promised to others{where}")
        return f"{device_set.needs()}; in the way: {', '.join(ways)}"


def _excess_of_type(demand: LoadDemand, snapshot: Snapshot) -> int:
    """How many residents of its type must go before one more is allowed."""
    limit = snapshot.admission.max_loaded(demand.type)
    if limit is None:
        return 0
    loaded = sum(r.type == demand.type and r.block is not EvictionBlock.STOPPING for r in snapshot.residents)
    return max(0, loaded - limit + 1)


def _smallest_victim_set(ordered: Sequence[Resident], device: DeviceId, short_mib: int) -> list[Resident]:
    """Of the sets with the fewest members that hold `short_mib` there, the one that comes first in the order.

    All members together must hold enough. The result is exact: a member is taken iff the largest later members can provide
    the rest, which holds iff a smallest set contains it and all taken before. O(members x set size).
    """
    later = sorted(resident.reserved_on(device) for resident in ordered)
    count = 1
    while sum(later[-count:]) < short_mib:
        count += 1
    taken: list[Resident] = []
    for resident in ordered:
        reserved_mib = resident.reserved_on(device)
        del later[bisect_left(later, reserved_mib)]
        rest = count - len(taken) - 1
        if reserved_mib + sum(later[len(later) - rest :]) >= short_mib:
            taken.append(resident)
            short_mib -= reserved_mib
            if rest == 0:
                break
    return taken


def _by_device(residents: Iterable[Resident]) -> dict[DeviceId, list[Resident]]:
    devices: defaultdict[DeviceId, list[Resident]] = defaultdict(list)
    for resident in residents:
        for device in resident.devices:
            devices[device].append(resident)
    return devices


def _reserved_mib(residents: Iterable[Resident], device: DeviceId) -> int:
    return sum(resident.reserved_on(device) for resident in residents)


def _model_ids(residents: Iterable[Resident]) -> tuple[ModelId, ...]:
    return tuple(resident.model for resident in residents)
