"""Recovery when handling an event raises, because of a bug in llmux or of unchecked data.

The scheduler changes its state in place, so an exception leaves the state half changed. Recovery keeps a copy of an earlier
state and the events since then. The scheduler depends on nothing else, so replaying these events restores the state.
Without exceptions, the cost is a list entry for each event, and a copy now and then.

Then the event is handled again, as `Mishandled`: the model at fault has failed, and all others are served. If this raises
for another model, that model has failed as well; if it raises once more, the event is dropped. An event about no model is
repeated once, then dropped. A dropped event changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Final

from supervisor.core.effects import Effect
from supervisor.core.events import Configured, Event, Mishandled
from supervisor.core.scheduler import Scheduler
from supervisor.core.state import MishandledError, SchedulerState
from supervisor.core.types import ModelId

MOST_EVENTS: Final = 1000
"""Maximum number of replayed events (about 50 ms). Higher with many models, whose state is copied less often."""

EVENTS_PER_MODEL: Final = 10

_VALUES: Final = (str, int, float, tuple, frozenset, Enum, type(None))

MOST_FAILED: Final = 8
"""Maximum number of models that fail for one event."""


class Recovery:
    """Keeps the last consistent state of one scheduler. Call `note` for each handled event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._saved_state = SchedulerState()
        self._save_state()

    def note(self, event: Event, now: float) -> None:
        """Remember an event that was handled at `now`."""
        self._events_since.append((event, now))
        if (
            len(self._events_since) >= self._max_events or type(event) is Configured
        ):  # the event may have changed every model
            self._save_state()

    def recover(self, event: Event, now: float, mistake: Exception) -> tuple[Event, list[Effect]] | None:
        """Handling `event` at `now` raised `mistake`: restore the state, and handle the event so that only its model fails.

        Returns the event that was handled instead, with its effects. None: `event` was dropped, so nothing changed.
        """
        failed: tuple[ModelId, ...] = ()
        is_repeated = is_dropped = False
        about = _model_at_fault(mistake)
        while True:
            self._restore_state()
            if about is not None and about not in failed and len(failed) < MOST_FAILED and not is_dropped:
                failed = (*failed, about)
            elif not failed and not is_repeated:
                is_repeated = True
            elif failed and not is_dropped:
                is_dropped = True
            else:
                return None
            again = Mishandled(None if is_dropped else event, failed, _exception_name(mistake)) if failed else event
            try:
                effects = self._scheduler.handle(again, now)
            except Exception as another:  # noqa: BLE001  # the only place that catches them
                about = _model_at_fault(another)
            else:
                self.note(again, now)
                return again, effects

    def _save_state(self) -> None:
        state, before = self._scheduler.state, self._saved_state.models
        idle = ((id(each), each, before.get(each.id)) for each in state.models.values() if each.worker is None)
        same = {
            place: kept for place, each, kept in idle if each == kept
        }  # nearly all of thousands: these need no copy
        self._saved_state = _copy_value(state, same)
        self._events_since: list[tuple[Event, float]] = []
        self._max_events = MOST_EVENTS + EVENTS_PER_MODEL * len(self._saved_state.models)

    def _restore_state(self) -> None:
        """Restore the state after the last noted event."""
        state, whole = self._scheduler.state, copied(self._saved_state)
        for attribute in _slots[SchedulerState]:  # other objects refer to this object
            setattr(state, attribute, getattr(whole, attribute))
        for event, at in self._events_since:
            self._scheduler.handle(event, at)
        self._save_state()  # the next attempt may raise, too


def _model_at_fault(mistake: Exception) -> ModelId | None:
    return mistake.about if isinstance(mistake, MishandledError) else None


def _exception_name(mistake: Exception) -> str:
    return type(mistake.__cause__ or mistake).__name__


def copied(value: Any) -> Any:
    """A deep copy of a state, sharing immutable values. An object with several references has one copy."""
    return _copy_value(value, {})


def _copy_value(value: Any, seen: dict[int, Any]) -> Any:
    kind: Any = type(value)
    if (made := seen.get(id(value))) is not None:
        return made
    if kind is dict or kind is OrderedDict:
        made = value.copy()
        if not all(map(_is_value.__getitem__, set(map(type, value.values())))):  # else a long queue takes long
            for key, item in value.items():
                if not _is_value[type(item)]:
                    made[key] = _copy_value(item, seen)
    elif kind is set:
        made = set(value)
    elif kind is list or kind is deque:
        made = value.copy()
        if not all(map(_is_value.__getitem__, set(map(type, value)))):
            for index, item in enumerate(value):
                if not _is_value[type(item)]:
                    made[index] = _copy_value(item, seen)
    else:
        made = seen[id(value)] = object.__new__(kind)
        anew = getattr(kind, "UNRECORDED", ())
        for attribute in (*_slots[kind], *getattr(value, "__dict__", ())):
            item = None if attribute in anew else getattr(value, attribute)
            if not _is_value[type(item)]:
                item = _copy_value(item, seen)
            setattr(made, attribute, item)
    seen[id(value)] = made
    return made


class _Values(dict[type, bool]):
    """By class: whether its objects are immutable, including their contents."""

    def __missing__(self, kind: type) -> bool:
        is_frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        self[kind] = is_frozen or issubclass(kind, _VALUES)
        return self[kind]


class _Slots(dict[type, tuple[str, ...]]):
    """By class: the names of all its slots."""

    def __missing__(self, kind: type) -> tuple[str, ...]:
        self[kind] = tuple(attribute for each in kind.__mro__ for attribute in getattr(each, "__slots__", ()))
        return self[kind]


_is_value, _slots = _Values(), _Slots()
