"""A model that several devices share, where they are not alike: in size, or in how much of it each has come to hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisor.core.events import MemorySampled, UnloadAsked
from supervisor.core.types import Crash, CrashClass, DeviceId, ModelId, WorkerState
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
        world.post(UnloadAsked(ModelId("spread")))
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
