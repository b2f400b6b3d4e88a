"""Default models come back when nothing else is asked for, and disturb nobody."""

from __future__ import annotations

import pytest

from supervisor.core.events import LoadRequested, PinRequested, UnloadRequested
from supervisor.core.types import Eviction, Limits, ModelId, ModelSpec, Policy
from tests.support.simulation import World, load, model

HOME, OTHER = ModelId("home"), ModelId("other")
LIMITS = Limits(min_residency_s=0.0, default_after_s=60.0)


def configured(world: World, *specs: ModelSpec, names: tuple[str, ...] = ("home",), **policy: object) -> None:
    default_models = tuple(ModelId(name) for name in names)
    world.configure(*specs, limits=LIMITS, policy=Policy(default_models=default_models, **policy))  # type: ignore[arg-type]


@pytest.fixture
def swapped(world):
    """`other` has just taken the place of `home`."""
    configured(world, model("home", 10000), model("other", 10000))
    load(world, "home")
    load(world, "other")
    assert world.loaded() == {"other"}
    return world


def kinds(world: World, name: str) -> list[str]:
    return [kind for kind, _ in world.reasons(name)]


class TestReturn:
    """It comes back when no other model was used for `default_after_s`."""

    def test_not_before(self, swapped):
        used_at = swapped.scheduler.state.models[OTHER].last_used
        swapped.run(used_at + 59.9 - swapped.now)
        assert swapped.loaded() == {"other"}
        swapped.run(0.2)
        assert swapped.state("other") == "stopping"
        swapped.run(3.0)
        assert swapped.loaded() == {"home"}
        assert ("return", "nothing else was asked for within 60 s") in swapped.reasons("home")

    def test_not_within_the_minimum_residency_of_another(self, world):
        limits, policy = Limits(min_residency_s=200.0, default_after_s=60.0), Policy(default_models=(HOME,))
        world.configure(model("home", 10000), model("other", 10000), limits=limits, policy=policy)
        load(world, "other")
        world.run(195.0)
        assert world.loaded() == {"other"}
        world.run(10.0)
        assert world.loaded() == {"home"}

    def test_each_use_of_another_puts_it_off(self, swapped):
        for _ in range(10):
            swapped.run(50.0)
            load(swapped, "other")
        assert swapped.starts == ["home", "other"]
        swapped.run(65.0)
        assert swapped.loaded() == {"home"}

    def test_not_while_another_is_busy(self, swapped):
        running = swapped.request("other")
        swapped.run(1000.0)
        assert swapped.loaded() == {"other"}
        swapped.finish(running)
        swapped.run(63.0)
        assert swapped.loaded() == {"home"}

    def test_when_a_daemon_has_begun(self, world):
        configured(world, model("home", 10000))
        world.run(59.0)
        assert world.loaded() == set()
        world.run(4.0)
        assert world.loaded() == {"home"}

    def test_its_own_keep_alive_does_not_unload_it(self, world):
        configured(world, model("home", 10000, keep_alive_s=5.0))
        load(world, "home")
        world.run(1000.0)
        assert world.starts == ["home"]

    def test_a_higher_one_goes_as_a_last_resort_only(self, world):
        specs = model("home", 10000), model("asr", 10000, "asr")
        configured(world, *specs, eviction=Eviction.STRICT)
        load(world, "asr")
        world.run(500.0)
        assert world.loaded() == {"asr"}
        configured(world, *specs)
        world.run(200.0)
        assert world.loaded() == {"home"}

    def test_a_name_of_no_model_does_no_harm(self, world):
        configured(world, model("other", 10000), names=("gone",))
        world.run(200.0)
        assert world.loaded() == set()

    def test_one_that_is_default_no_longer_stays_away(self, swapped):
        configured(swapped, model("home", 10000), model("other", 10000), names=())
        swapped.run(500.0)
        assert swapped.loaded() == {"other"}


class TestDisturbsNobody:
    """What is pinned, held or busy stays, and so does what an operator said."""

    def test_pinned_ones_stay(self, swapped):
        swapped.post(PinRequested(OTHER, pin=True))
        swapped.run(500.0)
        assert swapped.loaded() == {"other"}
        swapped.post(PinRequested(OTHER, pin=False))
        swapped.run(65.0)
        assert swapped.loaded() == {"home"}

    def test_held_ones_stay_for_their_hold(self, world):
        configured(world, model("home", 10000), model("other", 10000, hold_s=200.0))
        load(world, "other")
        world.run(190.0)
        assert world.loaded() == {"other"}
        world.run(70.0)
        assert world.loaded() == {"home"}

    def test_one_that_an_operator_unloaded_stays_away_until_it_is_asked_for(self, world):
        configured(world, model("home", 10000))
        load(world, "home")
        world.post(UnloadRequested(HOME))
        world.run(1000.0)
        assert world.loaded() == set()
        world.post(LoadRequested(HOME))
        world.run(3.0)
        assert world.loaded() == {"home"}

    def test_a_request_that_comes_while_it_returns_is_served_first(self, swapped):
        used_at = swapped.scheduler.state.models[OTHER].last_used
        swapped.run(used_at + 60.01 - swapped.now)
        assert swapped.state("other") == "stopping"
        late = swapped.request("other")
        swapped.run(3.0)
        assert late in swapped.dispatched
        swapped.finish(late)
        swapped.run(50.0)
        assert swapped.loaded() == {"other"}, "it does not come back at once"

    def test_two_that_do_not_fit_together_do_not_take_turns(self, world):
        configured(world, model("home", 10000), model("second", 10000), names=("home", "second"))
        world.run(1000.0)
        assert len(world.starts) == 1

    def test_a_set_comes_back_together(self, world):
        specs = model("home", 7000), model("small", 3000, "embedding"), model("other", 15000)
        configured(world, *specs, names=("home", "small"))
        load(world, "small")
        load(world, "other")
        assert world.loaded() == {"other"}
        world.run(70.0)
        assert world.loaded() == {"home", "small"}

    def test_no_member_of_the_set_goes_for_another(self, world):
        """The embedding model has a lower priority than the voice, which is idle and would be evicted later."""
        specs = model("home", 9000, "asr"), model("small", 3000, "embedding"), model("voice", 9000, "tts")
        configured(world, *specs, names=("home", "small"))
        load(world, "small")
        load(world, "voice")
        world.run(70.0)
        assert world.loaded() == {"home", "small"}
        assert world.starts.count(ModelId("small")) == 1
