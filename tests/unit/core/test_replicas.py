"""Several workers of one model: who gets a request, when another one is loaded, and when it goes."""

from __future__ import annotations

from collections import Counter

import pytest

from supervisor.core.effects import Decided
from supervisor.core.events import LoadAsked, PinAsked, UnloadAsked
from supervisor.core.types import Crash, CrashClass, DeviceId, Limits, ModelId
from tests.support.simulation import World, model

M = "m"
IDLE_S = 20.0


def several(world: World, *others, mib: int = 4000, limits: Limits | None = None, **keys) -> None:
    keys = {"replicas": 1, "replica_max": 3, "target_inflight": 2, **keys}
    world.configure(model(M, mib, **keys), *others, limits=limits or Limits(replica_idle_s=IDLE_S, min_residency_s=0.0))


def who(world: World, *tickets) -> list[str]:
    return [world.dispatched[ticket][0] for ticket in tickets if ticket in world.dispatched]


def loaded(world: World) -> set[str]:
    return {name for name, _ in world.alive}


class TestHowMany:
    """`replicas` whenever one is loaded, more while the queue needs them, never at others' cost."""

    def test_one_as_long_as_it_is_enough(self, world):
        several(world)
        tickets = [world.request(M) for _ in range(2)]
        world.run(30.0)
        assert who(world, *tickets) == [M, M]
        assert loaded(world) == {M}

    def test_the_queue_brings_more_as_long_as_memory_is_free(self, world):
        several(world)
        tickets = [world.request(M) for _ in range(12)]
        world.run(30.0)
        assert loaded(world) == {M, "m#2", "m#3"}
        assert Counter(who(world, *tickets)) == {M: 2, "m#2": 2, "m#3": 2}

    def test_fewer_than_one_more_would_take_bring_none(self, world):
        several(world)
        for _ in range(3):
            world.request(M)
        world.run(30.0)
        assert loaded(world) == {M}

    def test_always_so_many_once_one_is_loaded(self, world):
        several(world, replicas=2)
        world.run(10.0)
        assert loaded(world) == set()
        world.finish(world.request(M))
        world.run(10.0)
        ticket = world.request(M)
        world.run(10.0)
        assert loaded(world) == {M, "m#2"}
        world.finish(ticket)
        world.run(10 * IDLE_S)
        assert loaded(world) == {M, "m#2"}, "these stay"

    def test_at_the_start(self, world):
        several(world, replicas=2, preload=True)
        world.run(10.0)
        assert loaded(world) == {M, "m#2"}

    def test_an_operator_loads_all(self, world):
        several(world, replicas=2)
        world.post(LoadAsked(ModelId(M)))
        world.run(10.0)
        assert loaded(world) == {M, "m#2"}

    def test_nobody_goes_for_another_replica(self, world):
        several(world, model("other", 10000))
        world.finish(world.request("other"))
        world.run(10.0)
        other = world.request("other")
        world.run(10.0)
        world.finish(other)
        assert loaded(world) == {"other"}
        for _ in range(12):
            world.request(M)
        world.run(60.0)
        assert loaded(world) == {"other", M}
        assert sum(isinstance(e, Decided) and e.kind == "replica" for e in world.effects) < 10, (
            "it isn't told again and again"
        )

    def test_another_replica_goes_for_anybody(self, world):
        several(world, model("other", 8000))
        tickets = [world.request(M) for _ in range(12)]
        world.run(20.0)
        for ticket in tickets:
            world.finish(ticket)
        assert len(loaded(world)) == 3
        ticket = world.request("other")
        world.run(10.0)
        assert ticket in world.dispatched

    def test_those_too_many_go_when_they_are_idle(self, world):
        several(world)
        tickets = [world.request(M) for _ in range(12)]
        world.run(20.0)
        for ticket in tickets:
            world.finish(ticket)
        world.run(3 * IDLE_S)
        assert loaded(world) == {M}

    def test_on_several_devices(self):
        world = World(totals={DeviceId(f"gpu{n}"): 8192 for n in range(3)})
        several(world, mib=6000)
        for _ in range(12):
            world.request(M)
        world.run(30.0)
        assert {device for devices in world.alive.values() for device in devices} == world.totals.keys()

    def test_apart_as_long_as_there_are_devices(self):
        world = World(totals={DeviceId(f"gpu{n}"): 16384 for n in range(2)})
        several(world, mib=4000, replicas=3)
        world.request(M)
        world.run(30.0)
        used = Counter(device for devices in world.alive.values() for device in devices)
        assert sorted(used.values()) == [1, 2]


class TestWhoAnswers:
    """The replica that knows the conversation, else the one with the fewest requests."""

    @pytest.fixture
    def three(self, world):
        several(world, replicas=3, target_inflight=4)
        world.finish(world.request(M))
        world.run(20.0)
        first = world.request(M)
        world.run(20.0)
        world.finish(first)
        assert len(loaded(world)) == 3
        return world

    def test_the_least_loaded(self, three):
        assert Counter(who(three, *(three.request(M) for _ in range(9)))) == {M: 3, "m#2": 3, "m#3": 3}

    def test_a_conversation_goes_on_where_it_was(self, three):
        tickets = {prefix: three.request(M, prefix=prefix) for prefix in (1, 2, 3)}
        places = {prefix: who(three, ticket)[0] for prefix, ticket in tickets.items()}
        assert len(set(places.values())) == 3
        for ticket in tickets.values():
            three.finish(ticket)
        for _ in range(5):
            for prefix, place in places.items():
                ticket = three.request(M, prefix=prefix)
                assert who(three, ticket) == [place]
                three.finish(ticket)

    def test_but_not_where_it_would_wait(self, three):
        busy = [three.request(M, prefix=1) for _ in range(4)]
        assert len(set(who(three, *busy))) == 1
        ticket = three.request(M, prefix=1)
        assert who(three, ticket)[0] != who(three, busy[0])[0]

    def test_whoever_has_a_place_takes_the_next(self, three):
        tickets = [three.request(M) for _ in range(13)]
        assert len(who(three, *tickets)) == 12
        three.finish(next(ticket for ticket in tickets if three.dispatched[ticket][0] == "m#3"))
        assert who(three, tickets[12]) == ["m#3"]


class TestTogether:
    """One of them may end; what is said of the model is said of all."""

    @pytest.fixture
    def two(self, world):
        several(world, replicas=2, replica_max=2)
        ticket = world.request(M)
        world.run(20.0)
        world.finish(ticket)
        assert loaded(world) == {M, "m#2"}
        return world

    @pytest.mark.parametrize("crashed", [M, "m#2"])
    def test_a_crash_of_one_stops_nobody(self, two, crashed):
        two.crash(crashed, Crash(CrashClass.UNKNOWN, "gone"))
        ticket = two.request(M)
        assert who(two, ticket) == [({M, "m#2"} - {crashed}).pop()]
        two.run(30.0)
        assert loaded(two) == {M, "m#2"}, "it comes back"

    def test_what_waits_is_served_by_the_other(self, two):
        tickets = [two.request(M) for _ in range(6)]
        two.crash(M, Crash(CrashClass.BAD_ARGUMENTS, "gone for good"))
        assert two.state(M) == "failed"
        for _ in range(10):
            for ticket in list(two.dispatched):
                two.finish(ticket)
        assert not two.open
        assert not [ticket for ticket in tickets if ticket in two.rejected]
        assert who(two, two.request(M)) == ["m#2"]

    def test_without_any_the_failure_is_told(self, two):
        tickets = [two.request(M) for _ in range(6)]
        two.crash(M, Crash(CrashClass.BAD_ARGUMENTS, "gone for good"))
        two.crash("m#2", Crash(CrashClass.BAD_ARGUMENTS, "gone for good"))
        two.run(1.0)
        assert [two.rejected[ticket].code for ticket in tickets if ticket in two.rejected] == ["model_failed"] * 2
        assert two.rejected[two.request(M)].code == "model_failed"

    def test_the_first_may_be_evicted_alone(self, world):
        several(world, model("other", 8000), replicas=2, replica_max=2, mib=7000)
        first = world.request(M)
        world.run(20.0)
        world.finish(first)
        busy = world.request(M)
        (taken,) = who(world, busy)
        other = world.request("other")
        world.run(20.0)
        assert other in world.dispatched
        assert loaded(world) == {taken, "other"}
        assert who(world, world.request(M)) == [taken]
        world.run(60.0)
        assert world.state("other") == "ready", "nobody goes for the replica that is missing"

    def test_unload_ends_all_and_a_request_brings_them_back(self, two):
        two.post(UnloadAsked(ModelId(M), force=True))
        two.run(5.0)
        assert loaded(two) == set()
        two.run(100.0)
        assert loaded(two) == set()
        two.request(M)
        two.run(30.0)
        assert loaded(two) == {M, "m#2"}

    def test_pin_holds_all(self, two):
        two.post(PinAsked(ModelId(M), True))
        assert all(two.scheduler.state.models[name].pinned for name in (M, "m#2"))

    def test_a_reload_takes_some_away_and_adds_some(self, two):
        several(two, replicas=1, replica_max=1)
        two.run(5.0)
        assert loaded(two) == {M}
        assert "m#2" not in two.scheduler.state.models
        several(two, replicas=3)
        two.run(20.0)
        assert loaded(two) == {M, "m#2", "m#3"}

    def test_the_same_again(self, two):
        for n in range(20):
            two.request(M, prefix=n % 3)
        two.run(30.0)
        assert two.replays()
