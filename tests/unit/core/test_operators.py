"""What operators may do to a running model: pin it, and have it run with other settings, until the daemon ends."""

from __future__ import annotations

from supervisor.core.events import LoadAsked, PinAsked, Respecified, UnloadAsked
from supervisor.core.types import ModelId
from tests.support.simulation import World, model

A = ModelId("a")


class TestPin:
    """A pinned model keeps its memory, whoever asks; unpinned it is like all others again."""

    def test_is_not_evicted(self, world):
        world.configure(model("a", 10000), model("b", 10000))
        world.post(LoadAsked(A))
        world.run(3)
        world.post(PinAsked(A, True))
        ticket = world.request("b")
        world.run(3)
        assert world.state("a") == "ready"
        assert "pinned" in world.rejected[ticket].message

    def test_ends_when_it_is_unpinned(self, world):
        world.configure(model("a", 10000, pin=True), model("b", 10000))
        world.post(LoadAsked(A))
        world.run(3)
        world.post(PinAsked(A, False))
        ticket = world.request("b")
        world.run(5)
        assert world.dispatched == {ticket: ("b", 1)}

    def test_outlasts_a_reload(self, world):
        models = model("a", 10000), model("b", 10000)
        world.configure(*models)
        world.post(PinAsked(A, True))
        world.configure(*models)
        assert world.scheduler.state.models[A].pinned

    def test_holds_up_the_keep_alive_which_counts_again_afterwards(self, world):
        world.configure(model("a", 4000, keep_alive_s=5.0))
        world.post(LoadAsked(A))
        world.run(3)
        world.post(PinAsked(A, True))
        world.run(20)
        assert world.state("a") == "ready"
        world.post(PinAsked(A, False))
        world.run(5)
        assert world.state("a") == "stopped"


class TestRespecified:
    """Another definition means another worker, once the running requests have ended."""

    def test_replaces_an_idle_worker_at_once(self, world):
        world.configure(model("a", 4000))
        world.post(LoadAsked(A))
        world.run(3)
        world.post(Respecified(model("a", 6000, definition="a, larger")))
        world.post(LoadAsked(A))
        world.run(5)
        assert world.starts == ["a", "a"]
        assert world.scheduler.state.models[A].spec.footprint.mib == 6000

    def test_lets_requests_end_first(self, world):
        world.configure(model("a", 4000))
        ticket = world.request("a")
        world.run(3)
        world.post(Respecified(model("a", 6000, definition="a, larger")))
        world.post(LoadAsked(A))
        world.run(5)
        assert world.state("a") == "draining"
        world.finish(ticket)
        world.run(5)
        assert (world.state("a"), world.starts) == ("ready", ["a", "a"])

    def test_is_loaded_even_where_another_has_to_go_for_it(self, world):
        world.configure(model("a", 4000), model("b", 8000))
        ticket = world.request("a")
        world.post(LoadAsked(ModelId("b")))
        world.run(6)
        world.post(Respecified(model("a", 10000, definition="a, larger")))
        world.post(LoadAsked(A))
        world.finish(ticket)
        world.run(6)
        assert (world.state("a"), world.state("b")) == ("ready", "stopped")

    def test_does_nothing_to_a_worker_of_the_same_definition(self, world):
        world.configure(model("a", 4000))
        world.post(LoadAsked(A))
        world.run(3)
        world.post(Respecified(model("a", 4000, keep_alive_s=2.0)))
        assert world.state("a") == "ready"
        world.run(3)
        assert world.state("a") == "stopped"

    def test_followed_by_an_unload_stays_unloaded(self, world):
        world.configure(model("a", 4000))
        world.post(LoadAsked(A))
        world.run(3)
        world.post(Respecified(model("a", 6000, definition="a, larger")))
        world.post(UnloadAsked(A))
        world.run(5)
        assert (world.state("a"), world.starts) == ("stopped", ["a"])

    def test_of_a_model_that_is_not_there_is_nothing(self, world):
        world.configure(model("a", 4000))
        world.post(Respecified(model("z", 4000)))
        assert ModelId("z") not in world.scheduler.state.models


def test_decisions_since_a_number_are_those_after_it():
    world = World()
    world.configure(model("a", 4000))
    world.post(PinAsked(A, True))
    world.post(PinAsked(A, False))
    decisions = world.decisions.last()
    assert world.decisions.since(decisions[0].seq) == decisions[1:]
    assert world.decisions.since(decisions[-1].seq) == []
