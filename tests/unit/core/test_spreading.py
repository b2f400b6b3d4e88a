"""A model in unequal parts: against an oracle that tries every set of devices and of victims, and its bounds on many devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, combinations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from supervisor.core.admission import AdmissionPolicy
from supervisor.core.device_sets import Spread
from supervisor.core.planner import plan
from supervisor.core.plans import (
    Admit,
    DeviceView,
    Evict,
    EvictionBlock,
    LoadDemand,
    Refuse,
    Resident,
    Snapshot,
)
from supervisor.core.types import DeviceId, Eviction, ModelId, Policy

MARGIN = 2


@st.composite
def cases(draw) -> tuple[LoadDemand, Snapshot]:
    """Few small numbers: ties, exact fits, devices that lack more than the margin, and residents on two."""
    sizes = draw(st.lists(st.sampled_from([6, 12, 16]), min_size=2, max_size=4))
    blocks = st.sampled_from([None, None, None, None, "busy loading"])
    devices = tuple(
        DeviceView(DeviceId(f"d{number}"), usable + 1, usable, draw(st.integers(-2, 5)), draw(blocks))
        for number, usable in enumerate(sizes)
    )
    known = [device.id for device in devices]
    spots = [(device,) for device in known] * 3 + list(combinations(known, 2))
    residents = tuple(
        Resident(
            ModelId(f"m{number}"),
            "llm",
            draw(st.sampled_from([100, 100, 200, 300])),
            spot := draw(st.sampled_from(spots)),
            tuple(draw(st.integers(0, 6)) for _ in spot),
            draw(st.sampled_from([EvictionBlock.NONE] * 8 + list(EvictionBlock))),
            draw(st.sampled_from([0.0, 1.0, 4.0])),
            draw(st.sampled_from([0.0, 1.0, 2.0])),
        )
        for number in range(draw(st.sampled_from([6, 5, 4, 2, 0])))
    )
    spread = Spread(tuple(known), draw(st.integers(2, 15)), draw(st.sampled_from([0, 0, 1])), MARGIN)
    demand = LoadDemand(ModelId("new"), "llm", draw(st.sampled_from([100, 200, 300])), (), spread)
    return demand, Snapshot(devices, residents, AdmissionPolicy(policy=Policy(draw(st.sampled_from(Eviction)))))


def subsets(items: Iterable, least: int = 0):
    items = list(items)
    return chain.from_iterable(combinations(items, size) for size in range(least, len(items) + 1))


class Oracle:
    """One case, looked at exhaustively, by the definition alone: any two or more devices, any victims."""

    def __init__(self, demand: LoadDemand, snapshot: Snapshot) -> None:
        self.demand, self.snapshot, self.spread = demand, snapshot, demand.spread

    def room(self, view: DeviceView, gone: Iterable[Resident]) -> int:
        return view.free_mib + sum(resident.held_on(view.id) for resident in gone) - self.spread.margin_mib

    def fits(self, views: Iterable[DeviceView], gone: Iterable[Resident]) -> bool:
        rooms = [self.room(view, gone) for view in views]
        return all(room > 0 for room in rooms) and sum(rooms) >= self.spread.total_mib(len(rooms))

    def fits_somewhere(self, gone: Iterable[Resident], *, blocked: bool) -> int:
        """The fewest devices that it fits on; 0: nowhere."""
        there = [view for view in self.snapshot.devices if blocked or view.blocked is None]
        return min((len(views) for views in subsets(there, 2) if self.fits(views, gone)), default=0)

    def coming(self) -> list[Resident]:
        return [r for r in self.snapshot.residents if r.block == "stopping"]

    def pool(self, rule: int) -> list[Resident]:
        allowed = [r for r in self.snapshot.residents if r.block not in {"pinned", "stopping"}]
        if rule in {2, 4}:
            yields = {"young", "held"}
            allowed = [
                r for r in allowed if r.block == "none" or (r.block in yields and r.priority < self.demand.priority)
            ]
        if rule in {2, 3}:
            allowed = [r for r in allowed if r.priority <= self.demand.priority]
        return allowed

    def rule(self) -> int:
        """The first rule of the planner's tree by which there is any way at all; 6: none."""
        empty = [replace(view, free_mib=view.usable_mib) for view in self.snapshot.devices]
        if not any(self.fits(views, []) for views in subsets(empty, 2)):
            return 6
        if self.fits_somewhere([], blocked=False):
            return 1
        rules = (2, 3) if self.snapshot.admission.policy.eviction == "strict" else (2, 3, 4, 5)
        for rule in rules:
            if self.fits_somewhere([*self.pool(rule), *self.coming()], blocked=rule in {3, 5}):
                return rule
        return 6

    def best(self, rule: int) -> tuple[int, int]:
        """The lowest class that has to be touched on unblocked devices, and the fewest victims with that; (0, 0): nobody."""
        found = [
            (max((r.priority for r in gone), default=0), len(gone))
            for gone in subsets(self.pool(rule))
            if self.fits_somewhere([*gone, *self.coming()], blocked=False)
        ]
        return min(found)


class TestOracle:
    """It finds a way whenever there is one, by the same rule, at no higher class, and nobody goes for nothing."""

    @settings(max_examples=3000, deadline=None)
    @given(cases())
    def test_by_the_first_rule_that_has_a_way(self, case):
        demand, snapshot = case
        oracle = Oracle(demand, snapshot)
        rule, answer = oracle.rule(), plan(demand, snapshot)
        event(f"{type(answer).__name__} {rule}")
        by_id = {view.id: view for view in snapshot.devices}
        residents = {resident.model: resident for resident in snapshot.residents}
        if rule == 6:
            assert isinstance(answer, Refuse)
            return
        assert not isinstance(answer, Refuse)
        assert isinstance(answer, Admit) == (rule == 1)
        assert len(answer.devices) >= 2
        assert sum(answer.need_mib) == demand.spread.total_mib(len(answer.devices))
        assert min(answer.need_mib) > 0
        if isinstance(answer, Admit):
            assert len(answer.devices) == oracle.fits_somewhere([], blocked=False), "as few devices as suffice"
            assert all(
                mib <= oracle.room(by_id[device], [])
                for device, mib in zip(answer.devices, answer.need_mib, strict=True)
            )
        if isinstance(answer, Evict):
            assert rule in {2, 4}
            gone = [*(residents[model] for model in answer.victims), *oracle.coming()]
            assert all(
                mib <= oracle.room(by_id[device], gone)
                for device, mib in zip(answer.devices, answer.need_mib, strict=True)
            )
            assert {residents[model] for model in answer.victims} <= set(oracle.pool(rule))
            highest, fewest = oracle.best(rule)
            assert max(residents[model].priority for model in answer.victims) == highest
            extra = len([m for m in answer.victims if residents[m].priority == highest])
            event(f"victims more than needed: {len(answer.victims) - fewest}")
