"""The devices of this machine: all usable accelerators and host memory, or those that the configuration lists."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from runtimes.device_kind import CUDA, ROCM, VULKAN, DeviceKind, DeviceWanted
from supervisor.errors import ConfigError
from supervisor.host.memory.amd import AmdDriver
from supervisor.host.memory.host_memory import HostMemory
from supervisor.host.memory.memory import (
    CompositeSampler,
    DeviceFound,
    DeviceInfo,
    Driver,
    DriverUnavailableError,
    MemoryReader,
    MemorySampler,
    ThreadedSampler,
    in_thread,
)
from supervisor.host.memory.nvml import NvmlSession
from supervisor.host.memory.vulkan import VulkanDriver

DRIVERS: Final[dict[DeviceKind, Callable[[], Driver]]] = {CUDA: NvmlSession, ROCM: AmdDriver, VULKAN: VulkanDriver}
"""Opens the driver of each kind of accelerator, or raises DriverUnavailableError."""

OPEN_TIMEOUT_S = 15.0
"""A driver that wakes an idle GPU takes seconds; one that takes longer is stuck."""

Wanted = Literal["auto"] | Sequence[DeviceWanted]


@dataclass(frozen=True, slots=True)
class Opened:
    """The devices found. `notes` have the reasons why others are not used."""

    sampler: MemorySampler
    notes: tuple[str, ...]

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        return self.sampler.devices()


async def open_sampler(wanted: Wanted = "auto", *, margin_mib: int | None = None, named_by: str = "") -> Opened:
    """Find the devices. `margin_mib` is the default margin, `named_by` the variable that names the devices, if any.

    Takes seconds where an idle GPU must be woken, at most OPEN_TIMEOUT_S. Raises ConfigError, with all problems, if a
    listed device is missing; "auto" always finds one.
    """
    opening = in_thread(lambda: _find_all(margin_mib) if wanted == "auto" else (_find_listed(wanted, margin_mib), []))
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            readers, notes = await asyncio.shield(opening)
    except ConfigError as error:
        raise ConfigError(tuple(f"{named_by} {problem}".lstrip() for problem in error.problems)) from None
    except TimeoutError:
        kinds = DRIVERS if wanted == "auto" else dict.fromkeys(one.kind for one in wanted if one.kind.accelerates)
        vendors = " or ".join(kind.vendor for kind in kinds)
        reason = f"the {vendors} driver did not answer within {OPEN_TIMEOUT_S:g} s"
        if wanted != "auto":
            raise ConfigError((f"devices: {reason}",)) from None
        readers, notes = [HostMemory(margin_mib=margin_mib)], [f"{reason}; using host memory"]
    samplers = [ThreadedSampler(reader) for reader in readers]
    return Opened(samplers[0] if len(samplers) == 1 else CompositeSampler(samplers), tuple(notes))


def _find_listed(wanted: Sequence[DeviceWanted], margin_mib: int | None) -> list[MemoryReader]:
    readers: list[MemoryReader] = []
    problems: list[str] = []
    pooled: list[str] = []  # the devices that compute in main memory
    for kind in dict.fromkeys(device.kind for device in wanted if device.kind.accelerates):
        mine = [device for device in wanted if device.kind == kind]
        try:
            driver = DRIVERS[kind]()
            found = driver.find()
        except DriverUnavailableError as error:
            problems.append(f"devices: no {kind.vendor} {kind.noun} can be used: {error}")
            continue
        chosen = [(_choose_device(device, found, problems), _margin_of(device, margin_mib)) for device in mine]
        pooled += [f"{kind.noun} {device.index} ({device.name})" for device, _ in chosen if device and device.unified]
        if len({device.index for device, _ in chosen if device}) < len(mine) and not problems:
            problems.append(f"devices: the same {kind.noun} is listed twice")
        if not problems:
            readers.append(driver.reader([(device, margin) for device, margin in chosen if device]))
    hosts = [device for device in wanted if not device.kind.accelerates]
    if len(hosts) > 1:
        problems.append("devices: host memory is listed twice")
    if len(pooled) + len(hosts) > 1 and pooled:
        others = " and ".join([*pooled[1:], *(["host memory"] if hosts else [])])
        problems.append(f"devices: {pooled[0]} and {others} are one memory: list one of them")
    if problems:
        raise ConfigError(tuple(problems))
    return [
        *readers,
        *(HostMemory(budget_mib=host.budget_mib, margin_mib=_margin_of(host, margin_mib)) for host in hosts),
    ]


def _find_all(margin_mib: int | None) -> tuple[list[MemoryReader], list[str]]:
    readers: list[MemoryReader] = []
    notes: list[str] = []
    used: list[DeviceFound] = []
    for kind, open_driver in DRIVERS.items():
        name = f"no {kind.vendor} {kind.noun}"
        try:
            driver = open_driver()
            found = driver.find()
        except DriverUnavailableError as error:
            if not notes:  # the first reason is enough
                notes.append(f"{name} ({error})")
            continue
        notes += [
            f"{kind.noun} {one.index} ({one.name}) {why}" for one in found if (why := one.only_listed or one.unusable)
        ]
        if usable := [(one, margin_mib) for one in found if not (one.unusable or one.only_listed)]:
            readers.append(driver.reader(usable))
            used = [one for one, _ in usable]
            break  # environments are made for one kind
        if found or not notes:
            notes.append(f"{name} that can be used")
    if not readers:
        return [HostMemory(margin_mib=margin_mib)], [*notes[:-1], f"{notes[-1]}; using host memory"]
    if not any(one.unified for one in used):  # else a GPU already has this memory
        readers.append(HostMemory(margin_mib=margin_mib))
    return readers, notes


def every_gpu() -> Opened:
    """All usable GPUs of every kind, listed or not. Blocks, up to seconds where a GPU sleeps."""
    readers: list[MemoryReader] = []
    for open_driver in DRIVERS.values():
        with contextlib.suppress(DriverUnavailableError):
            driver = open_driver()
            if usable := [(one, None) for one in driver.find() if not one.unusable]:
                readers.append(driver.reader(usable))
    return Opened(CompositeSampler([ThreadedSampler(reader) for reader in readers]), ())


def _margin_of(wanted: DeviceWanted, margin_mib: int | None) -> int | None:
    return margin_mib if wanted.margin_mib is None else wanted.margin_mib


def _choose_device(wanted: DeviceWanted, found: Sequence[DeviceFound], problems: list[str]) -> DeviceFound | None:
    noun = wanted.kind.noun
    if wanted.uuid is not None:
        what, matches = wanted.uuid, [one for one in found if one.uuid.startswith(wanted.uuid)]
    else:
        what, matches = f"index {wanted.index}", [one for one in found if one.index == wanted.index]
    there = ", ".join(f"{one.index}: {one.name} {one.uuid}" for one in found) or "none"
    if len(matches) != 1:
        problems.append(
            f"devices: {f'several {noun}s match' if matches else f'no {noun} has'} {what}; there are: {there}"
        )
        return None
    if matches[0].unusable:
        problems.append(f"devices: {noun} {matches[0].index} ({matches[0].name}) {matches[0].unusable}")
        return None
    return matches[0]


def detect() -> Literal["cpu", "cuda", "rocm"]:
    """The kind of device for environments: `cuda` or `rocm` where that driver shows a GPU, else `cpu`. May take seconds."""
    with contextlib.suppress(DriverUnavailableError):
        if NvmlSession().find():
            return "cuda"
    with contextlib.suppress(DriverUnavailableError):
        if any(not (one.unusable or one.only_listed) for one in DRIVERS[ROCM]().find()):
            return "rocm"
    return "cpu"
