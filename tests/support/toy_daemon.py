"""`llmux` on a machine with toy accelerators: a kind of device that stands here alone. Run as `python -m`.

The toys' memory is a file of JSON, `{"free_mib": [4000, 4000]}`, that $TOY_MEMORY names. A worker takes of each toy that it
may see what $TOY_MIB says.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from runtimes.device_kind import KINDS, DeviceKind
from supervisor.cli.main import main
from supervisor.core.events import DeviceSample, WorkerSample
from supervisor.core.types import DeviceId
from supervisor.host.memory.devices import DRIVERS
from supervisor.host.memory.memory import DeviceFound, DeviceInfo, DriverUnavailableError, Reading

TOY = DeviceKind(
    "toy",
    accelerator="abacus",
    noun="toy",
    vendor="Wooden",
    prefix="toy",
    variable="TOY_VISIBLE_DEVICES",
    settings={"TOY_ORDER": "LEFT_TO_RIGHT"},
    returns_at_exit=True,
)
TOTAL_MIB = 4000


class ToyDriver:
    """Finds as many toys as the file tells of."""

    def __init__(self):
        if "TOY_MEMORY" not in os.environ:
            raise DriverUnavailableError("no toys in the box")

    def find(self):
        return [DeviceFound(index, "", f"Abacus {index}", TOTAL_MIB) for index in range(len(free_mib()))]

    def reader(self, devices):
        return ToyReader(devices)


class ToyReader:
    def __init__(self, devices):
        self._devices = tuple(
            DeviceInfo(DeviceId(TOY.device_id(one.index)), TOY, one.name, one.total_mib, margin or 0, one.index)
            for one, margin in devices
        )

    def devices(self):
        return self._devices

    def read(self, holders):
        free = free_mib()
        return Reading(
            tuple(DeviceSample(one.id, free[one.index]) for one in self._devices),
            tuple(
                WorkerSample(*key, one.id, None)
                for key, held in holders.items()
                for one in self._devices
                if one.id in held.devices
            ),
        )


def free_mib():
    return json.loads(Path(os.environ["TOY_MEMORY"]).read_text())["free_mib"]


if __name__ == "__main__":
    KINDS["toy"] = TOY
    DRIVERS[TOY] = ToyDriver
    main()
