"""The plain case gives what the long way gives: the same effects, state and next deadline, in any state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from hypothesis import settings

from supervisor.core.admission import plain
from supervisor.core.admission.limits import Account, Rate, TenantLimits
from supervisor.core.effects import Alert, Effect
from supervisor.core.events import (
    Event,
    HandoverRequested,
    LoadRequested,
    RequestArrived,
    RequestFinished,
    ShutdownRequested,
    UnloadRequested,
    WorkerUnkillable,
    WorkerUnready,
)
from supervisor.core.planning.snapshots import device_summary
from supervisor.core.recovery import copied
from supervisor.core.scheduler import Scheduler
from supervisor.core.types import ModelId
from supervisor.engine.recording import packed
from tests.support.counts import examples
from tests.support.simulation import GPU, World, model
from tests.unit.core.test_scheduler_stateful import Scheduling

ACCOUNT = Account("key phone", TenantLimits(requests=Rate(50, 1.0)))


@dataclass
class BothWays(World):
    """Handles each request both ways, and compares them."""

    plain_ones: int = 0

    def handled(self, event: Event) -> tuple[Event, list[Effect]]:
        if not isinstance(event, RequestArrived | RequestFinished):
            return super().handled(event)
        other = Scheduler()
        other.state = copied(self.scheduler.state)
        self.plain_ones += plain.handle_if_plain(copied(self.scheduler.state), event, self.now) is not None
        with patch.object(plain, "handle_if_plain", lambda *_: None):
            wanted = other.handle(event, self.now)
        event, effects = super().handled(event)
        assert effects == wanted
        assert packed(self.scheduler.state) == packed(other.state)
        assert self.scheduler.deadline(self.now) == other.deadline(self.now)
        return event, effects


class BothWaysInAnyState(Scheduling):
    machine = BothWays


TestAnyState = BothWaysInAnyState.TestCase
TestAnyState.settings = settings(max_examples=examples(60), stateful_step_count=40)


def ready(**shape: object) -> BothWays:
    """One model that has answered a request."""
    world = BothWays(totals={GPU: 16384})
    world.configure(model("a", 1000, **shape))
    first = world.request("a")
    world.run(30.0)
    world.finish(first)
    world.plain_ones = 0
    return world


@pytest.mark.parametrize("shape", [{}, {"keep_alive_s": 60.0}, {"hold_s": 5.0}, {"target_inflight": 4}, {"pin": True}])
@pytest.mark.parametrize("demand", [{}, {"priority": 10}, {"tenant": "anna", "weight": 2.0}, {"keep_alive_s": 90.0}])
def test_ordinary_traffic_is_plain(shape, demand):
    world = ready(**shape)
    for _ in range(3):
        tickets = [world.request("a", **demand) for _ in range(3)]
        world.run(0.5)
        for ticket in tickets:
            world.finish(ticket)
    assert world.plain_ones == 18


@pytest.mark.parametrize(
    ("shape", "demand", "plain_ones"),
    [
        ({"target_inflight": 1}, {}, 2),  # the second one waits, and nothing is plain before it is over
        ({"replicas": 2, "replica_max": 2}, {}, 0),
        ({}, {"budget_s": 60.0}, 2),
        ({}, {"accounts": (ACCOUNT,)}, 0),
    ],
)
def test_other_traffic_takes_the_long_way(shape, demand, plain_ones):
    world = ready(**shape)
    tickets = [world.request("a", **demand) for _ in range(2)]
    for ticket in tickets:
        world.finish(ticket)
    assert world.plain_ones == plain_ones


def test_a_timer_that_is_due_fires_with_it():
    world = ready(keep_alive_s=60.0)
    world.now += 61.0
    world.request("a")
    assert world.plain_ones == 0


def test_the_last_request_begins_its_keep_alive():
    world = ready(keep_alive_s=60.0)
    running = world.request("a")
    world.run(70.0)  # meanwhile the timer has found it busy
    world.plain_ones = 0
    world.finish(running)
    assert world.plain_ones == 1
    world.run(70.0)
    assert world.state("a") == "stopped"


def test_a_worker_without_keep_alive_goes_with_its_last_request():
    world = BothWays(totals={GPU: 16384})
    world.configure(model("a", 1000, keep_alive_s=0.0))
    tickets = [world.request("a") for _ in range(2)]
    world.run(5.0)
    for ticket in tickets:
        world.finish(ticket)
    assert (world.plain_ones, world.state("a")) == (0, "stopping")


def test_nothing_is_plain_while_another_model_waits_for_memory():
    world = BothWays(totals={GPU: 16384})
    world.configure(model("a", 12000), model("b", 12000))
    running = world.request("a")
    world.run(5.0)
    world.post(LoadRequested(ModelId("b")))
    world.plain_ones = 0
    world.finish(world.request("a"))
    world.finish(running)
    assert world.plain_ones == 0


def test_a_worker_that_does_not_answer_gets_nothing():
    world = ready()
    world.post(WorkerUnready(ModelId("a"), world.scheduler.state.models[ModelId("a")].generation, "is silent"))
    world.request("a")
    assert world.plain_ones == 0


def test_a_worker_that_can_not_be_ended_gets_nothing():
    world = ready()
    world.post(WorkerUnkillable(ModelId("a"), world.scheduler.state.models[ModelId("a")].generation, "is there still"))
    world.request("a")
    assert world.plain_ones == 0


def test_a_hand_over_changes_nothing():
    world = ready()
    world.post(HandoverRequested())
    world.finish(world.request("a"))
    assert world.plain_ones == 2


def test_in_a_shutdown_nobody_gets_anything():
    world = ready()
    running = world.request("a")
    world.post(ShutdownRequested())
    world.plain_ones = 0
    world.request("a")
    world.finish(running)
    assert world.plain_ones == 0


def test_late_memory_is_told_with_it():
    world = BothWays(totals={GPU: 16384}, return_s=math.inf)
    world.configure(model("a", 1000), model("b", 1000))
    for name in "ab":
        ticket = world.request(name)
        world.run(5.0)
        world.finish(ticket)
    world.post(UnloadRequested(ModelId("b")))
    world.run(1.0)
    world.plain_ones = 0
    world.now += 60.0
    world.request("a")
    assert world.plain_ones == 0
    assert any(isinstance(effect, Alert) for effect in world.effects)


def test_what_is_known_of_a_device_is_known_anew():
    world = ready()
    ledger = world.scheduler.state.ledger
    for act in (lambda: world.request("a"), lambda: world.finish(next(iter(world.dispatched)))):
        device_summary(world.scheduler.state, world.now, GPU)
        assert ledger.summary(GPU) is not None
        act()
        assert ledger.summary(GPU) is None
    assert world.plain_ones == 2
