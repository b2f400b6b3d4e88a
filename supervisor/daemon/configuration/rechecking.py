"""Periodically rechecks models that can't run on this machine, until they can run, without a reload.

A missing file is no mistake of the configuration: a disk may be mounted late, or a file server be down for a while. Once the
model can run again, its memory, context and capabilities are read from its files again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from supervisor.catalog import Catalog
from supervisor.catalog.catalog import Learned
from supervisor.catalog.keys import Keyring
from supervisor.catalog.models.fitting import specs_for_devices
from supervisor.core.events import Configured
from supervisor.core.types import CrashClass, DeviceSpec, ModelId, ModelSpec
from supervisor.daemon.daemon import Daemon

log = structlog.get_logger("llmux.models")

INTERVAL_S: Final = 2.0


def apply(daemon: Daemon, catalog: Catalog, keyring: Keyring, specs: Sequence[ModelSpec]) -> None:
    """Put a catalog and keyring in force, in one turn of the loop. Keeps operators' overrides of unchanged models."""
    daemon.fleet.models = catalog.models
    daemon.fleet.limits = catalog.limits
    daemon.configure(catalog, keyring)
    kept = tuple(_with_override(daemon, spec) for spec in specs)
    devices = tuple(device.spec for device in daemon.sampler.devices())
    daemon.engine.post(Configured(kept, devices, catalog.limits.limits(), catalog.policy))


def _with_override(daemon: Daemon, spec: ModelSpec) -> ModelSpec:
    override = daemon.fleet.override_of(spec.id)
    if override is None:
        return spec
    daemon.fleet.override(spec.id, replace(override, base=spec))
    return override.spec


async def watch(daemon: Daemon) -> None:
    """Recheck models with missing files, forever."""
    while True:
        await asyncio.sleep(INTERVAL_S)
        await recheck(daemon, _models_to_check(daemon))


async def recheck(daemon: Daemon, names: Sequence[ModelId]) -> None:
    """Read the files of these models, and update the models. Does nothing if the configuration changes meanwhile."""
    catalog = daemon.catalog
    devices = [device.spec for device in daemon.sampler.devices()]
    found = (
        await asyncio.to_thread(partial(_updated_models, catalog, names, devices, daemon.learned())) if names else None
    )
    if found is None or daemon.catalog is not catalog or daemon.engine.queue().is_stopping:
        return
    after, specs = found
    for model in after.models.values():
        if model.troubles != catalog.models[model.id].troubles:
            log.info("model.looked_at", model=model.id, trouble=model.trouble or None)
    apply(daemon, after, daemon.keyring, specs)


def _models_to_check(daemon: Daemon) -> list[ModelId]:
    crashed = {each.id for each in daemon.engine.figures() if each.crash and each.crash.kind is CrashClass.UNUSABLE}
    return [model.id for model in daemon.catalog.models.values() if model.troubles or model.id in crashed]


def _updated_models(
    catalog: Catalog, names: Sequence[ModelId], devices: Sequence[DeviceSpec], learned: Learned
) -> tuple[Catalog, tuple[ModelSpec, ...]] | None:
    """The catalog and specifications with updated models; None: no change. Blocks on files."""
    models = catalog.models
    changed = {
        name: models[name].refreshed() for name in names if models[name].find_troubles() != models[name].troubles
    }
    if not changed:
        return None
    for model in changed.values():
        _ = model.capabilities  # for the views
    after = catalog.of({**models, **changed})
    return after, specs_for_devices(after, devices, learned)
