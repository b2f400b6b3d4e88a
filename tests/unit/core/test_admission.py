"""Another admission policy is one class: what it decides otherwise is what happens."""

from __future__ import annotations

from supervisor.core.admission import AdmissionPolicy
from supervisor.core.demand import ANY
from tests.support.simulation import World, model


class LongestQueueFirst(AdmissionPolicy):
    """Batching: the model with the most waiting requests is loaded first."""

    def rank_model(self, model, queue):
        return (-queue.count(model.id),)


class LastComeFirstServed(AdmissionPolicy):
    def rank_request(self, waiting):
        return (-waiting.seq,)


class TwoPerWorker(AdmissionPolicy):
    """A limit that does not come from the configuration."""

    def is_full(self, model, demand=ANY):
        return len(model.in_flight) >= 2


def two_that_wait(policy: AdmissionPolicy) -> World:
    """`a` and `b` wait, `a` first and `b` with more requests, while `c` holds all the memory."""
    world = World(admission=policy)
    world.configure(model("a", 10000), model("b", 10000), model("c", 10000))
    running = world.request("c")
    world.run(35)
    for name in ("a", "b", "b"):
        world.request(name)
    world.finish(running)
    world.run(4)
    return world


class TestOrderOfModels:
    def test_who_waits_longest_is_first_by_default(self):
        assert two_that_wait(AdmissionPolicy()).starts == ["c", "a"]

    def test_a_policy_may_prefer_the_longest_queue(self):
        world = two_that_wait(LongestQueueFirst())
        assert world.starts == ["c", "b"]
        assert world.replays(), "a replay decides the same"


class TestOrderOfRequests:
    def test_a_policy_may_serve_the_last_first(self):
        world = World(admission=LastComeFirstServed())
        world.configure(model("a", 4000, target_inflight=1))
        tickets = [world.request("a") for _ in range(3)]
        for expected in reversed(tickets):
            world.run(3)
            assert list(world.dispatched) == [expected]
            world.finish(expected)


class TestLimits:
    def test_a_policy_may_limit_what_a_worker_gets(self):
        world = World(admission=TwoPerWorker())
        world.configure(model("a", 4000))
        tickets = [world.request("a") for _ in range(3)]
        world.run(3)
        assert list(world.dispatched) == tickets[:2]
