"""Device memory: the free amount and each worker's use, measured off the event loop.

A `MemoryReader` knows one kind of device and blocks. A `ThreadedSampler` runs its readings in threads, one at a time, and
gives the last values, marked stale, when a reading is late. Memory is whole MiB: free is rounded down, use is rounded up.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import structlog

from runtimes.device_kind import DeviceAssignment, DeviceKind
from supervisor.core.events import DeviceSample, MemorySampled, WorkerSample
from supervisor.core.types import DeviceId, Devices, DeviceSpec, Generation, ModelId

T = TypeVar("T")
WorkerKey = tuple[ModelId, Generation]

MIB = 1024 * 1024
SAMPLE_TIMEOUT_S = 2.0

log = structlog.get_logger(__name__)


def default_margin_mib(total_mib: int) -> int:
    """The default margin: never leased, so that small errors of an estimate don't exhaust the memory."""
    return max(512, total_mib * 3 // 100)


def mib_up(size: int) -> int:
    """Bytes as MiB, rounded up."""
    return -(-size // MIB)


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device. `total_mib` is its free memory when nothing runs (host: the budget)."""

    id: DeviceId
    kind: DeviceKind
    name: str
    total_mib: int
    margin_mib: int
    index: int | None = None
    uuid: str | None = None
    driver: str | None = None
    capability: tuple[int, int] | None = None  # CUDA's compute capability, if known
    pci: str | None = None  # its address on the PCI bus, such as 0000:01:00.0

    @property
    def key(self) -> str:
        """The key of learned footprints: a card keeps its key when others are added or removed."""
        return self.uuid or self.id

    @property
    def label(self) -> str:
        """The name for people: `RTX 4080 (gpu0)`, `processor and RAM (host)`."""
        return f"{re.sub(r'^(NVIDIA|AMD) (GeForce )?', '', self.name)} ({self.id})"

    @property
    def spec(self) -> DeviceSpec:
        """The core's view of it."""
        kind = self.kind
        return DeviceSpec(
            self.id, self.total_mib, self.margin_mib, kind.returns_at_exit, kind.takes_whole, kind.name, self.label
        )

    @property
    def assignment(self) -> DeviceAssignment:
        """The adapters' view of it."""
        return DeviceAssignment(
            id=self.id, kind=self.kind, index=self.index, uuid=self.uuid, capability=self.capability, pci=self.pci
        )


@dataclass(frozen=True, slots=True)
class HolderPids:
    """A worker that holds memory on `devices`: the trees below `roots` are its processes.

    `roots` is empty while it is being spawned. `loading` is True until it is ready.
    """

    devices: Devices
    roots: tuple[int, ...]
    loading: bool


Holders = Mapping[WorkerKey, HolderPids]


@dataclass(frozen=True, slots=True)
class Reading:
    """A reader's measurements of its devices and of the workers on them."""

    devices: tuple[DeviceSample, ...]
    workers: tuple[WorkerSample, ...]
    busy: Mapping[DeviceId, float] = field(default_factory=dict)  # see `MemorySampler.busy`


class MemoryReader(Protocol):
    """One kind of device. Everything here blocks; readings are never made by two threads at once."""

    def devices(self) -> tuple[DeviceInfo, ...]: ...

    def read(self, holders: Holders) -> Reading:
        """Measure now; `holders` on devices of others are ignored. Raises OSError when nothing can be read."""
        ...


class DriverUnavailableError(Exception):
    """A kind of device has no driver here, or the driver doesn't answer."""


@dataclass(frozen=True, slots=True)
class DeviceFound:
    """A device, or the reason why it can't be used."""

    index: int
    uuid: str
    name: str
    total_mib: int = 0
    handle: object = None
    unusable: str | None = None
    only_listed: str | None = None  # the reason for using it only where the configuration lists it
    unified: bool = False  # its memory is the machine's main memory
    capability: tuple[int, int] | None = None  # as DeviceInfo's
    pci: str | None = None  # as DeviceInfo's


class Driver(Protocol):
    """An open driver of one kind of accelerator. Blocks, up to seconds where a device sleeps."""

    def find(self) -> Sequence[DeviceFound]:
        """Every device, usable or not, by index. Raises DriverUnavailableError."""
        ...

    def reader(self, devices: Sequence[tuple[DeviceFound, int | None]]) -> MemoryReader:
        """A reader for some of the devices, each with its margin in MiB (None: the default)."""
        ...


class MemorySampler(Protocol):
    """The sampler that the engine polls: each of `parts` separately, since a part that hangs would make the others wait."""

    @property
    def parts(self) -> Sequence[MemorySampler]: ...

    def devices(self) -> tuple[DeviceInfo, ...]: ...

    def busy(self) -> Mapping[DeviceId, float]:
        """The share of time, 0 to 1, that devices computed before their last reading, for drivers that show it."""
        ...

    async def sample(self, holders: Holders) -> MemorySampled:
        """The free memory of every device, and the use of each of `holders`. Bounded in time; never fails (see `stale`)."""
        ...


class ThreadedSampler:
    """Runs a reader off the event loop. A reading that hangs costs one thread and makes its values stale.

    While a reading runs, further calls wait for it, each at most `timeout_s`. The result says when its reading began. The
    threads are daemonic: a reading stuck in a driver must not prevent the daemon's exit.
    """

    def __init__(
        self,
        reader: MemoryReader,
        *,
        timeout_s: float = SAMPLE_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = reader
        self._timeout_s = timeout_s
        self._clock = clock
        self._running: asyncio.Future[MemorySampled] | None = None
        self._last: MemorySampled | None = None
        self._busy: Mapping[DeviceId, float] = {}
        self._trouble: str | None = None

    @property
    def parts(self) -> Sequence[MemorySampler]:
        return (self,)

    def devices(self) -> tuple[DeviceInfo, ...]:
        return self._reader.devices()

    def busy(self) -> Mapping[DeviceId, float]:
        return self._busy if self._trouble is None else {}

    async def sample(self, holders: Holders) -> MemorySampled:
        if self._running is None:
            wanted = dict(holders)  # the caller may change its dict meanwhile
            self._running = in_thread(lambda: self._read(wanted))
            self._running.add_done_callback(self._store_result)
        try:
            async with asyncio.timeout(self._timeout_s):
                sampled = await asyncio.shield(self._running)
        except TimeoutError:
            self._note_trouble(f"no answer within {self._timeout_s:g} s")
        except OSError as error:
            self._note_trouble(str(error))
        except Exception as error:  # noqa: BLE001  # a bug, or an impossible figure: the values are unknown
            self._note_trouble(f"its reader failed: {error!r}", error)
        else:
            self._note_trouble(None)
            return sampled
        return self._stale_sample(holders)

    def _read(self, holders: Holders) -> MemorySampled:
        taken_at = self._clock()
        reading = _check_reading(self._reader.read(holders))
        self._busy = reading.busy
        return MemorySampled(reading.devices, reading.workers, taken_at)

    def _store_result(self, running: asyncio.Future[MemorySampled]) -> None:
        self._running = None
        if not running.cancelled() and running.exception() is None:
            self._last = running.result()

    def _stale_sample(self, holders: Holders) -> MemorySampled:
        last = self._last or MemorySampled((), (), 0.0)
        known = {device.id: device for device in last.devices}
        used = {(worker.model, worker.generation, worker.device): worker.used_mib for worker in last.workers}
        ids = [device.id for device in self.devices()]
        return MemorySampled(
            tuple(replace(known.get(i, DeviceSample(i, 0)), stale=True) for i in ids),
            tuple(
                WorkerSample(*key, device, used.get((*key, device)))
                for key, holder in holders.items()
                for device in holder.devices
                if device in ids
            ),
            last.taken_at,
        )

    def _note_trouble(self, trouble: str | None, mistake: Exception | None = None) -> None:
        if trouble != self._trouble:
            if trouble:
                devices = [device.id for device in self.devices()]
                log.warning("memory.stale", devices=devices, reason=trouble, exc_info=mistake)
            else:
                log.info("memory.readable", devices=[device.id for device in self.devices()])
            self._trouble = trouble


class CompositeSampler:
    """Several samplers as one. A sample of all devices is as late, and as old, as the slowest sampler's."""

    def __init__(self, samplers: Sequence[MemorySampler]) -> None:
        self.parts = tuple(part for sampler in samplers for part in sampler.parts)

    def devices(self) -> tuple[DeviceInfo, ...]:
        return tuple(device for sampler in self.parts for device in sampler.devices())

    def busy(self) -> Mapping[DeviceId, float]:
        return {device: share for sampler in self.parts for device, share in sampler.busy().items()}

    async def sample(self, holders: Holders) -> MemorySampled:
        parts = await asyncio.gather(*(sampler.sample(holders) for sampler in self.parts))
        return MemorySampled(
            tuple(device for part in parts for device in part.devices),
            tuple(worker for part in parts for worker in part.workers),
            min(part.taken_at for part in parts),
        )


def _check_reading(reading: Reading) -> Reading:
    """The reading, if all figures are valid. Raises ValueError otherwise."""
    figures = (*(device.free_mib for device in reading.devices), *(worker.used_mib for worker in reading.workers))
    for figure in figures:
        if figure is not None and (type(figure) is not int or figure < 0):
            raise ValueError(f"{figure!r} MiB")
    return reading


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in its own daemon thread; cancelling the future doesn't end the thread."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # so that it can't be cancelled

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:  # noqa: BLE001  # the future's awaiter gets it
            result.set_exception(error)

    threading.Thread(target=run, name="memory", daemon=True).start()
    return asyncio.wrap_future(result)
