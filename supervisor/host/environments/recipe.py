"""The packages of a runtime's environment, read from the locks in the runtime's folder.

    requirements.lock           packages for every device
    requirements-<device>.lock  packages that only this device needs
    requirements-torch.lock     torch in the default index's build, with packages that only that build needs
    requirements-build.lock     packages compiled here, for the devices that the runtime has a `Build` for

All are pinned by hash. Only torch has a build for each kind of device. The build in its lock is for CUDA. Other devices,
and CUDA where UV_TORCH_BACKEND names another one, get another build of the same version: from a folder of wheels that pip's
or uv's settings name, else from the index that uv chooses.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, Literal, get_args

from runtimes.build import Archives, Build
from runtimes.pins import pins

Device = Literal["cpu", "cuda", "rocm", "vulkan"]

DEVICES: Final[tuple[Device, ...]] = get_args(Device)
BUILD_TAGS: Final[Mapping[str, str]] = {"cpu": r"cpu", "cuda": r"cu\d+", "rocm": r"rocm[\d.]+"}
"""The tags of torch's builds, by device; torch has no build for other devices."""


@dataclass(frozen=True)
class Recipe:
    """The packages of one runtime's environment, and the steps to install them."""

    name: str
    lock: Path
    prune: tuple[str, ...] = ()  # patterns below site-packages of harmful files, removed after the installation
    claims: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # device → name==version to declare as installed
    builds: Mapping[str, Build] = field(default_factory=dict)  # device → how its program is compiled
    archives: Archives | None = None  # the archives of its project's releases

    @cached_property
    def torch_lock(self) -> Path | None:
        """The lock of torch; None where the runtime needs no torch."""
        path = self.lock.with_name("requirements-torch.lock")
        return path if path.exists() else None

    @cached_property
    def torch(self) -> str | None:
        """The version of torch, without a build's tag."""
        if self.torch_lock is None:
            return None
        found = re.search(r"^torch===([^\s+]+)", self.torch_lock.read_text(encoding="utf-8"), re.MULTILINE)
        assert found is not None, f"{self.torch_lock} doesn't pin torch"
        return found.group(1)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that the environment can be made for, by its locks; empty where all devices get the same one."""
        own = {device for device in DEVICES if self._device_lock(device).exists() or device in self.builds}
        torch = set(BUILD_TAGS) if self.torch is not None else set()
        there = {"cpu", *own, *torch} if own or torch else set()
        return tuple(device for device in DEVICES if device in there and any(map(pinned, self.locks(device))))

    @property
    def varies(self) -> bool:
        """Does the environment depend on the device?"""
        return bool(self.devices)

    @property
    def build_lock(self) -> Path:
        """The lock of compiled packages, where there are any."""
        return self.lock.with_name("requirements-build.lock")

    def usual(self, detected: Device) -> Device:
        """The default device of an environment: never one for which a program would be compiled."""
        return detected if detected in self.devices and detected not in self.builds else "cpu"

    def locks(self, device: Device | None) -> tuple[Path, ...]:
        """The locks whose packages this device gets by hash; torch's lock only if it has the wanted build."""
        found = [self.lock]
        if device is not None and self._device_lock(device).exists():
            found.append(self._device_lock(device))
        if self.torch_lock is not None and device == "cuda" and torch_backend(device) is None:
            found.append(self.torch_lock)
        return tuple(found)

    def archive_lock(self, kind: str) -> Path | None:
        """The lock of packages that an archive of this kind needs from the package index; None: it needs none."""
        path = self.lock.with_name(f"requirements-{kind}.lock")
        return path if path.exists() else None

    def digest(self) -> str:
        """The digest of all packages for every device; an environment with another digest is outdated."""
        facts = (self.prune, sorted(self.claims.items()), *([sorted(self.builds)] if self.builds else []))
        hashed = hashlib.sha256(repr(facts).encode())
        for path in sorted(self.lock.parent.glob("requirements*.lock")):
            hashed.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
        return hashed.hexdigest()[:16]

    def _device_lock(self, device: Device) -> Path:
        return self.lock.with_name(f"requirements-{device}.lock")


def pinned(lock: Path) -> frozenset[str]:
    """The names of the packages of a lock."""
    return frozenset(pin.partition("==")[0] for pin in pins([lock]))


def torch_backend(device: Device) -> str | None:
    """The build that UV_TORCH_BACKEND names, if it is for this device."""
    named = os.environ.get("UV_TORCH_BACKEND", "")
    return named if device in BUILD_TAGS and re.fullmatch(BUILD_TAGS[device], named) else None


def local_torch(version: str, device: Device, folders: Iterable[str], python: tuple[int, int]) -> str | None:
    """`version+build` of a wheel for this device and Python in one of the folders; URLs are skipped."""
    tag = f"cp{python[0]}{python[1]}"
    wanted = re.compile(
        rf"torch-({re.escape(version)}\+{BUILD_TAGS[device]})-{tag}-{tag}-\S*{re.escape(platform.machine())}\.whl"
    )
    for folder in folders:
        path = Path(folder.removeprefix("file://"))
        for wheel in sorted(path.glob("torch-*.whl"), reverse=True):
            if (found := wanted.fullmatch(wheel.name)) is not None:
                return found.group(1)
    return None
