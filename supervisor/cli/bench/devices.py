"""The devices that can run a model, and the check of their memory: as measured, and by the daemon's ledger.

`cpu` is host memory, even where the daemon uses GPUs only; `cuda` is the GPU with the most free memory among those that the
configuration allows the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtimes.device_kind import HOST, DeviceWanted
from supervisor.catalog import Catalog, CatalogModel
from supervisor.cli import operations, output
from supervisor.cli.client import Client
from supervisor.cli.exit_codes import UnreachableError
from supervisor.core.events import DeviceSample
from supervisor.core.types import DeviceId
from supervisor.errors import LlmuxError
from supervisor.host.memory.devices import Opened, open_sampler
from supervisor.host.memory.memory import CompositeSampler, DeviceInfo, MemorySampler
from supervisor.schema.memory import Device


class BenchError(LlmuxError):
    """A device is missing or full, or its worker failed; the message has the remedy."""

    code = "bench_failed"


def ledger_of(daemon: Client) -> Mapping[DeviceId, Device]:
    """The devices of a daemon's ledger; none where no daemon answers. Raises LlmuxError when the daemon refuses."""
    try:
        devices = daemon.call(operations.READ_MEMORY).devices
    except UnreachableError:
        return {}
    return {DeviceId(device.id): device for device in devices}


async def open_devices(catalog: Catalog) -> Opened:
    """The GPUs that the configuration allows, and host memory. Raises ConfigError for a missing GPU."""
    if catalog.devices == "auto":
        found = await open_sampler("auto")
        if not all(device.kind.accelerates for device in found.devices):
            return found
        host = await open_sampler([DeviceWanted(HOST)])
        return Opened(CompositeSampler((found.sampler, host.sampler)), found.notes)
    listed = [one.wanted for one in catalog.devices]
    gpus = [one for one in listed if one.kind.accelerates]
    opened = await open_sampler(listed if len(gpus) < len(listed) else [*listed, DeviceWanted(HOST)])
    return Opened(opened.sampler, opened.notes if gpus else ("the configuration lists no GPU under devices",))


async def choose_devices(opened: Opened, model: CatalogModel, words: Sequence[str]) -> list[DeviceInfo]:
    """The devices that `words` name (`cuda`, `cpu`, or a device's id), each once; without words one of each kind.

    Raises BenchError, which lists the devices found.
    """
    free = {sample.id: sample.free_mib for sample in (await opened.sampler.sample({})).devices}
    (host,) = (device for device in opened.devices if not device.kind.accelerates)
    gpus = [device for device in opened.devices if device.kind.accelerates]
    allowed = [gpu for gpu in gpus if gpu.id in model.config.devices] or gpus
    roomiest = max(allowed, key=lambda gpu: free.get(gpu.id, 0), default=None)
    kinds = {device.kind.accelerator: device for device in (roomiest, host) if device is not None}
    meant: dict[str, DeviceInfo] = kinds | {str(device.id): device for device in opened.devices}
    if not words:
        words = list(kinds)
    for word in words:
        if word not in meant:
            there = ", ".join(f"{name} ({device.id}: {device.name})" for name, device in kinds.items())
            why = f" ({'; '.join(opened.notes)})" if opened.notes and roomiest is None else ""
            raise BenchError(f"There is no device {word!r} here{why}; there is: {there}.")
    chosen = {meant[word].id: meant[word] for word in words}
    if (gpus_wanted := model.adapter.gpus(model.config)) > 1 and any(one.kind.accelerates for one in chosen.values()):
        raise BenchError(
            f"{model.id} is spread over {gpus_wanted} GPUs, and bench tries one device at a time. On the processor: "
            f"llmux bench {model.id} --devices cpu"
        )
    return list(chosen.values())


async def check_memory(
    sampler: MemorySampler, device: DeviceInfo, model: CatalogModel, ledger: Mapping[DeviceId, Device]
) -> int:
    """The memory that the model is expected to take on the device, in MiB. Raises BenchError when less is free."""
    need = device.spec.need(model.spec())
    sampled = await sampler.sample({})
    free = next(
        (sample for sample in sampled.devices if sample.id == device.id), DeviceSample(device.id, 0, stale=True)
    )
    if free.stale:
        raise BenchError(
            f"The memory of {device.label} can't be read now; nothing is started on it. Look: llmux doctor"
        )
    room, by = free.free_mib - device.margin_mib, f"{output.mib(free.free_mib)} are free"
    entry = ledger.get(device.id)
    if entry is not None:
        if entry.blocked:
            raise BenchError(f"The daemon starts nothing on {device.label} now: {entry.blocked}. Try again later.")
        available = entry.available_mib
        if available is not None and available < room:
            room, by = available, f"by the daemon's ledger {output.mib(available)} may be taken"
    if need.mib > room:
        margin = f" and {output.mib(device.margin_mib)} of them are kept as a margin" if entry is None else ""
        raise BenchError(
            f"{model.id} takes {output.mib(need.mib)} ({need.source}: {need.detail}), but {by} on {device.label}{margin}. "
            "Make room: llmux ps, llmux unload MODEL."
        )
    return need.mib
