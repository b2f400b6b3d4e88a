"""A device that is lost or quarantined: nobody waits for what can only go there, and all goes on when it is back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisor.core.effects import Alert
from supervisor.core.events import LoadRequested, WorkerExited, WorkerUnkillable
from supervisor.core.types import MODEL_PLACEHOLDER, Crash, CrashClass, DeviceId, Limits, ModelId, RejectCode
from tests.support.simulation import GPU, World, load, model, record

GPU1 = DeviceId("gpu1")
LOST = "GPU is lost"


class Cards(World):
    """A world whose driver can say why a card can't be read."""

    why: str | None = None

    def reading(self):
        reading = super().reading()
        devices = tuple(replace(device, lost=self.why) if device.stale else device for device in reading.devices)
        return replace(reading, devices=devices)

    def lose(self, *devices, why=LOST):
        self.stale, self.why = set(devices), why
        self.sample()


def cards(*models, count=2, **limits):
    world = Cards(totals=dict.fromkeys((GPU, GPU1)[:count], 16384))
    world.configure(*(models or (model("a", 9000), model("b", 9000))), limits=Limits(**limits))
    return world


def alerts(world):
    return [effect.code for effect in world.effects if isinstance(effect, Alert)]


class TestLost:
    """The driver says that a card is gone, or says nothing for too long."""

    def test_those_who_wait_and_those_who_come_are_refused_at_once(self):
        world = cards(count=1)
        load(world, "a")
        waiting = world.request("b")
        world.lose(GPU)
        coming = world.request("b")
        for ticket in (waiting, coming):
            reject = world.rejected[ticket]
            assert reject.code is RejectCode.DEVICE_LOST
            assert reject.message == f"{MODEL_PLACEHOLDER} can't be loaded: gpu0 is lost: GPU is lost"
            assert reject.retry_after_s is None, "a person has to look"
        assert alerts(world) == ["device.lost"]

    def test_what_is_loaded_there_serves_on(self):
        world = cards(count=1)
        load(world, "a")
        world.lose(GPU)
        world.run(100)
        assert world.request("a") in world.dispatched

    def test_those_with_another_place_do_not_notice(self):
        world = cards()
        world.lose(GPU)
        ticket = world.request("a")
        world.run(3)
        assert ticket in world.dispatched
        assert record(world, "a").devices == (GPU1,)

    def test_it_comes_back(self):
        world = cards(count=1)
        world.lose(GPU)
        world.finish(world.request("a"))
        world.lose()
        ticket = world.request("a")
        world.run(3)
        assert ticket in world.dispatched
        assert alerts(world) == ["device.lost", "device.lifted"]

    def test_one_of_those_that_share_a_model(self):
        world = cards(model("spread", 20000, gpus=2))
        world.lose(GPU1)
        assert world.rejected[world.request("spread")].message.endswith("gpu1 is lost: GPU is lost")

    def test_all_are_named(self):
        world = cards()
        world.lose(GPU, GPU1)
        message = world.rejected[world.request("a")].message
        assert message == f"{MODEL_PLACEHOLDER} can't be loaded: gpu0 is lost: GPU is lost; gpu1 is lost: GPU is lost"

    def test_too_large_comes_first(self):
        world = cards(model("huge", 99000), count=1)
        world.lose(GPU)
        assert world.rejected[world.request("huge")].code is RejectCode.INSUFFICIENT_MEMORY

    @pytest.mark.parametrize("patience_s", [10.0, 30.0])
    def test_unreadable_for_too_long(self, patience_s):
        """A driver that only hesitates is waited for."""
        world = cards(count=1, memory_quarantine_s=patience_s)
        world.lose(GPU, why=None)
        ticket = world.request("a")
        world.run(patience_s - 1)
        assert ticket in world.open
        world.run(2)
        assert world.rejected[ticket].code is RejectCode.DEVICE_LOST
        assert f"its memory could not be read for {patience_s:.0f} s" in world.rejected[ticket].message
        assert alerts(world) == ["device.lost"]

    def test_unreadable_for_a_moment_again_and_again(self):
        world = cards(count=1)
        for _ in range(5):
            world.lose(GPU, why=None)
            world.run(20)
            world.lose()
            world.run(1)
        assert alerts(world) == []

    def test_never_read(self):
        world = Cards(totals={GPU: 16384})
        world.stale, world.why = {GPU}, LOST
        world.configure(model("a", 9000))
        assert world.rejected[world.request("a")].code is RejectCode.DEVICE_LOST

    def test_a_crashed_model_comes_back_with_its_card(self):
        world = cards(count=1)
        load(world, "a")
        world.lose(GPU)
        world.crash("a", Crash(CrashClass.GPU_LOST, LOST))
        world.run(100)
        assert not world.alive
        world.lose()
        world.run(10)
        assert world.loaded() == {"a"}

    def test_a_load_that_an_operator_asks_for(self):
        world = cards(count=1)
        world.lose(GPU)
        world.post(LoadRequested(ModelId("a")))
        assert record(world, "a").asked_at is None
        assert record(world, "a").life.reason == "gpu0 is lost: GPU is lost"

    def test_victims_are_freed(self):
        world = cards(count=1, min_residency_s=0.0)
        busy = world.request("a")
        world.run(3)
        world.request("b")
        assert world.state("a") == "draining"
        world.lose(GPU)
        assert world.state("a") == "ready"
        assert busy in world.dispatched
        assert world.replays()


class TestQuarantined:
    """A worker that can't be killed, or memory that is not back."""

    def stuck(self, count):
        world = cards(count=count)
        load(world, "a")
        key = record(world, "a").holder
        world.immortal.add(key)
        world.post(WorkerUnkillable(*key, "still there"))
        return world, key

    def test_refused_at_once(self):
        world, _ = self.stuck(1)
        reject = world.rejected[world.request("b")]
        assert reject.code is RejectCode.DEVICE_QUARANTINED
        assert reject.message.startswith(
            f"{MODEL_PLACEHOLDER} can't be loaded: gpu0 is quarantined: a's worker can't be ended: still there"
        )

    def test_who_asks_for_the_stuck_one_learns_the_same(self):
        world, _ = self.stuck(1)
        reject = world.rejected[world.request("a")]
        assert reject.code is RejectCode.DEVICE_QUARANTINED
        assert reject.message.startswith(
            f"{MODEL_PLACEHOLDER} can't be loaded: gpu0 is quarantined: its own worker can't be"
        )

    def test_those_who_wait_as_well(self):
        world = cards(count=1, min_residency_s=0.0)
        world.return_s = 50.0
        load(world, "a")
        ticket = world.request("b")
        world.run(25)
        assert ticket in world.open
        world.run(10)
        assert world.rejected[ticket].code is RejectCode.DEVICE_QUARANTINED
        world.run(20)
        again = world.request("b")
        world.run(5)
        assert again in world.dispatched

    def test_another_place(self):
        world, _ = self.stuck(2)
        ticket = world.request("b")
        world.run(3)
        assert ticket in world.dispatched

    def test_it_comes_back(self):
        world, key = self.stuck(1)
        world.immortal.discard(key)
        world.using.pop(key)
        del world.alive[key], world.leased[key]
        world.post(WorkerExited(*key))
        world.run(2)
        ticket = world.request("b")
        world.run(50)  # the other came back, too, and keeps its place for a while
        assert ticket in world.dispatched
