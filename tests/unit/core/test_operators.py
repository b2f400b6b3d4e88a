"""What operators may do to a running model: pin it, and have it run with other settings, until the daemon ends."""

from __future__ import annotations

from supervisor.core.events import LoadCancelled, LoadRequested, PinRequested, Respecified, UnloadRequested
from supervisor.core.types import ModelId, RejectCode, WorkerState
from tests.support.simulation import World, model

A = ModelId("a")


class TestCancelledLoad:
    """It ends wherever it stands, and who waited for it is told."""

    def test_while_it_loads(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("a")
        assert world.state("a") == "starting"
        world.post(LoadCancelled(A))
        assert world.rejected[ticket].code is RejectCode.MODEL_UNLOADED
        world.run(5)
        assert world.state("a") == "stopped"
        assert world.reasons("a")[-1] == ("cancel", "load cancelled by an operator")

    def test_while_it_waits_for_room_nothing_goes_for_it(self, world):
        world.configure(model("a", 10000), model("b", 10000))
        running = world.request("b")
        world.run(5)
        waiting = world.request("a", priority=0)
        world.post(LoadCancelled(A))
        assert waiting in world.rejected
        world.run(60)
        assert running in world.open
        assert world.state("b") == "ready"

    def test_an_operators_own(self, world):
        world.configure(model("a", 10000), model("b", 10000))
        running = world.request("b")
        world.run(5)
        world.post(LoadRequested(A))
        world.post(LoadCancelled(A))
        world.finish(running)
        world.run(60)
        assert (world.state("a"), world.state("b")) == ("stopped", "ready")

    def test_a_pause_after_a_crash(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.crash("a")
        assert world.state("a") == "backoff"
        world.post(LoadCancelled(A))
        assert ticket in world.rejected
        assert world.state("a") == "stopped"
        world.run(600)
        assert world.state("a") == "stopped"

    def test_of_one_replica_leaves_the_others_their_requests(self, world):
        world.configure(model("a", 4000, replicas=2, replica_max=2, target_inflight=1))
        first = world.request("a")
        waiting = world.request("a")
        while world.state("a") != "ready":
            world.run(0.1)
        assert world.state("a#2") == "starting"
        world.post(LoadCancelled(ModelId("a#2")))
        assert waiting not in world.rejected
        world.finish(first)
        assert world.dispatched[waiting] == ("a", 1)

    def test_of_what_is_loaded_or_not_wanted_is_nothing(self, world):
        world.configure(model("a", 4000), model("b", 4000))
        ticket = world.request("a")
        world.run(5)
        for name in ("a", "b", "unknown"):
            world.post(LoadCancelled(ModelId(name)))
        assert (world.state("a"), world.state("b")) == ("ready", "stopped")
        assert ticket in world.dispatched
        assert not world.reasons("b")

    def test_the_next_request_loads_it_again(self, world):
        world.configure(model("a", 4000))
        world.request("a")
        world.post(LoadCancelled(A))
        ticket = world.request("a")
        world.run(10)
        assert ticket in world.dispatched


class TestPin:
    """A pinned model keeps its memory, whoever asks; unpinned it is like all others again."""

    def test_is_not_evicted(self, world):
        world.configure(model("a", 10000), model("b", 10000))
        world.post(LoadRequested(A))
        world.run(3)
        world.post(PinRequested(A, True))
        ticket = world.request("b")
        world.run(3)
        assert world.state("a") == "ready"
        assert "pinned" in world.rejected[ticket].message

    def test_ends_when_it_is_unpinned(self, world):
        world.configure(model("a", 10000, pin=True), model("b", 10000))
        world.post(LoadRequested(A))
        world.run(3)
        world.post(PinRequested(A, False))
        ticket = world.request("b")
        world.run(5)
        assert world.dispatched == {ticket: ("b", 1)}

    def test_outlasts_a_reload(self, world):
        models = model("a", 10000), model("b", 10000)
        world.configure(*models)
        world.post(PinRequested(A, True))
        world.configure(*models)
        assert world.scheduler.state.models[A].pinned

    def test_holds_up_the_keep_alive_which_counts_again_afterwards(self, world):
        world.configure(model("a", 4000, keep_alive_s=5.0))
        world.post(LoadRequested(A))
        world.run(3)
        world.post(PinRequested(A, True))
        world.run(20)
        assert world.state("a") == "ready"
        world.post(PinRequested(A, False))
        world.run(5)
        assert world.state("a") == "stopped"


class TestRespecified:
    """Another definition means another worker, once the running requests have ended."""

    def test_replaces_an_idle_worker_at_once(self, world):
        world.configure(model("a", 4000))
        world.post(LoadRequested(A))
        world.run(3)
        world.post(Respecified(model("a", 6000, definition="a, larger")))
        world.post(LoadRequested(A))
        world.run(5)
        assert world.starts == ["a", "a"]
        assert world.scheduler.state.models[A].spec.footprint.mib == 6000

    def test_lets_requests_end_first(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(3)
        world.post(Respecified(model("a", 6000, definition="a, larger")))
        world.post(LoadRequested(A))
        world.run(5)
        assert world.state("a") == "draining"
        world.finish(ticket)
        world.run(5)
        assert (world.state("a"), world.starts) == ("ready", ["a", "a"])

    def test_is_loaded_even_where_another_has_to_go_for_it(self, world):
        world.configure(model("a", 4000), model("b", 8000))
        ticket = world.request("a")
        world.post(LoadRequested(ModelId("b")))
        world.run(6)
        world.post(Respecified(model("a", 10000, definition="a, larger")))
        world.post(LoadRequested(A))
        world.finish(ticket)
        world.run(6)
        assert (world.state("a"), world.state("b")) == ("ready", "stopped")

    def test_does_nothing_to_a_worker_of_the_same_definition(self, world):
        world.configure(model("a", 4000))
        world.post(LoadRequested(A))
        world.run(3)
        world.post(Respecified(model("a", 4000, keep_alive_s=2.0)))
        assert world.state("a") == "ready"
        world.run(3)
        assert world.state("a") == "stopped"

    def test_followed_by_an_unload_stays_unloaded(self, world):
        world.configure(model("a", 4000))
        world.post(LoadRequested(A))
        world.run(3)
        world.post(Respecified(model("a", 6000, definition="a, larger")))
        world.post(UnloadRequested(A))
        world.run(5)
        assert (world.state("a"), world.starts) == ("stopped", ["a"])

    def test_of_a_model_that_is_not_there_is_nothing(self, world):
        world.configure(model("a", 4000))
        world.post(Respecified(model("z", 4000)))
        assert ModelId("z") not in world.scheduler.state.models


def test_decisions_since_a_number_are_those_after_it():
    world = World()
    world.configure(model("a", 4000))
    world.post(PinRequested(A, True))
    world.post(PinRequested(A, False))
    decisions = world.decisions.last()
    assert world.decisions.since(decisions[0].seq) == decisions[1:]
    assert world.decisions.since(decisions[-1].seq) == []


class TestTrouble:
    """A model that can't run on this machine has failed while it has no worker, and nothing goes for it."""

    GONE = "path: /nas/a.gguf: there is no such file"

    def test_nothing_is_loaded_or_evicted_for_it(self, world):
        world.configure(model("a", 10000, trouble=self.GONE, preload=True), model("b", 10000))
        world.request("b")
        world.run(5)
        refused = world.rejected[world.request("a")]
        assert (refused.code, self.GONE in refused.message) == (RejectCode.MODEL_FAILED, True)
        world.post(LoadRequested(A))
        world.post(UnloadRequested(A))
        world.run(1300)
        assert (world.state("a"), world.state("b")) == ("failed", "ready")
        assert self.GONE in record(world).life.reason

    def test_it_comes_back_as_it_was_wanted(self, world):
        world.configure(model("a", 4000, trouble=self.GONE, preload=True), model("c", 4000, trouble=self.GONE))
        world.configure(model("a", 4000, preload=True), model("c", 4000))
        world.run(30)
        assert (world.state("a"), world.state("c")) == ("ready", "stopped")

    def test_a_worker_goes_on_and_is_not_replaced(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(5)
        world.finish(ticket)
        world.configure(model("a", 4000, trouble=self.GONE))
        assert world.request("a") not in world.rejected
        world.post(UnloadRequested(A, force=True))
        world.run(30)
        assert record(world).state is WorkerState.FAILED

    def test_a_crashed_one_is_not_started_in_vain(self, world):
        world.configure(model("a", 4000))
        world.request("a")
        world.run(5)
        world.configure(model("a", 4000, trouble=self.GONE))
        world.crash("a")
        world.run(300)
        assert (world.state("a"), record(world).generation) == ("failed", 1)


def record(world: World):
    return world.scheduler.state.models[A]
