"""The cost of a decision: the core alone, at sizes beyond our machines.

`python -m bench.decisions` fills a simulated fleet (models, devices, requests queued) and times single events: the
median, the 99.9th percentile and the worst of many, in µs of this process' CPU, without the garbage collector. An event
must cost the same however long the queue is: compare lines that differ only in `queued`. `step` is the cost of a request's
events; `plan` that of events that make the core plan models anew.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count

from supervisor.core.decisions import DecisionLog
from supervisor.core.effects import Effect, StartWorker
from supervisor.core.events import (
    Configured,
    DeviceSample,
    Event,
    MemorySampled,
    RequestArrived,
    RequestFinished,
    WorkerReady,
    WorkerSample,
)
from supervisor.core.scheduler import Scheduler
from supervisor.core.types import DeviceId, DeviceSpec, Footprint, FootprintSource, Limits, ModelId, ModelSpec, TicketId

DEVICE_MIB = 80_000
MODEL_MIB = 9_000
FREE = 1 << 30


class Fleet:
    """`models` on `devices`: as many loaded as fit, each with one request; the others unloaded, `queued` requests waiting."""

    def __init__(self, models: int, devices: int, queued: int, *, waiting_models: int) -> None:
        self.scheduler = Scheduler()
        self.decisions = DecisionLog()
        self.now = 0.0
        self._tickets = count(1)
        self.device_ids = [DeviceId(f"gpu{i}") for i in range(devices)]
        self.names = [ModelId(f"model-{i}") for i in range(models)]
        specs = tuple(
            ModelSpec(name, "llm", 100, Footprint(MODEL_MIB, FootprintSource.EXPLICIT), definition=name)
            for name in self.names
        )
        limits = Limits(
            queue_total=FREE, queue_per_model=FREE, loads_per_device=FREE, min_residency_s=FREE, linger_s=0.0
        )
        self.handle(Configured(specs, tuple(DeviceSpec(d, DEVICE_MIB, 512) for d in self.device_ids), limits))
        self.running: dict[ModelId, TicketId] = {}
        self.sample()
        fit = devices * ((DEVICE_MIB - 512) // MODEL_MIB)
        for name in self.names[:fit]:
            self.running[name] = self.arrive(name)
        self.warm = self.names[: min(fit, models)]
        self.cold = self.names[fit : fit + waiting_models]
        self.sample()
        for i in range(queued if self.cold else 0):
            self.arrive(self.cold[i % len(self.cold)])

    def handle(self, event: Event) -> list[Effect]:
        self.now += 1e-3
        effects = self.scheduler.handle(event, self.now)
        self.decisions.note(effects, self.now)
        for effect in effects:
            if isinstance(effect, StartWorker):
                self.handle(WorkerReady(effect.model, effect.generation))
        return effects

    def arrive(self, name: ModelId) -> TicketId:
        ticket = TicketId(f"t{next(self._tickets)}")
        self.handle(RequestArrived(ticket, name))
        return ticket

    def sample(self) -> None:
        self.handle(self.reading())

    def reading(self) -> MemorySampled:
        leases = self.scheduler.state.ledger.leases()
        free = dict.fromkeys(self.device_ids, DEVICE_MIB)
        for lease in leases:
            free[lease.device] -= lease.mib
        workers = tuple(WorkerSample(*lease.holder, lease.device, lease.mib) for lease in leases)
        return MemorySampled(tuple(DeviceSample(d, mib, outside_mib=0) for d, mib in free.items()), workers, self.now)


def timed(work: Iterator[Callable[[], object]], seconds: float) -> list[float]:
    """µs of each call, without the first."""
    costs = []
    ends = time.perf_counter() + seconds
    for step in work:
        began = time.thread_time_ns()
        step()
        costs.append((time.thread_time_ns() - began) / 1e3)
        if time.perf_counter() > ends:
            break
    return costs[1:] or costs


def passing(fleet: Fleet) -> Iterator[Callable[[], object]]:
    """A request to a ready worker arrives; the worker keeps another request, so that it isn't idle."""
    for i in count():
        name = fleet.warm[i % len(fleet.warm)]
        ticket = TicketId(f"p{i}")
        yield lambda name=name, ticket=ticket: fleet.handle(RequestArrived(ticket, name))  # type: ignore[misc]
        fleet.handle(RequestFinished(ticket))


def ending(fleet: Fleet) -> Iterator[Callable[[], object]]:
    """A worker's request ends while the worker runs another one."""
    for i in count():
        ticket = TicketId(f"e{i}")
        fleet.handle(RequestArrived(ticket, fleet.warm[i % len(fleet.warm)]))
        yield lambda ticket=ticket: fleet.handle(RequestFinished(ticket))  # type: ignore[misc]


def queueing(fleet: Fleet) -> Iterator[Callable[[], object]]:
    """A request for a model with waiting requests."""
    for i in count():
        name = fleet.cold[i % len(fleet.cold)]
        yield lambda i=i, name=name: fleet.handle(RequestArrived(TicketId(f"q{i}"), name))  # type: ignore[misc]


def disconnecting(fleet: Fleet) -> Iterator[Callable[[], object]]:
    """One of many requests that wait for a model is cancelled."""
    for i in count():
        name = fleet.cold[i % len(fleet.cold)]
        ticket = TicketId(f"l{i}")
        fleet.handle(RequestArrived(ticket, name))
        yield lambda ticket=ticket: fleet.handle(RequestFinished(ticket))  # type: ignore[misc]


def falling_idle(fleet: Fleet) -> Iterator[Callable[[], object]]:
    """A worker's last request ends while other requests wait for memory; then the worker's next request comes."""
    for i in count():
        name = fleet.warm[i % len(fleet.warm)]
        ticket = fleet.running.get(name)
        if ticket is None or ticket not in fleet.scheduler.state.tickets:
            continue
        yield lambda ticket=ticket: fleet.handle(RequestFinished(ticket))  # type: ignore[misc]
        fleet.running[name] = fleet.arrive(name)


def planning(fleet: Fleet) -> Iterator[Callable[[], object]]:
    """A reading of one device's memory."""
    while True:
        fleet.now += 0.25
        for reading in fleet.reading().by_device():
            yield lambda reading=reading: fleet.handle(reading)  # type: ignore[misc]


def asking(fleet: Fleet) -> Iterator[Callable[[], object]]:
    """The first request for a model, while everything else goes on: the core looks at all devices."""
    unused = fleet.names[len(fleet.warm) + len(fleet.cold) :]
    for i in count():
        for name in fleet.warm[i % 10 :: 10]:  # change each device before the next request
            ticket = TicketId(f"w{i}{name}")
            fleet.handle(RequestArrived(ticket, name))
            fleet.handle(RequestFinished(ticket))
        name, ticket = unused[i % len(unused)], TicketId(f"a{i}")
        yield lambda name=name, ticket=ticket: fleet.handle(RequestArrived(ticket, name))  # type: ignore[misc]
        fleet.handle(RequestFinished(ticket))


STEPS = {
    "step: arrives, dispatched": passing,
    "step: ends, worker busy": ending,
    "step: arrives, queued": queueing,
    "step: leaves the queue": disconnecting,
    "step: ends, worker idle": falling_idle,
    "plan: a cold model": asking,
    "plan: a reading": planning,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    seconds = parser.parse_args().seconds
    sizes = [
        (20, 1, 10, 4),
        (20, 1, 1_000, 4),
        (20, 1, 10_000, 4),
        (1_000, 100, 10, 10),
        (1_000, 100, 1_000, 10),
        (1_000, 100, 10_000, 10),
    ]
    print(
        f"{'models':>7}{'devices':>8}{'queued':>8}{'waiting':>8}  {'what':<28}{'median µs':>11}{'p99.9 µs':>11}{'worst µs':>11}"
    )
    for models, devices, queued, waiting in sizes:
        for what, steps in STEPS.items():
            fleet = Fleet(models, devices, queued, waiting_models=waiting)
            gc.collect()
            gc.freeze()
            gc.disable()
            costs = sorted(timed(steps(fleet), seconds))
            gc.enable()
            gc.unfreeze()
            late = costs[min(len(costs) - 1, int(len(costs) * 0.999))]
            figures = f"{statistics.median(costs):>11.1f}{late:>11.0f}{costs[-1]:>11.0f}"
            print(f"{models:>7}{devices:>8}{queued:>8}{waiting:>8}  {what:<28}{figures}", flush=True)


if __name__ == "__main__":
    main()
