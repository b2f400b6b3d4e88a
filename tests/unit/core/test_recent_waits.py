"""How long requests waited lately: of one model, of all, and nothing that was long ago."""

from __future__ import annotations

from supervisor.core.recent_waits import LATELY_S, MOST_WAITS, QueueLoad, RecentWaits
from supervisor.core.types import Limits, ModelId, RejectCode
from tests.support.simulation import World, load, model

A, B = ModelId("a"), ModelId("b")


def test_of_one_model_and_of_all():
    waits = RecentWaits()
    for number in range(100):
        waits.note(A, number / 100, 10.0)
    waits.note(B, 9.0, 10.0)
    assert round(waits.mean_s(10.0, A) or 0, 3) == 0.495
    assert waits.p95_s(10.0, A) == 0.94
    assert waits.p95_s(10.0, B) == waits.mean_s(10.0, B) == 9.0
    assert round(waits.mean_s(10.0) or 0, 3) == round((49.5 + 9) / 101, 3)


def test_long_ago_is_nothing():
    waits = RecentWaits()
    assert waits.mean_s(0.0) is None
    waits.note(A, 1.0, 10.0)
    assert waits.mean_s(10.0 + LATELY_S) == 1.0
    assert waits.mean_s(10.1 + LATELY_S) is None
    assert waits.p95_s(10.1 + LATELY_S) is None


def test_only_the_last():
    waits = RecentWaits()
    waits.note(A, 1000.0, 0.0)
    for _ in range(MOST_WAITS):
        waits.note(A, 1.0, 0.0)
    assert waits.mean_s(0.0) == 1.0


class TestAFullQueue:
    """Who is refused gets to know how many wait, and how long others did."""

    def test_of_the_model_that_is_full(self):
        world = World(load_s=4.0)
        world.configure(model("a", 4000, target_inflight=1), model("b", 4000), limits=Limits(queue_per_model=2))
        first = world.request("a")
        world.run(10.0)
        load(world, "b")
        assert world.request("b") in world.dispatched  # at once: that is no wait of the other's
        queued = [world.request("a") for _ in range(2)]
        reject = world.rejected[world.request("a")]
        assert reject.code is RejectCode.QUEUE_FULL
        assert reject.about == QueueLoad(2, 4.0)
        world.run(6.0)
        world.finish(first)
        world.request("a")
        assert queued[0] in world.dispatched
        assert world.rejected[world.request("a")].about == QueueLoad(2, 5.0)
        assert world.replays()

    def test_of_a_model_that_says_how_many(self):
        world = World(load_s=4.0)
        world.configure(model("a", 4000, max_queue=1))
        world.request("a")
        assert world.rejected[world.request("a")].about == QueueLoad(1, None)

    def test_of_all_where_all_together_are_too_many(self):
        world = World(load_s=4.0)
        world.configure(model("a", 4000), model("b", 4000), limits=Limits(queue_total=2))
        world.request("a")
        world.request("b")
        assert world.rejected[world.request("b")].about == QueueLoad(2, None)
