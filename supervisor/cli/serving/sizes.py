"""The sizes of a configuration's models on this machine, for commands that run without a daemon: `config check`, `doctor`.

Sizes and warnings are the same as the daemon's: they follow from this machine's devices and from measurements of daemons.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from supervisor.catalog import Catalog, check_devices
from supervisor.catalog.catalog import Learned
from supervisor.catalog.models.fitting import specs_for_devices
from supervisor.core.types import DeviceId, DeviceSpec, ModelSpec
from supervisor.daemon.configuration.sizes import warnings_of
from supervisor.errors import ConfigError
from supervisor.host.memory.devices import open_sampler
from supervisor.host.store.store import FOOTPRINTS, FootprintKey, learned_footprints

if TYPE_CHECKING:
    from supervisor.host.memory.memory import DeviceInfo


@dataclass(frozen=True, slots=True)
class OnThisMachine:
    """The configuration, sized for this machine's devices. `problems`: reasons for which `serve` would refuse to start.

    `troubles`: reasons why single models can't run here, each with its place in the file.
    """

    catalog: Catalog
    devices: tuple[DeviceSpec, ...]
    specs: tuple[ModelSpec, ...]
    problems: tuple[str, ...]
    troubles: tuple[str, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the models' memory, each with the model's name."""
        return tuple(f"{model}: {warning}" for model, warning in warnings_of(self.catalog, self.specs, self.devices))

    @property
    def sizes(self) -> dict[str, str]:
        """Context and slots by model, in words."""
        return {str(model.id): str(model.sizing) for model in self.catalog.models.values() if model.sizing is not None}


def on_this_machine(catalog: Catalog) -> OnThisMachine:
    """Examine the devices and the models' files. Takes seconds where a GPU has to wake up; never fails."""
    try:
        devices = asyncio.run(open_sampler(catalog.wanted_devices, named_by=catalog.devices_variable)).devices
    except ConfigError as error:
        return OnThisMachine(catalog, (), (), error.problems, _model_troubles(catalog))
    known = tuple(device.spec for device in devices)
    sized = catalog.sized(known)
    specs = specs_for_devices(sized, known, _learned_figures(catalog, devices))
    placeless = check_devices(sized, known, sized.model_specs())
    return OnThisMachine(sized, known, specs, (), (*_model_troubles(catalog), *map(str, placeless)))


def _model_troubles(catalog: Catalog) -> tuple[str, ...]:
    return tuple(str(trouble) for model in catalog.models.values() for trouble in model.troubles)


def _learned_figures(catalog: Catalog, devices: tuple[DeviceInfo, ...]) -> Learned:
    names = {device.key: DeviceId(device.id) for device in devices}
    learned, raised = learned_footprints(catalog.server.state_dir / FOOTPRINTS)
    return Learned(named(learned, names), raised=named(raised, names))


def named(found: Mapping[FootprintKey, int], names: Mapping[str, DeviceId]) -> dict[tuple[str, DeviceId], int]:
    """The stored figures for the devices of this machine. `names`: a device's key in the store → its id."""
    return {(model, names[key]): mib for (model, key), mib in found.items() if key in names}
