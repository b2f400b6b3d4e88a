"""Which cards a worker sees: only the one that the supervisor gave it."""

from __future__ import annotations

from runtimes.base import DeviceAssignment


def visible_devices(device: DeviceAssignment) -> dict[str, str]:
    """Environment for a worker on this device; on the host it sees no card at all."""
    if device.kind == "host":
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {
        "CUDA_VISIBLE_DEVICES": device.uuid or str(device.index or 0),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # else an index means another card than NVML's
    }
