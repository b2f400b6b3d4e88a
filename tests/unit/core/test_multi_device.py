"""A model in unequal parts: against an oracle that tries every set of devices and of victims, and its bounds on many devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from supervisor.core.admission.admission import AdmissionPolicy
from supervisor.core.memory.device_sets import Spread
from supervisor.core.planning.multi_device import in_proportion
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
from supervisor.core.types import DeviceId, Eviction, ModelId, Policy, RejectCode
from tests.support.counts import examples

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
        return view.free_mib + sum(resident.reserved_on(view.id) for resident in gone) - self.spread.margin_mib

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
            yields = {"young", "held", "used"}
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

    def lowest_class(self, rule: int) -> int:
        """The lowest class that has to be touched on unblocked devices; 0: nobody has to go."""
        return min(
            max((r.priority for r in gone), default=0)
            for gone in subsets(self.pool(rule))
            if self.fits_somewhere([*gone, *self.coming()], blocked=False)
        )


class TestOracle:
    """It finds a way whenever there is one, by the same rule, at no higher class, and nobody goes for nothing."""

    @settings(max_examples=examples(1000), deadline=None)
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
            assert max(residents[model].priority for model in answer.victims) == oracle.lowest_class(rule)
            for victim in answer.victims:
                fewer = [resident for resident in gone if resident.model != victim]
                assert any(
                    mib > oracle.room(by_id[device], fewer)
                    for device, mib in zip(answer.devices, answer.need_mib, strict=True)
                ), f"{victim} goes for nothing"
            self.leads_to_an_admission(demand, snapshot, answer)

    @staticmethod
    def leads_to_an_admission(demand: LoadDemand, snapshot: Snapshot, answer: Evict) -> None:
        """Once its victims and those that stop are gone it is simply admitted."""
        coming = {resident for resident in snapshot.residents if resident.block is EvictionBlock.STOPPING}
        victims = {resident for resident in snapshot.residents if resident.model in answer.victims}

        def later(gone: set[Resident]) -> object:
            devices = tuple(
                replace(view, free_mib=view.free_mib + sum(r.reserved_on(view.id) for r in gone))
                for view in snapshot.devices
            )
            left = tuple(resident for resident in snapshot.residents if resident not in gone)
            return plan(demand, Snapshot(devices, left, snapshot.admission))

        assert isinstance(later(coming | victims), Admit)


def on(device: int, name: str, mib: int, priority: int = 100) -> Resident:
    return Resident(ModelId(name), "llm", priority, (DeviceId(f"d{device:02}"),), (mib,), idle_s=9.0)


def machine(*free: int, usable: int = 16000) -> tuple[DeviceView, ...]:
    return tuple(DeviceView(DeviceId(f"d{i:02}"), usable + 500, usable, mib) for i, mib in enumerate(free))


def want(mib: int, devices: tuple[DeviceView, ...], *options: Option, each: int = 0) -> LoadDemand:
    spread = Spread(tuple(view.id for view in devices), mib, each, max(512, each))
    return LoadDemand(ModelId("new"), "llm", 100, options, spread)


class TestWhich:
    def test_one_device_if_any_can_ever_have_it(self):
        """Even if somebody has to go there, and the parts would fit now."""
        devices = machine(9000, 9000)
        whole = [Option((view.id,), (10000,)) for view in devices]
        answer = plan(want(10000, devices, *whole), Snapshot(devices, (on(0, "a", 7000), on(1, "b", 7000))))
        assert isinstance(answer, Evict)
        assert answer.devices == ("d00",)

    def test_parts_where_each_device_has_something_that_stays(self):
        devices = machine(9000, 9000)
        whole = [Option((view.id,), (10000,)) for view in devices]
        stay = tuple(replace(on(i, name, 7000), block=EvictionBlock.PINNED) for i, name in enumerate("ab"))
        answer = plan(want(10000, devices, *whole), Snapshot(devices, stay))
        assert answer == Admit(
            (DeviceId("d00"), DeviceId("d01")),
            (5000, 5000),
            "needs 10000 MiB: 5000 MiB on d00 and 5000 MiB on d01, in proportion to what it can have there, less 512 MiB each; "
            "9000 and 9000 free",
        )

    def test_no_more_devices_than_needed_and_those_with_most_room(self):
        devices = machine(3000, 12000, 5000, 14000)
        answer = plan(want(20000, devices), Snapshot(devices, ()))
        assert isinstance(answer, Admit)
        assert (answer.devices, sum(answer.need_mib)) == (("d01", "d03"), 20000)

    def test_what_each_device_takes_besides_counts_for_each(self):
        devices = machine(8000, 8000, 8000)
        answer = plan(want(15000, devices, each=600), Snapshot(devices, ()))
        assert isinstance(answer, Admit)
        assert (len(answer.devices), sum(answer.need_mib)) == (3, 15000 + 2 * 600)

    def test_a_device_that_is_out_is_left_out(self):
        devices = machine(16000, 16000, 16000)
        out = (replace(devices[0], blocked="lost: gone", outage=RejectCode.DEVICE_LOST), *devices[1:])
        answer = plan(want(20000, devices), Snapshot(out, ()))
        assert isinstance(answer, Admit)
        assert answer.devices == ("d01", "d02")
        refused = plan(want(40000, devices), Snapshot(out, ()))
        assert refused == Refuse("d00 is lost: gone", RejectCode.DEVICE_LOST)

    def test_what_stays_in_the_way_is_named(self):
        devices = machine(2000, 2000)
        stay = tuple(replace(on(i, name, 14000), block=EvictionBlock.PINNED) for i, name in enumerate("ab"))
        refused = plan(want(20000, devices), Snapshot(devices, stay))
        assert isinstance(refused, Refuse)
        assert not refused.fits_nowhere
        assert refused.reason.endswith("in the way: pinned a holds 14000 MiB, pinned b holds 14000 MiB")

    def test_who_is_busy_is_waited_for(self):
        devices = machine(2000, 16000)
        busy = replace(on(0, "a", 14000), block=EvictionBlock.BUSY, in_flight=1)
        answer = plan(want(20000, devices), Snapshot(devices, (busy,)))
        assert isinstance(answer, Wait)
        assert answer.waits_for == ("a",)


class TestParts:
    @given(st.lists(st.integers(1, 40), min_size=1, max_size=16), st.data())
    def test_they_add_up_and_none_exceeds_its_room(self, room, data):
        total = data.draw(st.integers(len(room), max(len(room), sum(room))))
        parts = in_proportion(total, room)
        assert sum(parts) == total
        assert all(1 <= part <= most for part, most in zip(parts, room, strict=True))

    def test_in_proportion(self):
        assert in_proportion(14336, (7168, 11264)) == (5576, 8760)


class TestCost:
    """On 16 devices with eight models each it looks at sums of room, and at no choice of devices."""

    @pytest.mark.parametrize(("need", "kind"), [(30_000, Admit), (190_000, Evict), (400_000, Refuse)])
    def test_a_few_looks_for_each_resident(self, need, kind, monkeypatch):
        looks = []
        fits = Spread.fits
        monkeypatch.setattr(Spread, "fits", lambda spread, room: looks.append(1) or fits(spread, room))
        devices = machine(*[4000 + 100 * i for i in range(16)])
        residents = tuple(on(i, f"m{i}-{j}", 1000 + 50 * j, 100 * (j % 2)) for i in range(16) for j in range(8))
        assert isinstance(plan(want(need, devices), Snapshot(devices, residents)), kind)
        assert len(looks) <= 4 * len(residents)
