"""How things look: tables that fit the terminal, amounts, colours for states, bars, and a line that repaints itself.

Colour is put on with `click.style` and taken off again by `click.echo` where the output is no terminal, or $NO_COLOR is set.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

import click

COLOURS: Final = {
    "installed": "green",
    "outdated": "yellow",
    "broken": "red",
    "ready": "green",
    "starting": "cyan",
    "draining": "yellow",
    "stopping": "yellow",
    "backoff": "yellow",
    "failed": "red",
    "ok": "green",
    "warn": "yellow",
    "fail": "red",
    "valid": "green",
    "expired": "red",
}
LAST_COLUMN: Final = 20  # is never cut to less
BAR: Final = 24
REPAINT_S: Final = 0.1
SPINNER: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def table(rows: Sequence[Sequence[str]], *, width: int | None = None) -> str:
    """Left-aligned columns, the first row the head; with `width` the last column is cut to fit."""
    rows = [[_one_line(cell) for cell in row] for row in rows]
    widths = [max(cells(row[column]) for row in rows) for column in range(len(rows[0]))]
    if width is not None:
        widths[-1] = max(LAST_COLUMN, min(widths[-1], width - sum(widths[:-1]) - 2 * (len(widths) - 1)))
    lines = []
    for number, row in enumerate(rows):
        shown = [_padded(cell, w) for cell, w in zip(row[:-1], widths[:-1], strict=True)]
        shown.append(cut(row[-1], widths[-1]))
        line = "  ".join(shown).rstrip()
        lines.append(click.style(line, bold=True) if number == 0 else line)
    return "\n".join(lines)


def terminal_width() -> int | None:
    """Columns of the terminal; None where the output goes elsewhere and nothing must be cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def cells(text: str) -> int:
    """Columns it takes on a terminal."""
    plain = click.unstyle(text)
    if plain.isascii():
        return len(plain)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in plain)


def cut(text: str, width: int) -> str:
    """At most this wide; loses its colours where it has to be cut."""
    if cells(text) <= width:
        return text
    plain = click.unstyle(text)
    while cells(plain) > max(0, width - 1):
        plain = plain[:-1]
    return f"{plain}…" if width > 0 else ""


def state(word: str) -> str:
    """A state in its colour."""
    return click.style(word, fg=COLOURS.get(word))


def dim(text: str) -> str:
    """What matters less."""
    return click.style(text, dim=True)


def mib(value: object) -> str:
    """An amount of memory."""
    if not isinstance(value, int | float):
        return "-"
    return f"{value / 1024:.1f} GiB" if value >= 10 * 1024 else f"{value:.0f} MiB"


def duration(value: object) -> str:
    """Seconds, as people say them."""
    if not isinstance(value, int | float):
        return "-"
    if value < 60:
        return f"{value:.0f} s"
    if value < 3600:
        return f"{value // 60:.0f} min"
    if value < 48 * 3600:
        return f"{value // 3600:.0f} h {value % 3600 // 60:.0f} min"
    return f"{value // 86400:.0f} d"


def clock(at: object) -> str:
    """The time of day of seconds since the epoch."""
    return time.strftime("%H:%M:%S", time.localtime(at)) if isinstance(at, int | float) else "-"


def text(value: object) -> str:
    """Anything that may be missing."""
    return "-" if value is None else str(value)


def bar(share: float, width: int = BAR) -> str:
    """A share from 0 to 1."""
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)


class Progress:
    """Repaints one line on stderr until the block ends, in a thread; nothing at all where stderr is no terminal.

    `frame` gives the line; it may block, and what it raises ends only the painting.
    """

    def __init__(self, frame: Callable[[], str]) -> None:
        self._frame = frame
        self._done = threading.Event()
        context = click.get_current_context(silent=True)
        self._plain = context is not None and context.color is False
        self._thread = threading.Thread(target=self._paint, daemon=True) if sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(1.0)
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _paint(self) -> None:
        turn = 0
        while not self._done.is_set():
            line = f"{SPINNER[turn % len(SPINNER)]} {self._frame()}"
            if self._done.is_set():
                return
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            line = cut(click.unstyle(line) if self._plain else line, columns - 1)
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            turn += 1
            self._done.wait(REPAINT_S)


def _one_line(cell: str) -> str:
    return cell.replace("\n", " ")


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - cells(cell))
