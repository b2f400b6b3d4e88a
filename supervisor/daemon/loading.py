"""Loading and unloading as operators ask for it, with settings that last until an unload, a change of the model's configuration or the daemon's end.

An override is told twice, to the workers (how the next one is started) and to the core (what it takes, and that a running
one of another definition has to be replaced), in one turn of the loop, so that the two never disagree about a start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pydantic import JsonValue

from supervisor.catalog.catalog import misplaced
from supervisor.catalog.overrides import Override, overridden
from supervisor.core.events import LoadAsked, Respecified, UnloadAsked
from supervisor.core.types import ModelId, ModelSpec
from supervisor.daemon.daemon import Context
from supervisor.errors import InvalidRequestError, UnavailableError


async def load(context: Context, model: ModelId, overrides: Mapping[str, JsonValue] | None) -> None:
    """Load it and return when it is ready. `overrides` replace those it has (empty: none any more); None keeps them.

    Raises InvalidRequestError for overrides that can't be, UnavailableError when it can't be loaded.
    """
    if overrides:
        await _override(context, model, overrides)
    elif overrides is not None:
        _drop(context, model)
    await context.engine.load(model)


async def unload(context: Context, model: ModelId, *, force: bool) -> None:
    """Unload it, drop its overrides, and return when its memory is back."""
    _drop(context, model)
    await context.engine.unload(model, force=force)


def ask_load(context: Context, model: ModelId) -> None:
    """Begin to load it."""
    context.engine.post(LoadAsked(model))


def ask_unload(context: Context, model: ModelId) -> None:
    """Begin to unload it, and drop its overrides."""
    _drop(context, model)
    context.engine.post(UnloadAsked(model))


async def _override(context: Context, model: ModelId, values: Mapping[str, JsonValue]) -> None:
    configured = context.catalog.models[model]
    runtimes_dir = context.catalog.server.runtimes_dir
    learned = context.learned()

    def prepare() -> Override:
        changed = overridden(configured, values, runtimes_dir=runtimes_dir)
        _ = changed.capabilities  # read here, off the loop, for the views
        return Override(changed, dict(values), changed.spec(learned), configured.spec(learned))

    override = await asyncio.to_thread(prepare)
    if context.catalog.models.get(model) is not configured:
        raise UnavailableError(f"The configuration was reloaded while {model} was looked at; try again.")
    _refuse_too_large(context, override.spec)
    context.workers.override(model, override)
    context.engine.post(Respecified(override.spec))


def _drop(context: Context, model: ModelId) -> None:
    override = context.workers.override_of(model)
    if override is not None:
        context.workers.override(model, None)
        context.engine.post(Respecified(override.base))


def _refuse_too_large(context: Context, spec: ModelSpec) -> None:
    """The running worker must not go for one that fits nowhere."""
    found = misplaced(spec, context.engine.journal.scheduler.state.ledger.devices())
    if found is not None:
        message = f"With these overrides {spec.id} has no place here: {found[1]}."
        raise InvalidRequestError(message, code="invalid_override", param="overrides")
