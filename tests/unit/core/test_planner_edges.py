"""The planner where one more or one less makes the difference, and devices that are out of service."""

from __future__ import annotations

from itertools import combinations

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
from supervisor.core.types import DeviceId, ModelId, Policy, RejectCode


def view(name, free, total=10000, blocked=None, outage=None):
    return DeviceView(DeviceId(name), total, total, free, blocked, outage)


def on(name, *devices, mib=10, kind="llm", priority=100, block=EvictionBlock.NONE, idle_s=100.0):
    places = tuple(map(DeviceId, devices or ("d0",)))
    return Resident(ModelId(name), kind, priority, places, (mib,) * len(places), block, idle_s)


def want(need, *devices, parts=1, priority=100, kind="llm"):
    sets = combinations(map(DeviceId, devices or ("d0",)), parts)
    return LoadDemand(ModelId("new"), kind, priority, tuple(Option(places, (need,) * len(places)) for places in sets))


def world(*things, **policy):
    views = tuple(thing for thing in things if isinstance(thing, DeviceView))
    residents = tuple(thing for thing in things if isinstance(thing, Resident))
    return Snapshot(views, residents, AdmissionPolicy(policy=Policy(**policy)))


class TestExactly:
    """What just fits fits."""

    def test_free(self):
        assert isinstance(plan(want(10), world(view("d0", 10))), Admit)
        assert not isinstance(plan(want(10), world(view("d0", 9))), Admit)

    def test_the_whole_device(self):
        assert isinstance(plan(want(10), world(view("d0", 0, total=10))), Refuse)
        assert isinstance(plan(want(10), world(view("d0", 0, total=10), on("a", mib=10))), Evict)
        too_large = plan(want(11), world(view("d0", 10, total=10)))
        assert isinstance(too_large, Refuse)
        assert too_large.outage is None

    def test_a_victim_that_is_just_enough_needs_nobody_who_stops(self):
        """What is on its way back counts first; what it leaves over is not waited for."""
        stopping = on("stopping", mib=5, block=EvictionBlock.STOPPING)
        answer = plan(want(10), world(view("d0", 0), on("a", mib=10), stopping))
        assert isinstance(answer, Evict)
        assert answer.victims == ("a",)
        assert "after" not in answer.reason

    def test_what_stops_is_just_enough(self):
        stopping = on("stopping", mib=10, block=EvictionBlock.STOPPING)
        answer = plan(want(10), world(view("d0", 0), on("a", mib=10), stopping))
        assert isinstance(answer, Wait)
        assert answer.waits_for == ("stopping",)

    def test_limit_by_type(self):
        limited = world(view("d0", 100), on("a"), on("b", idle_s=1.0), max_loaded={"llm": 2})
        answer = plan(want(10), limited)
        assert isinstance(answer, Evict)
        assert answer.victims == ("a",)
        assert isinstance(plan(want(10, kind="tts"), limited), Admit)

    def test_a_limit_by_type_is_met_on_any_device(self):
        answer = plan(want(10, "d1"), world(view("d0", 0), view("d1", 100), on("a"), max_loaded={"llm": 1}))
        assert isinstance(answer, Evict)
        assert answer.victims == ("a",)


class TestSpread:
    """On two devices the victims of one may be enough for the other."""

    def test_a_victim_made_superfluous_stays(self):
        small, both = on("small", "d0", mib=5, idle_s=1000.0), on("both", "d0", "d1", mib=8)
        answer = plan(want(8, "d0", "d1", parts=2), world(view("d0", 3), view("d1", 0), small, both))
        assert isinstance(answer, Evict)
        assert answer.victims == ("both",)

    def test_both_go_where_both_are_needed(self):
        small, both = on("small", "d0", mib=5, idle_s=1000.0), on("both", "d0", "d1", mib=8)
        answer = plan(want(13, "d0", "d1", parts=2), world(view("d0", 0), view("d1", 5), small, both))
        assert isinstance(answer, Evict)
        assert answer.victims == ("small", "both")

    def test_one_whom_the_limit_forces_out_is_not_spared(self):
        forced, both = on("forced", "d0", mib=5, idle_s=1000.0), on("both", "d0", "d1", mib=8, kind="tts")
        answer = plan(
            want(8, "d0", "d1", parts=2), world(view("d0", 0), view("d1", 0), forced, both, max_loaded={"llm": 1})
        )
        assert isinstance(answer, Evict)
        assert set(answer.victims) == {"forced", "both"}


class TestRefusals:
    """They say what is in the way, where, and no more than that."""

    PINNED = EvictionBlock.PINNED

    def test_many_devices(self):
        views = [view(f"d{n}", 0) for n in range(5)]
        pinned = [on(f"m{n}", f"d{n}", block=self.PINNED) for n in range(5)]
        answer = plan(want(10, *(v.id for v in views)), world(*views, *pinned))
        assert isinstance(answer, Refuse)
        assert answer.reason.endswith("; 2 more devices can't take it either")
        assert answer.reason.count("pinned") == 3

    def test_many_places(self):
        views = [view(f"d{n}", 0) for n in range(4)]
        pinned = [on(f"m{n}", f"d{n}", mib=10000, block=self.PINNED) for n in range(4)]
        answer = plan(want(10, *(v.id for v in views), parts=2), world(*views, *pinned))
        assert isinstance(answer, Refuse)
        assert answer.reason.endswith("; 3 more places can't take it either")

    def test_devices_and_places(self):
        """Some runtimes take host memory whole and share GPUs."""
        views = [view(f"d{n}", 0) for n in range(4)]
        demand = want(10, "d0", "d1", "d2")
        pair = Option((DeviceId("d2"), DeviceId("d3")), (10, 10))
        demand = LoadDemand(demand.model, demand.type, demand.priority, (*demand.options, pair))
        answer = plan(demand, world(*views))
        assert isinstance(answer, Refuse)
        assert answer.reason.endswith("; 1 more place can't take it either")

    def test_who_else_uses_it(self):
        one = plan(want(10), world(view("d0", 4)))
        assert isinstance(one, Refuse)
        assert one.reason.endswith("in the way: 9996 MiB are used outside or promised to others")
        two = plan(want(10, "d0", "d1", parts=2), world(view("d0", 10000), view("d1", 4)))
        assert isinstance(two, Refuse)
        assert two.reason.endswith("in the way: 9996 MiB are used outside or promised to others on d1")

    def test_only_those_who_are_in_the_way(self):
        pinned_there = on("there", "d1", block=self.PINNED)
        pinned_here = on("here", "d0", mib=10000, block=self.PINNED)
        snapshot = world(view("d0", 0), view("d1", 9990), pinned_here, pinned_there)
        for demand in (want(10, "d0"), want(10, "d0", "d1", parts=2)):
            answer = plan(demand, snapshot)
            assert isinstance(answer, Refuse)
            assert answer.reason.endswith("in the way: pinned here holds 10000 MiB")

    def test_a_limit_by_type_has_only_that_type_in_the_way(self):
        pinned, other = on("a", block=self.PINNED), on("b", kind="tts", block=self.PINNED)
        answer = plan(want(10), world(view("d0", 100), pinned, other, max_loaded={"llm": 1}))
        assert isinstance(answer, Refuse)
        assert answer.reason.endswith("in the way: max_loaded allows 1 llm, pinned a holds 10 MiB")


class TestOutOfService:
    """A device that is lost or quarantined is no place, and its own reason to refuse."""

    LOST = view("d0", 10000, blocked="lost: GPU is lost", outage=RejectCode.DEVICE_LOST)

    def test_refused(self):
        answer = plan(want(10), world(self.LOST))
        assert answer == Refuse("d0 is lost: GPU is lost", RejectCode.DEVICE_LOST)

    def test_the_other_is_taken_even_if_somebody_must_go(self):
        answer = plan(want(10, "d0", "d1"), world(self.LOST, view("d1", 0), on("a", "d1")))
        assert isinstance(answer, Evict)
        assert answer.devices == ("d1",)

    def test_a_place_that_needs_it_is_none(self):
        answer = plan(want(10, "d0", "d1", parts=2), world(self.LOST, view("d1", 10)))
        assert isinstance(answer, Refuse)
        assert answer.outage is RejectCode.DEVICE_LOST

    def test_one_that_is_too_small_anyway_does_not_matter(self):
        small = view("d0", 0, total=5, blocked="lost: x", outage=RejectCode.DEVICE_LOST)
        answer = plan(want(10, "d0", "d1"), world(small, view("d1", 0)))
        assert isinstance(answer, Refuse)
        assert answer.outage is None

    def test_what_is_loaded_there_is_loaded(self):
        answer = plan(want(10), world(self.LOST, on("new")))
        assert isinstance(answer, Admit)

    def test_many(self):
        names = [f"d{n}" for n in range(5)]
        lost = [view(n, 10, blocked="lost: x", outage=RejectCode.DEVICE_LOST) for n in names]
        answer = plan(want(10, *names), world(*lost))
        assert isinstance(answer, Refuse)
        assert answer.reason == "d0 is lost: x; d1 is lost: x; d2 is lost: x; 2 more are out, too"
