"""Fair shares: what tenants get of the workers, by the worker-second."""

from __future__ import annotations

import random

import pytest

from supervisor.core.admission.fair_shares import FairShares
from supervisor.core.demand import HIGH, LOW, NORMAL, Demand
from supervisor.core.events import LoadRequested, RequestArrived
from supervisor.core.types import Limits, ModelId, TicketId
from tests.support.simulation import World, model

M = ModelId("m")


def ask(world: World, name: str, tenant: str, priority: int = NORMAL, weight: float = 1.0) -> TicketId:
    ticket = TicketId(f"{tenant}:{next(world._tickets)}")
    world.open[ticket] = ModelId(name)
    world.post(RequestArrived(ticket, ModelId(name), Demand(priority, tenant, weight=weight)))
    return ticket


def served(world: World, tenants: dict[str, tuple[float, float]], *, places: int, requests: int) -> dict[str, float]:
    """Tenants that always have five requests in the queue, each with its seconds a request and its weight: what each got."""
    world.configure(model("m", 4000, target_inflight=places), limits=Limits(queue_per_model=1000, queue_wait_s=1e9))
    took = dict.fromkeys(tenants, 0.0)
    chance = random.Random(1)

    def more(tenant: str) -> None:
        ask(world, "m", tenant, weight=tenants[tenant][1])

    for tenant in tenants:
        for _ in range(5):
            more(tenant)
    world.run(3)
    ends: dict[TicketId, float] = {}
    for _ in range(requests):
        for ticket in world.dispatched:
            tenant = ticket.split(":")[0]
            ends.setdefault(ticket, world.now + tenants[tenant][0] * chance.uniform(0.5, 1.5))
        first = min(ends, key=lambda ticket: ends[ticket])
        step_s = max(0.0, ends.pop(first) - world.now)
        for ticket in world.dispatched:
            took[ticket.split(":")[0]] += step_s / len(world.dispatched)
        world.now += step_s
        world.finish(first)
        more(first.split(":")[0])
    return took


class TestShares:
    """Tenants that always wait get equal worker-seconds, whatever each request takes."""

    @pytest.mark.parametrize("places", [1, 4])
    def test_long_and_short_requests(self, world, places):
        took = served(
            world, {"long": (8.0, 1.0), "short": (0.5, 1.0), "middling": (2.0, 1.0)}, places=places, requests=1500
        )
        fair = sum(took.values()) / 3
        assert all(abs(each - fair) < 0.1 * fair for each in took.values()), took

    def test_by_weight(self, world):
        took = served(world, {"twice": (1.0, 2.0), "once": (1.0, 1.0)}, places=2, requests=1000)
        assert took["twice"] / took["once"] == pytest.approx(2.0, rel=0.1)

    def test_who_comes_later_neither_pays_nor_saved_up(self, world):
        world.configure(model("m", 4000, target_inflight=1), limits=Limits(queue_per_model=1000))
        flood = [ask(world, "m", "flood") for _ in range(50)]
        world.run(3)
        for _ in range(20):
            world.now += 1.0
            world.finish(next(iter(world.dispatched)))
        late = [ask(world, "m", "late") for _ in range(10)]
        order = []
        for _ in range(20):
            world.now += 1.0
            ticket = next(iter(world.dispatched))
            order.append(ticket.split(":")[0])
            world.finish(ticket)
        assert abs(order.count("late") - 10) <= 1
        assert "late" not in order[12:] or order.count("flood") >= 8
        assert flood
        assert late

    def test_classes_have_counters_of_their_own(self):
        shares = FairShares()
        for number, priority in enumerate([HIGH, NORMAL]):
            shares.arrived(Demand(priority, "a"))
            shares.began(TicketId(str(number)), M, Demand(priority, "a"), 0.0)
        shares.ended(TicketId("0"), 10.0)
        assert shares.taken_s(Demand(HIGH, "a")) == 5.0
        assert shares.taken_s(Demand(NORMAL, "a")) == 1.0
        shares.check()

    def test_a_worker_second_is_shared_by_what_runs(self):
        shares = FairShares()
        for tenant in "ab":
            shares.arrived(Demand(tenant=tenant))
            shares.arrived(Demand(tenant=tenant))  # so that their counters stay
            shares.began(TicketId(tenant), M, Demand(tenant=tenant), 0.0)
        shares.ended(TicketId("a"), 4.0)
        shares.ended(TicketId("b"), 6.0)
        assert shares.taken_s(Demand(tenant="a")) == 2.0
        assert shares.taken_s(Demand(tenant="b")) == 4.0

    def test_memory_is_bounded(self):
        shares = FairShares()
        for number in range(20_000):
            demand = Demand(tenant=f"t{number}")
            shares.arrived(demand)
            shares.began(TicketId(f"{number}"), M, demand, float(number))
            shares.ended(TicketId(f"{number}"), number + 5.0)
        shares.check()
        assert len(shares._taken) <= 3000


class TestClasses:
    """The higher class first, until the lower one has waited too long."""

    def test_a_higher_class_goes_first_and_age_counts(self, world):
        world.configure(model("m", 4000, target_inflight=1), limits=Limits(aging_s=10.0))
        running = ask(world, "m", "x")
        world.run(3)
        low = ask(world, "m", "x", LOW)
        world.run(15)
        early_high = ask(world, "m", "x", HIGH)
        world.run(10)
        late_high = ask(world, "m", "x", HIGH)
        order = []
        for ticket in (running, early_high, low, late_high):
            assert list(world.dispatched) == [ticket], order
            order.append(ticket)
            world.finish(ticket)

    def test_a_flood_of_high_does_not_starve_low(self, world):
        world.configure(model("m", 4000, target_inflight=1), limits=Limits(queue_per_model=1000))
        ask(world, "m", "x", HIGH)
        world.run(3)
        low = ask(world, "m", "y", LOW)
        for _ in range(300):
            ask(world, "m", "x", HIGH)
            world.run(1)
            world.finish(next(iter(world.dispatched)))
            if low in world.dispatched:
                break
        assert low in world.dispatched
        assert world.now < 1000 + 140, "two classes and some seconds"

    def test_without_aging_the_class_is_all(self, world):
        world.configure(model("m", 4000, target_inflight=1), limits=Limits(aging_s=float("inf")))
        running = ask(world, "m", "x")
        world.run(3)
        ask(world, "m", "x", LOW)
        world.run(500)
        high = ask(world, "m", "x", HIGH)
        world.finish(running)
        assert list(world.dispatched) == [high]


class TestPressing:
    """A request of a higher class may ask a busy worker of a lower class to drain, and only that."""

    def test_a_young_busy_victim_of_a_lower_class_drains_at_once_and_is_not_cut(self, world):
        world.configure(model("a", 10000), model("b", 10000))
        running = ask(world, "a", "x", LOW)
        world.run(3)
        waiting = ask(world, "b", "y", HIGH)
        assert world.state("a") == "draining"
        world.run(60)
        assert running not in world.cut
        world.finish(running)
        world.run(3)
        assert waiting in world.dispatched

    @pytest.mark.parametrize("priority", [NORMAL, LOW])
    def test_others_wait_for_the_minimum_residency(self, world, priority):
        world.configure(model("a", 10000), model("b", 10000))
        ask(world, "a", "x", NORMAL)
        world.run(3)
        ask(world, "b", "y", priority)
        assert world.state("a") == "ready"

    def test_who_comes_for_a_draining_model_in_a_higher_class_has_it(self, world):
        world.configure(model("a", 10000), model("b", 10000))
        running = ask(world, "a", "x")
        world.run(40)
        waiting = ask(world, "b", "y")
        assert world.state("a") == "draining"
        high = ask(world, "a", "z", HIGH)
        assert high in world.dispatched
        world.finish(high)
        assert world.state("a") == "draining", "for the other one, who waits on"
        world.finish(running)
        world.run(5)
        assert waiting in world.dispatched

    @pytest.mark.parametrize("priority", [NORMAL, LOW])
    def test_others_wait_for_its_next_worker(self, world, priority):
        world.configure(model("a", 10000), model("b", 10000))
        ask(world, "a", "x")
        world.run(40)
        ask(world, "b", "y")
        later = ask(world, "a", "z", priority)
        assert later not in world.dispatched
        assert world.state("a") == "draining"

    def test_where_it_has_no_place_it_comes_first_when_the_answer_has_ended(self, world):
        world.configure(model("a", 10000, target_inflight=1), model("b", 10000))
        running = ask(world, "a", "x")
        world.run(40)
        waiting = ask(world, "b", "y")
        world.run(10)
        high = ask(world, "a", "z", HIGH)
        assert world.state("a") == "draining"
        world.run(20)
        assert running not in world.cut
        world.finish(running)
        world.run(10)
        assert high in world.dispatched
        assert waiting in world.open

    def test_a_worker_that_also_serves_the_same_class_is_left_alone(self, world):
        world.configure(model("a", 10000), model("b", 10000))
        ask(world, "a", "x", LOW)
        world.run(3)
        high = ask(world, "a", "x", HIGH)
        ask(world, "b", "y", HIGH)
        assert world.state("a") == "ready"
        world.finish(high)
        assert world.state("a") == "draining", "only lower classes are left"


class TestBypass:
    """So many later requests may overtake a model that waits, within the minimum residency, and no more."""

    def test_the_bound_ends_the_batch(self, world):
        world.configure(model("a", 10000), model("b", 10000), limits=Limits(overtakes=5, min_residency_s=1000.0))
        ask(world, "a", "x")
        world.run(3)
        waiting = ask(world, "b", "x")
        world.run(0.1)
        later = []
        for _ in range(20):
            later.append(ask(world, "a", "x"))
            world.run(0.1)
        assert len([ticket for ticket in later if ticket in world.dispatched]) == 5
        for ticket in list(world.dispatched):
            world.finish(ticket)
        world.run(5)
        assert waiting in world.dispatched

    def test_an_operator_s_load_is_overtaken_as_often_as_a_request(self, world):
        world.configure(model("a", 10000), model("b", 10000), limits=Limits(overtakes=5, min_residency_s=1000.0))
        ask(world, "a", "x")
        world.run(3)
        world.post(LoadRequested(ModelId("b")))
        world.run(0.1)
        later = []
        for _ in range(20):
            later.append(ask(world, "a", "x"))
            world.run(0.1)
        assert len([ticket for ticket in later if ticket in world.dispatched]) == 5

    def test_requests_that_came_before_it_don_t_count(self, world):
        world.configure(
            model("a", 10000, target_inflight=1), model("b", 10000), limits=Limits(overtakes=2, min_residency_s=1000.0)
        )
        early = [ask(world, "a", "x") for _ in range(6)]
        world.run(3)
        ask(world, "b", "x")
        for ticket in early[:5]:
            world.finish(ticket)
        assert world.state("a") == "ready"
        assert early[5] in world.dispatched
