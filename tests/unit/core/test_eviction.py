"""How long a victim's requests may run: while they go on and their clients read, unless the configuration has a limit."""

from __future__ import annotations

import math

import pytest

from supervisor.core.admission import admission
from supervisor.core.admission.waiting import wait_reason
from supervisor.core.demand import HIGH, LOW, NORMAL
from supervisor.core.events import ClientsRead, LoadRequested, UnloadRequested
from supervisor.core.types import Crash, CrashClass, Limits, ModelId, RejectCode
from tests.support.counts import times
from tests.support.simulation import World, model, record

NO_RESIDENCY = {"min_residency_s": 0.0}
SLOW_BPS = 600


def busy(*others, limits=None, **victim):
    """A world in which `victim` has all the memory and one request that goes on; and that request."""
    world = World()
    world.configure(
        model("victim", 14000, **victim),
        *(others or (model("equal", 14000), model("urgent", 14000, priority=300))),
        limits=Limits(**{"queue_wait_s": 10_000} | NO_RESIDENCY | (limits or {})),
    )
    ticket = world.request("victim")
    world.run(3)
    assert ticket in world.dispatched
    return world, ticket


def lasts(world, ticket, most=2000.0):
    """How long the request goes on from now, in seconds; infinite: it is never cut."""
    began = world.now
    world.run(most, until=lambda: ticket in world.cut)
    return world.now - began if ticket in world.cut else math.inf


class TestAnswers:
    """An eviction waits for the answers that run to their end, whoever waits for it."""

    WAITERS = (model("equal", 14000), model("low", 14000, priority=1), model("dictation", 14000, priority=300))

    @pytest.mark.parametrize("priority", [HIGH, NORMAL, LOW])
    @pytest.mark.parametrize("waiter", ["equal", "low", "dictation"])
    def test_whoever_waits(self, waiter, priority):
        world, ticket = busy(*self.WAITERS)
        waiting = world.request(waiter, priority)
        assert lasts(world, ticket, 310) == math.inf
        world.finish(ticket)
        world.run(5)
        assert waiting in world.dispatched
        assert world.replays()

    def test_nor_for_a_request_of_higher_class_to_the_model_itself(self):
        world, ticket = busy(target_inflight=1)
        world.request("equal")
        world.request("victim", HIGH)
        assert lasts(world, ticket, 310) == math.inf

    def test_a_dictation_during_an_answer_of_six_minutes(self):
        """Both are whole; the decisions and the request's own wait say what it waited for."""
        world, answer = busy(model("dictation", 14000, "asr"))
        dictation = world.request("dictation", HIGH)
        assert wait_reason(world.scheduler.state, record(world, "dictation")).what == "victim to end its requests"
        world.run(360)
        world.finish(answer)
        world.run(5)
        assert dictation in world.dispatched
        assert not world.cut
        assert [reason for kind, reason in world.reasons("victim") if kind in {"drain", "evicted"}] == [
            "drains for dictation; 1 request in flight, never cut while clients read",
            "makes room for dictation",
        ]
        assert [reason.rpartition("; ")[2] for kind, reason in world.reasons("dictation") if kind == "wait"] == [
            "waiting for victim (llm, 14000 MiB, 1 request in flight)"
        ]

    def test_an_answer_without_end_costs_the_waiter_its_time(self):
        world, ticket = busy(limits={"queue_wait_s": 600.0})
        waiting = world.request("urgent")
        assert lasts(world, ticket, 601) == math.inf
        assert world.rejected[waiting].code is RejectCode.QUEUE_TIMEOUT
        assert world.rejected[waiting].message == (
            "Waited 600 s for {model}, at last for victim to end its requests. To see why: llmux why {model}"
        )
        assert world.state("victim") == "ready"


class TestConfigured:
    """`drain_s` is all that counts where it is set; a model's own comes first."""

    @pytest.mark.parametrize("waiter", ["equal", "urgent"])
    @pytest.mark.parametrize("drain_s", [0.0, 60.0, 300.0])
    def test_by_the_limits(self, waiter, drain_s):
        world, ticket = busy(limits={"drain_s": drain_s})
        world.request(waiter)
        world.read[ticket] = 0
        assert lasts(world, ticket) == pytest.approx(drain_s, abs=1)

    @pytest.mark.parametrize("limits", [None, {"drain_s": 10.0}, {"drain_s": math.inf}])
    def test_by_the_model(self, limits):
        world, ticket = busy(limits=limits, drain_s=60.0)
        world.request("urgent")
        assert lasts(world, ticket) == pytest.approx(60, abs=1)

    @pytest.mark.parametrize("where", [{"limits": {"drain_s": math.inf}}, {"drain_s": math.inf}])
    def test_never(self, where):
        world, ticket = busy(**where)
        waiting = world.request("urgent")
        world.read[ticket] = 0
        assert lasts(world, ticket, times(1500, 5000)) == math.inf
        assert "never cut" in world.reasons("victim")[-1][1]
        world.finish(ticket)
        world.run(5)
        assert waiting in world.dispatched
        assert world.replays()

    @pytest.mark.parametrize(("drain_s", "expected_s"), [(None, 30), (math.inf, 30), (60.0, 60)])
    def test_an_ordered_drain(self, drain_s, expected_s):
        """Also in the middle of another: an unload ends in any case."""
        world, ticket = busy(drain_s=drain_s)
        world.request("equal")
        world.run(0.5)
        world.post(UnloadRequested(ModelId("victim")))
        assert lasts(world, ticket) == pytest.approx(expected_s, abs=1)


class TestReading:
    """Requests are cut when the clients of all of them have stopped reading."""

    def slow(self, world, ticket, bps, seconds):
        """The client reads steadily; what of it the request lasts."""
        began = world.now
        while ticket not in world.cut and world.now < began + seconds:
            world.read[ticket] = int(bps * (world.now - began))
            world.run(0.5)
        return world.now - began

    @pytest.mark.parametrize("bps", [0, SLOW_BPS])
    def test_too_slow(self, bps):
        world, ticket = busy()
        world.read[ticket] = 0
        waiting = world.request("equal")
        assert self.slow(world, ticket, bps, 200) == pytest.approx(admission.LOOK_S, abs=1)
        assert world.reasons("victim")[-1] == (
            "evicted",
            "drains for equal; 1 request cut as the clients have stopped reading",
        )
        world.run(5)
        assert waiting in world.dispatched
        assert world.replays()

    def test_slow_but_fast_enough(self):
        world, ticket = busy()
        world.request("equal")
        self.slow(world, ticket, admission.LEAST_READ_BPS + 100, 250)
        assert not world.cut

    def test_stopped_in_the_middle(self):
        world, ticket = busy()
        world.request("equal")
        self.slow(world, ticket, 100_000, 100)
        assert lasts(world, ticket) <= 2 * admission.LOOK_S + 1

    def test_a_client_that_holds_nothing_up_reads(self):
        """It waits for the worker."""
        world, ticket = busy()
        world.request("equal")
        for _ in range(8):
            world.run(admission.LOOK_S / 2)
            world.read[ticket] = 0
            world.run(admission.LOOK_S / 4)
            world.read.clear()
            world.run(admission.LOOK_S / 4)
        assert not world.cut

    def test_one_that_reads_saves_all(self):
        world, slow = busy()
        honest = world.request("victim")
        world.read[slow] = 0
        world.request("equal")
        world.run(100)
        assert not world.cut
        world.finish(honest)
        assert lasts(world, slow) <= admission.LOOK_S + 1

    def test_one_that_reads_nothing_waits_for_nobody(self):
        world, ticket = busy()
        world.read[ticket] = 0
        world.request("urgent")
        assert lasts(world, ticket) == pytest.approx(admission.LOOK_S, abs=1)

    def test_words_that_come_too_late(self):
        world, ticket = busy()
        generation = record(world, "victim").generation
        world.post(ClientsRead(ModelId("victim"), generation, {ticket: 0}))
        world.post(ClientsRead(ModelId("nobody"), generation, {}))
        assert world.state("victim") == "ready"
        world.post(UnloadRequested(ModelId("victim")))
        for _ in range(2):
            world.post(ClientsRead(ModelId("victim"), generation, {ticket: 0}))
        assert world.state("victim") == "draining"


class TestTold:
    """What `llmux why` shows."""

    def test_once_for_all_who_wait(self):
        world, _ = busy()
        world.request("equal")
        world.request("urgent")
        assert [reason for kind, reason in world.reasons("victim") if kind == "drain"] == [
            "drains for equal; 1 request in flight, never cut while clients read",
        ]

    def test_why_new_requests_wait(self):
        world, _ = busy()
        world.request("equal")
        for _ in range(3):
            world.request("victim")
        assert [reason for kind, reason in world.reasons("victim") if kind == "queue"] == [
            "waits for its next worker: this one drains for equal"
        ]

    def test_a_load_that_an_operator_asks_for_drains_too(self):
        world, ticket = busy()
        world.post(LoadRequested(ModelId("urgent")))
        world.run(60)
        assert world.state("victim") == "draining"
        world.finish(ticket)
        world.run(5)
        assert world.loaded() == {"urgent"}


class TestOrdered:
    """An operator, a reload or the shutdown wants it gone."""

    def test_to_ask_again_gives_no_more_time(self):
        world, ticket = busy()
        for _ in range(3):
            world.post(UnloadRequested(ModelId("victim")))
            world.run(admission.ORDERED_DRAIN_S / 2)
        assert ticket in world.cut
        assert world.state("victim") == "stopped"

    def test_an_unloaded_one_that_crashes_meanwhile_stays_away(self):
        world, _ = busy()
        world.post(UnloadRequested(ModelId("victim")))
        world.crash("victim", Crash(CrashClass.UNKNOWN, "it ended"))
        world.run(300)
        assert world.state("victim") == "stopped"
        assert world.starts == ["victim"]
        assert ("crash", "unknown: it ended") in world.reasons("victim")

    def test_a_changed_one_that_crashes_meanwhile_comes_back_changed(self):
        world, _ = busy()
        world.configure(model("victim", 14000, definition="other"))
        world.crash("victim", Crash(CrashClass.UNKNOWN, "it ended"))
        world.run(10)
        assert world.loaded() == {"victim"}
        assert record(world, "victim").spec.definition == "other"


class TestReload:
    """A drain under way follows the configuration."""

    MODELS = (model("victim", 14000), model("equal", 14000))

    def reloaded(self, before, after, *, reads=True):
        world, ticket = busy(limits={"drain_s": before})
        if not reads:
            world.read[ticket] = 0
        world.request("equal")
        world.run(10)
        world.configure(*self.MODELS, limits=Limits(queue_wait_s=10_000, drain_s=after, **NO_RESIDENCY))
        return lasts(world, ticket, 600)

    def test_one_that_would_never_end_gets_an_end(self):
        assert self.reloaded(math.inf, 60) == pytest.approx(50, abs=1)

    def test_one_that_is_over_by_now_ends(self):
        assert self.reloaded(None, 5) == pytest.approx(0, abs=1)

    def test_clients_that_read_nothing_keep_the_new_time(self):
        assert self.reloaded(None, 500) == pytest.approx(490, abs=1)

    def test_back_to_the_default(self):
        assert self.reloaded(500, None) == math.inf

    def test_back_to_the_default_while_clients_read_nothing(self):
        assert self.reloaded(500, None, reads=False) == pytest.approx(admission.LOOK_S, abs=1)


def test_several_victims():
    """Each by its own end; the whole plan waits for the slowest."""
    world = World()
    world.configure(
        model("a", 7000),
        model("b", 7000, "asr"),
        model("urgent", 14000, priority=200),
        limits=Limits(queue_wait_s=10_000, **NO_RESIDENCY),
    )
    tickets = {name: world.request(name) for name in "ab"}
    world.run(6)
    assert set(tickets.values()) <= set(world.dispatched)
    waiting = world.request("urgent")
    world.run(10)
    world.finish(tickets["a"])
    assert lasts(world, tickets["b"], 100) == math.inf
    world.finish(tickets["b"])
    world.run(5)
    assert waiting in world.dispatched


class TestEnd:
    """Who has drained goes, whatever has changed meanwhile."""

    def test_a_young_victim_in_demand(self, world):
        """Its queue would keep it, and the other one looks cheaper to reload now."""
        world.configure(model("a", 7500), model("b", 7500), model("c", 7500), limits=Limits(min_residency_s=60.0))
        running = {name: world.request(name, LOW) for name in ("a", "b")}
        world.run(5.0)
        world.request("c", HIGH)
        (victim,) = [name for name in running if world.state(name) == "draining"]
        world.request(victim, LOW)
        world.run(1.0)
        world.finish(running[victim])
        assert world.state(victim) == "stopping"
        world.run(5.0)
        assert world.state("c") == "ready"
        assert running.keys() - {victim} < world.loaded()

    @pytest.mark.parametrize("late", [0.0, 0.3])
    def test_one_that_needs_two_busy_ones_to_go(self, world, late):
        """Both have always something to do; without new requests for either it comes all the same."""
        world.configure(model("a", 7500), model("b", 7500), model("c", 15000), limits=Limits(min_residency_s=0.0))
        wanted = None
        for turn in range(60):
            for name in ("a", "b"):
                ticket = world.request(name)
                world.later(1.0 + late * (name == "b"), lambda ticket=ticket: world.finish(ticket))
            world.run(0.5)
            if turn == 10:
                wanted = world.request("c")
        assert wanted in world.dispatched
