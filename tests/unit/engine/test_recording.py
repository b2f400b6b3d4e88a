"""Recordings: what the scheduler decided is decided again, byte for byte, and nothing but its own objects is made."""

from __future__ import annotations

import random
import sys

import pytest

from supervisor.core.events import WorkerExited
from supervisor.core.scheduler import Scheduler
from supervisor.core.types import Crash, CrashClass, Generation, ModelId
from supervisor.engine import recording
from supervisor.engine.recording import Recording, event_line, packed, replay, unpacked
from supervisor.errors import InvalidRequestError
from tests.support.cases import cases
from tests.support.counts import SOAK
from tests.support.simulation import World, model

EVENTS = 100_000 if SOAK else 5_000


def busy_world(events, seed):
    """Clients come and go at random, models crash, memory is used by others; the recording begins in the middle."""
    world, chance = World(), random.Random(seed)
    names = [f"m{number}" for number in range(6)]
    world.configure(*(model(name, 5000, priority=100 + number) for number, name in enumerate(names)))
    recorded = None
    count = 0
    original = world.scheduler.handle

    def handle(event, now):
        nonlocal count
        effects = original(event, now)
        if recorded is not None:
            count += 1
            recorded.add(now, event, effects)
        return effects

    world.scheduler.handle = handle
    world.check = lambda: None  # the stateful test does that
    while count < events:
        if recorded is None and world.now > 1020:
            del world.scheduler.handle
            recorded = Recording(world.scheduler, world.now)
            world.scheduler.handle = handle
        open_ = list(world.open)
        if len(open_) < chance.randrange(1, 40):
            world.request(chance.choice(names), chance.randrange(3))
        else:
            world.finish(chance.choice(open_))
        if chance.random() < 0.02 and (loaded := sorted(world.loaded())):
            world.crash(chance.choice(loaded), Crash(CrashClass.UNKNOWN, "it fell", ("last words",)))
        if chance.random() < 0.3:
            world.run(chance.random() * 2)
    return recorded.take()


class TestReplay:
    """A recording is all that is needed."""

    @pytest.mark.parametrize("seed", [1, 2])
    def test_decides_the_same(self, seed):
        lines = busy_world(EVENTS, seed)
        count = 0
        for count, replayed in enumerate(replay(lines), 1):
            assert replayed.is_same, (replayed.recorded, replayed.replayed)
        assert count >= EVENTS

    def test_another_outcome_is_found(self):
        lines = busy_world(500, 3)
        at = next(i for i, line in enumerate(lines) if b'"Decided"' in line)
        lines[at] = lines[at].replace(b'"reason":"', b'"reason":"not ', 1)
        assert [one.number for one in replay(lines) if not one.is_same] == [at]

    def test_the_state_is_whole(self):
        world = World()
        world.configure(model("a", 4000), model("b", 14000))
        world.request("a")
        world.run(5)
        world.request("b")
        again = unpacked(packed(world.scheduler))
        again.state.check()
        assert isinstance(again, Scheduler)
        assert packed(again) == packed(world.scheduler)
        assert again.state.queue._admission is again.state.admission, "one object stays one"


class TestHostileFiles:
    """A file from a stranger makes objects of the core's classes, or an error."""

    @cases("name", ["Popen", "object", "type", "Recording", "str", "os", "__import__"])
    def test_other_classes(self, name):
        with pytest.raises(InvalidRequestError, match="the scheduler has no"):
            unpacked([name, {"args": ["touch", "x"]}, 0])

    @cases(
        "value",
        [[], ["Tick"], ["Tick", 5], ["Crash", {"kind": 1, "nothing": 2}], ["tuple"], ["&", 7], [[], []], ["dict", [1]]],
    )
    def test_wrong_shapes(self, value):
        with pytest.raises(InvalidRequestError, match="can't be read"):
            unpacked(value)

    def test_endless_nesting(self):
        depth = sys.getrecursionlimit() * 2
        line = b'{"llmux_recording":6,"scheduler":' + b'["list",[' * depth + b"]]" * depth + b"}\n"
        with pytest.raises(InvalidRequestError, match="can't be read"):
            list(replay([line]))


class TestRecording:
    """It costs nothing when nobody listens, and is bounded when the listener is slow."""

    def test_a_slow_listener_is_told_that_it_broke_off(self, monkeypatch):
        monkeypatch.setattr(recording, "BACKLOG_BYTES", 1000)
        every = set()
        world = World()
        one = Recording(world.scheduler, 0.0, every)
        world.configure(model("a", 1000))
        effects = []
        event = world.reading()
        for _ in range(1000):
            one.add(1.0, event, effects)
        assert every == set()
        assert one.broke_off
        lines = one.take()
        assert sum(map(len, lines)) < 1000 + len(event_line(1.0, event, effects)) + len(lines[0]) + 200
        with pytest.raises(InvalidRequestError, match="broke off"):
            list(replay(lines))

    def test_text_that_is_no_unicode(self):
        world = World()
        world.configure(model("a", 1000))
        one = Recording(world.scheduler, world.now)
        crash = Crash(CrashClass.UNKNOWN, "it said \udcff")
        event = WorkerExited(ModelId("a"), Generation(1), crash)
        one.add(world.now, event, world.scheduler.handle(event, world.now))
        assert [replayed.is_same for replayed in replay(one.take())] == [True]

    async def test_next(self):
        one = Recording(Scheduler(), 0.0)
        assert len(await one.next(60)) == 1
        assert await one.next(0.01) == []
        one.end()
        assert await one.next(60) is None
