"""A day of requests: models and tenants by Zipf's law, more by day than by night, and bursts."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from supervisor.core.demand import HIGH, LOW, NORMAL

DAY_S = 86_400.0
CLASSES = ((HIGH, 0.1), (NORMAL, 0.7), (LOW, 0.2))


@dataclass(frozen=True, slots=True)
class Request:
    at: float
    model: int
    tenant: int
    priority: int
    service_s: float  # seconds alone on a worker


def zipf(count: int, exponent: float) -> list[float]:
    """Cumulative shares."""
    return list(accumulate(1 / rank**exponent for rank in range(1, count + 1)))


def draw(chance: random.Random, cumulative: list[float]) -> int:
    return bisect_left(cumulative, chance.random() * cumulative[-1])


def day(seed: int, *, models: int, tenants: int, per_s: float, hours: float) -> Iterator[Request]:
    """`per_s` requests a second on average, a third of that at night; a burst of 40 for one model every two minutes."""
    chance = random.Random(seed)
    of_models, of_tenants = zipf(models, 1.0), zipf(tenants, 1.0)
    names = list(range(models))
    chance.shuffle(names)  # so that popularity doesn't depend on size
    now, burst_at = 0.0, chance.expovariate(1 / 120)
    waiting: list[Request] = []
    while now < hours * 3600:
        rate = per_s * (1 - 0.5 * math.cos(2 * math.pi * now / DAY_S))
        now += chance.expovariate(rate)
        waiting.append(_random_request(chance, now, names[draw(chance, of_models)], draw(chance, of_tenants)))
        while burst_at < now:
            model, tenant = names[draw(chance, of_models)], draw(chance, of_tenants)
            waiting += [_random_request(chance, burst_at + chance.uniform(0, 10), model, tenant) for _ in range(40)]
            burst_at += chance.expovariate(1 / 120)
        waiting.sort(key=lambda request: request.at)
        while waiting and waiting[0].at <= now:
            yield waiting.pop(0)


def _random_request(chance: random.Random, at: float, model: int, tenant: int) -> Request:
    priority = chance.choices([each for each, _ in CLASSES], [share for _, share in CLASSES])[0]
    return Request(at, model, tenant, priority, min(60.0, chance.lognormvariate(0.7, 0.8)))
