"""Which GPUs a worker sees: only those that the supervisor assigned."""

from __future__ import annotations

from collections.abc import Sequence

from runtimes.base import DeviceAssignment


def visible_devices(devices: Sequence[DeviceAssignment]) -> dict[str, str]:
    """Environment of a worker on these devices; on the host it sees no GPU."""
    if devices[0].kind == "host":
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(device.uuid or str(device.index or 0) for device in devices),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # otherwise an index names another GPU than NVML's
    }
