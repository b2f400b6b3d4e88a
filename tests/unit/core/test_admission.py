"""Another admission policy is one class: what it decides otherwise is what happens."""

from __future__ import annotations

from supervisor.core.admission.admission import AdmissionPolicy, FirstCome
from supervisor.core.demand import DEFAULT_DEMAND, LOW, MOST_URGENT, NORMAL
from supervisor.core.types import Policy
from tests.support.cases import cases
from tests.support.simulation import GPU, World, model


class LongestQueueFirst(AdmissionPolicy):
    """Batching: the model with the most waiting requests is loaded first."""

    def rank_model(self, model, queue):
        return (-queue.count(model.id),)


class LastComeFirstServed(AdmissionPolicy):
    def rank_request(self, waiting):
        return (-waiting.seq,)


class TwoPerWorker(AdmissionPolicy):
    """A limit that does not come from the configuration."""

    def is_full(self, model, demand=DEFAULT_DEMAND):
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


class TestByName:
    """The configuration names a policy."""

    def test_first_come_serves_in_the_order_of_arrival(self):
        world = World()
        world.configure(model("a", 4000, target_inflight=1), policy=Policy(admission="first_come"))
        tickets = [world.request("a", priority) for priority in (LOW, NORMAL, MOST_URGENT)]
        for expected in tickets:
            world.run(3)
            assert list(world.dispatched) == [expected]
            world.finish(expected)
        assert world.replays()

    @cases(("name", "left"), [("fair", "slow"), ("first_come", "quick")])
    def test_first_come_lets_the_least_recently_used_model_go(self, name, left):
        """By value the quick one goes first: it is back soon."""
        world = World(totals={GPU: 24_000})
        world.configure(*(model(each, 10_000) for each in ("slow", "quick", "c")), policy=Policy(admission=name))
        for each, world.load_s in (("slow", 60.0), ("quick", 1.0)):
            ticket = world.request(each)
            world.run(70)
            world.finish(ticket)
        world.run(600)
        world.request("c")
        world.run(10)
        assert {key[0] for key in world.alive} == {"c", left}

    def test_a_change_takes_those_along_who_wait(self):
        world = World()
        models = model("a", 4000, target_inflight=1)
        world.configure(models)
        running = world.request("a")
        world.run(5)
        low, high = world.request("a", LOW), world.request("a", MOST_URGENT)
        world.configure(models, policy=Policy(admission="first_come"))
        assert isinstance(world.scheduler.state.admission, FirstCome)
        world.finish(running)
        world.run(1)
        assert list(world.dispatched) == [low]
        world.configure(models)
        world.finish(low)
        world.run(1)
        assert list(world.dispatched) == [high]
        assert world.replays()
