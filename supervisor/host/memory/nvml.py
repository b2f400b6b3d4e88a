"""NVIDIA GPUs through NVML: free memory and, where the driver shows it, each process's use and how busy a GPU is.

NVML creates no CUDA context, which would cost hundreds of MiB on every GPU. Decisions rest on `free`, which means the same in
every NVML version, unlike `used`. The process list is trusted only if it shows our own processes, or at least processes that
exist here: in a container the list may be empty or hold the host's pids. Otherwise a worker's use is the
fall of free memory (`free_delta`), and the use of other programs is unknown. An unreadable GPU keeps its last values,
marked stale, while NVML is initialised again with backoff.

On machines where the GPU computes in main memory (GB10 in DGX Spark, Jetson) NVML has no memory figures: "Not Supported".
Such a GPU is one device with a budget of the machine's memory; see `unified`.

Tests set LLMUX_NVML_MODULE to a module's name or path: it is loaded instead of `pynvml`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import structlog

from runtimes.device_kind import CUDA
from supervisor.core.events import DeviceSample, WorkerSample
from supervisor.core.types import DeviceId
from supervisor.host.memory.free_delta import FreeDelta
from supervisor.host.memory.host_memory import HostMemory
from supervisor.host.memory.memory import (
    MIB,
    DeviceFound,
    DeviceInfo,
    DriverUnavailableError,
    HolderPids,
    Holders,
    Reading,
    WorkerKey,
    default_margin_mib,
    mib_up,
)
from supervisor.host.memory.unified import UnifiedMemory
from supervisor.host.process.procfs import ProcessTable

RETRY_FIRST_S = 1.0
RETRY_MAX_S = 60.0
NOT_SUPPORTED = 3

_LOST_CODES = frozenset({6, 15, 16})
"""Errors after which a GPU stays unreadable until a person acts: not found, lost, reset required."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Gpu:
    info: DeviceInfo
    handle: object
    pool: UnifiedMemory | None = None
    deltas: FreeDelta = field(default_factory=FreeDelta)
    last: DeviceSample | None = None
    used: dict[WorkerKey, int | None] = field(default_factory=dict)
    trouble: str | None = None


Listed = Mapping[int, int | None]
"""A device's process list: pid to bytes, None where unknown."""


def load_nvml() -> ModuleType:
    """Import `pynvml`, or the module in LLMUX_NVML_MODULE. Importing opens no driver.

    Raises DriverUnavailableError before the import if the driver's library is missing: the module takes 4 MiB.
    """
    name = os.environ.get("LLMUX_NVML_MODULE", "pynvml")
    if name.endswith(".py"):
        spec = importlib.util.spec_from_file_location("llmux_nvml", name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    if name == "pynvml":
        try:
            ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise DriverUnavailableError("NVML Shared Library Not Found") from error  # as NVML says it
    return importlib.import_module(name)


class NvmlSession:
    """An initialised NVML. Raises DriverUnavailableError if there is none. Blocks, up to seconds on an idle GPU."""

    def __init__(self, host: Callable[[], HostMemory] = HostMemory) -> None:
        self.nvml, self.host = load_nvml(), host
        try:
            self.nvml.nvmlInit()
            self.driver = _decoded(self.nvml.nvmlSystemGetDriverVersion())
        except self.nvml.NVMLError as error:
            raise DriverUnavailableError(str(error)) from error

    def cuda(self) -> tuple[int, int] | None:
        """The newest CUDA version that the driver supports; None: unknown."""
        try:
            version = int(self.nvml.nvmlSystemGetCudaDriverVersion())  # 12040: 12.4
        except self.nvml.NVMLError:
            return None
        return version // 1000, version % 1000 // 10

    def find(self) -> tuple[DeviceFound, ...]:
        """See `Driver`."""
        try:
            return tuple(self._inspect(index) for index in range(self.nvml.nvmlDeviceGetCount()))
        except self.nvml.NVMLError as error:
            raise DriverUnavailableError(str(error)) from error

    def reader(self, devices: Sequence[tuple[DeviceFound, int | None]]) -> NvmlReader:
        return NvmlReader(self, devices)

    def _inspect(self, index: int) -> DeviceFound:
        nvml, name, uuid = self.nvml, "GPU", ""
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name, uuid = _decoded(nvml.nvmlDeviceGetName(handle)), _decoded(nvml.nvmlDeviceGetUUID(handle))
            if self._in_mig_mode(handle):
                return DeviceFound(index, uuid, name, unusable="is in MIG mode, whose partitions are not supported")
            capability, pci = self._compute_capability(handle), self._pci_address(handle)
            total_mib = self._total_mib(handle)
            if total_mib is None:
                whole = self.host().devices()[0].total_mib
                return DeviceFound(index, uuid, name, whole, handle, unified=True, capability=capability, pci=pci)
            return DeviceFound(index, uuid, name, total_mib, handle, capability=capability, pci=pci)
        except nvml.NVMLError as error:
            return DeviceFound(index, uuid, name, unusable=f"can't be read: {error}")

    def _in_mig_mode(self, handle: object) -> bool:
        try:
            return bool(self.nvml.nvmlDeviceGetMigMode(handle)[0] == 1)
        except self.nvml.NVMLError:
            return False  # most GPUs have no MIG

    def _compute_capability(self, handle: object) -> tuple[int, int] | None:
        try:
            major, minor = self.nvml.nvmlDeviceGetCudaComputeCapability(handle)
        except self.nvml.NVMLError:
            return None
        return int(major), int(minor)

    def _pci_address(self, handle: object) -> str | None:
        """The PCI address in the kernel's format: NVML's has a longer domain."""
        try:
            return _decoded(self.nvml.nvmlDeviceGetPciInfo(handle).busId).rstrip("\0").lower()[-len("0000:01:00.0") :]
        except self.nvml.NVMLError:
            return None

    def _total_mib(self, handle: object) -> int | None:
        """The free memory when nothing runs: version 2 knows the driver's own share, version 1 doesn't.

        None where the GPU has no memory of its own.
        """
        try:
            memory = self.nvml.nvmlDeviceGetMemoryInfo(handle, version=self.nvml.nvmlMemory_v2)
        except self.nvml.NVMLError:
            try:
                return int(self.nvml.nvmlDeviceGetMemoryInfo(handle).total) // MIB
            except self.nvml.NVMLError as error:
                if error.value != NOT_SUPPORTED:
                    raise
                return None
        return int(memory.total - memory.reserved) // MIB


class NvmlReader:
    """A MemoryReader for some of a session's GPUs, each with its margin in MiB (None: the default)."""

    def __init__(
        self,
        session: NvmlSession,
        gpus: Iterable[tuple[DeviceFound, int | None]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml = session.nvml
        self._clock = clock
        self._gpus = tuple(
            _Gpu(
                _device_info(gpu, margin_mib, session.driver),
                gpu.handle,
                UnifiedMemory(session.host(), gpu.total_mib) if gpu.unified else None,
            )
            for gpu, margin_mib in gpus
        )
        self._pids_are_ours = False  # the list has shown our processes: same pid namespace
        self._retry_after_s = RETRY_FIRST_S
        self._retry_at: float | None = None  # set while something can't be read

    def devices(self) -> tuple[DeviceInfo, ...]:
        return tuple(gpu.info for gpu in self._gpus)

    def read(self, holders: Holders) -> Reading:
        self._reinitialise()
        ids = {gpu.info.id for gpu in self._gpus}
        table = ProcessTable.scan() if any(not ids.isdisjoint(holder.devices) for holder in holders.values()) else None
        workers: list[WorkerSample] = []
        for gpu in self._gpus:
            mine = {key: holder for key, holder in holders.items() if gpu.info.id in holder.devices}
            try:
                self._read_gpu(gpu, mine, table)
            except self._nvml.NVMLError as error:
                self._mark_unreadable(gpu, error)
            workers += [WorkerSample(*key, gpu.info.id, gpu.used.get(key)) for key in mine]
        if not any(gpu.trouble for gpu in self._gpus):
            self._retry_at, self._retry_after_s = None, RETRY_FIRST_S
        devices = tuple(gpu.last or DeviceSample(gpu.info.id, 0, stale=True) for gpu in self._gpus)
        return Reading(devices, tuple(workers), self._utilisation())

    def _read_gpu(self, gpu: _Gpu, mine: Mapping[WorkerKey, HolderPids], table: ProcessTable | None) -> None:
        trees = {key: table.tree(holder.roots) if table else frozenset[int]() for key, holder in mine.items()}
        listed = self._list_processes(gpu.handle)
        if gpu.pool is not None:
            self._nvml.nvmlDeviceGetUUID(gpu.handle)  # fails where the GPU is lost
            taken = {key: _bytes_of(listed, tree) for key, tree in trees.items()}
            gpu.last, gpu.used = gpu.pool.read(gpu.info.id, mine, trees, taken)
            self._found_again(gpu)
            return
        free_mib = self._nvml.nvmlDeviceGetMemoryInfo(gpu.handle).free // MIB
        deltas = gpu.deltas.update(free_mib, {key: holder.loading for key, holder in mine.items()})
        ours = frozenset[int]().union(*trees.values())
        outside_mib = None
        gpu.used = deltas
        if listed is not None:
            if any(pid in listed for pid in ours):
                self._pids_are_ours = True
            # Memory of no listed process: the list hides a process, or a dead process's memory is not free yet.
            hidden_mib = gpu.info.total_mib - free_mib - sum(mib_up(size or 0) for size in listed.values())
            complete = hidden_mib <= max(gpu.info.margin_mib, default_margin_mib(gpu.info.total_mib))
            gpu.used = {key: self._worker_mib(listed, trees[key], deltas[key], complete=complete) for key in mine}
            foreign = [size for pid, size in listed.items() if pid not in ours]
            believed = (
                not mine or self._pids_are_ours or (table is not None and all(p in table.parents for p in listed))
            )
            if believed and complete and None not in foreign:
                outside_mib = mib_up(sum(size or 0 for size in foreign))
        gpu.last = DeviceSample(gpu.info.id, free_mib, outside_mib=outside_mib)
        self._found_again(gpu)

    def _found_again(self, gpu: _Gpu) -> None:
        if gpu.trouble is not None:
            log.info("gpu.readable", device=gpu.info.id)
            gpu.trouble = None

    def _utilisation(self) -> dict[DeviceId, float]:
        found = {}
        for gpu in self._gpus:
            with contextlib.suppress(self._nvml.NVMLError):  # not every GPU shows this
                found[gpu.info.id] = self._nvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu / 100
        return found

    def _worker_mib(self, listed: Listed, tree: frozenset[int], delta: int | None, *, complete: bool) -> int | None:
        sizes = [listed[pid] for pid in tree if pid in listed]
        known = [size for size in sizes if size is not None]
        if sizes and len(known) == len(sizes):
            return mib_up(sum(known))
        if not sizes and self._pids_are_ours and complete:
            return 0  # the worker has nothing on the GPU yet
        return delta

    def _list_processes(self, handle: object) -> Listed | None:
        """The GPU's processes; None: the driver gives no list. A process that computes and draws is in both of NVML's lists."""
        try:
            compute = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._nvml.NVMLError:
            return None
        try:
            graphics = self._nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
        except self._nvml.NVMLError:
            graphics = ()  # not supported by compute-only cards
        listed: dict[int, int | None] = {}
        for process in (*compute, *graphics):
            sizes = [size for size in (listed.get(process.pid), process.usedGpuMemory) if size is not None]
            listed[process.pid] = max(sizes, default=None)
        return listed

    def _mark_unreadable(self, gpu: _Gpu, error: Exception) -> None:
        reason = str(error)
        lost = reason if getattr(error, "value", None) in _LOST_CODES else None
        if gpu.trouble != reason:
            log.warning("gpu.unreadable", device=gpu.info.id, reason=reason)
        gpu.trouble = reason
        free_mib = gpu.last.free_mib if gpu.last else 0
        gpu.last = DeviceSample(gpu.info.id, free_mib, stale=True, lost=lost)
        if self._retry_at is None:
            self._retry_at = self._clock() + self._retry_after_s

    def _reinitialise(self) -> None:
        if self._retry_at is None or self._clock() < self._retry_at:
            return
        self._retry_after_s = min(2 * self._retry_after_s, RETRY_MAX_S)
        self._retry_at = self._clock() + self._retry_after_s
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            log.debug("nvml.shutdown_failed")  # NVML was not initialised
        try:
            self._nvml.nvmlInit()
            for gpu in self._gpus:
                gpu.handle = self._nvml.nvmlDeviceGetHandleByUUID(gpu.info.uuid or "")
        except self._nvml.NVMLError as error:
            log.debug("nvml.init_failed", reason=str(error))


def _bytes_of(listed: Listed | None, tree: frozenset[int]) -> int | None:
    """The bytes of a worker's processes on the GPU; None: the list doesn't show all."""
    sizes = [(listed or {})[pid] for pid in tree if pid in (listed or {})]
    known = [size for size in sizes if size is not None]
    return sum(known) if sizes and len(known) == len(sizes) else None


def _device_info(gpu: DeviceFound, margin_mib: int | None, driver: str) -> DeviceInfo:
    margin_mib = default_margin_mib(gpu.total_mib) if margin_mib is None else margin_mib
    device = DeviceId(CUDA.device_id(gpu.index))
    return DeviceInfo(
        device, CUDA, gpu.name, gpu.total_mib, margin_mib, gpu.index, gpu.uuid, driver, gpu.capability, gpu.pci
    )


def _decoded(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
