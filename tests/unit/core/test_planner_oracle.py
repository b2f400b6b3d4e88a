"""The planner against an oracle that tries every set of victims on every device.

The oracle shares no code with the planner. For each rule it enumerates all subsets, keeps those that are valid by
definition (limits met, space suffices, nothing lower kept for something higher), and takes the best by definition. On
top of that, each answer is proven by itself: what it says would work does, and what the earlier rules offer does not,
even if everything that they allow went at once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain, combinations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from supervisor.core.admission.admission import AdmissionPolicy
from supervisor.core.planning.planner import plan
from supervisor.core.planning.plans import (
    Admit,
    DeviceView,
    Evict,
    EvictionBlock,
    LoadDemand,
    Option,
    Refuse,
    Resident,
    Snapshot,
    Wait,
)
from supervisor.core.types import DeviceId, Eviction, Limits, ModelId, Policy
from tests.support.counts import examples

TYPES = ("llm", "tts")
NAMES = [f"m{number}" for number in range(7)]
DEVICES = [DeviceId(f"d{number}") for number in range(3)]

# Made once: Hypothesis takes longer to make a strategy than to draw from it.
COUNT = st.integers(1, len(DEVICES))
USABLE, FREE, BLOCKED = st.sampled_from([6, 12, 16]), st.integers(-2, 4), st.sampled_from([None] * 3 + ["busy loading"])
ORDER, RESIDENTS = st.permutations(NAMES), st.sampled_from([7, 6, 5, 3, 1, 0])
TYPE, PRIORITY, HELD = st.sampled_from(TYPES), st.sampled_from([100, 100, 200, 300]), st.integers(0, 6)
BLOCK = st.sampled_from([EvictionBlock.NONE] * 8 + list(EvictionBlock))
IDLE, RELOAD = st.sampled_from([0.0, 1.0, 4.0, 61.0]), st.sampled_from([0.0, 1.0, 2.0])
USED_BY, AGING = st.sampled_from([50, 50, 50, 80, 20]), st.sampled_from([60.0, 60.0, math.inf])
ASKED_PRIORITY, NEED, NEED_OF_EACH = st.sampled_from([100, 200, 300]), st.integers(2, 13), st.integers(1, 9)
LIMITS, EVICTION = st.dictionaries(TYPE, st.sampled_from([1, 2, 3, 4, 0])), st.sampled_from(Eviction)
SPOTS, PLACES = {}, {}  # by the number of devices
for count in range(1, len(DEVICES) + 1):
    known = DEVICES[:count]
    SPOTS[count] = st.sampled_from([(device,) for device in known] * 3 + list(combinations(known, 2)))
    PLACES[count] = st.one_of(st.just(known), st.lists(st.sampled_from([*known, DeviceId("gone")]), unique=True))


@st.composite
def cases(draw) -> tuple[LoadDemand, Snapshot]:
    """Few small numbers, so that ties and exact fits are common; free may be negative (promised beyond)."""
    devices = []
    for device in DEVICES[: draw(COUNT)]:
        usable = draw(USABLE)
        devices.append(DeviceView(device, usable + 1, usable, draw(FREE), draw(BLOCKED)))
    names = draw(ORDER)
    residents = tuple(
        Resident(
            model=ModelId(name),
            type=draw(TYPE),
            priority=draw(PRIORITY),
            devices=(spot := draw(SPOTS[len(devices)])),
            reserved_mib=tuple(draw(HELD) for _ in spot),
            block=draw(BLOCK),
            idle_s=draw(IDLE),
            reload_s=draw(RELOAD),
            used_by=draw(USED_BY),
        )
        for name in names[: draw(RESIDENTS)]
    )
    places = draw(PLACES[len(devices)])
    demand = LoadDemand(
        ModelId("new"), draw(TYPE), draw(ASKED_PRIORITY), tuple(Option((place,), (draw(NEED),)) for place in places)
    )
    limits = draw(LIMITS)
    admission = AdmissionPolicy(Limits(aging_s=draw(AGING)), Policy(draw(EVICTION), limits))
    return demand, Snapshot(tuple(devices), residents, admission)


class Oracle:
    """One case, looked at exhaustively."""

    def __init__(self, demand: LoadDemand, snapshot: Snapshot) -> None:
        self.demand = demand
        self.snapshot = snapshot
        views = {view.id: view for view in snapshot.devices}
        self.places = [
            (views[option.devices[0]], option.need_mib[0])
            for option in demand.options
            if option.devices[0] in views and option.need_mib[0] <= views[option.devices[0]].usable_mib
        ]
        counted = [r for r in snapshot.residents if r.type == demand.type and r.block != "stopping"]
        limit = snapshot.admission.policy.max_loaded.get(demand.type, 10**6)
        self.excess = max(0, len(counted) + 1 - limit)
        usable = {view.id for view, _ in self.places if view.outage is None}
        self.concerned = [
            r for r in snapshot.residents if usable & {*r.devices} or (self.excess and r.type == demand.type)
        ]

    # ------------------------------------------------------------------------------------------------ definitions

    def blocked_now(self, resident: Resident) -> bool:
        if resident.block in {"young", "held", "used"} and resident.priority < self.demand.priority:
            return False
        return resident.block != "none"

    def pool(self, rule: int) -> list[Resident]:
        """Whom the rule allows to go."""
        allowed = [r for r in self.snapshot.residents if r.block not in {"pinned", "stopping"}]
        if rule in {2, 4}:
            allowed = [r for r in allowed if not self.blocked_now(r)]
        if rule in {2, 3}:
            allowed = [r for r in allowed if r.priority <= self.demand.priority]
        return allowed

    def used_by(self, resident: Resident) -> float:
        """The least urgent class of all whose last use, with its age, comes before this one's or as early."""
        if resident.block == "draining":
            return math.inf
        if resident.block in {"pinned", "stopping"}:  # it is no victim
            return 50
        aging_s = self.snapshot.admission.limits.aging_s
        if math.isinf(aging_s):
            return resident.used_by
        later = lambda r: r.idle_s + r.used_by * aging_s / 30
        others = [r for r in self.concerned if r.block not in {"pinned", "stopping"}]
        return max(r.used_by for r in [resident, *others] if later(r) <= later(resident))

    def standing(self, resident: Resident) -> tuple[int, float]:
        return (resident.priority, -self.used_by(resident))

    def rank(self, resident: Resident) -> tuple[tuple[int, float], float, str]:
        cost = 0.0 if resident.block == "draining" else resident.reload_s / (resident.idle_s or 0.001)
        return (self.standing(resident), cost, resident.model)

    def coming(self, device: str) -> list[Resident]:
        return [r for r in self.snapshot.residents if device in r.devices and r.block == "stopping"]

    def allowed_places(self, rule: int) -> list[tuple[DeviceView, int]]:
        return [(view, need) for view, need in self.places if rule in {3, 5} or view.blocked is None]

    def is_possible(self, rule: int) -> bool:
        """Would it work if all that the rule allows went at once? No order, no closure, no search."""
        pool = self.pool(rule)
        if sum(r.type == self.demand.type for r in pool) < self.excess:
            return False
        return any(
            need <= view.free_mib + sum(r.reserved_on(view.id) for r in [*pool, *self.coming(view.id)])
            for view, need in self.allowed_places(rule)
        )

    # -------------------------------------------------------------------------------------------------- the search

    def best(self, rule: int) -> tuple[DeviceView, int, list[Resident]] | None:
        pool = self.pool(rule)
        found = []
        for view, need in self.allowed_places(rule):
            subsets = [victims for victims in powerset(pool) if self.is_valid(view, need, victims, pool)]
            if subsets:
                victims = min(subsets, key=lambda v: self.subset_key(v, pool))
                found.append((self.device_key(view, victims), view, need, sorted(victims, key=self.rank)))
        if not found:
            return None
        _, view, need, victims = min(found, key=lambda entry: entry[0])
        return view, need, victims

    def typed(self, pool: list[Resident]) -> list[Resident]:
        return sorted((r for r in pool if r.type == self.demand.type), key=self.rank)[: self.excess]

    def is_valid(self, view: DeviceView, need: int, victims: tuple[Resident, ...], pool: list[Resident]) -> bool:
        typed = self.typed(pool)
        if len(typed) < self.excess or any(t not in victims for t in typed):
            return False
        space = [v for v in victims if v not in typed]
        if any(v.reserved_on(view.id) == 0 for v in space):
            return False
        candidates = [r for r in pool if r.reserved_on(view.id) > 0 and r not in typed]
        if any(low.priority < v.priority and low not in space for v in space for low in candidates):
            return False
        returned = sum(r.reserved_on(view.id) for r in [*victims, *self.coming(view.id)])
        return view.free_mib + returned >= need

    def subset_key(self, victims: tuple[Resident, ...], pool: list[Resident]) -> tuple:
        typed = self.typed(pool)
        space = sorted((v for v in victims if v not in typed), key=self.rank)
        return (max(map(self.standing, space), default=(-math.inf, 0)), len(space), [self.rank(v) for v in space])

    def device_key(self, view: DeviceView, victims: tuple[Resident, ...]) -> tuple:
        return (
            view.blocked is not None,
            max(map(self.standing, victims), default=(-math.inf, 0)),
            len(victims),
            math.fsum(self.rank(v)[1] for v in victims),
            view.id,
        )

    def needs_coming(self, view: DeviceView, need: int, victims: list[Resident]) -> bool:
        return need > view.free_mib + sum(v.reserved_on(view.id) for v in victims)

    def expected(self) -> tuple:
        """(kind, device, need, models) of the right plan."""
        if not self.places:
            return ("Refuse",)
        fitting = [((v.id,), need) for v, need in self.places if v.blocked is None and need <= v.free_mib]
        if fitting and self.excess == 0:
            return ("Admit", *min(fitting))
        for rule in (2, 3) if self.snapshot.admission.policy.eviction == "strict" else (2, 3, 4, 5):
            best = self.best(rule)
            if best is None:
                continue
            view, need, victims = best
            coming = self.coming(view.id) if self.needs_coming(view, need, victims) else []
            coming = sorted(coming, key=self.rank)
            if rule in {2, 4} and victims:
                return ("Evict", (view.id,), need, tuple(v.model for v in victims))
            waits_for = [*coming, *(v for v in victims if self.blocked_now(v))]
            return ("Wait", (view.id,), need, tuple(r.model for r in waits_for))
        return ("Refuse",)


def powerset(items):
    return chain.from_iterable(combinations(items, size) for size in range(len(items) + 1))


def outline(answer) -> tuple:
    match answer:
        case Admit(devices, need, _):
            return ("Admit", devices, *need)
        case Evict(devices, need, models, _) | Wait(devices, need, models, _):
            return (type(answer).__name__, devices, *need, models)
        case Refuse():
            return ("Refuse",)


class TestOracle:
    """The plan is the one that trying everything finds."""

    @settings(max_examples=examples(600))
    @given(cases())
    def test_the_plan_is_the_best_of_all(self, case):
        demand, snapshot = case
        expected = Oracle(demand, snapshot).expected()
        event(expected[0])

        assert outline(plan(demand, snapshot)) == expected

    @settings(max_examples=examples(300))
    @given(cases(), st.randoms())
    def test_it_does_not_depend_on_the_order_of_its_input(self, case, random):
        demand, snapshot = case
        devices, residents, options = list(snapshot.devices), list(snapshot.residents), list(demand.options)
        for items in (devices, residents, options):
            random.shuffle(items)
        shuffled = Snapshot(tuple(devices), tuple(residents), snapshot.admission)

        other = plan(LoadDemand(demand.model, demand.type, demand.priority, tuple(options)), shuffled)

        assert plan(demand, snapshot) == other


class TestProofs:
    """Each kind of answer, proven without the search."""

    @settings(max_examples=examples(500))
    @given(cases())
    def test_what_it_says_works_and_what_comes_before_it_does_not(self, case):
        demand, snapshot = case
        oracle = Oracle(demand, snapshot)
        by_id = {resident.model: resident for resident in snapshot.residents}
        rules = (2, 3) if snapshot.admission.policy.eviction == "strict" else (2, 3, 4, 5)
        possible = [rule for rule in rules if oracle.is_possible(rule)]
        answer = plan(demand, snapshot)
        match answer:
            case Refuse(reason):
                assert not oracle.places or possible == []
                assert not reason.endswith("in the way: ")
            case Admit((device,), (need,), _):
                view = next(view for view in snapshot.devices if view.id == device)
                assert (device, need) in [(option.devices[0], option.need_mib[0]) for option in demand.options]
                assert need <= view.free_mib
                assert view.blocked is None
                assert oracle.excess == 0
            case Evict((device,), (need,), victims, _):
                assert possible
                assert possible[0] in {2, 4}
                gone = [by_id[model] for model in victims]
                assert gone
                assert all(r.block in {"none", "young", "held", "used"} for r in gone)
                view = next(view for view in snapshot.devices if view.id == device)
                back = sum(r.reserved_on(device) for r in [*gone, *oracle.coming(device)])
                assert need <= view.free_mib + back
                assert sum(r.type == demand.type for r in gone) >= oracle.excess
                if possible[0] == 2:
                    assert all(r.priority <= demand.priority for r in gone)
            case Wait(_, _, waits_for, _):
                assert possible
                assert not any(by_id[model].block in {EvictionBlock.NONE, EvictionBlock.PINNED} for model in waits_for)
                if possible[0] in {2, 4}:  # nothing has to go besides what is going already
                    assert all(by_id[model].block is EvictionBlock.STOPPING for model in waits_for)

    @settings(max_examples=examples(300))
    @given(cases())
    def test_carrying_the_evictions_out_leads_to_an_admission(self, case):
        """Victims go and their memory comes back, as does that of the stopping ones: then it is simply admitted."""
        demand, snapshot = case
        answer = plan(demand, snapshot)
        if not isinstance(answer, Evict):
            return
        gone = {
            r
            for r in snapshot.residents
            if r.model in answer.victims or (r.block is EvictionBlock.STOPPING and answer.devices[0] in r.devices)
        }
        devices = tuple(
            DeviceView(
                view.id,
                view.total_mib,
                view.usable_mib,
                view.free_mib + sum(r.reserved_on(view.id) for r in gone),
                view.blocked,
            )
            for view in snapshot.devices
        )
        left = tuple(r for r in snapshot.residents if r not in gone)

        assert isinstance(plan(demand, Snapshot(devices, left, snapshot.admission)), Admit)


@st.composite
def spread_cases(draw) -> tuple[LoadDemand, Snapshot]:
    """A model that two devices share, among others that one or two hold."""
    demand, snapshot = draw(cases())
    need = draw(NEED_OF_EACH)
    pairs = combinations([view.id for view in snapshot.devices], 2)
    return replace(demand, options=tuple(Option(pair, (need, need)) for pair in pairs)), snapshot


class TestSpread:
    """A model on two devices: what is planned works on both, and nobody goes for nothing."""

    @staticmethod
    def room(snapshot: Snapshot, device: DeviceId, gone) -> int:
        """What is free there once these are gone, and what is stopping."""
        view = next(view for view in snapshot.devices if view.id == device)
        back = [r for r in snapshot.residents if r.model in gone or r.block is EvictionBlock.STOPPING]
        return view.free_mib + sum(r.reserved_on(device) for r in back)

    def fits(self, case, option: Option, gone) -> bool:
        return all(
            self.room(case[1], device, gone) >= mib for device, mib in zip(option.devices, option.need_mib, strict=True)
        )

    @settings(max_examples=examples(600))
    @given(spread_cases())
    def test_evictions_make_room_on_both_and_nobody_is_superfluous(self, case):
        demand, snapshot = case
        answer = plan(demand, snapshot)
        event(type(answer).__name__)
        if not isinstance(answer, Evict):
            return
        option = next(option for option in demand.options if option.devices == answer.devices)
        assert self.fits(case, option, answer.victims)
        oracle = Oracle(replace(demand, options=()), snapshot)
        by_id = {resident.model: resident for resident in snapshot.residents}
        typed = {
            victim.model for victim in oracle.typed([by_id[model] for model in answer.victims])
        }  # first, as always
        for model in answer.victims:
            others = [other for other in answer.victims if other != model]
            assert model in typed or not self.fits(case, option, others), f"{model} went for nothing"

    @settings(max_examples=examples(600))
    @given(spread_cases())
    def test_it_is_refused_only_where_nothing_would_help(self, case):
        demand, snapshot = case
        answer = plan(demand, snapshot)
        usable = {view.id: view.usable_mib for view in snapshot.devices}
        large = [
            o
            for o in demand.options
            if all(mib <= usable[device] for device, mib in zip(o.devices, o.need_mib, strict=True))
        ]
        pool = {r.model for r in Oracle(replace(demand, options=()), snapshot).pool(5)}
        if snapshot.admission.policy.eviction == "strict":
            pool = {r.model for r in Oracle(replace(demand, options=()), snapshot).pool(3)}
        typed = sum(r.type == demand.type for r in snapshot.residents if r.model in pool)
        enough = typed >= Oracle(replace(demand, options=()), snapshot).excess
        possible = enough and any(self.fits(case, option, pool) for option in large)

        assert isinstance(answer, Refuse) == (not possible)

    @settings(max_examples=examples(300))
    @given(spread_cases())
    def test_what_is_admitted_is_free_on_both(self, case):
        demand, snapshot = case
        answer = plan(demand, snapshot)
        if isinstance(answer, Admit):
            views = [view for view in snapshot.devices if view.id in answer.devices]
            assert len(views) == 2
            assert all(view.free_mib >= answer.need_mib[0] and view.blocked is None for view in views)
