"""Several workers of one model: who gets a request, when another one is loaded, and when it goes."""

from __future__ import annotations

from collections import Counter

import pytest

from supervisor.core.effects import Decided, Dispatch, Reject, StartWorker
from supervisor.core.events import (
    LoadCancelled,
    LoadRequested,
    PinRequested,
    RequestArrived,
    RequestFinished,
    UnloadRequested,
    WorkerAdopted,
)
from supervisor.core.types import (
    Crash,
    CrashClass,
    DeviceId,
    Generation,
    Limits,
    ModelId,
    Policy,
    RejectCode,
    TicketId,
)
from supervisor.core.workers.replicas import expanded, models_to_balance
from tests.support.simulation import GPU, World, guessed, model

M = "m"
IDLE_S = 20.0


def several(world: World, *others, mib: int = 4000, limits: Limits | None = None, **keys) -> None:
    keys = {"replicas": 1, "replica_max": 3, "target_inflight": 2, **keys}
    world.configure(model(M, mib, **keys), *others, limits=limits or Limits(replica_idle_s=IDLE_S, min_residency_s=0.0))


def who(world: World, *tickets) -> list[str]:
    return [world.dispatched[ticket][0] for ticket in tickets if ticket in world.dispatched]


def finish_after(world: World, ticket: TicketId, seconds: float) -> None:
    world.later(seconds, lambda: world.finish(ticket))


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
        world.post(LoadRequested(ModelId(M)))
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
        two.post(UnloadRequested(ModelId(M), force=True))
        two.run(5.0)
        assert loaded(two) == set()
        two.run(100.0)
        assert loaded(two) == set()
        two.request(M)
        two.run(30.0)
        assert loaded(two) == {M, "m#2"}

    def test_pin_holds_all(self, two):
        two.post(PinRequested(ModelId(M), True))
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


class TestLasting:
    """The first `replicas` stay and go together; those beyond come and go with the queue."""

    def test_they_go_together_when_the_keep_alive_of_the_last_is_over(self, world):
        several(world, replicas=2, replica_max=2, keep_alive_s=300.0)
        finish_after(world, world.request(M), 10.0)
        world.run(150)
        finish_after(world, world.request(M), 1.0)
        world.run(200)
        assert loaded(world) == {M, "m#2"}
        world.run(7200)
        assert Counter(world.starts) == {M: 1, "m#2": 1}
        assert loaded(world) == set()

    def test_as_long_as_one_is_asked_to_stay(self, world):
        several(world, replicas=2, replica_max=2, keep_alive_s=20.0)
        finish_after(world, world.request(M, keep_alive_s=3600.0), 10.0)
        world.run(1800)
        assert (loaded(world), Counter(world.starts)) == ({M, "m#2"}, {M: 1, "m#2": 1})
        world.run(1900)
        assert loaded(world) == set()

    def test_as_long_as_one_works(self, world):
        several(world, replicas=2, replica_max=2, keep_alive_s=20.0)
        ticket = world.request(M)
        world.run(600)
        assert Counter(world.starts) == {M: 1, "m#2": 1}
        world.finish(ticket)
        world.run(60)
        assert loaded(world) == set()

    def test_those_of_a_default_model_stay(self, world):
        policy = Policy(default_models=(ModelId(M),))
        specs = model(M, 4000, replicas=2, replica_max=2, target_inflight=2, keep_alive_s=20.0)
        world.configure(specs, limits=Limits(min_residency_s=0.0), policy=policy)
        finish_after(world, world.request(M), 5.0)
        world.run(1200)
        assert (loaded(world), Counter(world.starts)) == ({M, "m#2"}, {M: 1, "m#2": 1})

    def test_those_beyond_go_although_all_have_the_same_keep_alive(self, world):
        several(world, keep_alive_s=15.0)
        tickets = [world.request(M) for _ in range(9)]
        world.run(10)
        assert len(loaded(world)) == 3
        for ticket in tickets:
            world.finish(ticket)
        for _ in range(20):
            world.run(4)
            finish_after(world, world.request(M), 0.5)
        assert loaded(world) == {M}

    def test_a_pin_holds_only_those_that_stay(self, world):
        several(world)
        tickets = [world.request(M) for _ in range(9)]
        world.run(10)
        world.post(PinRequested(ModelId(M), True))
        for ticket in tickets:
            world.finish(ticket)
        world.run(300)
        assert loaded(world) == {M}

    def test_a_pin_counts_for_one_that_a_reload_adds(self, world):
        several(world, replica_max=1)
        world.post(PinRequested(ModelId(M), True))
        several(world, replicas=2, replica_max=3)
        models = world.scheduler.state.models
        assert [models[name].pinned for name in (M, "m#2", "m#3")] == [True, True, False]


class TestTrouble:
    """What is wrong with one is no reason to refuse what another can do."""

    def test_one_that_fails_does_not_keep_the_next_from_coming(self, world):
        world.crash_on_start = lambda name: Crash(CrashClass.UNKNOWN, "x") if name == "m#2" else None
        several(world)
        for _ in range(30):
            world.request(M)
        world.run(300)
        assert loaded(world) == {M, "m#3"}

    def test_where_the_first_has_failed_the_next_is_loaded(self, world):
        several(world, replicas=2, replica_max=2, keep_alive_s=20.0)
        finish_after(world, world.request(M), 10.0)
        world.run(11)
        world.crash(M, Crash(CrashClass.BAD_ARGUMENTS, "x"))
        world.run(60)
        assert (loaded(world), world.state(M)) == (set(), "failed")
        ticket = world.request(M)
        world.run(5)
        assert who(world, ticket) == ["m#2"]

    def test_an_operators_load_resets_them_all(self, world):
        several(world, replicas=2, replica_max=2)
        world.request(M)
        world.run(10)
        world.crash("m#2", Crash(CrashClass.BAD_ARGUMENTS, "x"))
        assert world.state("m#2") == "failed"
        world.post(LoadRequested(ModelId(M)))
        world.run(10)
        assert loaded(world) == {M, "m#2"}

    def test_a_load_of_what_is_loaded_changes_nothing(self, world):
        several(world, replicas=2, replica_max=2)
        finish_after(world, world.request(M), 8.0)
        world.run(10)
        world.post(LoadRequested(ModelId(M)))
        world.run(10)
        assert Counter(world.starts) == {M: 1, "m#2": 1}

    def test_a_cancelled_load_stays_cancelled_until_somebody_waits(self, world):
        world.load_s = 50
        several(world, replicas=2, replica_max=2)
        for _ in range(2):
            world.request(M)
        world.run(60)
        world.post(LoadCancelled(ModelId("m#2")))
        world.run(300)
        assert Counter(world.starts) == {M: 1, "m#2": 1}
        world.request(M)
        world.run(60)
        assert loaded(world) == {M, "m#2"}

    def test_an_unload_that_waits_keeps_who_waits(self, world):
        several(world, model("other", 8000), replicas=2, replica_max=2, mib=7000)
        finish_after(world, world.request(M), 10.0)
        world.run(15)
        assert world.request(M) in world.dispatched
        world.request("other")
        world.run(40)
        left = loaded(world) - {"other"}
        assert len(left) == 1
        waiting = [world.request(M) for _ in range(3)]
        world.post(UnloadRequested(ModelId(M)))
        assert not set(waiting) & world.rejected.keys()


class TestKnown:
    """What is known of one is known of all."""

    def test_memory(self, world):
        world.beyond = {(M, GPU): 3000}
        world.configure(guessed(M, 4000, replicas=1, replica_max=2, target_inflight=2))
        for _ in range(9):
            world.request(M)
        world.run(10)
        models = world.scheduler.state.models
        assert [models[name].spec.learned[GPU].mib for name in (M, "m#2")] == [7000, 7000]

    def test_load_time(self):
        world = World(load_s=30.0)
        several(world)
        finish_after(world, world.request(M), 40.0)
        world.run(50)
        world.post(UnloadRequested(ModelId(M)))
        world.run(5)
        ticket = world.request(M, budget_s=5.0)
        assert world.rejected[ticket].code is RejectCode.BUDGET_TOO_SMALL


class TestPlaces:
    """SplitPlan as long as there are free devices, however many, also in parts."""

    @pytest.mark.parametrize("count", [8, 9, 16])
    def test_one_device_each(self, count):
        world = World(totals={DeviceId(f"gpu{n:02}"): 16384 for n in range(count)})
        several(world, replicas=4, replica_max=4)
        world.request(M)
        world.run(40)
        assert len(set(world.alive.values())) == len(world.alive) == 4

    def test_pairs(self):
        world = World(totals={DeviceId(f"gpu{n}"): 16384 for n in range(5)})
        several(world, replicas=2, replica_max=2, gpus=2)
        world.request(M)
        world.run(40)
        one, other = world.alive.values()
        assert not set(one) & set(other)

    def test_in_parts_where_no_single_device_is_free(self):
        world = World(totals={DeviceId("gpu0"): 24000, DeviceId("gpu1"): 12000, DeviceId("gpu2"): 12000})
        several(world, mib=14000, replicas=2, replica_max=2, spreads=True)
        world.request(M)
        world.run(40)
        assert set(world.alive.values()) == {("gpu0",), ("gpu1", "gpu2")}

    def test_adopting_one_loads_no_other(self, world):
        spec = model(M, 4000, replicas=2, replica_max=2)
        world.configure(spec)
        several_of = {each.id: each for each in expanded((spec,), Limits())}
        for name in (M, "m#2"):
            before = len(world.effects)
            key = ModelId(name), Generation(7)
            world.alive[key], world.using[key], world.leased[key] = (GPU,), {GPU: 4000}, {GPU: 4000}
            world.post(WorkerAdopted(several_of[key[0]], key[1], (GPU,), 4000, ready_at=world.now, last_used=world.now))
            assert not [effect for effect in world.effects[before:] if isinstance(effect, StartWorker)]
        world.run(60)
        assert (loaded(world), world.starts) == ({M, "m#2"}, [])


class TestCost:
    """What requests do all the time concerns no other model's replicas."""

    def test_only_its_own_model_is_looked_at(self, world):
        others = [model(name, 1000, replicas=1, replica_max=2) for name in ("other", "third")]
        world.configure(model("alone", 1000), model(M, 1000, replicas=1, replica_max=2), *others)
        for name, own in (("alone", []), (M, [M])):
            world.request(name)
            world.run(5)
            ticket = world.request(name)
            arrived = RequestArrived(ticket, ModelId(name))
            done = Dispatch(ticket, ModelId(name), Generation(1))
            assert list(models_to_balance(world.scheduler.state, arrived, [done], None)) == own
            assert list(models_to_balance(world.scheduler.state, RequestFinished(ticket), [], ModelId(name))) == own

    def test_where_anybody_is_refused_all_are(self, world):
        several(world)
        refused = Reject(TicketId("t"), RejectCode.QUEUE_TIMEOUT, "")
        arrived = RequestArrived(TicketId("u"), ModelId("else"))
        assert list(models_to_balance(world.scheduler.state, arrived, [refused], None)) == [M]


def test_nobody_waits_for_a_replica_that_cant_be_ended():
    """Another one would have served the request, and is configured no more."""
    world = World(totals={GPU: 16384, DeviceId("gpu1"): 8192})
    one = model(M, 4000, definition="a")
    world.configure(one)
    ticket = world.request(M)
    several(world, replicas=2, definition="b")
    world.not_to_be_killed((M, 1))
    world.configure(one)
    assert world.rejected[ticket].code is RejectCode.DEVICE_QUARANTINED, "as for one that arrives now"
    assert "can't be ended" in world.rejected[ticket].message
