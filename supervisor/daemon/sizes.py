"""Says in the log which context and slots were chosen for each model, and what is wrong with its memory."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from supervisor.catalog import Catalog
from supervisor.catalog.fitting import memory_warnings
from supervisor.core.types import DeviceSpec, ModelId, ModelSpec

log = structlog.get_logger("llmux.models")

Warnings = tuple[tuple[ModelId, str], ...]


def warnings_of(catalog: Catalog, specs: Sequence[ModelSpec], devices: Sequence[DeviceSpec]) -> Warnings:
    """What is wrong with the models' memory."""
    models = catalog.models
    return tuple((spec.id, told) for spec in specs for told in memory_warnings(models[spec.id], spec, devices))


def tell_sizes(catalog: Catalog, warnings: Warnings, before: Catalog | None = None) -> None:
    """Log the warnings, and the sizes that are not as `before`."""
    for model in catalog.models.values():
        known = before.models.get(model.id) if before is not None else None
        if model.sizing is not None and (known is None or known.sizing != model.sizing):
            log.info("model.sized", model=model.id, size=str(model.sizing))
    for name, reason in warnings:
        log.warning("model.memory", model=name, reason=reason)
