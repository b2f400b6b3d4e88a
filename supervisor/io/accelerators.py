"""The accelerator of this machine that environments are built for, found without loading a compute library."""

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
    """How many GPUs the kernel's AMD driver shows; the other nodes are processors, with id 0."""
    ids = []
    for node in nodes.glob("*/gpu_id"):
        with contextlib.suppress(OSError):
            ids.append(node.read_text(encoding="ascii").strip())
    return sum(gpu not in ("", "0") for gpu in ids)
