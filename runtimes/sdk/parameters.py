"""Tables of request parameters: the treatment of each parameter of an API by a runtime.

A parameter is *used*, *ignored* (it has no effect, and doesn't make the answer wrong), or *refused*: an error, except with
values that ask for the default behaviour. Names that aren't in the table are ignored, too, because clients send new ones all
the time, and a request must not fail for them. Nothing is ignored in silence: the response's header `x-llmux-ignored` names
each parameter without effect that isn't null, and the worker's log names each unknown one once. docs/runtimes.md shows the
tables.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, Literal, Union

from runtimes.sdk.errors import unsupported

Value = Union[None, bool, int, float, str, list["Value"], dict[str, "Value"]]  # noqa: UP007  # recursive
Fate = Literal["used", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """The treatment of a parameter. `note` is for people; `harmless` are the values that a refused parameter accepts."""

    fate: Fate
    note: str = ""
    harmless: tuple[Value, ...] = ()


used = partial(Parameter, "used")  # it works as in the API, or as in `note`
ignored = partial(Parameter, "ignored")  # it is accepted and has no effect


def refused(note: str, *harmless: Value) -> Parameter:
    """A parameter that isn't supported: a request that needs it is an error."""
    return Parameter("refused", note, (None, *harmless))


Table = Mapping[str, Parameter]


HEADER: Final = b"x-llmux-ignored"

_MOST_NAMED: Final = 100  # in a header; the supervisor shows fewer
_MOST_REPORTED: Final = 100
_reported: Final = set[str]()
_without_effect: Final = ContextVar[dict[str, None]]("_without_effect")


def begin() -> Mapping[str, None]:
    """Start to collect, for this request, the names of parameters without effect. `check` adds them in order."""
    names: dict[str, None] = {}
    _without_effect.set(names)
    return names


def header(names: Iterable[str]) -> bytes:
    """The value of `HEADER`. Clients choose the names, so only plain characters are repeated."""
    return ", ".join(
        "".join(c if c.isascii() and (c.isalnum() or c in "_-.[]") else "?" for c in name[:64])
        for name in islice(names, _MOST_NAMED)
    ).encode()


def check(table: Table, given: Mapping[str, object]) -> None:
    """Raises WorkerError for the first parameter that this table refuses. Notes those without effect (see `begin`)."""
    ignored = _without_effect.get({})
    for name, value in given.items():
        parameter = table.get(name)
        if parameter is None:
            _log_unknown(name[:50], table)
        elif parameter.fate == "refused" and not any(_equal_values(value, allowed) for allowed in parameter.harmless):
            raise unsupported(name, parameter.note)
        if value is not None and (parameter is None or parameter.fate == "ignored"):
            ignored[name] = None


def without_effect(name: str) -> None:
    """Report a part of a parameter, which `check` doesn't see, as without effect."""
    _without_effect.get({})[name] = None


def _log_unknown(name: str, table: Table) -> None:
    if name in _reported or len(_reported) >= _MOST_REPORTED:
        return
    _reported.add(name)
    near = difflib.get_close_matches(name, table, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    sys.stderr.write(f"ignored: the parameter {name!r}, which this runtime doesn't know.{hint}\n")


def _equal_values(value: object, allowed: Value) -> bool:
    """Are the values equal? A bool never equals a number."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
