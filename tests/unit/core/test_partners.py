import pytest

from supervisor.core.admission.waiting import wait_reason
from supervisor.core.events import (
    Configured,
    HandoverRequested,
    LeaseEnded,
    LeaseLost,
    LeaseRenewed,
    LeaseRestored,
    LeasesSeen,
    ShutdownRequested,
)
from supervisor.core.types import (
    PARTNER,
    DeviceId,
    DeviceSpec,
    Footprint,
    FootprintSource,
    Limits,
    ModelId,
    ModelSpec,
    Partner,
    RejectCode,
)
from tests.support.counts import times
from tests.support.simulation import GPU, World, load, model, record

JOB = ModelId("job")


@pytest.fixture
def world() -> World:
    world = World()
    world.configure(model("a", 9000), model("b", 4000), model("c", 9000, "tts"))
    return world


def granted(world: World, name: str = "job") -> bool:
    return ModelId(name) in world.others


def refused(world: World, name: str = "job") -> str | None:
    """Why it is not wanted any more; None while it is, or has its lease."""
    found = record(world, name)
    return found.life.reason if found.state == "stopped" and found.asked_at is None else None


class TestGrant:
    """A partner has its lease in the very step in which the memory is free."""

    def test_at_once_where_it_is_free(self, world):
        world.lease("job", 12000)
        assert granted(world)
        assert world.state("job") == "ready"

    def test_an_idle_model_goes_for_it(self, world):
        load(world, "a")
        world.run(40.0)
        world.lease("job", 12000)
        assert not granted(world)
        world.run(1.0)
        assert granted(world)
        assert world.state("a") == "stopped"

    def test_it_holds_the_memory_that_it_has_not_taken_yet(self, world):
        world.lease("job", 12000)
        ticket = world.request("a")
        world.run(1.0)
        assert world.rejected[ticket].code is RejectCode.INSUFFICIENT_MEMORY
        assert "job holds 12000 MiB" in world.rejected[ticket].message
        assert "pinned" not in world.rejected[ticket].message

    def test_what_is_left_is_for_models(self, world):
        world.lease("job", 11000)
        load(world, "b")
        assert world.loaded() == {"b", "job"}

    def test_it_is_spread_over_several_devices_in_equal_shares(self):
        world = World(totals={GPU: 16384, DeviceId("gpu1"): 16384})
        world.configure()
        world.lease("job", 24000, gpus=2)
        assert [(it.device, it.mib) for it in world.scheduler.state.ledger.leases()] == [(GPU, 12000), ("gpu1", 12000)]

    def test_one_that_is_too_large_is_refused_also_if_it_waits(self, world):
        world.lease("job", 99999, waits=True)
        assert "which has 15872 usable" in (refused(world) or "")

    def test_nothing_is_learned_of_it(self, world):
        world.lease("job", 8000, pid=1)
        world.others[JOB].takes = 7000
        world.run(2.0)
        assert not record(world, "job").spec.learned


class TestWithoutWaiting:
    """One that doesn't wait gets its lease once idle models are gone, or the reason why not at once; nothing goes in vain."""

    def test_a_busy_model_is_in_its_way(self, world):
        world.request("a")
        world.run(40.0)
        world.lease("job", 12000)
        assert "1 request in flight" in (refused(world) or "")
        assert world.state("a") == "ready"

    def test_no_idle_model_goes_where_a_busy_one_stays(self, world):
        load(world, "b")
        world.request("a")
        world.run(40.0)
        world.lease("job", 15000)
        assert refused(world) is not None
        assert world.loaded() == {"a", "b"}

    def test_a_model_that_loads_is_in_its_way(self, world):
        world.request("a")
        world.run(0.5)
        world.lease("job", 5000)
        assert "loading" in (refused(world) or "")

    def test_one_that_has_just_answered_is_idle(self, world):
        load(world, "a")
        world.finish(world.request("a"))
        world.lease("job", 12000)
        world.run(1.0)
        assert granted(world)

    def test_another_partner_is_in_its_way(self, world):
        world.lease("first", 12000)
        world.lease("job", 12000)
        assert "first holds 12000 MiB" in (refused(world) or "")


class TestWaiting:
    """One that waits is planned like a model that somebody wants, for as long as it asks."""

    def test_a_busy_model_is_drained_for_it(self, world):
        ticket = world.request("a")
        world.run(40.0)
        world.lease("job", 12000, waits=True)
        assert world.state("a") == "draining"
        world.finish(ticket)
        world.run(2.0)
        assert granted(world)

    def test_it_waits_for_another_partner_beyond_the_patience_of_requests(self, world):
        world.lease("first", 12000)
        world.lease("job", 12000, waits=True)
        world.run(times(1000, 5000))
        assert not granted(world)
        assert refused(world) is None
        world.post(LeaseEnded(ModelId("first"), "done"))
        world.run(1.0)
        assert granted(world)

    def test_who_leaves_frees_its_victim(self, world):
        world.request("a")
        world.run(40.0)
        world.lease("job", 12000, waits=True)
        world.post(LeaseEnded(JOB, "its client disconnected"))
        assert world.state("a") == "ready"
        assert JOB not in world.scheduler.state.models

    def test_a_model_that_came_later_does_not_take_what_it_was_granted(self, world):
        load(world, "a")
        world.lease("job", 12000, waits=True)
        ticket = world.request("c")
        world.run(60.0)
        assert granted(world)
        assert "job holds 12000 MiB" in world.rejected[ticket].message


class TestHeld:
    """While it lasts nothing takes its memory; it lasts as long as heartbeats come."""

    def test_no_model_of_any_priority_takes_its_place(self, world):
        world.lease("job", 12000)
        ticket = world.request("c")
        world.run(60.0)
        assert world.rejected[ticket].code is RejectCode.INSUFFICIENT_MEMORY
        assert world.state("job") == "ready"

    def test_it_ends_when_no_heartbeat_has_come_in_time(self, world):
        world.lease("job", 12000, ttl_s=30.0)
        for _ in range(10):
            world.run(29.0)
            world.post(LeaseRenewed(JOB))
        world.run(29.0)
        assert world.state("job") == "ready"
        world.run(2.0)
        assert JOB not in world.scheduler.state.models
        assert ("lease_ended", "no heartbeat came for 30 s") in world.reasons("job")

    def test_heartbeats_leave_one_timer(self, world):
        world.lease("job", 12000, ttl_s=30.0)
        for _ in range(100):
            world.now += 0.1
            world.post(LeaseRenewed(JOB))
        assert len(world.scheduler.state.timers) == 1

    def test_a_shorter_time_to_live_counts_at_once(self, world):
        world.lease("job", 12000, ttl_s=1000.0)
        world.post(LeaseRenewed(JOB, ttl_s=5.0))
        world.run(6.0)
        assert JOB not in world.scheduler.state.models

    def test_a_reload_leaves_it(self, world):
        world.lease("job", 12000)
        world.configure(model("a", 9000))
        assert world.state("job") == "ready"

    def test_a_heartbeat_of_one_that_ended_changes_nothing(self, world):
        world.lease("job", 12000, ttl_s=5.0)
        world.stale = {GPU}
        world.run(6.0)
        world.post(LeaseRenewed(JOB))
        world.stale = set()
        world.run(1.0)
        assert JOB not in world.scheduler.state.models


class TestEnd:
    """Its lease ends with the next reading; what its process keeps counts as used outside."""

    def test_the_memory_is_for_others_again(self, world):
        world.lease("job", 12000, pid=1)
        world.others[JOB].takes = 12000
        world.run(1.0)
        world.post(LeaseEnded(JOB, "done"))
        world.others[JOB].takes = 0
        load(world, "a")
        assert world.loaded() == {"a"}

    @pytest.mark.parametrize("pid", [None, 1])
    def test_what_an_expired_one_still_takes_is_not_given_away(self, world, pid):
        world.lease("job", 12000, ttl_s=5.0, pid=pid)
        world.others[JOB].takes = 12000
        world.run(7.0)
        assert JOB not in world.scheduler.state.models
        ticket = world.request("a")
        world.run(40.0)
        assert world.rejected[ticket].code is RejectCode.INSUFFICIENT_MEMORY
        assert world.scheduler.state.ledger.totals(GPU).quarantined is False

    def test_one_that_is_named_anew_is_another(self, world):
        world.lease("job", 12000)
        first = record(world, "job").generation
        world.post(LeaseEnded(JOB, "done"))
        world.run(1.0)
        world.lease("job", 12000)
        assert record(world, "job").generation > first

    def test_a_shutdown_waits_for_none(self, world):
        world.lease("job", 12000)
        world.post(ShutdownRequested())
        assert record(world, "job").exited


class TestMeasured:
    """What a partner took counts once, whether it can be told whose it is or not."""

    @pytest.mark.parametrize("pid", [None, 1])
    @pytest.mark.parametrize("takes", [0, 5000, 10000])
    def test_what_is_free_for_others(self, world, pid, takes):
        world.lease("job", 10000, pid=pid)
        world.others[JOB].takes = takes
        world.run(1.0)
        assert world.scheduler.state.ledger.totals(GPU).available_mib == 16384 - 512 - 10000

    def test_what_others_use_outside_is_not_taken_for_its_own_where_it_is_measured(self, world):
        world.outside = {GPU: 3000}
        world.sample()
        world.lease("job", 10000, pid=1)
        world.others[JOB].takes = 4000
        world.run(1.0)
        assert world.scheduler.state.ledger.totals(GPU).available_mib == 16384 - 512 - 3000 - 10000


class TestShared:
    """What others have leased of the devices counts as taken, whether they use it yet or not."""

    @pytest.mark.parametrize("takes", [0, 2000, 5000])
    def test_what_is_free(self, world, takes):
        world.outside = {GPU: takes}
        world.post(LeasesSeen({GPU: 5000}))
        world.sample()
        assert world.scheduler.state.ledger.totals(GPU).available_mib == 16384 - 512 - 5000

    def test_a_model_has_no_place_in_it(self, world):
        world.post(LeasesSeen({GPU: 9000}))
        ticket = world.request("a")
        world.run(1.0)
        assert world.rejected[ticket].code is RejectCode.INSUFFICIENT_MEMORY
        world.post(LeasesSeen({}))
        load(world, "a")

    def test_nothing_begins_while_it_is_unknown(self, world):
        load(world, "b")
        world.post(LeasesSeen(trouble="the store is away"))
        ticket = world.request("a")
        assert world.request("b") in world.dispatched
        world.run(60.0)
        assert world.loaded() == {"b"}
        assert "the store is away" in wait_reason(world.scheduler.state, record(world, "a")).what
        world.post(LeasesSeen())
        world.run(5.0)
        assert ticket in world.dispatched

    def test_nor_is_a_lease_granted(self, world):
        world.post(LeasesSeen(trouble="the store is away"))
        world.lease("job", 1000)
        assert refused(world) == "the store is away"

    def test_also_on_devices_that_come_later(self):
        world = World()
        world.post(LeasesSeen(trouble="the store is away"))
        world.configure(model("a", 9000, preload=True))
        world.run(5.0)
        assert world.loaded() == set()

    def test_a_worker_whose_memory_others_may_have_is_stopped(self, world):
        ticket = world.request("a")
        world.run(5.0)
        world.post(LeaseLost(ModelId("a"), record(world, "a").generation, "expired"))
        world.run(1.0)
        assert ticket in world.cut
        assert ("lease_ended", "expired") in world.reasons("a")
        world.run(5.0)
        assert world.loaded() == {"a"}  # there is room

    def test_so_is_a_partner(self, world):
        world.lease("job", 1000)
        world.post(LeaseLost(JOB, record(world, "job").generation, "expired"))
        world.run(1.0)
        assert JOB not in world.scheduler.state.models


class TestRestored:
    """A daemon that begins goes on with the leases of the one before it, whatever is free."""

    def test_it_holds_what_it_held(self):
        world = World()
        spec = ModelSpec(JOB, PARTNER, 100, Footprint(12000, FootprintSource.EXPLICIT), pin=True)
        device = DeviceSpec(GPU, 16384, 512)
        world.post(Configured((model("a", 9000, preload=True),), (device,), Limits()))
        world.post(LeaseRestored(spec, Partner("job", 30.0), (GPU,), 12000))
        world.run(5.0)
        assert world.loaded() == {"job"}
        world.run(30.0)
        load(world, "a")
        assert world.loaded() == {"a"}


class TestHandover:
    """Who asks during a hand-over waits for the successor."""

    def test_nothing_is_granted(self, world):
        world.post(HandoverRequested())
        world.lease("job", 1000)
        assert not granted(world)
