"""Which devices there are: all NVIDIA GPUs, else host memory, or what the configuration lists."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from supervisor.errors import ConfigError
from supervisor.io.host_memory import HostMemory
from supervisor.io.memory import CompositeSampler, DeviceInfo, MemoryReader, MemorySampler, ThreadedSampler, in_thread
from supervisor.io.nvml import GpuFound, NvmlReader, NvmlSession, NvmlUnavailableError

OPEN_TIMEOUT_S = 15.0
"""A driver that wakes an idle GPU takes seconds; one that takes longer hangs."""


@dataclass(frozen=True, slots=True)
class HostWanted:
    """Host memory, up to a budget (None: 80 % of what there is)."""

    budget_mib: int | None = None
    margin_mib: int | None = None


@dataclass(frozen=True, slots=True)
class GpuWanted:
    """One GPU, by `uuid` (a unique beginning is enough) or by `index` as nvidia-smi counts."""

    index: int | None = None
    uuid: str | None = None
    margin_mib: int | None = None


Wanted = HostWanted | GpuWanted


@dataclass(frozen=True, slots=True)
class Opened:
    """The devices found. `notes` say, for people, why something that is there is not used."""

    sampler: MemorySampler
    notes: tuple[str, ...]

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        return self.sampler.devices()


async def open_sampler(wanted: Literal["auto"] | Sequence[Wanted] = "auto", *, margin_mib: int | None = None) -> Opened:
    """Find the devices. `margin_mib` is for those that name none of their own.

    Takes seconds where an idle GPU has to be woken, at most OPEN_TIMEOUT_S. Raises ConfigError, with every problem in
    it, when a device that was asked for by name isn't there; "auto" always finds one.
    """
    opening = in_thread(lambda: _find(wanted, margin_mib))
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            readers, notes = await asyncio.shield(opening)
    except TimeoutError:
        reason = f"the NVIDIA driver did not answer within {OPEN_TIMEOUT_S:g} s"
        if wanted != "auto":
            raise ConfigError((f"devices: {reason}",)) from None
        readers, notes = [HostMemory(margin_mib=margin_mib)], [f"{reason}; using host memory"]
    samplers = [ThreadedSampler(reader) for reader in readers]
    return Opened(samplers[0] if len(samplers) == 1 else CompositeSampler(samplers), tuple(notes))


def _find(wanted: Literal["auto"] | Sequence[Wanted], margin_mib: int | None) -> tuple[list[MemoryReader], list[str]]:
    if wanted == "auto":
        return _find_all(margin_mib)
    readers: list[MemoryReader] = []
    problems: list[str] = []
    gpus = [device for device in wanted if isinstance(device, GpuWanted)]
    hosts = [device for device in wanted if isinstance(device, HostWanted)]
    if gpus:
        try:
            session = NvmlSession()
            found = session.find()
        except NvmlUnavailableError as error:
            problems.append(f"devices: no NVIDIA GPU can be used: {error}")
        else:
            chosen = [(_choose(gpu, found, problems), gpu.margin_mib) for gpu in gpus]
            if len({gpu.index for gpu, _ in chosen if gpu}) < len(gpus) and not problems:
                problems.append("devices: the same GPU is listed twice")
            if not problems:
                readers.append(
                    NvmlReader(session, [(gpu, margin_mib if own is None else own) for gpu, own in chosen if gpu])
                )
    if len(hosts) > 1:
        problems.append("devices: host memory is listed twice")
    if problems:
        raise ConfigError(tuple(problems))
    for host in hosts:
        own = margin_mib if host.margin_mib is None else host.margin_mib
        readers.append(HostMemory(budget_mib=host.budget_mib, margin_mib=own))
    return readers, []


def _find_all(margin_mib: int | None) -> tuple[list[MemoryReader], list[str]]:
    try:
        session = NvmlSession()
        found = session.find()
    except NvmlUnavailableError as error:
        return [HostMemory(margin_mib=margin_mib)], [f"no NVIDIA GPU ({error}); using host memory"]
    notes = [f"GPU {gpu.index} ({gpu.name}) {gpu.unusable}" for gpu in found if gpu.unusable]
    if usable := [(gpu, margin_mib) for gpu in found if not gpu.unusable]:
        return [NvmlReader(session, usable)], notes
    return [HostMemory(margin_mib=margin_mib)], [*notes, "no NVIDIA GPU that can be used; using host memory"]


def _choose(wanted: GpuWanted, found: Sequence[GpuFound], problems: list[str]) -> GpuFound | None:
    if wanted.uuid is not None:
        what, matches = wanted.uuid, [gpu for gpu in found if gpu.uuid.startswith(wanted.uuid)]
    else:
        what, matches = f"index {wanted.index}", [gpu for gpu in found if gpu.index == wanted.index]
    there = ", ".join(f"{gpu.index}: {gpu.name} {gpu.uuid}" for gpu in found) or "none"
    if len(matches) != 1:
        problems.append(f"devices: {'several GPUs match' if matches else 'no GPU has'} {what}; there are: {there}")
        return None
    if matches[0].unusable:
        problems.append(f"devices: GPU {matches[0].index} ({matches[0].name}) {matches[0].unusable}")
        return None
    return matches[0]
