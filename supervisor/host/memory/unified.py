"""One memory for processor and GPU: GB10 (DGX Spark), Jetson, AMD's APUs (Strix Halo).

GPU and programs take memory from the same pool, so there is one device with one budget, and host memory is no second device. A
worker's use is the memory that its processes have on the GPU, according to the driver, and their own memory (PSS) without
mapped files, which the kernel can drop once the weights have been copied.

    free    = min(available, budget - use of our workers), within 0 .. budget
    outside = budget - use of our workers - free: memory that others have taken out of the budget

If the driver shows no use, a worker's use is the fall of the available memory while it loads.
"""

from __future__ import annotations

from collections.abc import Mapping

from supervisor.core.events import DeviceSample
from supervisor.core.types import DeviceId
from supervisor.host.memory.free_delta import FreeDelta
from supervisor.host.memory.host_memory import HostMemory
from supervisor.host.memory.memory import MIB, HolderPids, WorkerKey, mib_up


class UnifiedMemory:
    """The pool of one device, of `budget_mib`. Blocks."""

    def __init__(self, host: HostMemory, budget_mib: int) -> None:
        self._host, self._budget_mib = host, budget_mib
        self._deltas = FreeDelta()

    def read(
        self,
        device: DeviceId,
        holders: Mapping[WorkerKey, HolderPids],
        trees: Mapping[WorkerKey, frozenset[int]],
        on_gpu: Mapping[WorkerKey, int | None],
        limit_mib: int | None = None,
    ) -> tuple[DeviceSample, dict[WorkerKey, int | None]]:
        """The free memory, and each worker's MiB. `on_gpu`: its bytes there, None: unknown. `limit_mib`: the driver's limit.

        Raises OSError when the kernel doesn't show the memory.
        """
        available_mib = self._host.available_bytes() // MIB
        deltas = self._deltas.update(available_mib, {key: holder.loading for key, holder in holders.items()})
        used: dict[WorkerKey, int | None] = {}
        for key, own in self._host.uses(trees).items():
            size = on_gpu[key]
            used[key] = deltas[key] if size is None else mib_up(size + own.total_bytes - own.file_bytes)
        left = self._budget_mib - sum(mib or 0 for mib in used.values())
        free = max(0, min(available_mib, left, *([] if limit_mib is None else [limit_mib])))
        return DeviceSample(device, free, outside_mib=max(0, left) - free), used
