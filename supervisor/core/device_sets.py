"""Where a model may be, one device or as many as it is spread over, and what it takes of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from supervisor.core.types import DeviceSpec, FootprintSource, ModelSpec

MOST_PLACES = 200
"""The planner looks at each of a model's places; more ways than this to choose its devices are a mistake."""


def places(model: ModelSpec, devices: Sequence[DeviceSpec]) -> list[tuple[DeviceSpec, ...]]:
    """Every place for it, of the devices where it may run. Empty where they are too few."""
    whole, shared = _divided(model, devices)
    return [*((device,) for device in whole), *combinations(shared, model.gpus)]


def count(model: ModelSpec, devices: Sequence[DeviceSpec]) -> int:
    """How many places there are."""
    whole, shared = _divided(model, devices)
    return len(whole) + math.comb(len(shared), model.gpus)


def usable_mib(place: Sequence[DeviceSpec]) -> int:
    """The most that a model can ever have on each of its devices."""
    return min(device.usable_mib for device in place)


def need_mib(model: ModelSpec, place: Sequence[DeviceSpec]) -> int:
    """What to lease on each of its devices: the largest footprint among them.

    A measurement, made where it did fit, never makes it too large for a place.
    """
    most = max(1, usable_mib(place))
    needs = [device.need(model) for device in place]
    return max(max(1, min(n.mib, most)) if n.source is FootprintSource.LEARNED else n.mib for n in needs)


def fits(model: ModelSpec, place: Sequence[DeviceSpec]) -> bool:
    """Is there room for it when nothing else is there?"""
    return need_mib(model, place) <= usable_mib(place)


def _divided(model: ModelSpec, devices: Sequence[DeviceSpec]) -> tuple[list[DeviceSpec], list[DeviceSpec]]:
    """The devices that take it whole, and those that share it."""
    allowed = [device for device in devices if not model.devices or device.id in model.devices]
    return [d for d in allowed if d.takes_whole], [d for d in allowed if not d.takes_whole]
