"""A loading worker's use, told from the fall of its device's free memory.

For drivers whose process list says nothing about our workers: they are in another pid namespace, or the list is empty
or without figures. The last free memory before a worker appeared is its baseline; what is missing since is its use, up
to and including the first reading at which it is no longer loading. It is only told while that worker is the only
thing that changes: when another of our workers comes or goes meanwhile it can't be told at all. What strangers take or
give back meanwhile is counted as the worker's: nothing tells the two apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from supervisor.io.memory import WorkerKey


class FreeDelta:
    """The account of one device. MiB throughout."""

    def __init__(self) -> None:
        self._free: int | None = None
        self._used: dict[WorkerKey, int | None] = {}
        self._loading: WorkerKey | None = None
        self._baseline = 0

    def update(self, free_mib: int, holders: Mapping[WorkerKey, bool]) -> dict[WorkerKey, int | None]:
        """Take a reading in. `holders`: every worker on the device, and whether it is loading. Use of each, or None."""
        arrived = [key for key in holders if key not in self._used]
        left = [key for key in self._used if key not in holders]
        for key in left:
            del self._used[key]
        if self._loading in left:
            self._loading = None
        elif self._loading is not None and (arrived or left):
            self._used[self._loading] = None
            self._loading = None
            self._free = None  # the newcomer has no baseline: the other one's load is in it
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
