"""A bounded record of what was decided and why, and the proof that the decisions can be repeated.

The journal wraps the scheduler. It keeps the last events with their effects, starting from a checkpoint of the
scheduler's whole state, so that `replay()` can run the same events through a copy and compare. It keeps the decisions
separately, overall and per model, for `llmux why`. Counts bound its memory: at most two segments of events.
"""

from __future__ import annotations

import pickle
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from supervisor.core.effects import Decided, Effect
from supervisor.core.events import Event
from supervisor.core.scheduler import Scheduler
from supervisor.core.types import ModelId

SEGMENT_EVENTS = 4096
DECISIONS = 2000
DECISIONS_PER_MODEL = 50


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. `at` is on the core's clock; `seq` is 1 for the first and grows by one."""

    seq: int
    at: float
    kind: str
    model: ModelId | None
    reason: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One event and its effects."""

    at: float
    event: Event
    effects: tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """An entry whose replay gave other effects: the core used something besides its events. A bug."""

    entry: Entry
    replayed: tuple[Effect, ...]


class _Segment:
    """Keeps the parts of entries: one more object per event would push others out of the processor's cache."""

    __slots__ = ("checkpoint", "effects", "events", "times")

    def __init__(self, scheduler: Scheduler) -> None:
        self.checkpoint = pickle.dumps(scheduler)  # our own object, never read from outside
        self.times = array("d")
        self.events: list[Event] = []
        self.effects: list[Sequence[Effect]] = []

    def append(self, now: float, event: Event, effects: Sequence[Effect]) -> None:
        self.times.append(now)
        self.events.append(event)
        self.effects.append(effects or ())

    def entries(self) -> Iterator[Entry]:
        for at, event, effects in zip(self.times, self.events, self.effects, strict=True):
            yield Entry(at, event, tuple(effects))


class Journal:
    """A scheduler that remembers. `handle` has the scheduler's contract."""

    def __init__(self, scheduler: Scheduler | None = None, *, segment_events: int = SEGMENT_EVENTS) -> None:
        self.scheduler = scheduler if scheduler is not None else Scheduler()
        self._segment_events = segment_events
        self._segments: deque[_Segment] = deque([_Segment(self.scheduler)], maxlen=2)
        self._decisions: deque[Decision] = deque(maxlen=DECISIONS)
        self._by_model: dict[ModelId, deque[Decision]] = {}
        self._seq = 0

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Let the scheduler take the event, and keep both."""
        segment = self._segments[-1]
        if len(segment.events) >= self._segment_events:
            segment = _Segment(self.scheduler)
            self._segments.append(segment)
        effects = self.scheduler.handle(event, now)
        segment.append(now, event, effects)
        for effect in effects:
            if type(effect) is Decided:
                self._keep(Decision(self._seq + 1, now, effect.kind, effect.model, effect.reason))
        return effects

    def _keep(self, decision: Decision) -> None:
        self._seq += 1
        self._decisions.append(decision)
        if decision.model is not None:
            self._by_model.setdefault(decision.model, deque(maxlen=DECISIONS_PER_MODEL)).append(decision)

    def decisions(self, model: ModelId | None = None, *, limit: int = DECISIONS) -> list[Decision]:
        """The last decisions, oldest first; those about one model if named (kept even when others were many)."""
        kept = self._decisions if model is None else self._by_model.get(model, deque())
        return list(kept)[-limit:]

    @property
    def last_seq(self) -> int:
        """The number of the newest decision; 0 before the first."""
        return self._seq

    def decisions_since(self, seq: int) -> list[Decision]:
        """All kept decisions after `seq`, oldest first. Costs no more than there are."""
        newest_first = takewhile(lambda decision: decision.seq > seq, reversed(self._decisions))
        return list(newest_first)[::-1]

    def entries(self) -> Iterator[Entry]:
        """All events still kept, oldest first."""
        for segment in self._segments:
            yield from segment.entries()

    def replay(self) -> Divergence | None:
        """Run all kept events through a copy of the scheduler as it was; None when every effect came out the same."""
        scheduler: Scheduler = pickle.loads(self._segments[0].checkpoint)  # noqa: S301 (written by this object, in memory)
        for entry in self.entries():
            effects = tuple(scheduler.handle(entry.event, entry.at))
            if effects != entry.effects:
                return Divergence(entry, effects)
        return None
