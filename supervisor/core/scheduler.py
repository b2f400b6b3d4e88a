"""The state machine: `handle(event, now) -> [Effect]`.

One object owns all state and is called from one place; nothing here waits, reads a clock, or touches a process. Each
event changes the records it is about, then wanted models are planned (`placement`), so that every decision is made on
the state as it is at the end of the event. Given the same events at the same times it returns the same effects: that is
what the journal replays.

A request's way:
 1. arrives → refused at once (unknown, failed, full, shutting down), or
 2. dispatched at once to a ready worker with room, or
 3. queued, which makes its model wanted; the worker's READY dispatches it *in the same turn*, so that nothing can evict
    the model between becoming ready and its first request;
 4. finished, however it ended.

Where what happens is decided: `requests` (1 to 4), `placement` (who is loaded, who has to go), `reports` (what workers
and devices say), `endings` (stops, crashes, what is left of a worker), `operators` (people and configurations), `timers`
(what only time brings). All of them change the one `World`.
"""

from __future__ import annotations

from typing import assert_never

from supervisor.core import operators, reports, requests, termination, timers
from supervisor.core.placement import place
from supervisor.core.state import Turn, World
from supervisor.core.types import (
    Configured,
    Effect,
    Event,
    LoadAsked,
    MemorySampled,
    PinAsked,
    RequestArrived,
    RequestFinished,
    Respecified,
    ShutdownAsked,
    Tick,
    UnloadAsked,
    WorkerExited,
    WorkerReady,
    WorkerUnkillable,
    WorkerUnready,
)


class Scheduler:
    """Decides what runs where and who is served. Not thread-safe: one writer."""

    def __init__(self) -> None:
        self.world = World()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at `now` (monotonic seconds, never going back) and say what has to be done, in order."""
        turn = Turn(now)
        replan = self._take(turn, event)
        replan = timers.ring(self.world, turn) or replan
        if replan:
            reports.watch_memory(self.world, turn)
            place(self.world, turn)
        return turn.effects

    def deadline(self, now: float) -> float:
        """When `Tick` is needed at the latest; infinity when nothing is due."""
        return min(self.world.next_wake(), self.world.queue.deadline(), self.world.ledger.deadline(now))

    def is_impatient(self) -> bool:
        """Is somebody waiting for memory, so that it should be sampled often?"""
        return bool(self.world.wanted) or self.world.ledger.is_waiting()

    def _take(self, turn: Turn, event: Event) -> bool:
        """Apply the event; True when plans have to be made anew."""
        world = self.world
        match event:
            case RequestArrived():
                return requests.arrived(world, turn, event)
            case RequestFinished():
                return requests.finished(world, turn, event)
            case WorkerReady():
                reports.ready(world, turn, event)
            case WorkerUnready():
                reports.unready(world, turn, event)
            case WorkerExited():
                termination.exited(world, turn, event)
            case WorkerUnkillable():
                termination.unkillable(world, turn, event)
            case MemorySampled():
                reports.sampled(world, turn, event)
            case LoadAsked():
                operators.load(world, turn, event)
            case UnloadAsked():
                operators.unload(world, turn, event)
            case PinAsked():
                operators.pin(world, turn, event)
            case Respecified():
                operators.respecify(world, turn, event)
            case Configured():
                operators.configure(world, turn, event)
            case ShutdownAsked():
                operators.shut_down(world, turn)
            case Tick():
                pass
            case _:
                assert_never(event)
        return True
