"""Every action upon a model, and the reason that `why` and `ps` give of it: what happened, in one sentence that is true."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from supervisor.core.events import (
    LeaseLost,
    LoadCancelled,
    LoadRequested,
    PinRequested,
    Respecified,
    ShutdownRequested,
    UnloadRequested,
)
from supervisor.core.types import (
    Crash,
    CrashClass,
    Generation,
    Limits,
    ModelId,
    ModelSpec,
    Policy,
)
from tests.support.simulation import World, model
from tests.unit.core.test_handover import A as SAME
from tests.unit.core.test_handover import adopted

A, B = ModelId("a"), ModelId("b")
CONFIGURED = model("a", 10000, definition="file")
OVERRIDDEN = replace(CONFIGURED, definition="override")
OTHER = model("b", 10000)


def loaded(world: World, spec: ModelSpec = CONFIGURED, **more: object) -> None:
    """Loaded, and idle for longer than its minimum residency."""
    world.configure(spec, OTHER, **more)
    ticket = world.request("a")
    world.run(5)
    world.finish(ticket)
    world.run(40)


def busy(world: World, spec: ModelSpec = CONFIGURED) -> None:
    loaded(world, spec)
    world.request("a")


def overridden(world: World) -> None:
    loaded(world)
    world.post(Respecified(OVERRIDDEN))
    world.post(LoadRequested(A))
    world.run(10)
    assert world.state("a") == "ready"


def unloaded_with_overrides(world: World) -> None:
    overridden(world)
    world.post(UnloadRequested(A, spec=CONFIGURED))


def drained_with_overrides(world: World) -> None:
    overridden(world)
    ticket = world.request("a")
    world.post(UnloadRequested(A, spec=CONFIGURED))
    world.run(1)
    assert world.scheduler.state.models[A].life.reason == "unloaded by an operator"
    world.finish(ticket)


def evicted(world: World) -> None:
    loaded(world)
    world.request("b")


def evicted_while_busy(world: World) -> None:
    loaded(world)
    ticket = world.request("a")
    world.request("b")
    world.run(1)
    assert world.scheduler.state.models[A].life.reason == "drains for b"
    world.finish(ticket)


def beyond_a_limit_by_type(world: World) -> None:
    small = model("a", 1000)
    world.configure(small, model("b", 1000), policy=Policy(max_loaded={"llm": 1}))
    ticket = world.request("a")
    world.run(5)
    world.finish(ticket)
    world.run(40)
    world.request("b")


def cancelled(world: World) -> None:
    world.configure(CONFIGURED, OTHER)
    world.request("a")
    world.post(LoadCancelled(A))


def left(world: World) -> None:
    world.configure(CONFIGURED, OTHER)
    world.finish(world.request("a"), served=False)


def crashed(world: World) -> None:
    loaded(world)
    world.crash("a", Crash(CrashClass.GPU_LOST, "the GPU or its driver failed"))


def crashed_for_good(world: World) -> None:
    loaded(world)
    world.crash("a", Crash(CrashClass.BAD_ARGUMENTS, "its arguments or its files are wrong"))


def hung(world: World) -> None:
    loaded(world)
    world.crash("a", Crash(CrashClass.UNRESPONSIVE, "its health check failed too often"))


def too_large_while_it_loads(world: World) -> None:
    world.configure(CONFIGURED, OTHER)
    world.request("a")
    world.crash("a", Crash(CrashClass.OUT_OF_MEMORY, "it ran out of memory"))
    while world.state("a") != "starting":
        world.run(0.1)
    world.crash("a", Crash(CrashClass.OUT_OF_MEMORY, "it ran out of memory"))


def in_trouble(world: World) -> None:
    world.configure(replace(CONFIGURED, trouble="path: /gone: there is no such file"), OTHER)


def mended(world: World) -> None:
    in_trouble(world)
    world.configure(CONFIGURED, OTHER)


def changed(world: World) -> None:
    loaded(world)
    world.configure(OVERRIDDEN, OTHER)


def changed_while_it_is_unloaded(world: World) -> None:
    busy(world)
    world.post(UnloadRequested(A))
    world.configure(OVERRIDDEN, OTHER)
    world.post(UnloadRequested(A, force=True))


def leased_by_others(world: World) -> None:
    loaded(world)
    world.post(LeaseLost(A, Generation(1), "the lease store gave it to another"))


def leased_to_a_partner(world: World) -> None:
    loaded(world)
    world.lease("lease:1", 12000)


def handed_over(world: World, *, is_unloaded: bool = False) -> None:
    """To this daemon, which has only begun."""
    world.configure(SAME, OTHER)
    world.post(adopted(world, is_unloaded=is_unloaded))


def after(act: Callable[[World], None], *events: object) -> Callable[[World], None]:
    def both(world: World) -> None:
        act(world)
        for event in events:
            world.post(event)

    return both


ACTIONS: dict[str, tuple[Callable[[World], None], str, str, tuple[str, str]]] = {
    # action: what is done, the state that `ps` shows, its reason, and a decision that `why` has
    "load": (loaded, "ready", r"loaded in 2\.0 s", ("ready", r"loaded in")),
    "unload": (
        after(loaded, UnloadRequested(A)),
        "stopped",
        "unloaded by an operator",
        ("stop", "unloaded by an operator"),
    ),
    "unload by force": (
        after(busy, UnloadRequested(A, force=True)),
        "stopped",
        "unloaded by an operator",
        ("stop", "unloaded by an operator"),
    ),
    "load with overrides": (overridden, "ready", "loaded in", ("stop", "an operator loads it with other settings")),
    "unload of a model with overrides": (
        unloaded_with_overrides,
        "stopped",
        "unloaded by an operator",
        ("stop", "unloaded by an operator"),
    ),
    "unload of a busy model with overrides": (
        drained_with_overrides,
        "stopped",
        "unloaded by an operator",
        ("drain", "unloaded by an operator; 1 in flight"),
    ),
    "restart for a flush": (
        after(loaded, UnloadRequested(A, reason="restarted to flush its cache")),
        "stopped",
        "restarted to flush its cache",
        ("stop", "restarted to flush its cache"),
    ),
    "cancel of a load": (
        cancelled,
        "stopped",
        "its load was cancelled by an operator",
        ("cancel", "load cancelled by an operator"),
    ),
    "last client leaves a load": (
        left,
        "stopped",
        "nobody waits for it any more",
        ("cancel", "load cancelled: nobody waits for it any more"),
    ),
    "pin": (after(loaded, PinRequested(A, pin=True)), "ready", "loaded in", ("pin", "asked by an operator")),
    "unpin": (after(loaded, PinRequested(A, pin=False)), "ready", "loaded in", ("unpin", "asked by an operator")),
    "eviction": (evicted, "stopped", "evicted for b", ("evicted", "made room for b: needs 10000 MiB")),
    "eviction of a busy model": (evicted_while_busy, "stopped", "evicted for b", ("evicted", "makes room for b")),
    "max_loaded": (beyond_a_limit_by_type, "stopped", "evicted for b", ("evicted", "made room for b: .*llm")),
    "lease for another program": (
        leased_to_a_partner,
        "stopped",
        "evicted for lease:1",
        ("evicted", "made room for lease:1"),
    ),
    "lease lost to another coordinator": (
        leased_by_others,
        "ready",
        "loaded in",
        ("stop", "the lease store gave it to another"),
    ),
    "crash": (crashed, "backoff", "the GPU or its driver failed; next try in", ("crash", "gpu_lost: the GPU")),
    "crash that can't mend itself": (
        crashed_for_good,
        "failed",
        "failed: its arguments or its files are wrong",
        ("failed", "failed: its arguments"),
    ),
    "hang": (hung, "backoff", "its health check failed too often", ("crash", "unresponsive: its health check")),
    "out of memory": (
        too_large_while_it_loads,
        "failed",
        "failed again with more memory: it ran out of memory",
        ("raise", "ran out of memory while loading; tried once more"),
    ),
    "file is missing": (in_trouble, "failed", "can't run here: path: /gone", ("failed", "can't run here: path: /gone")),
    "file is there again": (mended, "stopped", "what was missing is there", ("recovered", "what was missing is there")),
    "changed by a reload": (changed, "ready", "loaded in", ("stop", "its configuration changed")),
    "changed by a reload while it goes": (
        changed_while_it_is_unloaded,
        "stopped",
        "unloaded by an operator",
        ("stop", "unloaded by an operator"),
    ),
    "hand-over": (handed_over, "ready", "handed over with 0 running", ("adopted", "handed over with 0 running")),
    "hand-over of a model that is being unloaded": (
        partial(handed_over, is_unloaded=True),
        "stopped",
        "unloaded by an operator",
        ("stop", "unloaded by an operator"),
    ),
    "shutdown": (
        after(loaded, ShutdownRequested()),
        "stopped",
        "llmux is shutting down",
        ("stop", "llmux is shutting down"),
    ),
}
SETTLING = {"crash": 0.1, "hang": 0.1}
"""Seconds after which it is looked at, where it would go on otherwise."""


class TestEveryAction:
    """What is done to a model is told as one event with one reason, whatever steps it takes."""

    @pytest.mark.parametrize("name", ACTIONS)
    def test_reason(self, world, name):
        act, state, reason, (kind, why) = ACTIONS[name]
        act(world)
        world.run(SETTLING.get(name, 8))
        found = world.scheduler.state.models[A]
        assert (world.state("a"), bool(re.match(reason, found.life.reason))) == (state, True), found.life.history_text()
        decisions = world.reasons("a")
        assert any(kind == each and re.match(why, told) for each, told in decisions), decisions

    @pytest.mark.parametrize("name", [name for name in ACTIONS if name.startswith("unload")])
    def test_an_unload_is_no_load_with_other_settings(self, world, name):
        ACTIONS[name][0](world)
        world.run(8)
        last = [told for kind, told in world.reasons("a") if kind in ("stop", "drain")][-1]
        assert "unloaded by an operator" in last

    def test_removed_by_a_reload(self, world):
        loaded(world)
        world.configure(OTHER)
        world.run(8)
        assert A not in world.scheduler.state.models
        assert ("stop", "removed from the configuration") in world.reasons("a")

    def test_idle_for_keep_alive(self, world):
        loaded(world, replace(CONFIGURED, keep_alive_s=60.0))
        world.run(60)
        assert world.scheduler.state.models[A].life.reason == "idle for 60 s (keep_alive_s)"

    def test_a_load_that_got_no_place(self, world):
        world.configure(CONFIGURED, replace(OTHER, pin=True), limits=Limits(queue_wait_s=30.0))
        world.request("b")
        world.run(5)
        world.post(LoadRequested(A))
        world.run(60)
        found = world.scheduler.state.models[A]
        assert world.state("a") == "stopped"
        assert "b" in found.life.reason
