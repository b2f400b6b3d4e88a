"""Reload: read the configuration again and apply the differences.

Every check runs off the loop, before anything changes; then catalog, routes, auth, limits and the core's specifications are
replaced within one turn. A model with a changed definition gets a new worker after its streams, the worker of a removed
model stops, and all others don't notice. Settings that only a start can change (addresses, directories, devices) stay as
they are and are reported.

Reloads run one after another, whether the API, SIGHUP or the file watch asks for them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import structlog
from pydantic import BaseModel

from supervisor.catalog import Catalog, Configuration, check_devices
from supervisor.catalog.catalog import Learned
from supervisor.catalog.keys import Keyring, load_keys, refuse_exposed
from supervisor.core.events import Configured
from supervisor.core.types import ModelSpec
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.views import Json
from supervisor.errors import ConfigError, LlmuxError, UnavailableError
from supervisor.io import notify

log = structlog.get_logger("llmux.reload")

WATCH_INTERVAL_S: Final = 2.0
LIVE: Final = frozenset({"allowed_hosts", "allowed_origins", "api_keys", "watch"})
"""Settings of `server` that need no restart."""

Stamp = tuple[int, int, int] | None
"""A file's modification time, size and number; None: it isn't there."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What a reload did. Models and virtual models by name, settings as `limits.drain_s`."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    restarted: tuple[str, ...]  # those of `changed` whose worker is replaced
    unchanged: int
    settings: tuple[str, ...]  # changed, and in effect
    needs_restart: tuple[str, ...]  # changed in the file, and not in effect

    def view(self) -> Json:
        """For the API."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class _Prepared:
    catalog: Catalog
    keyring: Keyring
    specs: tuple[ModelSpec, ...]
    needs_restart: tuple[str, ...]


class Reloader:
    """One for each daemon. Use from the event loop's thread."""

    def __init__(self, daemon: Daemon, configuration: Configuration) -> None:
        self._daemon = daemon
        self._configuration = configuration
        self._last: asyncio.Task[Difference | LlmuxError] | None = None
        self._read = self._stamps()

    async def reload(self, cause: str) -> Difference:
        """Reload, after the reloads that were requested earlier. It continues if the caller is cancelled.

        Raises ConfigError with every problem; then nothing was changed. Raises UnavailableError while shutting down.
        """
        outcome = await asyncio.shield(self.begin(cause))
        if isinstance(outcome, LlmuxError):
            raise outcome
        return outcome

    def begin(self, cause: str) -> asyncio.Task[Difference | LlmuxError]:
        """Begin a reload; its result is logged."""
        self._last = asyncio.create_task(self._reload_after(self._last, cause), name=f"reload: {cause}")
        return self._last

    async def watch(self) -> None:
        """Loops while `server.watch` is on: reloads after a file changed and then stayed the same for one interval."""
        before = self._read
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if not self._daemon.catalog.server.watch:
                continue
            now = await asyncio.to_thread(self._stamps)
            if now == before and now != self._read:
                await self.begin("a file changed")
            before = now

    async def _reload_after(
        self, previous: asyncio.Task[Difference | LlmuxError] | None, cause: str
    ) -> Difference | LlmuxError:
        if previous is not None:
            await asyncio.wait({previous})
        if self._is_stopping():
            return UnavailableError("llmux is shutting down.", code="shutting_down")
        notify.reloading()
        try:
            prepared = await asyncio.to_thread(self._prepare, self._daemon.learned())
            if self._is_stopping():
                return UnavailableError("llmux is shutting down.", code="shutting_down")
            difference = self._apply(prepared)
        except ConfigError as error:
            log.error("reload.refused", cause=cause, problems=error.problems)  # noqa: TRY400  # a file's mistake, not ours
            self._daemon.hub.publish("reload", {"problems": list(error.problems)})
            return error
        except Exception:
            log.exception("reload.failed", cause=cause)
            raise
        finally:
            if not self._is_stopping():
                notify.notify("READY=1", f"STATUS=serving {len(self._daemon.catalog.listing())} models")
        log.info("reload.finished", cause=cause, **difference.view())
        self._daemon.hub.publish("reload", difference.view())
        return difference

    def _is_stopping(self) -> bool:
        return self._daemon.engine.queue().is_stopping

    # ------------------------------------------------------------------------------------------------- off the loop

    def _stamps(self) -> dict[Path, Stamp]:
        return {path: _stamp(path) for path in self._configuration.files(self._daemon.catalog)}

    def _prepare(self, learned: Learned) -> _Prepared:
        """Everything that is slow or may fail. Blocks on files. Raises ConfigError."""
        running = self._daemon.catalog
        self._read = self._stamps()
        wanted = self._configuration.read()
        fixed = [key for key in _different(running.server, wanted.server) if key not in LIVE]
        server = wanted.server.model_copy(update={key: getattr(running.server, key) for key in fixed})
        needs_restart = [f"server.{key}" for key in fixed] + ["devices"] * (wanted.devices != running.devices)
        catalog = replace(wanted, server=server, devices=running.devices)
        problems: list[str] = []
        keyring = Keyring()
        if server.api_keys is not None:
            try:
                keyring = load_keys(server.api_keys)
            except ConfigError as error:
                problems += error.problems
        if not problems and (exposed := refuse_exposed(server, keyring)) is not None:
            problems.append(exposed)
        specs = catalog.model_specs(learned)
        problems += check_devices(catalog, [device.spec for device in self._daemon.sampler.devices()], specs)
        if problems:
            raise ConfigError(tuple(problems))
        for model in catalog.models.values():
            _ = model.capabilities  # for the views
        return _Prepared(catalog, keyring, specs, tuple(needs_restart))

    # -------------------------------------------------------------------------------------------- in one turn of it

    def _apply(self, prepared: _Prepared) -> Difference:
        daemon, before, after = self._daemon, self._daemon.catalog, prepared.catalog
        settings = [f"server.{key}" for key in _different(before.server, after.server)]
        settings += [f"limits.{key}" for key in _different(before.limits, after.limits)]
        if prepared.keyring.keys != daemon.keyring.keys and "server.api_keys" not in settings:
            settings.append("server.api_keys")
        for warning in prepared.keyring.warnings:
            log.warning("keys.exposed", message=warning)
        daemon.fleet.models = after.models
        daemon.fleet.limits = after.limits
        daemon.configure(after, prepared.keyring)
        specs = tuple(map(self._overridden, prepared.specs))
        devices = tuple(device.spec for device in daemon.sampler.devices())
        daemon.engine.post(Configured(specs, devices, after.limits.limits(), after.limits.policy()))
        return self._difference(before, after, tuple(settings), prepared.needs_restart)

    def _overridden(self, spec: ModelSpec) -> ModelSpec:
        """Keep an operator's overrides of unchanged models."""
        override = self._daemon.fleet.override_of(spec.id)
        if override is None:
            return spec
        self._daemon.fleet.override(spec.id, replace(override, base=spec))
        return override.spec

    def _difference(
        self, before: Catalog, after: Catalog, settings: tuple[str, ...], needs_restart: tuple[str, ...]
    ) -> Difference:
        old, new = _names(before), _names(after)
        changed = tuple(name for name, about in new.items() if name in old and old[name] != about)
        replaced = {status.id for status in self._daemon.engine.models() if status.is_replaced}
        return Difference(
            added=tuple(name for name in new if name not in old),
            removed=tuple(name for name in old if name not in new),
            changed=changed,
            restarted=tuple(model for model in after.models if model in changed and model in replaced),
            unchanged=sum(old.get(name) == about for name, about in new.items()),
            settings=settings,
            needs_restart=needs_restart,
        )


def _names(catalog: Catalog) -> dict[str, tuple[object, ...]]:
    """Every name and what it means. A name of both a model and a virtual model means both."""
    names: dict[str, tuple[object, ...]] = {model.id: (model.config,) for model in catalog.models.values()}
    for virtual in catalog.virtual.values():
        names[virtual.name] = (*names.get(virtual.name, ()), virtual.config)
    return names


def _different(before: BaseModel, after: BaseModel) -> Iterator[str]:
    return (key for key in type(before).model_fields if getattr(before, key) != getattr(after, key))


def _stamp(path: Path) -> Stamp:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino
    return None
