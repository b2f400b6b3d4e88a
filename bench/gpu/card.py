"""One NVIDIA GPU, read through its driver without the daemon."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from supervisor.host.memory.memory import DeviceFound, DriverUnavailableError
from supervisor.host.memory.nvml import NvmlSession

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """The first usable GPU. `nvml` is the driver's module."""

    found: DeviceFound
    driver: str
    nvml: Any = field(repr=False)

    @property
    def id(self) -> str:
        """The GPU's id in llmux."""
        return f"gpu{self.found.index}"

    @property
    def title(self) -> str:
        """The GPU's name, memory and driver, for people."""
        return f"{self.found.name}, {self.found.total_mib} MiB, driver {self.driver}"

    def free_mib(self) -> int:
        """The free memory, in MiB."""
        return int(self.nvml.nvmlDeviceGetMemoryInfo(self.found.handle).free) // MIB

    def pids(self) -> set[int]:
        """The processes with a context on the GPU."""
        return {process.pid for process in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.found.handle)}


def first() -> Card | str:
    """The first GPU, or the reason why there is none."""
    try:
        session = NvmlSession()
        usable = [gpu for gpu in session.find() if not gpu.unusable]
    except DriverUnavailableError as error:
        return f"no NVIDIA GPU: {error}"
    return Card(usable[0], session.driver, session.nvml) if usable else "no NVIDIA GPU that can be used"
