"""A hand-over, from the core's side: the old scheduler begins nothing, the new one goes on with workers that it never started."""

from __future__ import annotations

from dataclasses import replace

from supervisor.core.demand import LOW, NORMAL
from supervisor.core.effects import StartWorker, StopWorker
from supervisor.core.events import (
    Configured,
    HandoverEnded,
    HandoverRequested,
    RequestFinished,
    UnloadRequested,
    WorkerAdopted,
)
from supervisor.core.types import DeviceSpec, Generation, ModelId, TicketId, WorkerState
from tests.support.simulation import GPU, World, model

A, B = model("a", 10_000), model("b", 10_000)


def state(world: World, name: str) -> WorkerState:
    return world.scheduler.state.models[ModelId(name)].state


def adopted(world: World, **more: object) -> WorkerAdopted:
    """Worker 7 of model a, which an earlier scheduler started."""
    event = WorkerAdopted(
        spec=A, generation=Generation(7), devices=(GPU,), mib=10_000, ready_at=world.now, last_used=world.now, **more
    )
    world.alive[A.id, event.generation] = (GPU,)
    world.using[A.id, event.generation] = {GPU: 10_000}
    world.leased[A.id, event.generation] = {GPU: 10_000}
    return event


class TestTheOldOne:
    """Nothing new begins, and everything that runs goes on."""

    def test_loaded_models_answer_and_others_wait(self, world):
        world.configure(A, B)
        first = world.request("a")
        world.run(5)
        world.finish(first)
        world.post(HandoverRequested())
        world.finish(world.request("a"))
        waiting = world.request("b")
        world.run(60)
        assert (state(world, "a"), state(world, "b")) == (WorkerState.READY, WorkerState.STOPPED)
        assert waiting not in world.rejected
        world.post(HandoverEnded())
        world.run(10)
        assert waiting in world.dispatched

    def test_a_load_that_has_begun_ends(self, world):
        world.configure(A)
        ticket = world.request("a")
        world.run(0.5)
        assert state(world, "a") is WorkerState.STARTING
        world.post(HandoverRequested())
        world.run(5)
        assert ticket in world.dispatched

    def test_a_worker_that_was_to_make_room_serves_again(self, world):
        world.configure(A, B)
        running = world.request("a")
        world.run(40)
        world.request("b")
        world.run(1)
        assert state(world, "a") is WorkerState.DRAINING
        world.post(HandoverRequested())
        assert state(world, "a") is WorkerState.READY
        world.finish(running)
        world.run(1)
        assert state(world, "a") is WorkerState.READY
        world.post(HandoverEnded())
        world.run(10)
        assert state(world, "b") is WorkerState.READY


class TestTheNewOne:
    """An adopted worker is like one that it started itself."""

    def test_it_is_ready_and_busy_with_the_old_ones_requests(self, world):
        world.configure(A, B)
        world.post(adopted(world, tickets=(TicketId("old:1"), TicketId("old:2"))))
        assert state(world, "a") is WorkerState.READY
        assert not any(isinstance(effect, StartWorker) for effect in world.effects)
        assert world.request("a") in world.dispatched
        world.request("b")
        world.run(45)
        assert state(world, "a") is WorkerState.DRAINING  # busy: nothing is cut for b
        for ticket in list(world.scheduler.state.tickets):
            world.post(RequestFinished(ticket))
        world.run(10)
        assert state(world, "b") is WorkerState.READY

    def test_its_memory_is_leased(self, world):
        world.configure(A, B)
        world.post(adopted(world))
        assert [(lease.holder, lease.mib) for lease in world.scheduler.state.ledger.leases()] == [((A.id, 7), 10_000)]

    def test_the_next_generation_follows_its_own(self, world):
        world.configure(A)
        world.post(adopted(world))
        world.post(UnloadRequested(A.id))
        world.run(2)
        world.request("a")
        world.run(5)
        assert world.scheduler.state.models[A.id].generation == 8

    def test_who_waits_already_is_dispatched(self, world):
        world.configure(A)
        world.post(HandoverRequested())
        waiting = world.request("a")
        world.post(adopted(world))
        assert waiting in world.dispatched

    def test_one_that_an_operator_unloads_goes_after_its_requests(self, world):
        world.configure(A)
        world.post(adopted(world, tickets=(TicketId("old:1"),), is_unloaded=True))
        assert state(world, "a") is WorkerState.DRAINING
        world.post(RequestFinished(TicketId("old:1")))
        world.run(2)
        assert state(world, "a") is WorkerState.STOPPED

    def test_another_configuration_is_a_reload(self, world):
        """Its model is changed or removed: the worker ends after its requests."""
        changed = replace(A, definition="other")
        for models, after in ((changed, B), WorkerState.READY), ((B,), None):
            world = World()
            world.configure(A)
            world.post(adopted(world, tickets=(TicketId("old:1"),)))
            devices = tuple(DeviceSpec(GPU, total, world.margin) for total in world.totals.values())
            world.post(Configured(models, devices))
            assert state(world, "a") is WorkerState.DRAINING
            world.post(RequestFinished(TicketId("old:1")))
            stops = [effect for effect in world.effects if isinstance(effect, StopWorker)]
            assert [(stop.model, stop.generation) for stop in stops] == [(A.id, 7)]
            world.run(10)
            found = world.scheduler.state.models.get(A.id)
            assert (found and found.state) is after

    def test_who_used_it_last_counts_on(self, world):
        world.configure(A, B)
        world.post(adopted(world, last_priority=NORMAL))
        world.request("b", LOW)
        world.run(20)
        assert state(world, "a") is WorkerState.READY
        world.request("b", NORMAL)
        assert state(world, "a") is WorkerState.STOPPING

    def test_a_late_word_about_its_requests_is_harmless(self, world):
        world.configure(A)
        world.post(adopted(world, tickets=(TicketId("old:1"),)))
        world.post(UnloadRequested(A.id, force=True))
        world.run(2)
        world.post(RequestFinished(TicketId("old:1")))
        world.request("a")
        world.run(5)
        assert state(world, "a") is WorkerState.READY
