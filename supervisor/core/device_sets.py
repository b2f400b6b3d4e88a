"""Where a model may run: the device sets it may use, and what it takes of each device in them.

A device set is one device, or as many as the model is spread over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from supervisor.core.types import DeviceSpec, FootprintSource, ModelSpec

MAX_DEVICE_SETS = 200
"""The planner looks at each of a model's device sets; more ways than this to choose its devices are a mistake."""

_LEARNED = frozenset({FootprintSource.LEARNED, FootprintSource.RAISED})


def device_sets(model: ModelSpec, devices: Sequence[DeviceSpec]) -> list[tuple[DeviceSpec, ...]]:
    """Every device set for it, of the devices where it may run. Empty where they are too few."""
    whole, shared = _divided(model, devices)
    return [*((device,) for device in whole), *combinations(shared, model.gpus)]


def count_device_sets(model: ModelSpec, devices: Sequence[DeviceSpec]) -> int:
    """How many device sets there are."""
    whole, shared = _divided(model, devices)
    return len(whole) + math.comb(len(shared), model.gpus)


def usable_mib(device_set: Sequence[DeviceSpec]) -> int:
    """The most that a model can have on each device of the set."""
    return min(device.usable_mib for device in device_set)


def need_mib(model: ModelSpec, device_set: Sequence[DeviceSpec]) -> int:
    """What to lease on each device of the set: the largest footprint among them.

    What was learned is limited to what is usable: it never makes a model too large that was let in before.
    """
    most = max(1, usable_mib(device_set))
    needs = [device.need(model) for device in device_set]
    return max(max(1, min(n.mib, most)) if n.source in _LEARNED else n.mib for n in needs)


def fits(model: ModelSpec, device_set: Sequence[DeviceSpec]) -> bool:
    """Is there room for it when nothing else is loaded?"""
    return need_mib(model, device_set) <= usable_mib(device_set)


def _divided(model: ModelSpec, devices: Sequence[DeviceSpec]) -> tuple[list[DeviceSpec], list[DeviceSpec]]:
    """The devices that take it whole, and those that share it."""
    allowed = [device for device in devices if not model.devices or device.id in model.devices]
    return [d for d in allowed if d.takes_whole], [d for d in allowed if not d.takes_whole]
