"""What requests wait for: parts from the scheduler's own events, which add up and hold nothing else."""

from __future__ import annotations

import pytest

from supervisor.core.admission.waiting import WaitKind, WaitReason
from supervisor.core.types import ModelId, TicketId
from supervisor.engine.waits import MOST_PARTS, Waits, WaitTrace
from supervisor.gateway.record import BODY
from tests.support.simulation import rivals

A, B = ModelId("a"), ModelId("b")


@pytest.fixture
def world():
    return rivals()


@pytest.fixture
def waits(world, monkeypatch):
    """Looks after each event, as the engine does."""
    waits, handle = Waits(), world.scheduler.handle

    def handled(event, now):
        effects = handle(event, now)
        waits.update(world.scheduler.state, now)
        return effects

    monkeypatch.setattr(world.scheduler, "handle", handled)
    return waits


def kinds(wait, now):
    return [awaited.kind for awaited, _ in wait.parts(now)]


class TestParts:
    """In order, without gaps, from arrival to admission."""

    def test_of_a_swap(self, world, waits):
        ticket = world.request("a")
        world.run(40)
        world.request("b")
        wait = waits.begin(B, world.now)
        began = world.now
        world.run(3)
        assert kinds(wait, world.now) == [WaitKind.DRAIN]
        assert wait.current.others == (A,)
        world.finish(ticket)
        world.run(2)
        assert wait.current.kind is WaitKind.LOAD
        world.run(4)
        wait.end(world.now)
        assert kinds(wait, world.now + 100) == [WaitKind.DRAIN, WaitKind.UNLOAD, WaitKind.MEMORY, WaitKind.LOAD]
        assert sum(took_s for _, took_s in wait.parts(world.now)) == pytest.approx(world.now - began)
        assert wait.parts(0)[0][1] == pytest.approx(3.0)
        assert wait.current is None

    def test_one_that_came_later_has_only_the_later_parts(self, world, waits):
        world.request("a")
        first = waits.begin(A, world.now)
        world.run(1)
        world.request("a")
        second = waits.begin(A, world.now)
        world.run(1)
        assert sum(s for _, s in first.parts(world.now)) - sum(s for _, s in second.parts(world.now)) == pytest.approx(
            1
        )

    def test_nothing_is_kept_when_nobody_waits(self, world, waits):
        ticket = world.request("a")
        world.run(6)
        world.finish(ticket)
        world.run(2)
        assert waits._current == {}
        assert TicketId("t1") not in world.scheduler.state.queue

    def test_many_parts_are_added_up(self, world, waits):
        world.request("a")
        wait = waits.begin(A, 0.0)
        for at in range(1, 200):
            waits._current[A].next = type(waits._current[A])(WaitReason(WaitKind.TURN, f"turn {at % 2}"), float(at))
            waits._current[A] = waits._current[A].next
        wait.end(200.0)
        assert len(wait.parts(0)) <= MOST_PARTS
        assert sum(took_s for _, took_s in wait.parts(0)) == pytest.approx(200.0)

    def test_a_worker_that_ended_too_early(self):
        ((awaited, took_s),) = WaitTrace.lost(A, 1.0, 3.5).parts(99.0)
        assert (awaited.kind, took_s) == (WaitKind.RETRY, 2.5)

    def test_all_kinds_are_documented(self):
        from pathlib import Path

        page = (Path(__file__).parents[3] / "docs" / "reference" / "api.md").read_text()
        assert [kind for kind in WaitKind if f"`{kind.value}`" not in page] == []
        assert BODY.kind is WaitKind.BODY
