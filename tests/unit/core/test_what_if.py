"""What a load would mean, which is what it means then."""

from __future__ import annotations

import pytest

from supervisor.core.planning.plans import Admit, Evict, Refuse, Wait
from supervisor.core.planning.what_if import what_if
from supervisor.core.types import ModelSpec
from tests.support.simulation import GPU, World, load, model


def asked(world: World, spec: ModelSpec) -> Admit | Evict | Wait | Refuse:
    """The answer, which changes nothing."""
    before = world.scheduler.deadline(world.now)
    answer = what_if(world.scheduler.state, world.now, spec)
    assert world.scheduler.deadline(world.now) == before
    return answer


@pytest.fixture
def loaded(world):
    """`a` has most of the memory."""
    world.configure(model("a", 10000), model("b", 10000), model("small", 2000))
    load(world, "a")
    return world


class TestAnswer:
    """The planner's, for a model as it might be."""

    def test_what_is_free_is_enough(self, loaded):
        assert asked(loaded, model("small", 5000)) == Admit((GPU,), (5000,), asked(loaded, model("small", 5000)).reason)

    def test_who_would_go_goes(self, loaded):
        answer = asked(loaded, model("b", 10000))
        assert isinstance(answer, Evict)
        assert answer.victims == ("a",)
        load(loaded, "b")
        assert loaded.loaded() == {"b"}

    def test_its_own_worker_makes_room(self, loaded):
        assert isinstance(asked(loaded, model("a", 15000)), Admit)

    def test_the_requests_of_others_are_waited_for(self, loaded):
        loaded.request("a")
        answer = asked(loaded, model("b", 10000))
        assert isinstance(answer, Wait)
        assert answer.waits_for == ("a",)

    def test_a_pinned_one_stays(self, world):
        world.configure(model("a", 10000, pin=True), model("b", 10000))
        load(world, "a")
        assert isinstance(asked(world, model("b", 10000)), Refuse)

    def test_larger_than_the_device(self, loaded):
        answer = asked(loaded, model("b", 20000))
        assert isinstance(answer, Refuse)
        assert answer.fits_nowhere

    def test_of_a_model_that_nobody_knows(self, loaded):
        assert isinstance(asked(loaded, model("new", 10000)), Evict)

    def test_another_load_is_no_reason_to_wait(self, world):
        world.configure(model("a", 2000), model("b", 2000))
        world.request("a")
        assert world.state("a") == "starting"
        assert isinstance(asked(world, model("b", 2000)), Admit)
