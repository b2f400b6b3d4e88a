"""Small cases with a known optimum: one request after another, models of one size, room for a fixed number of them.

Belady's rule, which knows the future, evicts the model whose next request comes last. No policy loads less often.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.simulation.machine import DEVICE_MIB, Machine
from bench.simulation.traffic import Request, draw, zipf
from supervisor.core.admission.admission import AdmissionPolicy
from supervisor.core.demand import NORMAL


def fewest_loads(trace: Sequence[int], room: int) -> int:
    """The minimum number of loads."""
    coming: dict[int, list[int]] = {}
    for index in range(len(trace) - 1, -1, -1):
        coming.setdefault(trace[index], []).append(index)
    loaded: set[int] = set()
    loads = 0
    for model in trace:
        coming[model].pop()
        if model in loaded:
            continue
        loads += 1
        if len(loaded) == room:
            loaded.discard(max(loaded, key=lambda each: coming[each][-1] if coming[each] else len(trace)))
        loaded.add(model)
    return loads


def trace(seed: int, models: int, length: int) -> list[int]:
    chance = random.Random(seed)
    shares = zipf(models, 0.8)
    return [draw(chance, shares) for _ in range(length)]


def loads(policy: AdmissionPolicy, trace: Sequence[int], room: int) -> int:
    """The scheduler's number of loads on one device with room for `room` models."""
    machine = Machine(policy, models=max(trace) + 1, devices=1, mib=(DEVICE_MIB - 512) // room)
    requests = (Request(120.0 * i, model, 0, NORMAL, 1.0) for i, model in enumerate(trace))
    return machine.run(requests).loads
