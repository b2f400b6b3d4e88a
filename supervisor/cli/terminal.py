"""Renders the parts of `output` with `rich`. Only `output` imports this module: the rest of llmux runs without rich.

All text is plain: rich must not take any part of it for markup, a link or an emoji's name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from rich import table
from rich.console import Console, Group, OverflowMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import SegmentLines
from rich.spinner import Spinner
from rich.text import Text

from supervisor.cli.output import Bar, Cell, Row, Table, Words, clean

GAP: Final = 2
LAST_COLUMN: Final = 20  # characters: the last column is never narrower
BAR: Final = 24
REPAINTS_PER_S: Final = 10
_ONE_LINE: Final = {ord("\n"): " ", ord("\t"): " "}
WIDE: Final = 1_000_000  # tables are laid out at their full width; the terminal wraps or cuts them


def show(*what: Words | Table, err: bool) -> None:
    """Print each part. Lines are not wrapped here: the terminal wraps them, so that they can be copied whole."""
    console = _console(err=err)
    for one in what:
        console.print(_renderable(one, console, "ignore"), soft_wrap=True)


@contextmanager
def progress(frame: Callable[[], Row]) -> Iterator[None]:
    """Repaint a line on stderr until the block ends."""
    console, spinner = _console(err=True), Spinner("dots")
    last: RenderableType = ""
    asking = False  # false while Live starts or ends, because `frame` may block

    def look() -> RenderableType:
        nonlocal last, asking
        if asking:
            try:
                last = _table_lines([[spinner, *map(_render_cell, frame())]], console)
            except Exception:  # noqa: BLE001  # else the thread would print a traceback
                asking = False
        return last

    live = Live(
        get_renderable=look,
        console=console,
        transient=True,
        refresh_per_second=REPAINTS_PER_S,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with live:
        console.show_cursor(True)  # visible again even when the process is killed
        asking = True
        try:
            yield
        finally:
            asking = False


@contextmanager
def screen() -> Iterator[Callable[[Sequence[Words | Table]], None]]:
    """The terminal's alternate screen; the main one comes back at the end."""
    console = _console(err=False)
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with live:
        yield lambda page: live.update(Group(*(_renderable(one, console, "ellipsis") for one in page)), refresh=True)


def _console(*, err: bool) -> Console:
    """Only a terminal gets colours, whatever the environment says."""
    there = (sys.stderr if err else sys.stdout).isatty()
    plain = os.environ.get("NO_COLOR") or not there
    return Console(stderr=err, force_terminal=there, color_system=None if plain else "auto")


def _renderable(what: Words | Table, console: Console, overflow: OverflowMethod) -> RenderableType:
    if not isinstance(what, Table):
        text = _plain_text(what)
        text.no_wrap, text.overflow = True, overflow
        return text
    rows = [[_render_cell(cell) for cell in row] for row in what.rows]
    return _table_lines(rows, console, head=what.head, whole=what.whole or not console.is_terminal)


def _table_lines(
    rows: Sequence[Sequence[RenderableType]], console: Console, *, head: bool = False, whole: bool = False
) -> SegmentLines:
    """A table as lines that may be wider than the terminal, so that a narrow one doesn't lose a column that matters."""
    options = console.options.update(width=WIDE)
    widths = [
        max(console.measure(cell, options=options).maximum for cell in column) for column in zip(*rows, strict=True)
    ]
    if not whole:
        widths[-1] = max(LAST_COLUMN, min(widths[-1], console.width - sum(widths[:-1]) - GAP * (len(widths) - 1)))
    grid = table.Table.grid(padding=(0, GAP, 0, 0))
    for width in widths:
        grid.add_column(width=width, no_wrap=True, justify="default")
    for number, row in enumerate(rows):
        grid.add_row(*row, style="bold" if head and number == 0 else None)
    lines = console.render_lines(grid, options, pad=False)
    for line in lines:
        while line and line[-1].text.isspace():
            line.pop()
    return SegmentLines(lines, new_lines=True)


def _render_cell(cell: Cell) -> RenderableType:
    if isinstance(cell, Bar):
        return ProgressBar(1.0, cell.share, width=BAR, complete_style=cell.style, finished_style=cell.style)
    return _plain_text(cell, _ONE_LINE)


def _plain_text(words: Words, instead: Mapping[int, str] | None = None) -> Text:
    parts = words if isinstance(words, list) else [words]
    styled = [part if isinstance(part, tuple) else (part, "") for part in parts]
    return Text.assemble(*((clean(text).translate(instead or {}), style) for text, style in styled))
