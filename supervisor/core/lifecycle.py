"""A worker's life: the states and the one literal table of what may follow what.

An impossible step raises, changes nothing, and prints the worker's story, because a wrong state is a bug in the
scheduler and the story is what finds it.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from supervisor.core.types import State


class Step(StrEnum):
    """What can happen to a worker."""

    START = "start"  # memory is there: spawn it
    READY = "ready"  # it answers
    DRAIN = "drain"  # no new requests; it will be stopped when the running ones end
    RESUME = "resume"  # whoever wanted it drained doesn't any more
    STOP = "stop"  # signals are on their way
    GONE = "gone"  # its tree is gone and its memory is back
    CRASH = "crash"  # it ended by itself; try again later
    FAIL = "fail"  # it ended by itself too often, or can't ever work
    RETRY = "retry"  # the backoff is over
    RESET = "reset"  # an operator says: try again


TABLE: dict[tuple[State, Step], State] = {
    (State.STOPPED, Step.START): State.STARTING,
    (State.STARTING, Step.READY): State.READY,
    (State.STARTING, Step.STOP): State.STOPPING,
    (State.STARTING, Step.GONE): State.STOPPED,  # ended by itself in a way that needs no backoff
    (State.STARTING, Step.CRASH): State.BACKOFF,
    (State.STARTING, Step.FAIL): State.FAILED,
    (State.READY, Step.DRAIN): State.DRAINING,
    (State.READY, Step.STOP): State.STOPPING,
    (State.READY, Step.CRASH): State.BACKOFF,
    (State.READY, Step.FAIL): State.FAILED,
    (State.DRAINING, Step.RESUME): State.READY,
    (State.DRAINING, Step.STOP): State.STOPPING,
    (State.DRAINING, Step.CRASH): State.BACKOFF,
    (State.DRAINING, Step.FAIL): State.FAILED,
    (State.STOPPING, Step.GONE): State.STOPPED,
    (State.BACKOFF, Step.RETRY): State.STOPPED,
    (State.BACKOFF, Step.RESET): State.STOPPED,
    (State.FAILED, Step.RESET): State.STOPPED,
}

HAS_WORKER = frozenset({State.STARTING, State.READY, State.DRAINING, State.STOPPING})
"""States with a process that holds (or may hold) memory."""

SERVES = frozenset({State.READY, State.DRAINING})
"""States with requests in flight."""

STORY_LENGTH = 40


class ImpossibleStepError(AssertionError):
    """A step the table doesn't have. A bug; the message tells the worker's story."""


class Lifecycle:
    """One model's state, when it was entered and why, and the last steps that led there."""

    __slots__ = ("_name", "_story", "reason", "since", "state")

    def __init__(self, name: str, now: float) -> None:
        self._name = name
        self.state = State.STOPPED
        self.since = now
        self.reason = "never loaded"
        self._story: deque[tuple[float, Step, State, str]] = deque(maxlen=STORY_LENGTH)

    def can(self, step: Step) -> bool:
        """Does the table allow it now?"""
        return (self.state, step) in TABLE

    def step(self, step: Step, now: float, reason: str) -> None:
        """Take `step` at `now`, or raise ImpossibleStepError and stay as it is."""
        finish = TABLE.get((self.state, step))
        if finish is None:
            raise ImpossibleStepError(f"{self._name}: {step} in {self.state} ({reason}); story:\n{self.story()}")
        self.state, self.since, self.reason = finish, now, reason
        self._story.append((now, step, finish, reason))

    def story(self) -> str:
        """The last steps, one a line, oldest first."""
        return "\n".join(f"  {at:.3f} {step} -> {state}: {reason}" for at, step, state, reason in self._story)
