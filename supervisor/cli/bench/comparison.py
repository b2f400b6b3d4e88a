"""Run the workload on each device in turn; report a row for each device, and the ratio of their speeds.

A device that fails keeps its row, with the reason; the other devices are still measured.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Final

from supervisor.catalog import Catalog, Route
from supervisor.cli import configuration, output
from supervisor.cli.bench import temporary_worker, workloads
from supervisor.cli.bench.devices import BenchError, check_memory, choose_devices, ledger_of, open_devices
from supervisor.cli.bench.workloads import REAL_TIME, Round, WorkerClient, Workload
from supervisor.cli.client import Client
from supervisor.cli.serving import log_setup
from supervisor.errors import LlmuxError, NotFoundError
from supervisor.host.memory.memory import DeviceInfo
from supervisor.host.process.process import become_subreaper

WANTED: Final = 5.0
"""A GPU with a smaller ratio than this to the processor is probably not computing the model, or not all of it."""

Echo = Callable[[str], None]
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    devices: Sequence[str]
    rounds: int
    tokens: int | None
    prompt: str | None
    daemon: Client
    ocr: bool = False


@dataclass
class Result:
    device: DeviceInfo
    cold: Round | None = None  # the worker's first answer, before it has compiled or cached anything
    rounds: list[Round] = field(default_factory=list)
    estimate_mib: int | None = None
    measured_mib: int | None = None
    load_s: float | None = None
    problem: LlmuxError | None = None

    @property
    def rate(self) -> float | None:
        """The median rate of the rounds; None where the device failed."""
        return median(round_.rate for round_ in self.rounds) if self.rounds and self.problem is None else None

    def median_of(self, name: str) -> float | None:
        """The median of a figure that not every worker reports."""
        values = [value for round_ in self.rounds if (value := getattr(round_, name)) is not None]
        return round(median(values), 2) if values else None


@dataclass(frozen=True, slots=True)
class Comparison:
    route: Route
    workload: Workload
    results: list[Result]

    @property
    def failed(self) -> bool:
        return any(result.problem is not None for result in self.results)

    def ratio(self) -> Row | None:
        """The GPU's rate to the processor's, else the first device's to the last one's; None for fewer than two devices.

        `wanted` and `met` are None for devices other than a GPU and the processor.
        """
        rates = [(result.device, result.rate) for result in self.results if result.rate is not None]
        if len(rates) < 2:
            return None
        (over, fast), (under, slow) = rates[0], rates[-1]
        if not over.kind.accelerates:
            (over, fast), (under, slow) = rates[-1], rates[0]
        times = fast / slow
        judged = over.kind.accelerates and not under.kind.accelerates
        return {
            "device": over.id,
            "over": under.id,
            "times": round(times, 2),
            "wanted": WANTED if judged else None,
            "met": times >= WANTED if judged else None,
        }

    def as_json(self) -> Row:
        return {
            "model": self.route.model.id,
            "runtime": self.route.model.adapter.name,
            "type": self.route.model.config.type,
            "counts": self.workload.counts,
            "unit": self.workload.unit,
            "devices": [self._row(result) for result in self.results],
            "ratio": self.ratio(),
        }

    def _row(self, result: Result) -> Row:
        rate = result.rate
        return {
            "device": result.device.id,
            "kind": result.device.kind.accelerator,
            "name": result.device.name,
            "rate": round(rate, 2) if rate is not None else None,
            "prompt_tokens_per_s": result.median_of("prompt_rate"),
            "first_ms": result.median_of("first_ms"),
            "load_s": round(result.load_s, 3) if result.load_s is not None else None,
            "estimate_mib": result.estimate_mib,
            "measured_mib": result.measured_mib,
            "real_time_factor": round(1 / rate, 4) if rate and self.workload.unit == REAL_TIME else None,
            "cold": _round_figures(result.cold) if result.cold is not None else None,
            "rounds": [_round_figures(one) for one in result.rounds],
            "note": next((one.note for one in result.rounds), None) if result.problem is None else None,
            "problem": str(result.problem) if result.problem is not None else None,
            "detail": list(result.problem.detail) if result.problem is not None else [],
        }

    def report(self) -> list[output.Table | str]:
        head = ("DEVICE", self.workload.unit.upper(), "PROMPT", "FIRST", "LOAD", "ESTIMATE", "MEASURED", "NOTE")
        rows = [_table_row(self._row(result)) for result in self.results]
        parts: list[output.Table | str] = [output.Table([head, *rows], whole=True)]
        for result in self.results:
            if result.problem is not None and result.problem.detail:
                parts += [f"{result.device.id}, last words of its worker:", *(f"  {x}" for x in result.problem.detail)]
            parts += self._extra_figures(result)
        ratio = self.ratio()
        if ratio is not None:
            verdict = ""
            if ratio["met"] is not None:
                verdict = f"; wanted: {WANTED:g} times or more, {'met' if ratio['met'] else 'not met'}"
            parts.append(f"{ratio['device']} is {ratio['times']} times as fast as {ratio['over']}{verdict}.")
        return parts

    def _extra_figures(self, result: Result) -> list[output.Table | str]:
        """The figures that have no column: the first answer beside the others, the real-time factor."""
        rate, device = result.rate, result.device.id
        if rate is None or result.cold is None:
            return []
        if self.workload.shows_cold:
            cold, warm = _round_figures(result.cold), _round_figures(min(result.rounds, key=lambda one: one.seconds))
            return [
                f"{device}: the first answer took {_figures_text(cold)}; the quickest of the others {_figures_text(warm)}."
            ]
        if self.workload.unit == REAL_TIME:
            return [f"{device}: real-time factor {1 / rate:.3g}; below 1 it is faster than one listens."]
        return []


def _round_figures(one: Round) -> Row:
    return {
        "amount": one.amount,
        "seconds": round(one.seconds, 4),
        "rate": round(one.rate, 2),
        "first_ms": round(one.first_ms, 2) if one.first_ms is not None else None,
        "words_found": one.words_found,
    }


def _figures_text(figures: Row) -> str:
    return (
        f"{figures['seconds']:.2f} s ({figures['first_ms']:.0f} ms to the first token, {figures['rate']:.1f} tokens/s)"
    )


def run(options: Options, config: Path | None, echo: Echo) -> Comparison:
    """Measure the model on each device; `echo` gets the progress. Blocks; a signal ends the run and the worker.

    Raises LlmuxError where the run can't begin, KeyboardInterrupt.
    """
    log_setup.configure("error", "console")
    catalog = configuration.required(config).read(check_files=False)
    route = _route_of(catalog, options.model)
    workload, path = workloads.choose(route, options.prompt, options.tokens, ocr=options.ocr)
    become_subreaper()
    try:
        results = asyncio.run(_measure_devices(options, catalog, route, workload, path, echo))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    return Comparison(route, workload, results)


def _route_of(catalog: Catalog, name: str) -> Route:
    """The model and rewrite of this name. Raises NotFoundError, or BenchError for a model that can't be started here."""
    route = catalog.route(name)
    if route is None:
        near = catalog.nearest(name)
        raise NotFoundError(
            f"There is no model {name!r} in the configuration.{f' Did you mean {near}?' if near is not None else ''}"
        )
    adapter, config = route.model.adapter, route.model.config
    if adapter.remote:
        raise BenchError(f"{route.model.id} is run by others; there is no device here to compare.")
    if problems := adapter.check(config, runtimes_dir=catalog.server.runtimes_dir):
        raise BenchError(f"{route.model.id} can't be started:", detail=tuple(problems))
    return route


async def _measure_devices(
    options: Options, catalog: Catalog, route: Route, workload: Workload, path: str, echo: Echo
) -> list[Result]:
    this = asyncio.current_task()
    assert this is not None
    for signum in (signal.SIGTERM, signal.SIGHUP):  # asyncio.run does the same for SIGINT
        asyncio.get_running_loop().add_signal_handler(signum, this.cancel)
    opened = await open_devices(catalog)
    model = await asyncio.to_thread(route.model.sized, [device.spec for device in opened.devices])
    route = replace(route, model=model)
    results = [Result(device) for device in await choose_devices(opened, route.model, options.devices)]
    current = [""]

    def print_line(line: str) -> None:
        current[0] = line
        if not sys.stderr.isatty():
            echo(line)

    with output.progress(lambda: current):
        for result in results:
            device = result.device
            try:
                ledger = await asyncio.to_thread(ledger_of, options.daemon)
                result.estimate_mib = await check_memory(opened.sampler, device, route.model, ledger)
                print_line(f"{device.id}: loading {route.model.id}")
                async with temporary_worker.running(route.model, device, catalog, opened.sampler) as worker:
                    result.load_s = worker.load_s
                    client = WorkerClient(worker.upstream, route, path)
                    for number in range(options.rounds + 1):
                        print_line(f"{device.id}: {f'round {number} of {options.rounds}' if number else 'warming up'}")
                        round_ = await workload.run(client, number)
                        if number:
                            result.rounds.append(round_)
                        else:  # the first answer is slower: kernels are compiled, caches filled
                            result.cold = round_
                        await worker.measure()
                    result.measured_mib = worker.measured_mib
                if device.kind.accelerates and result.measured_mib == 0:
                    raise BenchError(
                        "it took nothing of the GPU's memory, so it computed on the processor; look at the model's settings "
                        "and at what its runtime was built for: llmux doctor"
                    )
            except LlmuxError as error:
                result.problem = error
    return results


def _table_row(row: Row) -> output.Row:
    def figure(name: str, unit: str = "", digits: int = 0) -> str:
        value = row[name]
        return f"{value:.{digits}f}{unit}" if isinstance(value, int | float) else "-"

    return (
        str(row["device"]),
        figure("rate", digits=1),
        figure("prompt_tokens_per_s", " tokens/s"),
        figure("first_ms", " ms"),
        figure("load_s", " s", digits=1),
        output.mib(row["estimate_mib"]),
        output.mib(row["measured_mib"]),
        str(row["problem"] or row["note"] or ""),
    )
