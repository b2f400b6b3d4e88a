"""One NVIDIA GPU as its driver sees it, read past the daemon."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from supervisor.host.memory.memory import DeviceFound, DriverUnavailableError
from supervisor.host.memory.nvml import NvmlSession

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """The first GPU that can be used. `nvml` is the driver's module."""

    found: DeviceFound
    driver: str
    nvml: Any = field(repr=False)

    @property
    def id(self) -> str:
        """What llmux calls it."""
        return f"gpu{self.found.index}"

    @property
    def title(self) -> str:
        """For people: its name, its memory, its driver."""
        return f"{self.found.name}, {self.found.total_mib} MiB, driver {self.driver}"

    def free_mib(self) -> int:
        """What nobody has."""
        return int(self.nvml.nvmlDeviceGetMemoryInfo(self.found.handle).free) // MIB

    def pids(self) -> set[int]:
        """Processes with a context on it."""
        return {process.pid for process in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.found.handle)}


def first() -> Card | str:
    """The first GPU, or why there is none."""
    try:
        session = NvmlSession()
        usable = [gpu for gpu in session.find() if not gpu.unusable]
    except DriverUnavailableError as error:
        return f"no NVIDIA GPU: {error}"
    return Card(usable[0], session.driver, session.nvml) if usable else "no NVIDIA GPU that can be used"
