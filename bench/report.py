"""The report of a bench run: a table of all measures, and the goals with their figures for docs/performance.md."""

from __future__ import annotations

import datetime as dt
import math
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.targets import LLMUX

Samples = dict[str, dict[str, list[float]]]  # measure → target → one value per round

PAGE: Final = Path(__file__).parent.parent / "docs" / "performance.md"
PLOT: Final = PAGE.parent / "images" / "performance.svg"
BEGIN, END = "<!-- begin: python -m bench --write -->", "<!-- end -->"
DIRECT: Final = "direct"


@dataclass(frozen=True)
class Goal:
    """`measure` of llmux, divided by that of `other`, if any."""

    what: str
    measure: str
    most: float | None
    other: str | None = None

    def values(self, samples: Samples, target: str = LLMUX) -> list[float]:
        """One value a round; none where a measure is missing."""
        rows = samples.get(self.measure, {})
        mine = rows.get(target, [])
        if self.other is None:
            return mine
        return [value / base for value, base in zip(mine, rows.get(self.other, []), strict=False)]


GO: Final = "Go"
GOALS: Final = (
    Goal("CPU of a small request ÷ Go, 64 connections", "request c64, CPU µs", 1.2, GO),
    Goal("the same, 16 connections", "request c16, CPU µs", None, GO),
    Goal("the same, 1 connection", "request c1, CPU µs", 1.2, GO),
    Goal("p50 of a small request ÷ Go, 64 connections", "request c64, p50 µs", 0.6, GO),
    Goal("p99 of a small request ÷ Go, 64 connections", "request c64, p99 µs", None, GO),
    Goal("CPU of a streamed event ÷ Go, 128 streams", "chunk x128, CPU µs", 1.0, GO),
    Goal("first event of 128 streams that begin at once ÷ Go", "first chunk of 128 at once, ms", 1.0, GO),
    *(
        Goal(f"CPU of a request {name} ÷ plain", f"request {name} ÷ plain", most)
        for name, most in (
            ("with tools", 1.15),
            ("with content parts", 1.15),
            ("with a limit", 1.15),
            ("by a virtual name", 1.15),
            ("with a default", 1.15),
            ("of Anthropic's API, passed on", 1.2),
            ("of Anthropic's API, translated", 1.2),
            ("of Ollama's API, translated", 1.2),
            ("for a response, passed on and kept", 1.4),
            ("for a response, translated and kept", 1.4),
        )
    ),
    Goal("RSS idle, MiB", "RSS idle, MiB", 50),
    Goal("RSS of an open stream, KiB", "open stream, KiB", 12),
    Goal("CPU from the start to the first answer of /health, s", "cold start to /health, CPU s", 0.4),
    Goal("longest wait of others beside 10 MB bodies, ms", "10 MB body, others wait ms", 5),
)


def others_share() -> float:
    """The processors' load in a second in which this program only waits; includes neighbours of a virtual machine."""

    def read() -> tuple[int, int]:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return fields[3] + fields[4], sum(fields)

    idle, total = read()
    time.sleep(1)
    idle_then, total_then = read()
    return 1 - (idle_then - idle) / max(1, total_then - total)


def digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _baseline(samples: Samples) -> str | None:
    """The target that the others are compared with."""
    return next((name for name in (GO, "nginx") if name in samples["RSS idle, MiB"]), None)


def _ratio_text(samples: Samples, measure: str, name: str) -> str:
    """The ratio to Go's; empty for memory and starts, which are next to nothing in a small proxy."""
    base = _baseline(samples)
    if base is None or name in {DIRECT, base} or measure.endswith(("MiB", "KiB", "CPU s")):
        return ""
    found = Goal("", measure, None, base).values(samples, name)
    return digits(statistics.median(found)) if found else ""


def plain(samples: Samples) -> str:
    """Medians, each followed by its ratio to Go's; then the goals."""
    names, base = list(samples["RSS idle, MiB"]), _baseline(samples)
    width = max(map(len, samples)) + 2
    lines = ["".ljust(width) + "".join(name.rjust(12) + (f"÷{base}" if base else "").rjust(8) for name in names)]
    for measure, rows in samples.items():
        cells = ""
        for name in names:
            if name not in rows:
                continue
            cells += digits(statistics.median(rows[name])).rjust(12) + _ratio_text(samples, measure, name).rjust(8)
        lines.append(measure.ljust(width) + cells)
    return "\n".join([*lines, "", *goals(samples)])


def goals(samples: Samples) -> list[str]:
    """A table in Markdown: llmux's median, its spread over the rounds, and the goal."""
    lines = ["| What | llmux | least to most | goal |", "| --- | --- | --- | --- |"]
    for goal in GOALS:
        if values := goal.values(samples):
            spread = f"{digits(min(values))} to {digits(max(values))}" if len(values) > 1 else ""
            most = "" if goal.most is None else f"≤ {goal.most:g}"
            found = statistics.median(values)
            shown = f"**{digits(found)}**" if goal.most is not None and found > goal.most else digits(found)
            lines.append(f"| {goal.what} | {shown} | {spread} | {most} |")
    return lines


def peers(samples: Samples) -> list[str]:
    """All measures, in Markdown: the medians, and each ratio to Go's in parentheses."""
    names = list(samples["RSS idle, MiB"])
    lines = [f"| | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for measure, rows in samples.items():
        if not all(name in rows for name in names):
            continue
        cells = []
        for name in names:
            ratio = _ratio_text(samples, measure, name)
            cells.append(digits(statistics.median(rows[name])) + (f" ({ratio})" if ratio else ""))
        lines.append(f"| {measure} | {' | '.join(cells)} |")
    return lines


def plot(samples: Samples) -> str:
    """A plot as SVG: llmux's ratios to Go's and to the plain request, and their goals."""
    return bars(
        [(goal.what, values, goal.most) for goal in GOALS if "÷" in goal.what if (values := goal.values(samples))]
    )


def bars(rows: Sequence[tuple[str, list[float], float | None]], cap: float = math.inf) -> str:
    """A plot as SVG: a bar for each median, a line from minimum to maximum, and a mark at the goal.

    Longer bars end at `cap`, with their value beside the name.
    """
    left, unit, height = 380, 120, 24
    most = min(cap, max(2.5, *(max(values) for _, values, _ in rows)))
    width, bottom = left + int(unit * most) + 40, 30 + height * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 30}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{bottom + 30}" fill="#fff"/>',
    ]
    for half in range(int(2 * most) + 1):
        x = left + half * unit / 2
        parts.append(f'<path d="M{x:.0f} 20V{bottom}" stroke="{"#888" if half == 2 else "#ddd"}"/>')
        parts.append(f'<text x="{x:.0f}" y="{bottom + 16}" text-anchor="middle">{half / 2:g}</text>')
    for number, (what, values, goal) in enumerate(rows):
        y, found = 26 + height * number, statistics.median(values)
        label = f"{what}: {digits(found)}" if found > cap else what
        colour = "#d55e00" if goal is not None and found > goal else "#0072b2"
        parts.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{label}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{min(found, cap) * unit:.0f}" height="15" fill="{colour}"/>')
        low, high = (left + min(value, cap) * unit for value in (min(values), max(values)))
        parts.append(f'<path d="M{low:.0f} {y + 7.5}H{high:.0f}" stroke="#000"/>')
        if goal is not None:
            x = left + goal * unit
            parts.append(f'<path d="M{x:.0f} {y - 2}V{y + 17}" stroke="#009e73" stroke-width="3"/>')
    return "\n".join([*parts, "</svg>", ""])


def put(lines: Sequence[str], begin: str, end: str) -> None:
    """Write the lines into the page, between these marks."""
    before, rest = PAGE.read_text().split(begin, 1)
    PAGE.write_text(f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{rest.split(end, 1)[1]}")


def about(rounds: int, busy: float) -> str:
    """The date, versions, rounds, and the load of the machine by other programs."""
    today = dt.datetime.now(dt.UTC).date()
    others = f"; other programs used {busy:.0%} of the processors" if busy >= 0.01 else ""
    return f"{today:%-d %B %Y}, Python {platform.python_version()}, {rounds} rounds{others}."


def write(samples: Samples, rounds: int, busy: float) -> None:
    """Write the tables into the page, between its marks, and the plot beside the page."""
    text = [
        f"{about(rounds, busy)} A goal that is missed is bold.",
        "",
        *goals(samples),
        "",
        "![The ratios; a green mark is a goal](images/performance.svg)",
        "",
        "The figures behind them, each with its ratio to Go's in parentheses:",
        "",
        *peers(samples),
    ]
    put(text, BEGIN, END)
    PLOT.write_text(plot(samples))
