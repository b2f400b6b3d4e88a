"""Which accelerator an environment should be built for on this machine, without loading a library that computes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from supervisor.io.memory import DriverUnavailableError
from supervisor.io.nvml import NvmlSession
from supervisor.io.recipe import Device

AMD_NODES: Final = Path("/sys/class/kfd/kfd/topology/nodes")


def detect() -> Device:
    """`cuda` where NVIDIA's driver shows a GPU, `rocm` where AMD's does, else `cpu`. Takes seconds where a GPU sleeps."""
    with contextlib.suppress(DriverUnavailableError):
        if NvmlSession().find():
            return "cuda"
    return "rocm" if amd_gpus(AMD_NODES) else "cpu"


def amd_gpus(nodes: Path) -> int:
    """How many the kernel's AMD driver shows; processors are nodes too, without a GPU's number."""
    ids = []
    for node in nodes.glob("*/gpu_id"):
        with contextlib.suppress(OSError):
            ids.append(node.read_text(encoding="ascii").strip())
    return sum(gpu not in ("", "0") for gpu in ids)
