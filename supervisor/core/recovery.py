"""Recovery when handling an event raises, because of a bug of ours, or of data that nobody had checked.

The scheduler changes its state in place, so such an event leaves it half changed. The state as it was before is made anew: a
copy of it is kept, with the events since, and the scheduler looks at nothing else, so the same events give the same state.
While nothing raises, that costs an entry in a list for each event, and a copy now and then.

Then the event is handled again, as `Mishandled`: the model that was being handled has failed, and the others are served. If
that raises for another model, that one has failed as well; if it raises once more, the event is dropped. An event that
is about no model is repeated once, then dropped. Dropped means: nothing of it has happened.
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
"""So many are handled again at the most: some 50 ms. More where there are many models, whose state is copied less often."""

EVENTS_PER_MODEL: Final = 10

_VALUES: Final = (str, int, float, tuple, frozenset, Enum, type(None))

MOST_FAILED: Final = 8
"""So many models fail for one event at the most."""


class Recovery:
    """The last state that is known to be whole, of one scheduler. `note` each event that it has handled."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._saved_state = SchedulerState()
        self._save_state()

    def note(self, event: Event, now: float) -> None:
        """Remember an event that was handled at `now`."""
        self._events_since.append((event, now))
        if len(self._events_since) >= self._max_events or type(event) is Configured:  # it may have changed every model
            self._save_state()

    def recover(self, event: Event, now: float, mistake: Exception) -> tuple[Event, list[Effect]] | None:
        """Handling `event` at `now` raised `mistake`: restore the state, and handle it so that only its model fails.

        Returns the event that was handled instead, with its effects. None: `event` was dropped, so nothing has happened.
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
            except Exception as another:  # noqa: BLE001  # this is the one place that takes them
                about = _model_at_fault(another)
            else:
                self.note(again, now)
                return again, effects

    def _save_state(self) -> None:
        state, before = self._scheduler.state, self._saved_state.models
        idle = ((id(each), each, before.get(each.id)) for each in state.models.values() if each.worker is None)
        same = {place: kept for place, each, kept in idle if each == kept}  # of thousands nearly all: no copy for these
        self._saved_state = _copy_value(state, same)
        self._events_since: list[tuple[Event, float]] = []
        self._max_events = MOST_EVENTS + EVENTS_PER_MODEL * len(self._saved_state.models)

    def _restore_state(self) -> None:
        """Restore the state as it was after the last event that was noted."""
        state, whole = self._scheduler.state, copied(self._saved_state)
        for attribute in _slots[SchedulerState]:  # others know the state by this object
            setattr(state, attribute, getattr(whole, attribute))
        for event, at in self._events_since:
            self._scheduler.handle(event, at)
        self._save_state()  # the next attempt may raise, too


def _model_at_fault(mistake: Exception) -> ModelId | None:
    return mistake.about if isinstance(mistake, MishandledError) else None


def _exception_name(mistake: Exception) -> str:
    return type(mistake.__cause__ or mistake).__name__


def copied(value: Any) -> Any:
    """A deep copy of a state, but for values that never change. An object that stands in several places has one copy."""
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
    """By class: do its objects never change, with all that they hold?"""

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
