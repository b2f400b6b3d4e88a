"""llmux's metrics, in Prometheus's terms.

They use base units (seconds, bytes, tokens), and counters end in `_total`. Durations of requests have OpenTelemetry's
names for generative AI. State (memory, queues, models) is read from the engine when a client gets the metrics.

Counters and histograms of requests are our own: like prometheus_client's, but without locks, which makes counting ten
times cheaper. Use them from the event loop's thread only: requests end and metrics are read there. Their lines are generated
one by one, in the format of prometheus_client, so that other tasks may run between two of them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter as Counted
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client import Counter, Histogram, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from supervisor.core.effects import Decided, Effect, Reject, StopWorker
from supervisor.core.events import Event, WorkerExited, WorkerReady
from supervisor.core.types import CrashClass, RejectCode, StopCause, base_of
from supervisor.daemon.observability import metric_table
from supervisor.daemon.observability.metric_table import Described
from supervisor.engine.ticket import Ticket
from supervisor.gateway.attempt import Usage
from supervisor.gateway.request import Request
from supervisor.host.distribution import version
from supervisor.host.process.threads import in_thread

if TYPE_CHECKING:
    from supervisor.daemon.daemon import Daemon

MIB: Final = 1024 * 1024

Labels = tuple[str, ...]
Relabel = Callable[[Labels], Labels | None]
"""Maps the counted labels to the labels of a series that sums several of them; None: not part of any series."""
Sample = tuple[Labels, float]
_SUMMED = 256  # amounts that are added at once, in a tenth of a millisecond

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PER_TOKEN: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_PER_SECOND: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
SUCCESS: Final = "success"
ERROR: Final = "error"
_NONE: Final = "none"  # the client left before it got a status
_STATUSES: Final = ("200", "400", "429", "500", "502", "503", "504", _NONE)  # of requests for a known model
_UNKNOWN: Final = ("400", "404", _NONE)  # of requests for unknown models
_DECISION: Final = (0.00001, 0.000025, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.005, 0.025)


disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double our series without a use


class Metrics:
    """One for each daemon. Gets data from the engine (`observe`), from requests (`finished`) and at the start (`orphans`)."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.dropped_lines: Callable[[], int] = lambda: 0  # of the log
        self._sources: list[Callable[[], Iterable[str]]] = []

        def counter(metric: Described, relabel: Relabel | None = None) -> FastCounter:
            found = FastCounter(metric, relabel)
            self._sources.append(found.lines)
            return found

        def histogram(metric: Described, bounds: Sequence[float] = _SECONDS) -> FastHistogram:
            found = FastHistogram(metric, bounds)
            self._sources.append(found.lines)
            return found

        # Counted once by model, tenant, status and result: each request comes here.
        self.requests = counter(metric_table.REQUESTS, lambda counted: (counted[0], counted[2]))
        self.requests.also(
            metric_table.TENANT_REQUESTS, lambda counted: (counted[1], counted[2]) if counted[1] else None
        )
        self.cached: dict[str, list[int]] = {}
        """By model, of answers that say how many were cached: tokens taken in, and how many were."""
        self._prompt = counter(metric_table.PROMPT_TOKENS)
        self._completion = counter(metric_table.COMPLETION_TOKENS)
        self.queue_wait = histogram(metric_table.QUEUE_WAIT)
        # A runner's name (`runner_metrics`), but it is counted here: a listener of its own would cost each request more.
        self._worked = histogram(metric_table.RUNNER_WORK)
        self._duration = histogram(metric_table.DURATION)
        self._first = histogram(metric_table.FIRST_TOKEN)
        self._per_token = histogram(metric_table.PER_TOKEN, _PER_TOKEN)
        self._speed = histogram(metric_table.SPEED, _PER_SECOND)
        self._load = histogram(metric_table.LOAD)
        self._swaps = counter(metric_table.SWAPS)
        self._stops = counter(metric_table.EVICTIONS)
        self._crashes = counter(metric_table.CRASHES)
        self._orphans = Counter(metric_table.ORPHANS.name, metric_table.ORPHANS.help, registry=None)
        self.register(self._orphans)
        decision = metric_table.DECISION
        self._decision = Histogram(decision.name, decision.help, buckets=_DECISION, registry=None)
        self.register(self._decision)
        self._refusals = counter(metric_table.REFUSALS)
        self._sources.append(_StateGauges(daemon).lines)
        self._process = ProcessCollector(registry=None)
        daemon.engine.observers.append(self.observe)
        daemon.requests.listeners.append(self.finished)
        daemon.on_configure.append(self._begin_known_series)

    def _begin_known_series(self) -> None:
        """Begin all foreseeable series at 0: a rate can't see a series' first value as an increase.

        Histograms of requests are left out: they would be thousands of series, and one request hardly matters there.
        """
        for code in RejectCode:
            self._refusals.add((code.value,), 0)
        for status in _UNKNOWN:
            self.requests.add(("unknown", "", status, ERROR), 0)
        for route in self._daemon.catalog.listing():
            self._prompt.add((route.name,), 0)
            self._completion.add((route.name,), 0)
            for status in _STATUSES:
                self.requests.add((route.name, "", status, SUCCESS if status == "200" else ERROR), 0)
        for model in self._daemon.catalog.models:
            self._load.expect(model)
            self._swaps.add((model,), 0)
            for cause in StopCause:
                self._stops.add((model, cause.value), 0)
            for kind in CrashClass:
                self._crashes.add((model, kind.value), 0)

    def register(self, collector: Collector) -> None:
        """Add a collector's metrics, which are all collected in one turn of the loop."""
        self._sources.append(lambda: (generate_latest(collector).decode(),))

    def lines(self) -> Iterator[str]:
        """All metrics in Prometheus's text format, in chunks. A chunk continues a metric, or begins with the head of one."""
        for source in self._sources:
            yield from source()

    async def own_process(self) -> str:
        """The metrics of the event loop and of the process. A thread counts the descriptors: with thousands that takes long."""
        tasks = metric_table.TASKS.gauge(len(asyncio.all_tasks()))
        return await in_thread(lambda: generate_latest(_Collected(tasks, *self._process.collect())).decode())

    def orphans(self, count: int) -> None:
        """Count the leftovers that were killed at the start."""
        self._orphans.inc(count)

    def observe(self, event: Event, effects: Sequence[Effect]) -> None:
        """See `engine.Observer`."""
        for effect in effects:
            if type(effect) is StopWorker:
                self._stops.add((base_of(effect.model), effect.cause.value))
            elif type(effect) is Decided:
                self._decision.observe(self._daemon.engine.last_decision_s)
                if effect.kind == "evict" and effect.model is not None:
                    self._swaps.add((base_of(effect.model),))
            elif type(effect) is Reject:
                self._refusals.add((effect.code.value,))
        if type(event) is WorkerExited and event.crash is not None:
            self._crashes.add((base_of(event.model), event.crash.kind.value))
        elif type(event) is WorkerReady and any(
            type(effect) is Decided and effect.kind == "ready" for effect in effects
        ):
            status = self._daemon.engine.model(event.model)
            if status is not None and status.load_s is not None:
                self._load.observe(base_of(event.model), status.load_s)

    def finished(self, ended: Sequence[Request]) -> None:
        """Count requests that ended. All unknown model names are counted as one: clients could invent any number of them."""
        by_name: dict[str | None, list[Request]] = {}
        for request in ended:
            by_name.setdefault(request.name, []).append(request)
        for requested, requests in by_name.items():
            route = None if requested is None else self._daemon.catalog.route(requested)
            name = "unknown" if requested is None or route is None else requested
            for (tenant, status, result), count in Counted(map(_outcome_labels, requests)).items():
                label = self._daemon.clients.label(tenant) if tenant else ""
                self.requests.add((name, label, str(status or _NONE), result), count)
            if served := [(each, each.attempt.ticket) for each in requests if each.attempt.ticket is not None]:
                self._count_served(name, served)

    def _count_served(self, name: str, served: Sequence[tuple[Request, Ticket]]) -> None:
        """Count the times and tokens of requests by this name that got a worker."""
        self._observe_times(name, served)
        self._count_prompts(name, [request.usage for request, _ in served])
        self._count_completions(name, served)

    def _observe_times(self, name: str, served: Sequence[tuple[Request, Ticket]]) -> None:
        """Count the times at the worker, in the queue, in total, and to the first byte."""
        self._worked.observe(name, *[request.ended_at - ticket.admitted for request, ticket in served])
        self.queue_wait.observe(name, *[ticket.admitted - ticket.arrived for _, ticket in served])
        self._duration.observe(name, *[request.ended_at - request.arrived_at for request, _ in served])
        firsts = [request.attempt.outcome.first_byte_s for request, _ in served]
        self._first.observe(name, *[first_s for first_s in firsts if first_s is not None])

    def _count_prompts(self, name: str, usages: Sequence[Usage]) -> None:
        """Count the prompt tokens, and the cached ones of answers that report these."""
        total = sum(usage.prompt or 0 for usage in usages)
        if total:
            self._prompt.add((name,), total)
        for usage in usages:
            if usage.prompt and usage.cached is not None:
                counts = self.cached.setdefault(name, [0, 0])
                counts[0] += usage.prompt
                counts[1] += min(usage.cached, usage.prompt)

    def _count_completions(self, name: str, served: Sequence[tuple[Request, Ticket]]) -> None:
        """Count the completion tokens, and how fast each answer was generated."""
        total = 0
        for request, ticket in served:
            if tokens := request.usage.completion:
                total += tokens
                worked_s, first_s = request.ended_at - ticket.admitted, request.attempt.outcome.first_byte_s
                if worked_s > 0:
                    self._speed.observe(name, tokens / worked_s)
                if request.stream and first_s is not None and tokens > 1:
                    self._per_token.observe(name, max(0.0, worked_s - first_s) / (tokens - 1))
        if total:
            self._completion.add((name,), total)


def _outcome_labels(request: Request) -> tuple[str, int, str]:
    """The tenant, status and result of a request."""
    outcome = request.attempt.outcome
    is_success = 0 < outcome.status < 400 and not (outcome.error or request.failure)
    status = outcome.error_status or outcome.status or request.failed_status
    return request.demand.tenant, status, SUCCESS if is_success else ERROR


class _Collected(Collector):
    """A collector of metrics that were collected already."""

    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class _StateGauges(Collector):
    """Gauges, read from the scheduler at each scrape."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._version = version()

    def lines(self) -> Iterator[str]:
        """The lines. All figures of models are of the same moment."""
        models = self._daemon.engine.figures()
        yield from family(metric_table.BUILD, [((self._version,), 1)])
        yield from family(metric_table.MODEL_STATE, (((model.id, model.state.value), 1) for model in models))
        yield from family(metric_table.QUEUE_DEPTH, (((model.id,), model.queued) for model in models))
        yield from family(metric_table.IN_FLIGHT, (((model.id,), model.in_flight) for model in models))
        yield generate_latest(self).decode()

    def collect(self) -> Iterable[Metric]:
        dropped = metric_table.LOG_LINES_DROPPED.counter()
        dropped.add_metric([], self._daemon.metrics.dropped_lines())
        yield from (dropped, *self._bodies(), *self._memory())

    def _bodies(self) -> Iterator[GaugeMetricFamily]:
        kept, limit = metric_table.BODIES.gauge(), metric_table.BODY_LIMIT.gauge()
        budget = self._daemon.bodies
        for where, used, most in (
            ("memory", budget.used, budget.limit),
            ("disk", budget.disk_used, budget.disk_limit),
        ):
            kept.add_metric([where], used)
            limit.add_metric([where], most)
        yield from (kept, limit)

    def _memory(self) -> Iterator[GaugeMetricFamily]:
        devices = [
            metric.gauge()
            for metric in (
                metric_table.DEVICE_TOTAL,
                metric_table.DEVICE_FREE,
                metric_table.DEVICE_AVAILABLE,
                metric_table.DEVICE_OUTSIDE,
            )
        ]
        lease, measured = metric_table.WORKER_LEASE.gauge(), metric_table.WORKER_MEMORY.gauge()
        partner_lease, partner_measured = metric_table.PARTNER_LEASE.gauge(), metric_table.PARTNER_MEMORY.gauge()
        for device in self._daemon.engine.devices():
            totals = device.totals
            figures = (totals.total_mib, totals.free_mib, totals.available_mib, totals.outside_mib)
            for each, mib in zip(devices, figures, strict=True):
                if mib is not None:
                    each.add_metric([device.id], mib * MIB)
            for device_lease in device.leases:
                about = [device_lease.holder[0], device.id]
                (partner_lease if device_lease.is_partner else lease).add_metric(about, device_lease.mib * MIB)
                if device_lease.measured_mib is not None:
                    (partner_measured if device_lease.is_partner else measured).add_metric(
                        about, device_lease.measured_mib * MIB
                    )
        yield from (*devices, lease, measured, partner_lease, partner_measured)


# ---------------------------------------------------------------------------------------------- counters and histograms


@lru_cache(4096)
def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@lru_cache(4096)
def _number(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def family(metric: Described, samples: Iterable[Sample]) -> Iterator[str]:
    """The lines of a metric in Prometheus's text format. Every sample has the metric's labels."""
    name, labels = metric.sample_name, metric.labels
    yield f"# HELP {name} {metric.help}\n# TYPE {name} {metric.type}\n"
    order = sorted(range(len(labels)), key=labels.__getitem__)
    for values, value in samples:
        pairs = ",".join([f'{labels[at]}="{_escaped(values[at])}"' for at in order])
        yield f"{name}{{{pairs}}} {_number(value)}\n"


class FastCounter:
    """Amounts by labels."""

    def __init__(self, metric: Described, relabel: Relabel | None = None) -> None:
        """`relabel` makes the values of the metric's labels from those that are counted; None: they are the same."""
        self._families = [(metric, relabel)]
        self._amounts: dict[Labels, int] = {}

    def also(self, metric: Described, relabel: Relabel) -> None:
        """Show the same amounts as this metric too, by its labels."""
        self._families.append((metric, relabel))

    def add(self, labels: Labels, amount: int = 1) -> None:
        """Add the amount for these values of the labels."""
        self._amounts[labels] = self._amounts.get(labels, 0) + amount

    def lines(self) -> Iterator[str]:
        """The lines for Prometheus. All amounts are of the moment of the first line."""
        counted = tuple(self._amounts.items())
        for metric, relabel in self._families:
            samples = counted if relabel is None else (yield from _sums(counted, relabel))
            yield from family(metric, samples)


def _sums(counted: Iterable[tuple[Labels, int]], relabel: Relabel) -> Generator[str, None, Iterable[Sample]]:
    """Sum the amounts by other labels. Yields empty lines meanwhile, so that other tasks may run between them."""
    amounts: Counted[Labels] = Counted()
    for at, (each, amount) in enumerate(counted):
        if (labels := relabel(each)) is not None:
            amounts[labels] += amount
        if not at % _SUMMED:
            yield ""
    return amounts.items()


class FastHistogram:
    """The distribution of values, by model. `bounds` are the buckets' upper ends, ascending."""

    def __init__(self, metric: Described, bounds: Sequence[float]) -> None:
        self._metrics = [metric]
        self._bounds = bounds
        self._ends = (*map(_number, bounds), "+Inf")
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def also(self, metric: Described) -> None:
        """Show the same values as this metric too."""
        self._metrics.append(metric)

    def expect(self, model: str) -> list[int]:
        """Show this model, even before its first value. Returns its counts by bucket."""
        self._sums.setdefault(model, 0.0)
        return self._counts.setdefault(model, [0] * len(self._ends))

    def observe(self, model: str, *values: float) -> None:
        """Count the values."""
        if not values:
            return
        counts = self._counts.get(model)
        if counts is None:
            counts = self.expect(model)
        bounds = self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self._sums[model] += sum(values)

    def lines(self) -> Iterator[str]:
        """The lines that Prometheus reads. The counts of one model are of one moment, those of the next may be of a later one."""
        for metric in self._metrics:
            name = metric.name
            yield f"# HELP {name} {metric.help}\n# TYPE {name} {metric.type}\n"
            for model, counts in tuple(self._counts.items()):
                label = f'model="{_escaped(model)}"'
                sums = [*map(_number, accumulate(counts))]
                buckets = [
                    f'{name}_bucket{{le="{end}",{label}}} {count}\n'
                    for end, count in zip(self._ends, sums, strict=True)
                ]
                total = _number(self._sums[model])
                yield f"{''.join(buckets)}{name}_count{{{label}}} {sums[-1]}\n{name}_sum{{{label}}} {total}\n"
