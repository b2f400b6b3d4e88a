"""What the order of requests promises, over simulated time and whatever comes: nobody starves, a higher class waits for
the running answers at most, and no device idles while somebody waits for it.

Fairness between tenants, the bypass bound and budgets have tests of their own: test_fair_shares, test_budget.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import partial

from hypothesis import event, given, settings
from hypothesis import strategies as st

from supervisor.core.demand import HIGH, LOW, NORMAL
from supervisor.core.effects import Decided, Dispatch
from supervisor.core.model_state import ModelState
from supervisor.core.types import DeviceId, Limits, ModelId, RejectCode, TicketId, WorkerState
from tests.support.counts import examples
from tests.support.simulation import GPU, World, model

GPU1 = DeviceId("gpu1")
STEP_S = 0.4  # longer than the world takes between two readings
ANSWER_S = 40.0
"""What the longest answer takes."""

sizes = {"a": 9000, "b": 7000, "c": 6000, "d": 15000}
names = st.sampled_from(sorted(sizes))
arrivals = st.lists(
    st.tuples(
        st.floats(0.0, 5.0),
        names,
        st.sampled_from([NORMAL, LOW]),
        st.sampled_from([0.1, 1.0, 8.0, 40.0]),
    ),
    min_size=1,
    max_size=15,
)


@dataclass
class Serving(World):
    """A world whose answers take as long as each ticket says; it knows when each came, and when it was dispatched."""

    takes_s: dict[TicketId, float] = field(default_factory=dict)
    came: dict[TicketId, float] = field(default_factory=dict)
    begun: dict[TicketId, float] = field(default_factory=dict)

    def _carry_out(self, effect):
        super()._carry_out(effect)
        if isinstance(effect, Dispatch):
            self.begun[effect.ticket] = self.now
            self.later(self.takes_s[effect.ticket], partial(self._answered, effect.ticket))

    def _answered(self, ticket: TicketId) -> None:
        if ticket in self.open:
            self.finish(ticket)

    def ask(self, name: str, priority: int, takes_s: float) -> TicketId:
        """A request whose answer takes so long."""
        ticket = TicketId(f"t{len(self.takes_s) + 1}")
        self.takes_s[ticket] = takes_s
        self.came[ticket] = self.now
        assert self.request(name, priority) == ticket
        return ticket

    def play(self, asked: list[tuple[float, str, int, float]]) -> None:
        """Requests one after another, each after a pause."""
        for pause_s, name, priority, takes_s in asked:
            self.run(pause_s)
            self.ask(name, priority, takes_s)

    def waits_s(self, ticket: TicketId) -> float:
        """How long it waited, or waits by now."""
        return self.begun.get(ticket, self.now) - self.came[ticket]


def serving(limits: Limits, devices: int = 1, places: int = 0) -> Serving:
    world = Serving(totals=dict.fromkeys((GPU, GPU1)[:devices], 16384))
    world.configure(*(model(name, mib, target_inflight=places) for name, mib in sizes.items()), limits=limits)
    return world


class TestStarvation:
    """By the deadline everybody is answered or told; with patience everybody is answered."""

    @settings(max_examples=examples(40))
    @given(arrivals, st.sampled_from([3.0, 20.0, 90.0]))
    def test_nobody_waits_past_the_deadline(self, asked, patience_s):
        world = serving(Limits(queue_wait_s=patience_s))
        world.play(asked)
        while len(world.open) > len(world.begun.keys() & world.open.keys()):
            world.run(STEP_S)
            late = [t for t in world.open if t not in world.begun and world.waits_s(t) > patience_s + STEP_S]
            assert late == []
        assert {reject.code for reject in world.rejected.values()} <= {RejectCode.QUEUE_TIMEOUT}

    @settings(max_examples=examples(20))
    @given(arrivals)
    def test_a_flood_for_loaded_models_starves_nobody(self, asked):
        """Short requests keep the loaded models busy without end; who waits for another model has its turn."""
        world = serving(Limits(min_residency_s=5.0))
        world.play(asked)
        waiting = set(world.takes_s)
        for _ in range(800):
            for name in sorted(world.loaded()):
                world.ask(name, NORMAL, 0.4)
            world.run(STEP_S)
            if waiting <= world.begun.keys():
                break
        assert waiting <= world.begun.keys()


class TestInversion:
    """A request of a higher class waits for lower ones only until the running answers have ended."""

    @settings(max_examples=examples(100))
    @given(arrivals, names, st.floats(0.0, 5.0), st.sampled_from([0, 1]))
    def test_no_longer_than_the_running_answers(self, asked, name, pause_s, places):
        world = serving(Limits(aging_s=math.inf), places=places)
        world.play(asked)
        world.run(pause_s)
        ticket = world.ask(name, HIGH, 1.0)
        turn_s = world.exit_s + world.return_s + world.load_s + 2 * STEP_S
        full_s = ANSWER_S * places  # who has the only place of the model itself
        world.run(full_s + turn_s + ANSWER_S + turn_s)  # what loads is not broken off; then its drain, and its own turn
        assert ticket in world.begun, world.reasons(name)[-5:]

    @settings(max_examples=examples(60))
    @given(arrivals, names, st.sampled_from([20.0, 70.0, 130.0]), st.sampled_from([0, 1]))
    def test_nor_longer_than_two_behind_who_waited_long(self, asked, name, pause_s, places):
        """Then the lower one has its turn first."""
        world = serving(Limits(), places=places)
        world.play(asked)
        world.run(pause_s)
        ticket = world.ask(name, HIGH, 1.0)
        turn_s = world.exit_s + world.return_s + world.load_s + 2 * STEP_S
        ahead = len(sizes) * (turn_s + ANSWER_S) + ANSWER_S * places
        world.run(ahead + turn_s)
        assert ticket in world.begun, world.reasons(name)[-5:]


@dataclass
class Watching(Serving):
    """It remembers by itself who used each model last, and judges every eviction by that."""

    used: dict[str, tuple[int, float, float]] = field(default_factory=dict)  # class, when, and until when it is kept
    running: dict[TicketId, tuple[str, int]] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    classes: dict[TicketId, int] = field(default_factory=dict)
    kept_s: float = 30.0
    judged: int = 0

    def _carry_out(self, effect):
        if isinstance(effect, Dispatch):
            self.running[effect.ticket] = (effect.model, self.classes[effect.ticket])
            self._use(effect.model, self.classes[effect.ticket])
        elif isinstance(effect, Decided) and effect.kind in {"evicted", "drain"}:
            found = re.search(r"(?:drains|makes room|made room) for (\w+)", effect.reason)
            if found is not None and not (effect.kind == "evicted" and effect.model in self.draining):
                self._judge(effect.model, found[1])
            if effect.kind == "drain":
                self.draining.add(effect.model)
        elif isinstance(effect, Decided) and effect.kind in {"resume", "ready"}:
            self.draining.discard(effect.model)
        super()._carry_out(effect)

    def finish(self, ticket, tokens=0, *, served=True):
        if ticket in self.running:
            name, priority = self.running.pop(ticket)
            self._use(name, priority)
        super().finish(ticket, tokens, served=served)

    def _use(self, name: str, priority: int) -> None:
        self.used[name] = (priority, self.now, self.now + self.kept_s)

    def _judge(self, victim: str, waiter: str) -> None:
        """Nobody less urgent, with its age, takes it from who uses it or used it within the time that keeps it."""
        self.judged += 1
        priority, _, until = self.used.get(victim, (100, 0.0, 0.0))
        if using := [asked for name, asked in self.running.values() if name == victim]:
            priority, until = min(using), math.inf if self.kept_s else -math.inf
        stopped_at = self.scheduler.state.models[ModelId(waiter)].stopped_at
        waiting = [t for t, name in self.open.items() if name == waiter and t not in self.begun]
        aged = [self.classes[t] - (self.now - max(self.came[t], stopped_at)) / 2 for t in waiting]
        assert waiting
        assert min(aged) <= priority + 1e-6 or self.now >= until - 1e-6, (victim, waiter, priority, aged, until)

    def ask(self, name, priority, takes_s):
        self.classes[TicketId(f"t{len(self.takes_s) + 1}")] = priority
        return super().ask(name, priority, takes_s)


class TestWhoUsedItLast:
    """Whoever comes when: no less urgent request evicts a model that a more urgent one uses, or used within its time."""

    @settings(max_examples=examples(40))
    @given(
        st.lists(
            st.tuples(
                st.floats(0.0, 40.0), names, st.sampled_from([HIGH, NORMAL, LOW]), st.sampled_from([0.1, 1.0, 8.0])
            ),
            min_size=2,
            max_size=20,
        ),
        st.sampled_from([0.0, 5.0, 30.0, 200.0]),
    )
    def test_every_eviction(self, asked, kept_s):
        world = Watching(kept_s=kept_s)
        models = (model(name, mib, own_keep_alive_s=kept_s) for name, mib in sizes.items())
        world.configure(*models, limits=Limits(min_residency_s=0.0))
        world.play(asked)
        world.run(300.0)
        event(f"{min(world.judged, 3)} evictions")
        assert set(world.takes_s) == world.begun.keys()


class TestIdleDevices:
    """No device idles while a request waits that it could serve."""

    @settings(max_examples=examples(40))
    @given(arrivals, st.integers(1, 2))
    def test_none_while_somebody_waits(self, asked, devices):
        world = serving(Limits(min_residency_s=0.0), devices)
        arrive = iter([*asked, (30.0, "a", NORMAL, 0.1)])
        for pause_s, name, priority, takes_s in arrive:
            for _ in range(int(pause_s / STEP_S)):  # at two looks in a row
                before = idle(world)
                world.run(STEP_S)
                assert not (before & idle(world)), "idle for a while, and somebody waits"
            world.ask(name, priority, takes_s)


def idle(world: Serving) -> set[tuple[DeviceId, str]]:
    """Each device on which nothing happens, with each model that waits and would have room there."""
    models = world.scheduler.state.models.values()
    moving = {
        device
        for found in models
        for device in found.devices
        if found.has_worker and (found.state is not WorkerState.READY or found.in_flight)
    }
    waiting = {world.open[ticket] for ticket in world.open.keys() - world.begun.keys()}
    state = world.scheduler.state
    served = {found.id for found in models if found.has_worker or _are_stopping(state.claims(found.id), state.models)}
    return {(device, name) for device in world.totals.keys() - moving for name in waiting - served}


def _are_stopping(claims: tuple[ModelId, ...], models: dict[ModelId, ModelState]) -> bool:
    """Is its place being made elsewhere?"""
    return any(models[name].state is WorkerState.STOPPING for name in claims)
