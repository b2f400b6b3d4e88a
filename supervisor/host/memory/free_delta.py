"""A loading worker's use, derived from the fall of its device's free memory.

For drivers whose process list doesn't show our workers: another pid namespace, an empty list, no figures. The last free
memory before a worker appeared is its baseline. The fall since then is its use, up to the first reading at which it no
longer loads. If another of our workers starts or ends meanwhile, the use is unknown. Memory that other programs take or free
meanwhile counts as the worker's, since nothing distinguishes the two.
"""

from __future__ import annotations

from collections.abc import Mapping

from supervisor.host.memory.memory import WorkerKey


class FreeDelta:
    """The account of one device. MiB throughout."""

    def __init__(self) -> None:
        self._free: int | None = None
        self._used: dict[WorkerKey, int | None] = {}
        self._loading: WorkerKey | None = None
        self._baseline = 0

    def update(self, free_mib: int, holders: Mapping[WorkerKey, bool]) -> dict[WorkerKey, int | None]:
        """Add a reading, and return each holder's use, or None. `holders`: all workers on the device, and whether each loads."""
        arrived = [key for key in holders if key not in self._used]
        left = [key for key in self._used if key not in holders]
        for key in left:
            del self._used[key]
        if self._loading in left:
            self._loading = None
        elif self._loading is not None and (arrived or left):
            self._used[self._loading] = None
            self._loading = None
            self._free = None  # a new worker has no baseline: that would include the other worker's load
        for key in arrived:
            self._used[key] = None
        if len(arrived) == 1 and not left and self._free is not None:
            self._loading, self._baseline = arrived[0], self._free
        if self._loading is not None:
            self._used[self._loading] = max(0, self._baseline - free_mib)
            if not holders[self._loading]:
                self._loading = None
        self._free = free_mib
        return dict(self._used)
