"""The read door: frozen values that say what the scheduler's state is at the moment somebody asks."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace

import pytest

from supervisor.core.events import LoadRequested, UnloadRequested
from supervisor.core.types import Crash, CrashClass, ModelId, WorkerState
from supervisor.engine.engine import Engine
from supervisor.engine.status import mark, model_status
from tests.support.simulation import GPU, rivals

A, B = ModelId("a"), ModelId("b")


@pytest.fixture
def world():
    return rivals()


def status(world, name):
    state = world.scheduler.state
    return model_status(state, state.models[name], world.now)


class TestModels:
    """What a model is, where its worker is, and who waits."""

    def test_never_loaded(self, world):
        found = status(world, A)
        assert (found.state, found.has_worker, found.devices, found.lease_mib) == (WorkerState.STOPPED, False, (), None)
        assert (found.idle_s, found.eta_s, found.load_s, found.is_wanted) == (None, None, None, False)

    def test_loading_tells_how_long_it_will_take(self, world):
        world.request("a")
        world.run(1)
        assert (status(world, A).state, status(world, A).devices, status(world, A).is_wanted) == (
            WorkerState.STARTING,
            (GPU,),
            True,
        )
        by_size = status(world, A).eta_s
        assert 9000 / 1024 - 1.5 < by_size < 9000 / 1024
        world.run(5)
        world.post(UnloadRequested(A, force=True))
        world.run(2)
        world.post(LoadRequested(A))
        world.run(1)
        assert status(world, A).eta_s == pytest.approx(3.0, abs=0.2), "the last load took four seconds"

    def test_busy_and_idle(self, world):
        ticket = world.request("a")
        world.run(5)
        assert (status(world, A).in_flight, status(world, A).idle_s) == (1, None)
        world.finish(ticket)
        world.run(2)
        assert (status(world, A).in_flight, status(world, A).lease_mib) == (0, 9000)
        assert status(world, A).idle_s == pytest.approx(2.0)

    def test_waiting_for_another(self, world):
        world.request("a")
        world.run(5)
        world.request("b")
        assert (status(world, B).queued, status(world, B).waits_for, status(world, B).is_wanted) == (1, (A,), True)

    def test_a_crash(self, world):
        world.request("a")
        world.run(5)
        world.crash("a", Crash(CrashClass.GPU_LOST, "the GPU fell off the bus"))
        world.run(0.1)
        found = status(world, A)
        assert (found.state, found.crash.kind, found.devices) == (WorkerState.BACKOFF, CrashClass.GPU_LOST, ())

    def test_it_stays_as_it_was_made(self, world):
        before = status(world, A)
        world.request("a")
        assert before.state is WorkerState.STOPPED
        with pytest.raises(FrozenInstanceError):
            before.queued = 5


class TestTheRest:
    """Devices and all requests together, through the engine."""

    @pytest.fixture
    def engine(self, world):
        engine = Engine(None, SimpleNamespace(parts=()))
        engine._scheduler = world.scheduler
        return engine

    def test_devices(self, world, engine):
        world.request("a")
        world.run(5)
        (found,) = engine.devices()
        assert (found.id, [lease.holder[0] for lease in found.leases]) == (GPU, [A])
        assert found.totals.available_mib == 16384 - 512 - 9000

    def test_queue(self, world, engine):
        world.request("a")
        world.request("a")
        assert (engine.queue().waiting, engine.queue().in_flight) == (2, 0)
        world.run(5)
        assert (engine.queue().waiting, engine.queue().in_flight) == (0, 2)


class TestMarks:
    """Two marks differ where two statuses do, but for what goes on with time alone."""

    def test_through_a_swap(self, world):
        seen = []

        def look() -> None:
            for name in (A, B):
                plain = {
                    "since_s": 0,
                    "idle_s": 0,
                    "eta_s": 0,
                    "unload_s": 0,
                    "protected_s": 0,
                    "retry_s": 0,
                    "leases": (),
                }
                known = replace(status(world, name), **plain)
                known = replace(known, replicas=tuple(replace(each, **plain) for each in known.replicas))
                state = world.scheduler.state
                seen.append((known, mark(state, state.models[name], world.now)))

        look()
        first = world.request("a")
        for _ in range(8):
            world.run(1)
            look()
        second = world.request("b")
        look()
        world.finish(first)
        for _ in range(8):
            world.run(1)
            look()
        world.finish(second)
        look()
        world.run(1)
        look()
        assert len({repr(known) for known, _ in seen}) > 5
        for known, made in seen:
            for other, another in seen:
                assert made != another or known == other
                if known.spec is other.spec and known.state is other.state and not known.has_worker:
                    assert (made == another) == (known == other)
