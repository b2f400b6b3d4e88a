"""A scripted tree of the files that AMD's kernel driver shows: `/sys`, `/proc` and `/dev`, written below a folder of a test.

The names, formats and units are the kernel's (amdgpu, amdkfd). A test changes the world by writing it again, and makes it
misbehave by removing or overwriting single files.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

MIB = 1 << 20
PROCESSOR = {"gpu_id": "0", "name": "", "properties": "cpu_cores_count 16\nsimd_count 0\n"}


class Amd:
    """`sys` and `proc` are what a driver is given; `dev`, beside `sys`, has the devices that workers would open."""

    def __init__(self, folder: Path) -> None:
        self.sys, self.proc, self.dev = folder / "sys", folder / "proc", folder / "dev"
        (self.dev / "dri").mkdir(parents=True)
        (self.dev / "kfd").touch()
        self.nodes = self.sys / "class/kfd/kfd/topology/nodes"
        self._node(0, PROCESSOR)

    def gpu(
        self, place: int, *, vram_mib: int, gtt_mib: int = 8192, apu: bool = False, name: str = "", unique: int = 0
    ) -> Path:
        """A GPU as node `place` (from 1); returns the folder of its figures."""
        minor = 127 + place
        (self.dev / "dri" / f"renderD{minor}").touch()
        told = f"simd_count 128\nvendor_id 4098\ndrm_render_minor {minor}\nunique_id {unique}\n"
        self._node(place, {"gpu_id": f"{4000 + place}", "name": f"gfx{place}", "properties": told})
        folder = self.sys / f"devices/pci0000:00/{self.address(place)}"
        folder.mkdir(parents=True, exist_ok=True)
        link = self.sys / f"class/drm/renderD{minor}/device"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        (folder / "product_name").write_text(f"{name}\n")
        (folder / "gpu_metrics").write_bytes(bytes([0x78, 0, 3 if apu else 1, 0]) + bytes(116))
        (folder / "gpu_busy_percent").write_text("25\n")
        (folder / "mem_info_vram_total").write_text(f"{vram_mib * MIB}\n")
        (folder / "mem_info_gtt_total").write_text(f"{gtt_mib * MIB}\n")
        self._driver(folder, "amdgpu", "0x1002")
        self.take(place)
        return folder

    def intel(self, place: int, *, driver: str = "xe", device: str = "0xe20b") -> Path:
        """One of Intel's, which has no figures in files; returns its folder."""
        minor = 127 + place
        (self.dev / "dri" / f"renderD{minor}").touch()
        folder = self.sys / f"devices/pci0000:00/{self.address(place)}"
        folder.mkdir(parents=True)
        link = self.sys / f"class/drm/renderD{minor}/device"
        link.parent.mkdir(parents=True)
        link.symlink_to(folder)
        self._driver(folder, driver, "0x8086")
        (folder / "device").write_text(f"{device}\n")
        return folder

    def _driver(self, folder: Path, driver: str, vendor: str) -> None:
        place = self.sys / "bus/pci/drivers" / driver
        place.mkdir(parents=True, exist_ok=True)
        (folder / "driver").unlink(missing_ok=True)
        (folder / "driver").symlink_to(place)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text("0x030000\n")
        on_bus = self.sys / "bus/pci/devices" / folder.name
        on_bus.parent.mkdir(parents=True, exist_ok=True)
        on_bus.unlink(missing_ok=True)
        on_bus.symlink_to(folder)

    def take(self, place: int, *, vram_mib: int = 0, gtt_mib: int = 0) -> None:
        """So much is taken of it, by whomever."""
        folder = self.sys / f"devices/pci0000:00/{self.address(place)}"
        (folder / "mem_info_vram_used").write_text(f"{vram_mib * MIB}\n")
        (folder / "mem_info_gtt_used").write_text(f"{gtt_mib * MIB}\n")

    def lose(self, place: int) -> None:
        """It is not on the bus any more."""
        shutil.rmtree(self.sys / f"devices/pci0000:00/{self.address(place)}")

    def client(self, pid: int, descriptor: int, place: int, client: int, **kib: int) -> None:
        """A descriptor of a process, open on a GPU, with what its client holds: `vram` and `gtt`, in KiB."""
        fields: Mapping[str, object] = {
            "pos": 0,
            "drm-driver": "amdgpu",
            "drm-pdev": self.address(place),
            "drm-client-id": client,
            **{f"drm-memory-{kind}": f"{size} KiB" for kind, size in kib.items()},
        }
        file = self.proc / f"{pid}/fdinfo/{descriptor}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{name}:\t{value}\n" for name, value in fields.items()))

    @staticmethod
    def address(place: int) -> str:
        """On the PCI bus."""
        return f"0000:{place:02x}:00.0"

    def _node(self, place: int, files: Mapping[str, str]) -> None:
        folder = self.nodes / str(place)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
