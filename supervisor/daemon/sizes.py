"""Says in the log which context and slots were chosen for each model, and what is wrong with its memory."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from supervisor.catalog import Catalog
from supervisor.catalog.catalog import memory_warnings
from supervisor.core.types import DeviceSpec, ModelSpec

log = structlog.get_logger("llmux.models")


def tell_sizes(
    catalog: Catalog, specs: Sequence[ModelSpec], devices: Sequence[DeviceSpec], before: Catalog | None = None
) -> tuple[str, ...]:
    """Log the sizes that are not as `before`, and every warning. Returns the warnings, each with its model's name."""
    warnings: list[str] = []
    for spec in specs:
        model, known = catalog.models[spec.id], before.models.get(spec.id) if before is not None else None
        if model.sizing is not None and (known is None or known.sizing != model.sizing):
            log.info("model.sized", model=spec.id, size=str(model.sizing))
        for warning in memory_warnings(model, spec, devices):
            log.warning("model.memory", model=spec.id, reason=warning)
            warnings.append(f"{spec.id}: {warning}")
    return tuple(warnings)
