"""Loading and unloading for operators, with overrides.

Overrides last until an unload, a change of the model's configuration, or the daemon's end.

They change two places within one turn of the loop, so that both agree about every start: the workers (how to start the
next one) and the core (its footprint, and that a running worker with another definition must be replaced).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from pydantic import JsonValue

from supervisor.catalog.models.fitting import misplaced
from supervisor.catalog.models.overrides import Override, overridden, renamed
from supervisor.catalog.models.sources import is_missing
from supervisor.core.events import LoadRequested, Respecified, UnloadRequested
from supervisor.core.types import ModelId, ModelSpec
from supervisor.daemon.configuration.rechecking import look_again
from supervisor.daemon.daemon import Daemon
from supervisor.errors import InvalidRequestError, UnavailableError


async def load(
    daemon: Daemon, model: ModelId, overrides: Mapping[str, JsonValue] | None, requested_name: str | None = None
) -> None:
    """Load the model and return when it is ready. `overrides` replace its overrides (empty: remove all); None keeps them.

    Errors name it as `requested_name`.
    Raises InvalidRequestError for invalid overrides, UnavailableError if the model can't be loaded.
    """
    if daemon.catalog.models[model].troubles:
        await look_again(daemon, (model,))
    if overrides:
        await _override(daemon, model, overrides, requested_name or model)
    elif overrides is not None and (spec := _dropped(daemon, model)) is not None:
        daemon.engine.post(Respecified(spec))
    await daemon.engine.load(model, requested_name)


async def unload(daemon: Daemon, model: ModelId, requested_name: str | None = None, *, force: bool) -> None:
    """Unload the model, drop its overrides, and return when its memory is back."""
    await daemon.engine.unload(model, requested_name, UnloadRequested(model, force, _dropped(daemon, model)))


def ask_load(daemon: Daemon, model: ModelId) -> None:
    """Begin to load the model and return."""
    daemon.engine.post(LoadRequested(model))


async def override(
    daemon: Daemon, model: ModelId, values: Mapping[str, JsonValue], check: Callable[[ModelSpec], None]
) -> None:
    """Add to the model's overrides: a running worker with others is replaced. Raises InvalidRequestError, UnavailableError.

    And what `check` raises of the model as it is to be.
    """
    before = daemon.fleet.override_of(model)
    await _override(daemon, model, {**({} if before is None else before.values), **values}, model, check)


def ask_unload(daemon: Daemon, model: ModelId) -> None:
    """Begin to unload the model, drop its overrides and return."""
    daemon.engine.post(UnloadRequested(model, spec=_dropped(daemon, model)))


async def _override(
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
    # The running worker must not go for one that fits nowhere.
    found = misplaced(override.spec, [device.spec for device in daemon.engine.devices()])
    if found is not None:
        message = f"With these overrides {requested_name} has no place here: {found[1]}."
        raise InvalidRequestError(message, code="invalid_override", param="overrides")
    if check is not None:
        check(override.spec)
    daemon.fleet.override(model, override)
    daemon.engine.post(Respecified(override.spec))


def _dropped(daemon: Daemon, model: ModelId) -> ModelSpec | None:
    """What it is without its overrides, which end; the core must learn of it in the same turn. None: it has none."""
    override = daemon.fleet.override_of(model)
    daemon.fleet.override(model, None)
    return None if override is None else override.base


async def may_pull(daemon: Daemon, model: ModelId) -> bool:
    """Are files of it missing that a client may have fetched?"""
    server, configured, status = daemon.catalog.server, daemon.catalog.models[model], daemon.engine.model(model)
    if not server.allow_pull or configured.config.source is None or (status is not None and status.has_worker):
        return False
    problems = await asyncio.to_thread(configured.adapter.check, configured.config, runtimes_dir=server.runtimes_dir)
    return any(is_missing(configured.config, problem) for problem in problems)
