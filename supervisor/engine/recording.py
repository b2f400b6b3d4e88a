"""A recording: the scheduler's initial state, then every event with its effects, each a line of JSON.

The core depends only on its state and its events, so a recording can be replayed anywhere and must give the same effects,
byte for byte. Recording costs nothing without a listener. Reading a recording creates only objects of the core's own classes
and runs no other code, so an untrusted recording is safe to replay.
"""

from __future__ import annotations

import json
import pkgutil
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from inspect import getmembers, isclass
from typing import Any, Final

from supervisor import core
from supervisor.core.admission.admission import AdmissionPolicy
from supervisor.core.effects import Effect
from supervisor.core.events import Event
from supervisor.core.scheduler import Scheduler
from supervisor.engine.listener import Listener
from supervisor.errors import InvalidRequestError

FORMAT: Final = 6
BACKLOG_BYTES: Final = 64 * 1024 * 1024  # maximum size of lines not yet taken; beyond, the recording ends

_BACK_REFERENCE: Final = "&"
_CONTAINERS: Final = {kind.__name__: kind for kind in (tuple, set, frozenset, deque, dict, OrderedDict)}


class Recording(Listener[bytes]):
    """One listener's recording, line by line."""

    def __init__(self, scheduler: Scheduler, now: float, every: set[Recording] | None = None) -> None:
        super().__init__(set() if every is None else every)
        self._bytes = 0
        self.broke_off = False  # whether lines are missing at the end
        self.put(line({"llmux_recording": FORMAT, "at": now, "scheduler": packed(scheduler)}))

    def add(self, at: float, event: Event, effects: Sequence[Effect]) -> None:
        """Keep one event with its effects for the listener."""
        if self._ended:
            return
        try:
            text = event_line(at, event, effects)
        except Exception:
            self.broke_off = True
            self.end()
            raise
        self._bytes += len(text)
        if self._bytes > BACKLOG_BYTES:
            self.broke_off = True
            text = line({"error": "The recording broke off: its listener was too slow."})
            self.end()
        self.put(text)

    def take(self) -> list[bytes]:
        """See Listener."""
        self._bytes = 0
        return super().take()


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replayed event of a recording."""

    number: int  # 1 for the first
    at: float
    event: Event
    effects: tuple[Effect, ...]  # of this replay
    recorded: bytes  # the line in the file
    replayed: bytes  # the line as it would be written now

    @property
    def is_same(self) -> bool:
        """Whether the replay gave the same effects, byte for byte."""
        return self.recorded == self.replayed


def replay(lines: Iterable[bytes]) -> Iterator[Replayed]:
    """Replay a recording, event by event. Raises InvalidRequestError for a file that is no recording, or is incomplete."""
    scheduler: Scheduler | None = None
    number = 0
    for text in lines:
        try:
            if scheduler is None:
                scheduler = _recorded_state(json.loads(text.decode()))
                continue
            number += 1
            replayed = _replay_line(scheduler, number, text)
        except InvalidRequestError:
            raise
        except Exception as error:  # a file may hold anything
            raise InvalidRequestError(f"Line {number + 1} of the recording can't be read: {error!r}.") from error
        yield replayed
    if scheduler is None:
        raise InvalidRequestError("This is not a recording: it is empty.")


def _recorded_state(content: Any) -> Scheduler:
    found = content.get("llmux_recording") if isinstance(content, dict) else None
    if found is None:
        raise InvalidRequestError("This is not a recording; llmux record makes one.")
    if found != FORMAT:
        raise InvalidRequestError(
            f"Another version of llmux made this recording (format {found}; this one reads {FORMAT}): replay it with that."
        )
    scheduler = unpacked(content["scheduler"])
    assert isinstance(scheduler, Scheduler)
    return scheduler


def _replay_line(scheduler: Scheduler, number: int, text: bytes) -> Replayed:
    content = json.loads(text.decode())
    if "error" in content:
        raise InvalidRequestError(str(content["error"]))
    at, event = float(content["at"]), unpacked(content["event"])
    effects = tuple(scheduler.handle(event, at))
    return Replayed(number, at, event, effects, text, event_line(at, event, effects))


def event_line(at: float, event: Event, effects: Iterable[Effect]) -> bytes:
    """One event as a line."""
    return line({"at": at, "event": packed(event), "effects": [packed(effect) for effect in effects]})


def line(content: dict[str, Any]) -> bytes:
    """A line of a recording. Infinite times are written as `Infinity`."""
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


# ------------------------------------------------------------------------------------- objects of the core as JSON, and back


def packed(value: Any) -> Any:
    """A value of the core as JSON: `[class, {attribute: value}]`, and `[kind, [items]]` for containers.

    A mutable object is written once, with a number; further references contain only the number, and reading restores them.
    """
    return _pack(value, {})


def _pack(value: Any, seen: dict[int, int]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    name = type(value).__name__
    if isinstance(value, Enum):
        return [name, value.value]
    if isinstance(value, dict):
        return [name, [[_pack(key, seen), _pack(item, seen)] for key, item in value.items()]]
    if isinstance(value, set | frozenset):
        return [name, sorted(_pack(item, seen) for item in value)]
    if isinstance(value, list | tuple):
        return [name, [_pack(item, seen) for item in value]]
    if isinstance(value, deque):
        return [name, [_pack(item, seen) for item in value], value.maxlen]
    if is_dataclass(value) and type(value).__dataclass_params__.frozen:  # type: ignore[union-attr]  # not a class
        return [name, {attribute: _pack(item, seen) for attribute, item in _attributes(value)}]
    if id(value) in seen:
        return [_BACK_REFERENCE, seen[id(value)]]
    number = seen[id(value)] = len(seen)
    return [name, {attribute: _pack(item, seen) for attribute, item in _attributes(value)}, number]


def unpacked(value: Any) -> Any:
    """The inverse of `packed`. Raises InvalidRequestError for classes that the core doesn't have."""
    try:
        return _unpack(value, {})
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"The recording can't be read: {error!r}.") from error


def _unpack(value: Any, seen: dict[int, Any]) -> Any:
    if not isinstance(value, list):
        return value
    name, content, *more = value
    match name:
        case _ if name == _BACK_REFERENCE:
            return seen[content]
        case "list":
            return [_unpack(item, seen) for item in content]
        case "dict" | "OrderedDict":
            return _CONTAINERS[name]([(_unpack(key, seen), _unpack(item, seen)) for key, item in content])
        case "tuple" | "set" | "frozenset" | "deque":
            return _CONTAINERS[name]([_unpack(item, seen) for item in content], *more)
    kind = _core_classes().get(name)
    if kind is None:
        raise InvalidRequestError(f"The recording can't be read: the scheduler has no {str(name)[:50]!r}.")
    if issubclass(kind, Enum):
        return kind(content)
    made = kind.__new__(kind)
    if more:
        seen[more[0]] = made
    for field in fields(kind) if is_dataclass(kind) else ():  # another version of llmux may have written it
        if field.name not in content and field.default is not MISSING:
            object.__setattr__(made, field.name, field.default)
        elif field.name not in content and field.default_factory is not MISSING:
            object.__setattr__(made, field.name, field.default_factory())
    for attribute, item in content.items():
        object.__setattr__(made, attribute, _unpack(item, seen))
    return made


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    """The attributes set on an object, in the order of its class, except those in its class's UNRECORDED."""
    left_out = getattr(value, "UNRECORDED", ())
    for kind in reversed(type(value).__mro__):
        for attribute in getattr(kind, "__slots__", ()):
            if attribute not in left_out and hasattr(value, attribute):
                yield attribute, getattr(value, attribute)
    yield from getattr(value, "__dict__", {}).items()


@cache
def _core_classes() -> dict[str, type]:
    """The core's own classes, by name."""
    modules = (import_module(found.name) for found in pkgutil.walk_packages(core.__path__, f"{core.__name__}."))
    own = {
        name: kind
        for module in modules
        for name, kind in getmembers(module, isclass)
        if kind.__module__ == module.__name__
    }
    return own | {
        kind.__name__: kind for kind in AdmissionPolicy.__subclasses__()
    }  # a policy may be defined in another package
