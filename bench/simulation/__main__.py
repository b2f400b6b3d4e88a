"""`make simulate`: a day of a large machine with each policy, and small cases against the optimum.

Writes the tables and the plots of docs/scheduling.md. The same seeds give the same decisions; only the last column is
measured.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

from bench.simulation import belady
from bench.simulation.machine import Machine, Outcome
from bench.simulation.plots import curves
from bench.simulation.policies import POLICIES
from bench.simulation.traffic import day
from supervisor.core.demand import PRIORITIES

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- simulated -->", "<!-- end simulated -->"


def at(sorted_values: list[float], share: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * share))] if sorted_values else 0.0


def simulated(options: argparse.Namespace) -> dict[str, Outcome]:
    outcomes = {}
    for name, policy in POLICIES.items():
        machine = Machine(policy(), models=options.models, devices=options.devices)
        requests = day(1, models=options.models, tenants=50, per_s=options.per_s, hours=options.hours)
        gc.collect()
        gc.freeze()
        gc.disable()
        outcomes[name] = machine.run(requests)
        gc.enable()
        gc.unfreeze()
        print(f"{name}: {sum(map(len, outcomes[name].waits.values()))} requests", file=sys.stderr, flush=True)
    return outcomes


def day_table(outcomes: dict[str, Outcome], options: argparse.Namespace) -> list[str]:
    count = sum(map(len, outcomes["llmux"].waits.values()))
    lines = [
        f"{options.models} models on {options.devices} GPUs of 80 GB, {options.hours:g} hours, {count} requests of 50 tenants.",
        "Waits are seconds from arrival to a worker: mean, 99th percentile, worst.",
        "",
        "| Policy | high | normal | low | Loads | Time loading | Requests cut | A decision, µs: median, 99.9 % |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, outcome in outcomes.items():
        waits = []
        for priority in PRIORITIES.values():
            values = sorted(outcome.waits[priority])
            mean = sum(values) / len(values) if values else 0.0
            waits.append(f"{mean:.2f}, {at(values, 0.99):.1f}, {at(values, 1.0):.0f}")
        costs = sorted(outcome.decisions_us)
        hours = outcome.loading_s / 3600
        lines.append(
            f"| {name} | {' | '.join(waits)} | {outcome.loads} | {hours:.1f} h | {outcome.cut} "
            f"| {at(costs, 0.5):.0f}, {at(costs, 0.999):.0f} |"
        )
    return lines


def belady_table() -> list[str]:
    lines = [
        "One GPU, models of one size, 1000 requests one after another: how often a model was loaded. Belady's rule knows the",
        "future: no policy loads less often.",
        "",
        "| Models | Room for | Belady's rule | llmux | FIFO, plain LRU |",
        "| --- | --- | --- | --- | --- |",
    ]
    for models, room in [(8, 2), (8, 4), (20, 4), (20, 10)]:
        requests = belady.trace(3, models, 1000)
        loads = [belady.loads(POLICIES[name](), requests, room) for name in ("llmux", "FIFO, plain LRU")]
        lines.append(f"| {models} | {room} | {belady.fewest_loads(requests, room)} | {loads[0]} | {loads[1]} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--devices", type=int, default=100)
    parser.add_argument("--per-s", type=float, default=3.0, help="requests a second, on average")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--write", action="store_true", help="into docs/scheduling.md")
    options = parser.parse_args()
    outcomes = simulated(options)
    text = "\n".join([*day_table(outcomes, options), "", "![Waits](images/waits.svg)", "", *belady_table()])
    print(text)
    if options.write:
        page = DOCS / "scheduling.md"
        before, rest = page.read_text().split(BEGIN, 1)
        page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}")
        waits = {
            name: sorted(wait for each in outcome.waits.values() for wait in each) for name, outcome in outcomes.items()
        }
        (DOCS / "images" / "waits.svg").write_text(curves(waits))


if __name__ == "__main__":
    main()
