"""The facts that decide which build of a program computes on this machine's GPU. Starts no vendor's program."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from runtimes.machine import Gpu, Machine, Vendor, Version, Vulkan
from supervisor.host.memory.amd import AmdDriver
from supervisor.host.memory.drm import sys_folder
from supervisor.host.memory.memory import DriverUnavailableError
from supervisor.host.memory.nvml import NvmlSession
from supervisor.host.memory.vulkan import VulkanDriver

VENDORS: Final[Mapping[str, Vendor]] = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
_TITLES: Final[Mapping[Vendor, str]] = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}
DISPLAY: Final = ("0x03", "0x12")
"""Classes of PCI devices that compute: displays, and accelerators without one."""
SOFTWARE: Final = "lvp_"
"""Mesa's driver that computes on the processor."""


def loads(library: str) -> bool:
    """Does the system's loader find this library? Loads it into this process."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def look(root: Path | None = None, resolves: Callable[[str], bool] = loads) -> Machine:
    """Collect the facts. `root` stands for `/`. Blocks, up to seconds where a GPU sleeps."""
    sys = root / "sys" if root is not None else sys_folder()
    dev, root = sys.with_name("dev"), root or Path("/")
    found = {gpu.pci: gpu for gpu in _on_bus(sys)}
    driver = cuda = None
    try:
        session = NvmlSession()
        driver, cuda = session.driver, session.cuda()
        for one in session.find():
            pci = one.pci or f"nvidia {one.index}"
            known = found.get(pci, Gpu("nvidia", pci))
            found[pci] = replace(known, name=one.name, capability=one.capability)
    except DriverUnavailableError:
        pass
    for kernel in (AmdDriver, VulkanDriver):  # AmdDriver calls unusable the GPUs that only VulkanDriver can use
        with contextlib.suppress(DriverUnavailableError):
            for one in kernel(sys).find():
                if one.pci in found:
                    why = one.unusable or one.only_listed or ""
                    found[one.pci] = replace(found[one.pci], name=one.name, unusable=why)
    renders = sorted(dev.glob("dri/renderD*"))
    vulkan = Vulkan(resolves("libvulkan.so.1"), tuple(_vulkan_drivers(root)), any(map(_can_open, renders)))
    gpus = tuple(found[pci] for pci in sorted(found))
    return Machine(platform.machine(), glibc(), gpus, driver, cuda, vulkan)


def _on_bus(sys: Path) -> Iterator[Gpu]:
    for folder in sys.glob("bus/pci/devices/*"):
        vendor = VENDORS.get(_read_text(folder / "vendor"))
        if vendor is not None and _read_text(folder / "class").startswith(DISPLAY):
            name = (
                _read_text(folder / "product_name")
                or f"{_TITLES[vendor]} GPU {_read_text(folder / 'device').removeprefix('0x')}"
            )
            driver = folder / "driver"
            yield Gpu(vendor, folder.name, name, driver=driver.resolve().name if driver.exists() else "")


def _vulkan_drivers(root: Path) -> Iterator[str]:
    named = os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES")
    folders = ("usr/share", "usr/local/share", "etc")
    places = (
        map(Path, named.split(":"))
        if named
        else (file for folder in folders for file in sorted((root / folder / "vulkan/icd.d").glob("*.json")))
    )
    yield from (path.name for path in places if path.is_file() and not path.name.startswith(SOFTWARE))


def _can_open(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def glibc() -> Version | None:
    """The version of glibc; None: the C library is another one."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):  # musl has none
        return None
    major, _, minor = version.partition(".")
    return (int(major), int(minor)) if name == "glibc" and major.isdigit() and minor.isdigit() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
