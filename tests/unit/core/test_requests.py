"""What a client is told instead of an answer: it names the model as the client did, whatever the core knows it by."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from supervisor.core.events import UnloadRequested, WorkerUnkillable, WorkerUnready
from supervisor.core.types import Crash, CrashClass, Limits, ModelId
from supervisor.engine.ticket import rejection
from tests.support.simulation import GPU, load, model, record

HIDDEN = model("hidden", 9000)
PINNED = model("other", 9000, pin=True)


def crashing(kind):
    def ask(world):
        world.crash_on_start = lambda _model: Crash(kind, "it ended", quote="its words")
        world.configure(HIDDEN, limits=Limits(crash_limit=1))
        queued = world.request("hidden")
        world.run(10)
        return queued, world.request("hidden")

    return ask


def stuck(world):
    world.configure(HIDDEN)
    queued = world.request("hidden")
    world.immortal.add(record(world, "hidden").holder)
    world.post(WorkerUnkillable(*record(world, "hidden").holder, "still there"))
    return queued, world.request("hidden")


def late_memory(world):
    world.configure(HIDDEN)
    load(world, "hidden")
    world.return_s = 1000.0
    world.crash("hidden")
    queued = world.request("hidden")
    world.run(40)
    return queued, world.request("hidden")


def full_queue(world):
    world.configure(HIDDEN, limits=Limits(queue_per_model=1))
    world.request("hidden")
    return (world.request("hidden"),)


def waited_too_long(world):
    world.load_s = 100.0
    world.configure(HIDDEN, limits=Limits(queue_wait_s=5.0))
    queued = world.request("hidden")
    world.run(6)
    return (queued,)


def unloaded(world):
    world.configure(HIDDEN)
    queued = world.request("hidden")
    world.post(UnloadRequested(ModelId("hidden")))
    return (queued,)


def removed_while_it_drains(world):
    world.configure(model("hidden", 9000, target_inflight=1))
    load(world, "hidden")
    world.request("hidden")
    queued = world.request("hidden")
    world.configure()
    return queued, world.request("hidden")


def no_room(world):
    world.configure(HIDDEN, PINNED)
    load(world, "other")
    return (world.request("hidden"),)


def too_large(world):
    world.configure(replace(HIDDEN, footprint=model("", 99000).footprint))
    return (world.request("hidden"),)


def lost(world):
    world.configure(HIDDEN, limits=Limits(memory_quarantine_s=1.0))
    world.stale = {GPU}
    world.sample()
    queued = world.request("hidden")
    world.run(5)
    return (queued,)


def elsewhere(world):
    world.configure(model("hidden", 1, remote=True))
    world.run(3)
    world.post(WorkerUnready(*record(world, "hidden").holder, "it refuses connections"))
    return (world.request("hidden"),)


class TestNames:
    """A message never has a name that the client didn't use, also within a command to type."""

    @pytest.mark.parametrize(
        ("refused", "said"),
        [
            (crashing(CrashClass.UNKNOWN), "public does not start: .* llmux logs public.* llmux load public$"),
            (crashing(CrashClass.BAD_ARGUMENTS), "public does not start: .* Fix the cause, then: llmux load public$"),
            (crashing(CrashClass.NOT_INSTALLED), "it ended"),
            (stuck, "its own worker can't be ended|public's worker can't be ended"),
            (late_memory, "public can't be loaded: gpu0 is quarantined: its own worker ended 3. s ago"),
            (full_queue, "1 requests are queued for public"),
            (waited_too_long, "Waited 5 s for public, at last for .* llmux why public$"),
            (unloaded, "public was unloaded by an operator"),
            (removed_while_it_drains, "public was removed|There is no model 'public'"),
            (no_room, "public can't be loaded: .* pinned other holds"),
            (too_large, "public can't be loaded: needs"),
            (lost, "public can't be loaded: gpu0 is lost"),
            (elsewhere, "public: it refuses connections"),
        ],
        ids=[
            "does not start", "failed for good", "not installed", "stuck", "late memory", "full queue", "waited too long",
            "unloaded", "removed while it drains", "no room", "too large", "lost", "elsewhere",
        ],
    )  # fmt: skip
    def test_as_the_client_asked(self, world, refused, said):
        tickets = refused(world)
        messages = [
            rejection(world.rejected[ticket], "public").message for ticket in tickets if ticket in world.rejected
        ]
        assert messages
        for message in messages:
            assert re.search(said, message)
            assert "hidden" not in message
            assert "{" not in message

    def test_operators_read_the_models_own(self, world):
        late_memory(world)
        (alert,) = [effect for effect in world.effects if getattr(effect, "code", "") == "device.quarantined"]
        assert alert.message.startswith("hidden's worker ended 3")
        assert world.scheduler.state.ledger.view(GPU).blocked.startswith("quarantined: hidden's worker ended 3")
