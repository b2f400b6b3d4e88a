"""The kinds of devices that models run on. All differences between kinds are here, except how to read a device's memory,
which is in supervisor/host/memory/devices.py.

A new kind is an entry of `KINDS` and a driver for it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """One kind of device. `name` is its name in configuration files and in the API."""

    name: str
    accelerator: str  # its name in libraries: cpu, cuda
    noun: str  # for people, as the next
    vendor: str = ""
    prefix: str = ""  # the devices are called `prefix` + index; host memory, of which there is one, by its name
    variable: str | None = None  # lists the devices that a process may see
    settings: Mapping[str, str] = field(
        default_factory=dict, hash=False
    )  # further variables, so that indices mean the same everywhere
    returns_at_exit: bool = False  # a process's memory is back before its exit can be seen
    takes_whole: bool = False  # never one of several devices that share a model

    @property
    def accelerates(self) -> bool:
        """Is it an accelerator: any device except host memory?"""
        return self != HOST

    @property
    def build(self) -> str:
        """The name of library builds for this kind: cpu, cuda, rocm."""
        return self.name if self.accelerates else self.accelerator

    def device_id(self, index: int | None = None) -> str:
        """The device's name in models and in the API."""
        return f"{self.prefix}{index}" if self.accelerates else self.name


HOST: Final = DeviceKind("host", "cpu", "host memory", returns_at_exit=True, takes_whole=True)
CUDA: Final = DeviceKind(
    "cuda",
    "cuda",
    "GPU",
    vendor="NVIDIA",
    prefix="gpu",
    variable="CUDA_VISIBLE_DEVICES",
    settings={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},  # else an index means another card than NVML's
)

ROCM: Final = DeviceKind(
    "rocm",
    "cuda",  # torch and llama.cpp on ROCm call it so, too
    "GPU",
    vendor="AMD",
    prefix="amd",
    variable="ROCR_VISIBLE_DEVICES",
)

VULKAN: Final = DeviceKind("vulkan", "vulkan", "GPU", vendor="Intel", prefix="vk")  # and AMD's without ROCm's driver

KINDS: Final[dict[str, DeviceKind]] = {kind.name: kind for kind in (HOST, CUDA, ROCM, VULKAN)}


@dataclass(frozen=True, slots=True)
class DeviceWanted:
    """A device that the configuration lists by `uuid` (a unique prefix is enough) or by `index`; host memory has neither."""

    kind: DeviceKind
    index: int | None = None
    uuid: str | None = None
    budget_mib: int | None = None  # of host memory; None: 80 % of all
    margin_mib: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """A device that a worker runs on. `index` and `uuid` are None if there is only one device of its kind.

    `capability` is CUDA's compute capability, `pci` the address on the PCI bus; None: unknown, or meaningless for the kind.
    """

    id: str
    kind: DeviceKind
    index: int | None = None
    uuid: str | None = None
    capability: tuple[int, int] | None = None
    pci: str | None = None


def visibility(devices: Iterable[DeviceAssignment]) -> dict[str, str]:
    """Environment variables that limit a worker to these devices, for every kind."""
    given = tuple(devices)
    env: dict[str, str] = {}
    for kind in KINDS.values():
        mine = [device for device in given if device.kind == kind]
        if kind.variable is not None:
            env[kind.variable] = ",".join(device.uuid or str(device.index or 0) for device in mine)
            env |= kind.settings if mine else {}
    return env


def visibility_variables() -> frozenset[str]:
    """The variables that only llmux sets."""
    return frozenset(kind.variable for kind in KINDS.values() if kind.variable is not None)
