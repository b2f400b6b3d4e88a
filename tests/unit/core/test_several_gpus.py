"""A model that several devices share, where they are not alike: in size, or in how much of it each has come to hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisor.core.events import Configured, Event, MemorySampled, UnloadRequested, WorkerAdopted
from supervisor.core.planning import placement
from supervisor.core.scheduler import Scheduler
from supervisor.core.types import Crash, CrashClass, DeviceId, DeviceSpec, Limits, ModelId, Policy, WorkerState
from tests.support.simulation import GPU, World, guessed, load, model, record

GPU1 = DeviceId("gpu1")


@pytest.fixture
def world():
    """A large card and a small one."""
    world = World(totals={GPU: 24000, GPU1: 12000})
    yield world
    assert world.replays(), "a replay decides the same"


class TestUnevenlyDivided:
    def test_what_was_measured_on_the_large_one_is_not_too_large_for_the_place(self, world):
        """It runs there: 13000 and 10000, of which the small one could never hold the larger."""
        world.beyond = {("spread", GPU): 3000}
        world.configure(guessed("spread", 20000, gpus=2))
        load(world, "spread")
        assert {device: learned.mib for device, learned in record(world, "spread").spec.learned.items()} == {
            GPU: 13000,
            GPU1: 10000,
        }
        world.post(UnloadRequested(ModelId("spread")))
        world.run(2)
        assert record(world, "spread").state is WorkerState.STOPPED
        load(world, "spread")

    def test_all_that_it_holds_comes_back_when_it_goes(self, world):
        """20000 on the large one, leased or not: for a model that needs as much it is evicted, and none is refused."""
        world.beyond = {("spread", GPU): 10000}
        world.configure(model("spread", 20000, gpus=2), model("large", 20000, priority=200, devices=(GPU,)))
        load(world, "spread")
        load(world, "large")
        (evicted,) = [d.reason for d in world.decisions.last(ModelId("large")) if d.kind == "evict"]
        assert "evicting spread (llm, 20000 + 10000 MiB, idle" in evicted


class TestUnreadable:
    def test_nothing_is_learned_on_one_that_can_not_be_read(self, world):
        """What it is said to take there was seen while it still loaded."""
        world.gradual = True
        world.configure(guessed("spread", 20000, gpus=2))
        world.request("spread")
        world.run(0.9)
        while_loading = world.reading()
        world.run(1.2)  # ready, and not read since
        assert record(world, "spread").state is WorkerState.READY
        old = {(worker.model, worker.device): worker for worker in while_loading.workers}
        assert 0 < old[ModelId("spread"), GPU1].used_mib < 10000
        now = world.reading()
        devices = tuple(replace(device, stale=device.id == GPU1) for device in now.devices)
        workers = tuple(old[w.model, w.device] if w.device == GPU1 else w for w in now.workers)
        learned = record(world, "spread").spec.learned
        world.post(MemorySampled(devices, workers, now.taken_at))
        assert record(world, "spread").spec.learned.keys() - learned.keys() == {GPU}


class TestOutOfMemory:
    def test_the_one_retry_stays_within_the_smaller(self, world):
        """A quarter more than 10000 is more than the small one has; the retry takes what there is."""
        crashes = [Crash(CrashClass.OUT_OF_MEMORY, "no memory left")]
        world.crash_on_start = lambda _model: crashes.pop() if crashes else None
        world.configure(model("spread", 20000, gpus=2))
        ticket = world.request("spread")
        world.run(8)
        assert ticket in world.dispatched
        assert world.starts == ["spread", "spread"]
        leases = world.scheduler.state.ledger.leases()
        assert [(lease.device, lease.mib) for lease in leases] == [(GPU, 11488), (GPU1, 11488)]


class TestInParts:
    """`gpus: auto`: what it needs is one sum, and its parts follow what is free."""

    def leased(self, world, name: str = "apart") -> dict[DeviceId, int]:
        leases = world.scheduler.state.ledger.leases_of(record(world, name).holder)
        return {lease.device: lease.mib for lease in leases}

    def test_whole_where_one_has_room(self, world):
        world.configure(model("apart", 20000, spreads=True))
        load(world, "apart")
        assert self.leased(world) == {GPU: 20000}

    def test_in_proportion_where_none_has(self, world):
        world.configure(model("apart", 30000, spreads=True))
        load(world, "apart")
        assert self.leased(world) == {GPU: 20302, GPU1: 9698}

    def test_in_proportion_where_a_partner_has_a_part_of_the_only_one_that_is_large_enough(self, world):
        world.configure(model("apart", 20000, spreads=True))
        world.lease("job", 8000, devices=(GPU,))
        world.run(1)
        load(world, "apart")
        assert self.leased(world) == {GPU: 11542, GPU1: 8458}

    def test_others_see_its_parts(self, world):
        """What it leaves of the large card is enough for another; the small card is full."""
        world.configure(model("apart", 30000, spreads=True), model("small", 3000))
        load(world, "apart")
        load(world, "small")
        assert world.loaded() == {"apart", "small"}
        assert self.leased(world, "small") == {GPU: 3000}

    def test_two_that_do_not_fit_together_take_turns(self, world):
        world.configure(model("apart", 30000, spreads=True), model("whole", 20000))
        for name in ("apart", "whole", "apart"):
            load(world, name)
            assert name in world.loaded()
        assert self.leased(world) == {GPU: 20302, GPU1: 9698}

    def test_what_is_measured_is_of_all_parts_and_not_limited_to_one_device(self, world):
        world.beyond = {("apart", GPU): 300, ("apart", GPU1): 200}
        world.configure(guessed("apart", 30000, spreads=True))
        load(world, "apart")
        learned = {device: footprint.mib for device, footprint in record(world, "apart").spec.learned.items()}
        assert learned == {GPU: 30500, GPU1: 30500}
        world.post(UnloadRequested(ModelId("apart")))
        world.run(2)
        load(world, "apart")
        assert sum(self.leased(world).values()) == 30500

    def test_out_of_memory_raises_all_of_it_as_far_as_the_cards_go(self, world):
        crashes = [Crash(CrashClass.OUT_OF_MEMORY, "no memory left")]
        world.crash_on_start = lambda _model: crashes.pop() if crashes else None
        world.configure(model("apart", 30000, spreads=True))
        ticket = world.request("apart")
        world.run(8)
        assert ticket in world.dispatched
        assert record(world, "apart").spec.raised == {GPU: 37500, GPU1: 37500}
        assert self.leased(world) == {GPU: 22976, GPU1: 10976}  # all but the margins

    def test_one_that_ran_out_of_memory_on_one_card_gets_two(self, world):
        crashes = [Crash(CrashClass.OUT_OF_MEMORY, "no memory left")]
        world.crash_on_start = lambda _model: crashes.pop() if crashes else None
        world.configure(model("apart", 20000, spreads=True))
        ticket = world.request("apart")
        world.run(8)
        assert ticket in world.dispatched
        assert sum(self.leased(world).values()) == 25000

    def test_a_successor_knows_the_parts(self, world):
        world.configure(model("apart", 30000, spreads=True))
        load(world, "apart")
        before, successor = record(world, "apart"), Scheduler()
        parts = tuple(self.leased(world).values())
        devices = tuple(DeviceSpec(device, total, world.margin) for device, total in world.totals.items())
        successor.handle(Configured((before.spec,), devices, Limits(), Policy()), world.now)
        successor.handle(WorkerAdopted(before.spec, before.generation, before.devices, parts), world.now)
        assert {lease.device: lease.mib for lease in successor.state.ledger.leases()} == self.leased(world)


class TestSixteenCards:
    """However many ways there are to choose among them, a decision makes a few plans."""

    def test_each_event_of_an_eviction(self, monkeypatch):
        plans: list[object] = []
        real = placement.plan
        monkeypatch.setattr(placement, "plan", lambda *asked: plans.append(asked) or real(*asked))
        world = World(totals={DeviceId(f"gpu{i:02}"): 8000 for i in range(16)}, load_s=0.5)
        world.configure(model("apart", 60000, spreads=True), *(model(f"m{i}", 5000) for i in range(16)))
        for i in range(16):
            load(world, f"m{i}")
        assert len(world.loaded()) == 16
        plans.clear()
        ticket = world.request("apart")
        assert len(plans) <= 3
        most, post = 0, world.post

        def counted(event: Event) -> None:
            nonlocal most
            plans.clear()
            post(event)
            most = max(most, len(plans))

        monkeypatch.setattr(world, "post", counted)
        world.run(5)
        assert ticket in world.dispatched
        assert most <= 6
        leases = world.scheduler.state.ledger.leases_of(record(world, "apart").holder)
        assert sum(lease.mib for lease in leases) == 60000
