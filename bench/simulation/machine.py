"""A simulated machine that carries out a scheduler's effects and counts the results."""

from __future__ import annotations

import heapq
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from bench.simulation.traffic import Request
from supervisor.core.admission.admission import AdmissionPolicy
from supervisor.core.demand import Demand
from supervisor.core.effects import CutRequest, Dispatch, Effect, Reject, StartWorker, StopWorker
from supervisor.core.events import (
    Configured,
    DeviceSample,
    Event,
    MemorySampled,
    RequestArrived,
    RequestFinished,
    Tick,
    WorkerExited,
    WorkerReady,
    WorkerSample,
)
from supervisor.core.scheduler import Scheduler
from supervisor.core.types import DeviceId, DeviceSpec, Footprint, FootprintSource, Limits, ModelId, ModelSpec, TicketId

DEVICE_MIB = 80_000
LOAD_MIB_PER_S = 2_000
EXIT_S = 0.3
PLACES = 8
"""Requests that a worker answers at once; eight concurrent requests take three times as long each as a single one."""


@dataclass
class Outcome:
    """The result of a run. `waits`: seconds from arrival to a worker, by class."""

    waits: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    refused: int = 0
    cut: int = 0
    loads: int = 0
    loading_s: float = 0.0
    busy_s: float = 0.0  # worker seconds with requests
    ended_at: float = 0.0
    decisions_us: list[float] = field(default_factory=list)
    by_tenant: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Machine:
    """`models` of random sizes, or of `mib` each, on `devices`."""

    def __init__(
        self, policy: AdmissionPolicy, *, models: int, devices: int, seed: int = 7, mib: int | None = None
    ) -> None:
        chance = random.Random(seed)
        self.scheduler = Scheduler(policy)
        self.now = 0.0
        self.outcome = Outcome()
        self.names = [ModelId(f"m{i}") for i in range(models)]
        sizes = [4_000, 6_000, 9_000, 16_000, 16_000, 24_000, 40_000] if mib is None else [mib]
        self.size = {name: chance.choice(sizes) for name in self.names}
        self.device_ids = [DeviceId(f"gpu{i:03}") for i in range(devices)]
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._seq = count()
        self._requests: dict[TicketId, Request] = {}
        self._workers: dict[ModelId, tuple[int, DeviceId, int]] = {}  # generation, device, MiB
        self._running: dict[ModelId, dict[TicketId, float]] = defaultdict(dict)
        self._used = dict.fromkeys(self.device_ids, 0)
        self._stopping: set[ModelId] = set()
        specs = tuple(
            ModelSpec(
                name, "llm", 100, Footprint(mib, FootprintSource.EXPLICIT), definition=name, target_inflight=PLACES
            )
            for name, mib in self.size.items()
        )
        limits = Limits(queue_total=1 << 20, queue_per_model=1 << 20)
        self.handle(Configured(specs, tuple(DeviceSpec(d, DEVICE_MIB, 512) for d in self.device_ids), limits))
        for device in self.device_ids:
            self.sample(device)

    def run(self, requests: Iterable[Request]) -> Outcome:
        """Simulate all requests, and an hour after the last one."""
        for request in requests:
            self._run_until(request.at)
            self._on_arrival(request)
        self._run_until(self.now + 3600.0)
        self.outcome.ended_at = self.now
        return self.outcome

    def handle(self, event: Event) -> None:
        began = time.thread_time_ns()
        effects = self.scheduler.handle(event, self.now)
        self.outcome.decisions_us.append((time.thread_time_ns() - began) / 1e3)
        for effect in effects:
            self._carry_out(effect)

    def sample(self, device: DeviceId) -> None:
        workers = tuple(
            WorkerSample(name, generation, device, mib)
            for name, (generation, where, mib) in self._workers.items()
            if where == device
        )
        free = DEVICE_MIB - self._used[device]
        self.handle(MemorySampled((DeviceSample(device, free, outside_mib=0),), workers, self.now))

    def later(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._seq), action))

    def _run_until(self, end: float) -> None:
        while True:
            at = min(self.scheduler.deadline(self.now), self._due[0][0] if self._due else end)
            if at >= end:
                self.now = end
                return
            self.now = max(self.now, at)
            if self._due and self._due[0][0] <= self.now:
                heapq.heappop(self._due)[2]()
            else:
                self.handle(Tick())
                self.now += 1e-6

    def _on_arrival(self, request: Request) -> None:
        ticket = TicketId(f"t{next(self._seq)}")
        self._requests[ticket] = request
        demand = Demand(request.priority, f"tenant {request.tenant}")
        self.handle(RequestArrived(ticket, self.names[request.model], demand))

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case StartWorker(name, generation, devices, (mib, *_)):
                self._workers[name] = (generation, devices[0], mib)
                load_s = 1.0 + self.size[name] / LOAD_MIB_PER_S
                self.outcome.loads += 1
                self.outcome.loading_s += load_s
                self.later(load_s, lambda: self._on_loaded(name, generation, devices[0]))
                self._used[devices[0]] += mib
            case StopWorker(name, generation):
                if name not in self._stopping:
                    self._stopping.add(name)
                    self.later(EXIT_S, lambda: self._on_exited(name, generation))
            case Dispatch(ticket, name):
                self._begin_request(ticket, name)
            case Reject(ticket):
                self._requests.pop(ticket, None)
                self.outcome.refused += 1
            case CutRequest(ticket):
                self.outcome.cut += 1
                self.later(0.0, lambda: self._end_request(ticket))
            case _:
                pass

    def _on_loaded(self, name: ModelId, generation: int, device: DeviceId) -> None:
        if self._workers.get(name, (0,))[0] == generation and name not in self._stopping:
            self.handle(WorkerReady(name, generation))
            self.now += 1e-6
            self.sample(device)

    def _on_exited(self, name: ModelId, generation: int) -> None:
        _, device, mib = self._workers.pop(name)
        self._stopping.discard(name)
        self._used[device] -= mib
        self._running.pop(name, None)
        self.handle(WorkerExited(name, generation, None))
        self.now += 1e-6
        self.sample(device)

    def _begin_request(self, ticket: TicketId, name: ModelId) -> None:
        request = self._requests[ticket]
        self.outcome.waits[request.priority].append(self.now - request.at)
        running = self._running[name]
        running[ticket] = self.now
        slower = 1 + 2 * (len(running) - 1) / (PLACES - 1)
        self.later(request.service_s * slower, lambda: self._end_request(ticket))

    def _end_request(self, ticket: TicketId) -> None:
        request = self._requests.pop(ticket, None)
        if request is None:
            return
        running = self._running[self.names[request.model]]
        if (began := running.pop(ticket, None)) is not None:
            share = (self.now - began) / (len(running) + 1)
            self.outcome.busy_s += share
            self.outcome.by_tenant[f"tenant {request.tenant}"] += share
        self.handle(RequestFinished(ticket))
