"""Device sets: where a model may run, and how much memory it takes of each device there.

A device set is one device, or several that share the model equally. A model that `spreads` over as many devices as it needs
has only single devices as fixed device sets: the sizes of its parts depend on the free memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Final

from supervisor.core.types import Devices, DeviceSpec, FootprintSource, ModelSpec

MAX_DEVICE_SETS = 200
"""Maximum number of device sets of a model. The planner evaluates each of them; more are a configuration error."""

MARGIN_MIB: Final = 512
"""Minimum free memory of each device besides its part: for the driver, and because layers can't be divided."""

MOST_PARTS: Final = 16
"""No program divides a model among more GPUs."""

_LEARNED = frozenset({FootprintSource.LEARNED, FootprintSource.RAISED})


@dataclass(frozen=True, slots=True)
class Spread:
    """The devices over which a model may be split in unequal parts, and the total memory of the parts."""

    devices: Devices
    whole_mib: int
    each_mib: int = 0  # additional memory for each device after the first
    margin_mib: int = MARGIN_MIB  # stays free on each device

    def total_mib(self, parts: int) -> int:
        """MiB that the given number of parts take together."""
        return self.whole_mib + (parts - 1) * self.each_mib

    def fits(self, room: Iterable[int]) -> bool:
        """Whether all devices together have enough room. `room`: MiB of each device."""
        left = sorted((mib - self.margin_mib for mib in room if mib > self.margin_mib), reverse=True)[:MOST_PARTS]
        together = accumulate(left)
        return any(mib >= self.total_mib(parts) for parts, mib in enumerate(together, 1) if parts > 1)


def device_sets(model: ModelSpec, devices: Sequence[DeviceSpec]) -> list[tuple[DeviceSpec, ...]]:
    """All device sets for the model, among the devices where it may run. Empty if too few devices are allowed."""
    whole, shared = _whole_and_shared_devices(model, devices)
    return [*((device,) for device in whole), *combinations(shared, model.gpus)]


def count_device_sets(model: ModelSpec, devices: Sequence[DeviceSpec]) -> int:
    """The number of device sets for the model, without listing them."""
    whole, shared = _whole_and_shared_devices(model, devices)
    return len(whole) + math.comb(len(shared), model.gpus)


def usable_mib(device_set: Sequence[DeviceSpec]) -> int:
    """The most that a model can have on each device of the set."""
    return min(device.usable_mib for device in device_set)


def spread(model: ModelSpec, devices: Sequence[DeviceSpec]) -> Spread | None:
    """How to split the model over several of these devices in unequal parts; None: it is never split.

    A learned footprint is of all devices of a load together. The largest one counts, on whichever devices it was measured.
    It is limited to the memory of these devices, as in `need_mib`.
    """
    shared = _whole_and_shared_devices(model, devices)[1]
    if not model.spreads or len(shared) < 2:
        return None
    whole_mib, each_mib, is_learned = model.footprint.mib, model.footprint.each_mib, False
    margin_mib = max(MARGIN_MIB, each_mib)
    measured = [model.learned[device.id].mib for device in shared if device.id in model.learned]
    if measured and model.footprint.source is not FootprintSource.EXPLICIT:
        whole_mib, each_mib, is_learned = max(measured), 0, True
    raised_mib = max(model.raised.get(device.id, 0) for device in shared)
    if raised_mib > whole_mib:
        whole_mib, each_mib, is_learned = raised_mib, 0, True
    if is_learned:
        room = sorted((max(0, device.usable_mib - margin_mib) for device in shared), reverse=True)
        whole_mib = max(1, min(whole_mib, sum(room[:MOST_PARTS])))
    return Spread(tuple(sorted(device.id for device in shared)), whole_mib, each_mib, margin_mib)


def need_mib(model: ModelSpec, device_set: Sequence[DeviceSpec], *, alone: bool = True) -> int:
    """The MiB to lease on each device of the set: the largest footprint among them.

    A learned footprint is limited to the usable memory: a model that was accepted before must not become too large. Without
    `alone` this limit doesn't apply, since the model may have been accepted for several devices.
    """
    most = max(1, usable_mib(device_set))
    needs = [device.need(model) for device in device_set]
    if not alone and not any(device.takes_whole for device in device_set):
        return max(need.mib for need in needs)
    return max(max(1, min(n.mib, most)) if n.source in _LEARNED else n.mib for n in needs)


def fits(model: ModelSpec, device_set: Sequence[DeviceSpec]) -> bool:
    """Whether the model fits on the device set when nothing else is loaded."""
    return need_mib(model, device_set) <= usable_mib(device_set)


def allowed(named: Sequence[str], kinds: frozenset[str] | None, devices: Sequence[DeviceSpec]) -> Sequence[DeviceSpec]:
    """Where a model may run: on the devices that it names; else on GPUs that its program supports; else on host memory.

    Without any of these it may run anywhere: the configuration lists devices without host memory.
    """
    if named:
        return [device for device in devices if device.id in named]
    gpus = [device for device in devices if not device.takes_whole and (kinds is None or device.kind in kinds)]
    return gpus or [device for device in devices if device.takes_whole] or devices


def _whole_and_shared_devices(
    model: ModelSpec, devices: Sequence[DeviceSpec]
) -> tuple[list[DeviceSpec], list[DeviceSpec]]:
    """The allowed devices that take the model whole, and those that may share it."""
    mine = allowed(model.devices, model.kinds, devices)
    return [d for d in mine if d.takes_whole], [d for d in mine if not d.takes_whole]
