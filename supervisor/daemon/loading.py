"""Loading and unloading for operators, with overrides.

Overrides last until an unload, a change of the model's configuration, or the daemon's end.

They change two parts within one turn of the loop, so that both agree about every start: the fleet (how to start the next
worker) and the core (the footprint; a running worker with another definition is replaced).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from pydantic import JsonValue

from supervisor.catalog.models.fitting import placement_problem
from supervisor.catalog.models.overrides import Override, overridden, renamed
from supervisor.catalog.models.sources import is_missing
from supervisor.core.events import LoadRequested, Respecified, UnloadRequested
from supervisor.core.types import ModelId, ModelSpec
from supervisor.daemon.configuration.rechecking import recheck
from supervisor.daemon.daemon import Daemon
from supervisor.errors import InvalidRequestError, UnavailableError


async def load(
    daemon: Daemon, model: ModelId, overrides: Mapping[str, JsonValue] | None, requested_name: str | None = None
) -> None:
    """Load the model and return when it is ready. `overrides` replace the present ones (empty: remove all); None keeps them.

    Errors call the model `requested_name`.
    Raises InvalidRequestError for invalid overrides, UnavailableError if the model can't be loaded.
    """
    if daemon.catalog.models[model].troubles:
        await recheck(daemon, (model,))
    if overrides:
        await _apply_overrides(daemon, model, overrides, requested_name or model)
    elif overrides is not None and (spec := _remove_overrides(daemon, model)) is not None:
        daemon.engine.post(Respecified(spec))
    await daemon.engine.load(model, requested_name)


async def unload(daemon: Daemon, model: ModelId, requested_name: str | None = None, *, force: bool) -> None:
    """Unload the model, drop its overrides, and return when its memory is back."""
    await daemon.engine.unload(model, requested_name, UnloadRequested(model, force, _remove_overrides(daemon, model)))


def ask_load(daemon: Daemon, model: ModelId) -> None:
    """Begin to load the model and return."""
    daemon.engine.post(LoadRequested(model))


async def override(
    daemon: Daemon, model: ModelId, values: Mapping[str, JsonValue], check: Callable[[ModelSpec], None]
) -> None:
    """Add to the model's overrides: a running worker with other overrides is replaced.

    Raises InvalidRequestError, UnavailableError, and any error of `check`, which gets the new specification.
    """
    before = daemon.fleet.override_of(model)
    await _apply_overrides(daemon, model, {**({} if before is None else before.values), **values}, model, check)


def ask_unload(daemon: Daemon, model: ModelId) -> None:
    """Begin to unload the model, drop its overrides and return."""
    daemon.engine.post(UnloadRequested(model, spec=_remove_overrides(daemon, model)))


async def _apply_overrides(
    daemon: Daemon,
    model: ModelId,
    values: Mapping[str, JsonValue],
    requested_name: str,
    check: Callable[[ModelSpec], None] | None = None,
) -> None:
    configured = daemon.catalog.models[model]
    runtimes_dir = daemon.catalog.server.runtimes_dir
    learned = daemon.learned()
    own = renamed(configured, values)

    def prepare() -> Override:
        changed = overridden(configured, own, runtimes_dir=runtimes_dir)
        _ = changed.capabilities  # read here, off the loop, for the views
        return Override(changed, own, changed.spec(learned), configured.spec(learned))

    override = await asyncio.to_thread(prepare)
    if daemon.catalog.models.get(model) is not configured:
        raise UnavailableError(f"The configuration was reloaded while {requested_name} was looked at; try again.")
    # Don't stop the running worker for a worker that fits nowhere.
    found = placement_problem(override.spec, [device.spec for device in daemon.engine.devices()])
    if found is not None:
        message = f"With these overrides {requested_name} has no place here: {found[1]}."
        raise InvalidRequestError(message, code="invalid_override", param="overrides")
    if check is not None:
        check(override.spec)
    daemon.fleet.override(model, override)
    daemon.engine.post(Respecified(override.spec))


def _remove_overrides(daemon: Daemon, model: ModelId) -> ModelSpec | None:
    """Remove the model's overrides. Returns its specification without them, for the core in the same turn; None: it had none."""
    override = daemon.fleet.override_of(model)
    daemon.fleet.override(model, None)
    return None if override is None else override.base


async def may_pull(daemon: Daemon, model: ModelId) -> bool:
    """Whether files of the model are missing that a client may have fetched."""
    server, configured, status = daemon.catalog.server, daemon.catalog.models[model], daemon.engine.model(model)
    if not server.allow_pull or configured.config.source is None or (status is not None and status.has_worker):
        return False
    problems = await asyncio.to_thread(configured.adapter.check, configured.config, runtimes_dir=server.runtimes_dir)
    return any(is_missing(configured.config, problem) for problem in problems)
