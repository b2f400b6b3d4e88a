"""The table of races and costs, the plot of llmux's ratios, and what llmux loses, for docs/performance.md."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Final

from bench import report
from bench.report import Samples, digits
from bench.router.races import Outcome, Race
from bench.router.server import COMMANDS, ROUTER
from bench.targets import LLMUX

BEGIN, END = "<!-- begin: python -m bench.router --write -->", "<!-- end: router -->"
PLOT: Final = report.PLOT.with_name("router.svg")
LOSS: Final = 1.25

Outcomes = dict[Race, dict[str, list[Outcome]]]  # race → server → one a round


def cell(race: Race, outcomes: list[Outcome]) -> str:
    """Good answers of all, workers at once, and the median of the rounds' longest waits; failures are bold."""
    kinds = Counter(answer.kind for outcome in outcomes for answer in outcome.answers)
    bad = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if kind != "good")
    good = f"{kinds['good']} of {kinds.total()}"
    most = max(outcome.most for outcome in outcomes)
    shown = [f"**{good}** ({bad})" if bad else good, f"**{most}**" if most > race.most else str(most)]
    return "; ".join([*shown, f"{digits(statistics.median(outcome.longest_s for outcome in outcomes))} s"])


def ratios(outcomes: Outcomes, samples: Samples) -> dict[str, list[float]]:
    """llmux's value divided by the router's, one a round: of longest waits where both gave only good answers, and of costs."""
    found = {}
    for race, by_server in outcomes.items():
        rounds = [by_server[name] for name in (LLMUX, ROUTER)]
        if all(answer.kind == "good" for several in rounds for outcome in several for answer in outcome.answers):
            found[race.what] = [mine.longest_s / its.longest_s for mine, its in zip(*rounds, strict=True)]
    for measure, rows in samples.items():
        found[measure] = [mine / its for mine, its in zip(rows[LLMUX], rows[ROUTER], strict=True)]
    return found


def table(outcomes: Outcomes, samples: Samples) -> list[str]:
    found = ratios(outcomes, samples)
    lines = [f"| | fit | {' | '.join(COMMANDS)} | llmux ÷ the router |", "| --- | --- | --- | --- | --- |"]

    def ratio(what: str) -> str:
        values = found.get(what, [])
        return f"{digits(statistics.median(values))} ({digits(min(values))} to {digits(max(values))})" if values else ""

    for race, by_server in outcomes.items():
        what = f"[{race.what}]({race.source})" if race.source else race.what
        cells = " | ".join(cell(race, by_server[name]) for name in COMMANDS)
        lines.append(f"| {what} | {race.limit} | {cells} | {ratio(race.what)} |")
    for measure, rows in samples.items():
        cells = " | ".join(digits(statistics.median(rows[name])) for name in COMMANDS)
        lines.append(f"| {measure} | 2 | {cells} | {ratio(measure)} |")
    return lines


def losses(outcomes: Outcomes, samples: Samples) -> str:
    """A sentence on the costs in which llmux is clearly worse."""
    medians = {what: statistics.median(values) for what, values in ratios(outcomes, samples).items()}
    worse = sorted((what for what in medians if medians[what] > LOSS), key=medians.__getitem__, reverse=True)
    listed = "; ".join(f"{what} ({digits(medians[what])} times)" for what in worse)
    return f"**Where llmux loses**, the most first: {listed or 'nowhere in this run'}."


def write(outcomes: Outcomes, samples: Samples, version: str, rounds: int, busy: float) -> None:
    """Write the tables into the page, between its marks, and the plot beside the page."""
    rows = [(what, values, 1.0) for what, values in ratios(outcomes, samples).items()]
    text = [
        f"{report.about(rounds, busy)} llama-server {version}.",
        "",
        *table(outcomes, samples),
        "",
        losses(outcomes, samples),
        "",
        "![llmux divided by llama.cpp's router; left of the green mark is less](images/router.svg)",
    ]
    report.put(text, BEGIN, END)
    PLOT.write_text(report.bars(rows, cap=5))
