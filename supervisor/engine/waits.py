"""The waits of queued requests: the reasons of each wait, and the time for each reason.

After each event `Waits` checks the models with queued requests. A model has a linked list of phases; each change of its wait
reason adds one. A request's wait begins at the phase of its arrival and ends at its admission, so no work is needed for each
request in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from supervisor.core.admission.waiting import WaitKind, WaitReason, wait_reason
from supervisor.core.state import SchedulerState
from supervisor.core.types import ModelId

MOST_PARTS: Final = 32  # of one wait; if there are more, parts with equal reasons are added up

WaitSegment = tuple[WaitReason, float]
"""A part of a wait: the reason, and how many seconds it took."""

_QUEUED: Final = WaitReason(WaitKind.TURN, "its turn")


@dataclass(slots=True)
class _Phase:
    reason: WaitReason
    since: float
    next: _Phase | None = None  # the following phase; None: this one continues


class WaitTrace:
    """One request's wait for a worker of its model. All times are on the engine's clock."""

    __slots__ = ("_parts", "_phase", "model", "since", "until")

    def __init__(self, model: ModelId, since: float, phase: _Phase) -> None:
        self.model = model
        self.since = since
        self.until: float | None = None  # set iff the wait has ended
        self._phase: _Phase | None = phase  # the phase at its arrival; None after the wait
        self._parts: tuple[WaitSegment, ...] = ()

    @classmethod
    def lost(cls, model: ModelId, since: float, until: float) -> WaitTrace:
        """The time that a request lost at a worker that ended before it took the request."""
        wait = cls(model, since, _Phase(WaitReason(WaitKind.RETRY, "another worker: the first ended too early"), since))
        wait.end(until)
        return wait

    def end(self, now: float) -> None:
        """End the wait: keep its parts, and drop its phases."""
        self._parts, self.until, self._phase = _merge_segments(self._segments(now)), now, None

    def parts(self, now: float) -> tuple[WaitSegment, ...]:
        """The parts so far, in order."""
        return self._parts if self.until is not None else _merge_segments(self._segments(now))

    @property
    def current(self) -> WaitReason | None:
        """The reason why the request waits now; None when the wait is over."""
        phase = self._phase
        while phase is not None and phase.next is not None:
            phase = phase.next
        return None if phase is None else phase.reason

    def _segments(self, now: float) -> Iterable[WaitSegment]:
        phase, since = self._phase, self.since
        while phase is not None:
            following = phase.next
            until = now if following is None else min(now, following.since)
            yield phase.reason, until - since
            phase, since = (following if until < now else None), until


class Waits:
    """The current phase of each model with queued requests."""

    def __init__(self) -> None:
        self._current: dict[ModelId, _Phase] = {}

    def update(self, state: SchedulerState, now: float) -> None:
        """Begin a new phase for each model whose wait reason has changed. Costs nothing while no request waits."""
        waiting = state.queue.models()
        if not waiting and not self._current:
            return
        before, self._current = self._current, {}
        for name in waiting:
            phase = before.get(name)
            found = wait_reason(state, state.models[name])
            if phase is None or (phase.reason is not found and phase.reason != found):
                following = _Phase(found, now)
                if phase is not None:
                    phase.next = following
                phase = following
            self._current[name] = phase

    def begin(self, model: ModelId, since: float) -> WaitTrace:
        """Begin the wait of a request that is queued for this model."""
        return WaitTrace(model, since, self._current.setdefault(model, _Phase(_QUEUED, since)))


def _merge_segments(parts: Iterable[WaitSegment]) -> tuple[WaitSegment, ...]:
    listed = tuple(parts)
    if len(listed) <= MOST_PARTS:
        return listed
    sums: dict[WaitReason, float] = {}
    for reason, took_s in listed:
        sums[reason] = sums.get(reason, 0.0) + took_s
    return tuple(sums.items())
