"""Facts about this machine that decide which build of a program can compute on its GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Version = tuple[int, int]
Vendor = Literal["nvidia", "amd", "intel"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU on the PCI bus. `pci` is its address, such as 0000:01:00.0."""

    vendor: Vendor
    pci: str
    name: str = ""
    capability: Version | None = None  # CUDA's compute capability
    driver: str = ""  # the kernel's
    unusable: str = ""  # why no model is placed on it by itself


@dataclass(frozen=True, slots=True)
class Vulkan:
    """The requirements of Vulkan besides a GPU."""

    loader: bool = False  # libvulkan.so.1 is found
    drivers: tuple[str, ...] = ()  # the files that describe its drivers (ICDs), by name
    opens: bool = False  # this user may open a GPU's render node


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine. `cuda` is the newest CUDA version that NVIDIA's driver supports; None: there is no such driver."""

    processor: str = "x86_64"  # as uname says it
    glibc: Version | None = None
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: Version | None = None
    vulkan: Vulkan = Vulkan()

    def gpus_of(self, vendor: Vendor) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.vendor == vendor)


@dataclass(frozen=True, slots=True)
class Choice:
    """The kinds of builds to try, the best first; empty: only the processor computes. `reasons` are sentences for people."""

    kinds: tuple[str, ...]
    reasons: tuple[str, ...] = ()
