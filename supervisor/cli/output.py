"""Output for people: text and amounts, tables, bars, a progress line, a screen that repaints.

This module only describes these parts. `terminal` renders them with `rich`, for a terminal or a pipe; it is imported when
the first part is shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Final, cast

COLOURS: Final = (
    dict.fromkeys(("installed", "ready", "ok", "valid", "held"), "green")
    | dict.fromkeys(("outdated", "draining", "stopping", "backoff", "warn"), "yellow")
    | dict.fromkeys(("broken", "failed", "fail", "expired", "interrupted"), "red")
    | {"starting": "cyan", "loading": "cyan"}
)
# Control characters, line separators and characters that change the writing direction; not tab and newline.
_CONTROL_CHARACTERS: Final = (
    *range(9),
    *range(11, 32),
    *range(127, 160),
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
)
UNSHOWN: Final = (
    *_CONTROL_CHARACTERS,
    *range(0xD800, 0xE000),
)  # and lone surrogates, which JSON may hold and UTF-8 can't
_NOTHING: Final = dict.fromkeys(UNSHOWN)

Styled = tuple[str, str]
"""Text and its style, in rich's terms."""

Words = str | Styled | list[str | Styled]


@dataclass(frozen=True, slots=True)
class Bar:
    """A share from 0 to 1."""

    share: float
    style: str = "cyan"


Cell = Words | Bar
Row = Sequence[Cell]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of equal length. On a terminal the last column is cut to the remaining width, unless the table is `whole`."""

    rows: Sequence[Row]
    head: bool = True  # the first row is the head
    whole: bool = False


def show(*what: Words | Table, err: bool = False) -> None:
    """Print each on a line of its own, without colours where the output is no terminal."""
    _let_rich_in()
    from supervisor.cli import terminal  # noqa: PLC0415  # not before something is shown

    terminal.show(*what, err=err)


def progress(frame: Callable[[], Row]) -> AbstractContextManager[None]:
    """Repaint one line on stderr, in a thread, until the block ends; do nothing where stderr is no terminal.

    `frame` gives the line's cells; it may block, and an exception in it ends only the painting.
    """
    if not sys.stderr.isatty():
        return nullcontext()
    _let_rich_in()
    from supervisor.cli import terminal  # noqa: PLC0415  # as above

    return terminal.progress(frame)


def screen() -> AbstractContextManager[Callable[[Sequence[Words | Table]], None]]:
    """The terminal's alternate screen until the block ends; gives a function that paints a page there."""
    _let_rich_in()
    from supervisor.cli import terminal  # noqa: PLC0415  # as above

    return terminal.screen()


def leave_rich_out() -> None:
    """Prevent the import of rich until something is shown.

    structlog and httpx import rich where it is installed, for features that llmux doesn't use: that costs the daemon 3 MiB.
    """
    sys.modules.setdefault("rich", cast("ModuleType", None))


def _let_rich_in() -> None:
    if sys.modules.get("rich", sys) is None:
        del sys.modules["rich"]


def clean(text: str) -> str:
    """Foreign text without the characters that control a terminal or can't be encoded."""
    return text.translate(_NOTHING)


def state(word: str, shown: str | None = None) -> Styled:
    return shown or word, COLOURS.get(word, "")


def dim(text: str) -> Styled:
    return text, "dim"


def mib(value: object) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value / 1024:.1f} GiB" if value >= 10 * 1024 else f"{value:.0f} MiB"


def duration(value: object) -> str:
    """A time in words, with tenths below ten seconds."""
    if not isinstance(value, int | float):
        return "-"
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 60:
        return f"{value:.0f} s"
    if value < 3600:
        return f"{value // 60:.0f} min"
    if value < 48 * 3600:
        return f"{value // 3600:.0f} h {value % 3600 // 60:.0f} min"
    return f"{value // 86400:.0f} d"


def clock(at: object) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at)) if isinstance(at, int | float) else "-"


def text(value: object) -> str:
    """Any value, or a dash for a missing one."""
    return "-" if value is None else str(value)
