"""Logs each model's context and slots, problems with its memory, and unusable files."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from supervisor.catalog import Catalog
from supervisor.catalog.models.fitting import memory_warnings, pins_warning
from supervisor.core.types import DeviceSpec, ModelId, ModelSpec

log = structlog.get_logger("llmux.models")

Warnings = tuple[tuple[ModelId, str], ...]


def warnings_of(catalog: Catalog, specs: Sequence[ModelSpec], devices: Sequence[DeviceSpec]) -> Warnings:
    """Warnings about the memory of models that can run here, and about pins that don't fit together."""
    usable = (spec for spec in specs if not spec.trouble)
    warnings = [(spec.id, text) for spec in usable for text in memory_warnings(catalog.models[spec.id], spec, devices)]
    if (pins := pins_warning(specs, devices)) is not None:
        warnings.append(pins)
    return tuple(warnings)


def log_model_sizes(catalog: Catalog, warnings: Warnings, before: Catalog | None = None) -> None:
    """Log the warnings, and the sizes and unusable files that differ from `before`."""
    for model in catalog.models.values():
        known = before.models.get(model.id) if before is not None else None
        if model.sizing is not None and (known is None or known.sizing != model.sizing):
            log.info("model.sized", model=model.id, size=str(model.sizing))
    for name, reason in warnings:
        log.warning("model.memory", model=name, reason=reason)
    for reason in catalog.unread:
        if before is None or reason not in before.unread:
            log.warning("model.unread", reason=reason)
