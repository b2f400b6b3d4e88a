"""Who has to go so that a model can be loaded, and why.

`plan` is a pure function of a demand and a snapshot; equal inputs give equal plans, every tie ends in an id. It walks
one numbered tree, whose numbers come back in the code:

0. Places are the demand's options on devices large enough for it. None → Refuse. Loaded already → Admit, needing 0.
1. It fits in what is free on an unblocked device, and `max_loaded` of its type is not exceeded → Admit.
2. It fits once residents without a hold and of no higher priority are gone → Evict them.
3. It would fit if those that are held only for now could go as well, or the device is blocked only for now → Wait.
4. `last_resort` only: like 2, with residents of higher priority too → Evict.
5. `last_resort` only: like 3, with residents of higher priority too → Wait.
6. Refuse, naming what is in the way.

A resident that is STOPPING goes whatever we decide: nothing is evicted for memory that is already on its way, so in
2 to 5 its memory counts as coming, and a plan that needs nothing else is a Wait for it. A YOUNG resident has no hold
against a demand of higher priority. A PINNED one never goes.

Victims are chosen in one order: lowest priority, least valuable (cheap to reload for the time it idled), id. First
those that `max_loaded` asks for, from any device; what they return on the device counts. Then, for space, whole
priority classes from the lowest up, and of the last class the smallest set that fits (docs/adr/0002-eviction-order.md).
Among devices: lowest class touched, fewest victims, least value, id.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from supervisor.core.types import (
    Admit,
    Demand,
    DeviceId,
    DeviceView,
    Evict,
    Eviction,
    Hold,
    ModelId,
    Option,
    Plan,
    Refuse,
    Resident,
    Snapshot,
    Wait,
)

SHOWN_DEVICES = 3
"""A refusal explains this many devices; of the others it only says how many there are."""


def plan(demand: Demand, snapshot: Snapshot) -> Plan:
    """What must happen so that `demand` can be loaded now.

    An Evict may rely on memory that STOPPING residents are about to return besides its victims': when the victims are
    gone, ask again instead of loading at once.
    """
    # 0.
    views = {view.id: view for view in snapshot.devices}
    known = sorted(
        (Place(option, views[option.device]) for option in demand.options if option.device in views),
        key=lambda place: place.view.id,
    )
    places = [place for place in known if place.option.need_mib <= place.view.usable_mib]
    for resident in snapshot.residents:
        if resident.model == demand.model and resident.hold is not Hold.STOPPING:
            return Admit(resident.device, 0, f"already loaded on {resident.device}")
    if not places:
        return Refuse(_too_large(known))

    # 1.
    excess = _excess(demand, snapshot)
    if excess == 0:
        for place in places:
            if place.view.blocked is None and place.option.need_mib <= place.view.free_mib:
                return Admit(place.view.id, place.option.need_mib, _needs(place))

    case = _Case(demand, snapshot, places, excess)
    protected = [True] if snapshot.policy.eviction is Eviction.STRICT else [True, False]
    for spare_higher in protected:
        # 2. and 4.
        fit = case.best(spare_higher=spare_higher, held=False)
        if fit is not None:
            return case.wait(fit) if not fit.victims else case.evict(fit)
        # 3. and 5.
        fit = case.best(spare_higher=spare_higher, held=True)
        if fit is not None:
            return case.wait(fit)
    # 6.
    return Refuse(case.refusal())


def value(resident: Resident) -> float:
    """What evicting it is expected to cost: seconds of reload per second it was idle. The least valuable goes first."""
    return resident.reload_s / max(resident.idle_s, 0.001)


def eviction_order(resident: Resident) -> tuple[int, float, str]:
    """Sort key: who goes first."""
    return resident.priority, value(resident), resident.model


@dataclass(frozen=True, slots=True)
class Place:
    """A device that is large enough, and what the model takes there."""

    option: Option
    view: DeviceView


@dataclass(frozen=True, slots=True)
class Fit:
    """A way to make it fit at `place`: `victims` go, and those `coming` (STOPPING) return what they hold."""

    place: Place
    victims: tuple[Resident, ...]
    coming: tuple[Resident, ...]

    def cost(self) -> tuple[bool, float, int, float, str]:
        """Sort key among devices; less is better."""
        return (
            self.place.view.blocked is not None,
            max((victim.priority for victim in self.victims), default=-math.inf),
            len(self.victims),
            math.fsum(value(victim) for victim in self.victims),
            self.place.view.id,
        )


class _Case:
    """One demand against one snapshot, past rule 1."""

    def __init__(self, demand: Demand, snapshot: Snapshot, places: Sequence[Place], excess: int) -> None:
        self.demand = demand
        self.policy = snapshot.policy
        self.places = places
        self.excess = excess
        devices = {place.view.id for place in places}
        self.residents = sorted(
            (
                resident
                for resident in snapshot.residents
                if resident.device in devices or (excess and resident.type == demand.type)
            ),
            key=eviction_order,
        )
        self.coming = _by_device(resident for resident in self.residents if resident.hold is Hold.STOPPING)

    def best(self, *, spare_higher: bool, held: bool) -> Fit | None:
        """The cheapest fit over all places; None when there is none.

        `held`: residents with a passing hold may go too, and blocked devices count.
        """
        pool = self._pool(spare_higher=spare_higher, held=held)
        typed = tuple(resident for resident in pool if resident.type == self.demand.type)[: self.excess]
        if len(typed) < self.excess:
            return None
        here = _by_device(resident for resident in pool if resident not in typed and resident.held_mib > 0)
        fits = [self._fit(place, typed, here) for place in self.places if held or place.view.blocked is None]
        return min((fit for fit in fits if fit is not None), key=Fit.cost, default=None)

    def _pool(self, *, spare_higher: bool, held: bool) -> list[Resident]:
        """Who may be a victim, in eviction order."""
        return [
            resident
            for resident in self.residents
            if resident.hold is not Hold.STOPPING
            and resident.hold is not Hold.PINNED
            and (held or not self._is_held(resident))
            and not (spare_higher and resident.priority > self.demand.priority)
        ]

    def _fit(self, place: Place, typed: tuple[Resident, ...], here: Mapping[DeviceId, list[Resident]]) -> Fit | None:
        device = place.view.id
        short = place.option.need_mib - place.view.free_mib - _held(r for r in typed if r.device == device)
        coming = self.coming.get(device, [])
        space = _space(here.get(device, []), short - _held(coming))
        if space is None:
            return None
        victims = tuple(sorted((*typed, *space), key=eviction_order))
        return Fit(place, victims, tuple(coming) if short > _held(space) else ())

    def _is_held(self, resident: Resident) -> bool:
        if resident.hold is Hold.YOUNG:
            return resident.priority >= self.demand.priority
        return resident.hold is not Hold.NONE

    def evict(self, fit: Fit) -> Evict:
        last_resort = any(victim.priority > self.demand.priority for victim in fit.victims)
        reason = f"{self._situation(fit)}; {'as a last resort ' if last_resort else ''}evicting {_list(fit.victims)}"
        if fit.coming:
            reason += f", after {_list(fit.coming)}"
        return Evict(fit.place.view.id, fit.place.option.need_mib, _ids(fit.victims), reason)

    def wait(self, fit: Fit) -> Wait:
        waits_for = (*fit.coming, *(victim for victim in fit.victims if self._is_held(victim)))
        others = [victim for victim in fit.victims if not self._is_held(victim)]
        parts = []
        if fit.place.view.blocked is not None:
            parts.append(f"waiting for {fit.place.view.id} ({fit.place.view.blocked})")
        if waits_for:
            parts.append(f"waiting for {_list(waits_for)}")
        if others:
            parts.append(f"then evicting {_list(others)}")
        reason = "; ".join((self._situation(fit), *parts))
        return Wait(fit.place.view.id, fit.place.option.need_mib, _ids(waits_for), reason)

    def _situation(self, fit: Fit) -> str:
        return _needs(fit.place) + (f", {self._limit()}" if self.excess else "")

    def _limit(self) -> str:
        return f"max_loaded allows {self.policy.max_loaded[self.demand.type]} {self.demand.type}"

    def refusal(self) -> str:
        """What is in the way, device by device."""
        shown = [self._obstacles(place) for place in self.places[:SHOWN_DEVICES]]
        hidden = len(self.places) - len(shown)
        if hidden:
            shown.append(f"{hidden} more {'device' if hidden == 1 else 'devices'} can't take it either")
        return "; ".join(shown)

    def _obstacles(self, place: Place) -> str:
        """Only what matters: the limit by type where it can't be met, memory where it would not suffice."""
        device = place.view.id
        pool = self._pool(spare_higher=self.policy.eviction is Eviction.STRICT, held=True)
        limited = sum(r.type == self.demand.type for r in pool) < self.excess
        going = {*pool, *(r for r in self.residents if r.hold is Hold.STOPPING)}
        is_short = place.option.need_mib > place.view.free_mib + _held(r for r in going if r.device == device)
        staying = [
            r
            for r in self.residents
            if r not in going and ((is_short and r.device == device) or (limited and r.type == self.demand.type))
        ]
        ways = [self._limit()] if limited else []
        ways += [f"pinned {r.model} holds {_mib(r.held_mib)}" for r in staying if r.hold is Hold.PINNED]
        protected = [
            f"{r.model} ({r.type}, priority {r.priority}, {_mib(r.held_mib)})"
            for r in staying
            if r.hold is not Hold.PINNED
        ]
        if protected:
            ways.append(f"the strict policy protects {' and '.join(protected)}")
        outside = place.view.usable_mib - place.view.free_mib - _held(r for r in self.residents if r.device == device)
        if is_short and outside > 0:
            ways.append(f"{_mib(outside)} are used outside or promised to others")
        return f"{_needs(place)}; in the way: {', '.join(ways)}"


def _excess(demand: Demand, snapshot: Snapshot) -> int:
    """How many residents of its type must go before one more is allowed."""
    limit = snapshot.policy.max_loaded.get(demand.type)
    if limit is None:
        return 0
    loaded = sum(r.type == demand.type and r.hold is not Hold.STOPPING for r in snapshot.residents)
    return max(0, loaded - limit + 1)


def _space(ordered: Sequence[Resident], short_mib: int) -> list[Resident] | None:
    """Whole classes from the lowest up, then the smallest set of the class that completes it."""
    space: list[Resident] = []
    if short_mib <= 0:
        return space
    for _, members in groupby(ordered, key=lambda resident: resident.priority):
        group = list(members)
        if _held(group) >= short_mib:
            return space + _smallest(group, short_mib)
        space += group
        short_mib -= _held(group)
    return None


def _smallest(ordered: Sequence[Resident], short_mib: int) -> list[Resident]:
    """Of the sets with the fewest members that hold `short_mib`, the one that comes first in the order.

    All members together must hold enough. Exact: one is taken whenever the largest of those behind it can make up the
    rest, which is precisely when some smallest set contains it and all taken before. O(members x set size).
    """
    later = sorted(resident.held_mib for resident in ordered)
    count = 1
    while sum(later[-count:]) < short_mib:
        count += 1
    taken: list[Resident] = []
    for resident in ordered:
        del later[bisect_left(later, resident.held_mib)]
        rest = count - len(taken) - 1
        if resident.held_mib + sum(later[len(later) - rest :]) >= short_mib:
            taken.append(resident)
            short_mib -= resident.held_mib
            if rest == 0:
                break
    return taken


def _by_device(residents: Iterable[Resident]) -> dict[DeviceId, list[Resident]]:
    devices: defaultdict[DeviceId, list[Resident]] = defaultdict(list)
    for resident in residents:
        devices[resident.device].append(resident)
    return devices


def _held(residents: Iterable[Resident]) -> int:
    return sum(resident.held_mib for resident in residents)


def _ids(residents: Iterable[Resident]) -> tuple[ModelId, ...]:
    return tuple(resident.model for resident in residents)


# ------------------------------------------------------------------------------------------------------------ reasons


def _needs(place: Place) -> str:
    return f"needs {_mib(place.option.need_mib)} on {place.view.id}, {max(place.view.free_mib, 0)} free"


def _too_large(known: Sequence[Place]) -> str:
    if not known:
        return "no device that it may run on is there"
    shown = [
        f"needs {_mib(place.option.need_mib)} on {place.view.id}, which has {place.view.usable_mib} usable"
        for place in known[:SHOWN_DEVICES]
    ]
    if len(known) > SHOWN_DEVICES:
        shown.append(f"{len(known) - SHOWN_DEVICES} more are too small as well")
    return "; ".join(shown)


def _list(residents: Iterable[Resident]) -> str:
    return ", ".join(f"{r.model} ({r.type}, {_mib(r.held_mib)}, {_condition(r)})" for r in residents)


def _condition(resident: Resident) -> str:
    match resident.hold:
        case Hold.BUSY:
            return f"{resident.in_flight} {'request' if resident.in_flight == 1 else 'requests'} in flight"
        case Hold.STARTING:
            return "still starting"
        case Hold.STOPPING:
            return "stopping"
        case Hold.RESERVED:
            return "reserved for a waiting request"
        case Hold.YOUNG:
            return "just loaded"
        case Hold.NONE | Hold.PINNED:
            return f"idle {_seconds(resident.idle_s)}"


def _mib(mib: int) -> str:
    return f"{mib} MiB"


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
