"""Reload: read the configuration again and apply the differences.

Every check runs off the loop, before anything changes; then catalog, routes, auth, limits and the core's specifications are
replaced within one turn. A model with a changed definition gets a new worker after its streams, the worker of a removed
model stops, and all others keep running. Settings that only a start can change (addresses, directories, devices) stay as
they are and are reported.

Reloads run one after another; the API, SIGHUP and the file watch request them. All requests during a reload share the next
reload, which reads the files after those requests. A reload waits until files stop changing, so it never reads a
half-written file. A reload that would remove every model or every key, as a lost file would, is refused unless forced.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec
import structlog
from pydantic import BaseModel

from supervisor.catalog import Catalog, Configuration
from supervisor.catalog.catalog import Learned
from supervisor.catalog.keys import Keyring, keyring_of, refuse_exposed, without_revoked
from supervisor.catalog.loading.loader import FileKind
from supervisor.catalog.models.fitting import specs_for_devices
from supervisor.core.admission.admission import policy_of
from supervisor.core.operators import may_keep_worker
from supervisor.core.types import ModelId, ModelSpec, WorkerState, base_of
from supervisor.core.workers.replicas import expanded
from supervisor.daemon.configuration import rechecking
from supervisor.daemon.configuration.sizes import Warnings, log_model_sizes, warnings_of
from supervisor.daemon.daemon import Daemon
from supervisor.errors import ConfigError, LlmuxError, UnavailableError
from supervisor.host.process import notify
from supervisor.schema.daemon import Difference, Stop

log = structlog.get_logger("llmux.reload")

WATCH_INTERVAL_S: Final = 2.0
STILL_S: Final = 0.5
"""Seconds without a change after which a file counts as completely written."""
STILL_WITHIN_S: Final = 10.0
"""The longest wait of a reload until its files are completely written."""
MOVING: Final = "something keeps writing to it"
LIVE: Final = frozenset(
    {"allowed_hosts", "allowed_origins", "api_keys", "watch", "runner_id", "runner_type", "health", "governance"}
    | {
        "multi_tenant",
        "metrics",
        "model_base_path",
        "allow_pull",
        "media",
        "responses",
        "load_feedback",
        "edit",
        "alerts",
    }
)
"""Settings of `server` that need no restart."""

Stamp = tuple[int, int, int, int] | None
"""A file's modification time, size, number and mode; None: it isn't there."""
Stamps = dict[Path, Stamp]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A simulated reload: its changes, and the resulting catalog and specifications."""

    difference: Difference
    catalog: Catalog
    specs: Mapping[ModelId, ModelSpec]


@dataclass(frozen=True, slots=True)
class _Prepared:
    catalog: Catalog
    keyring: Keyring
    specs: tuple[ModelSpec, ...]
    needs_restart: tuple[str, ...]
    warnings: Warnings
    removed_busy: frozenset[ModelId]  # models of folders whose files are gone, and that are not idle yet


@dataclass(slots=True)
class _ReloadRequest:
    """The combined request of all callers that share the next reload."""

    causes: dict[str, None] = field(default_factory=dict)
    force: bool = False


class Reloader:
    """A daemon's reloads. Use from the event loop's thread."""

    def __init__(self, daemon: Daemon, configuration: Configuration, *listens_on: str) -> None:
        """`listens_on`: the addresses of the listening sockets, which may differ from the configured one."""
        self._daemon = daemon
        self._configuration = configuration
        self._hosts = {
            **dict.fromkeys(listens_on, "the address that llmux listens on"),
            daemon.catalog.server.host: "server.host",
        }
        self._last_reload: asyncio.Task[Difference | LlmuxError] | None = None
        self._next_request: _ReloadRequest | None = None  # of `_last_reload`, until it begins
        self._read_stamps = self._stamps()
        self._read_model_stamps = self._model_stamps()  # of the files of `models_from`
        self._removed_busy: frozenset[ModelId] = frozenset()

    @property
    def configuration(self) -> Configuration:
        """The configuration that reloads read."""
        return self._configuration

    def files(self) -> dict[Path, FileKind]:
        """The files that a reload reads, existing or not; the base file is the first."""
        return self._configuration.files(self._daemon.catalog)

    async def reload(self, cause: str, *, force: bool = False) -> Difference:
        """Reload, beginning after this call. Returns the changes. The reload continues if the caller is cancelled.

        `force`: even if no model or no key is left. It applies to all callers that share the reload.

        Raises ConfigError with every problem; then nothing has changed. Raises UnavailableError while shutting down.
        """
        outcome = await asyncio.shield(self.begin(cause, force=force))
        if isinstance(outcome, LlmuxError):
            raise outcome
        return outcome

    def begin(self, cause: str, *, force: bool = False) -> asyncio.Task[Difference | LlmuxError]:
        """Begin a reload, or share the next one. The result is logged."""
        if self._next_request is None or self._last_reload is None:
            self._next_request = _ReloadRequest()
            self._last_reload = asyncio.create_task(self._reload_after(self._last_reload), name="reload")
        self._next_request.causes[cause] = None
        self._next_request.force |= force
        return self._last_reload

    async def preview(self, *, force: bool = False) -> Difference:
        """The changes that `reload` would make now. Changes nothing. Raises ConfigError as `reload` does."""
        outcome, _ = await self._prepare_when_stable(force=force)
        if isinstance(outcome, ConfigError):
            raise outcome
        return self._difference(outcome)

    async def rehearse(self, text: str, *, force: bool = False) -> Rehearsal:
        """Simulate a reload with this text as the base file. Raises ConfigError as `reload` does."""
        prepared = await asyncio.to_thread(
            self._prepare, self._daemon.learned(), self._busy_models(), force=force, text=text
        )
        return Rehearsal(self._difference(prepared), prepared.catalog, {spec.id: spec for spec in prepared.specs})

    async def watch(self) -> None:
        """Reload whenever a file changed and then stayed the same for one interval, forever.

        The configuration's own files are watched while `server.watch` is on, those of `models_from` always.
        """
        before, models_before = self._read_stamps, self._read_model_stamps
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now = await asyncio.to_thread(self._stamps) if self._daemon.catalog.server.watch else self._read_stamps
            models = await asyncio.to_thread(self._model_stamps) if self._daemon.catalog.models_from else {}
            is_new = (now, models) != (self._read_stamps, self._read_model_stamps)
            if (is_new and (now, models) == (before, models_before)) or self._removed_busy - self._busy_models():
                await asyncio.gather(self.begin("a file changed"), return_exceptions=True)  # which is logged
            before, models_before = now, models

    async def _reload_after(self, previous: asyncio.Task[Difference | LlmuxError] | None) -> Difference | LlmuxError:
        if previous is not None:
            await asyncio.wait({previous})
        request, self._next_request = self._next_request, None
        assert request is not None
        cause = ", ".join(request.causes)
        if self._is_stopping():
            return UnavailableError("llmux is shutting down.", code="shutting_down")
        notify.reloading()
        refused = ""
        try:
            models = await asyncio.to_thread(self._model_stamps)
            outcome, self._read_stamps = await self._prepare_when_stable(force=request.force)
            self._read_model_stamps = models
            if self._is_stopping():
                return UnavailableError("llmux is shutting down.", code="shutting_down")
            if isinstance(outcome, ConfigError):
                outcome = await self._revoke_keys_after(outcome)
                refused = f"; the last reload was refused: {outcome.problems[0].splitlines()[0]}"
                log.error("reload.refused", cause=cause, problems=outcome.problems)
                self._daemon.hub.publish("reload", {"problems": list(outcome.problems)})
                return outcome
            difference = self._difference(outcome)
            self._apply(outcome)
        except Exception:
            log.exception("reload.failed", cause=cause)
            raise
        finally:
            if not self._is_stopping():
                notify.notify("READY=1", f"STATUS=serving {len(self._daemon.catalog.listing())} models{refused}")
        log.info("reload.finished", cause=cause, **msgspec.to_builtins(difference))
        self._daemon.hub.publish("reload", difference)
        return difference

    async def _revoke_keys_after(self, error: ConfigError) -> ConfigError:
        """Revoke removed keys although the configuration has mistakes. Returns the error, which mentions that."""
        daemon, path = self._daemon, self._daemon.catalog.server.api_keys
        if path is None or any(problem.startswith(f"{path}: {MOVING}") for problem in error.problems):
            return error
        before = daemon.keyring
        after = await asyncio.to_thread(without_revoked, before, path)
        lost = [old.name for old, new in zip(before.keys, after.keys, strict=True) if old != new]
        if not lost:
            return error
        daemon.configure(daemon.catalog, after)
        log.warning("keys.revoked", keys=lost)
        return ConfigError((*error.problems, f"{path}: what was revoked is in force all the same: {', '.join(lost)}"))

    def _busy_models(self) -> frozenset[ModelId]:
        """The models with running or waiting requests."""
        workers = (each for model in self._daemon.engine.active() for each in model.replicas)
        return frozenset(base_of(each.id) for each in workers if each.in_flight or each.queued)

    def _is_stopping(self) -> bool:
        return self._daemon.engine.queue().is_stopping

    async def _prepare_when_stable(self, *, force: bool) -> tuple[_Prepared | ConfigError, Stamps]:
        """Prepare a reload when no file changes any more. Returns the files' stamps as well."""
        files = self._configuration.files(self._daemon.catalog)
        last_try = time.monotonic() + STILL_WITHIN_S
        while True:
            before = await asyncio.to_thread(_stamps, files)
            await asyncio.sleep(STILL_S)
            outcome: _Prepared | ConfigError
            try:
                outcome = await asyncio.to_thread(
                    self._prepare, self._daemon.learned(), self._busy_models(), force=force
                )
            except ConfigError as error:
                outcome = error
            if isinstance(outcome, _Prepared):  # it may name another file of keys, which is watched from now on
                files = self._configuration.files(outcome.catalog)
            after = await asyncio.to_thread(_stamps, files)
            if before == after:
                return outcome, after
            if time.monotonic() >= last_try:
                remedy = "nothing was changed; reload again when it is written"
                moving = (path for path in files if before.get(path) != after[path])
                return ConfigError(tuple(f"{path}: {MOVING}; {remedy}" for path in moving)), self._read_stamps

    # ----------------------------------------------------------------------------------------------------- off the loop

    def _stamps(self) -> Stamps:
        return _stamps(self.files())

    def _model_stamps(self) -> Stamps:
        return _stamps(self._configuration.model_files(self._daemon.catalog))

    def _prepare(
        self, learned: Learned, busy: frozenset[ModelId], *, force: bool, text: str | None = None
    ) -> _Prepared:
        """Do all parts of a reload that are slow or may fail. Blocks on files. Raises ConfigError."""
        running = self._daemon.catalog
        wanted = self._configuration.read(text=text).with_set(self._daemon.runtime.active_set)
        fixed = [key for key in _changed_keys(running.server, wanted.server) if key not in LIVE]
        server = wanted.server.model_copy(update={key: getattr(running.server, key) for key in fixed})
        needs_restart = [f"server.{key}" for key in fixed] + ["devices"] * (wanted.devices != running.devices)
        devices = [device.spec for device in self._daemon.sampler.devices()]
        catalog = _with_kept_facts(replace(wanted, server=server, devices=running.devices).sized(devices), running)
        catalog, removed_busy = _with_removed_busy(catalog, running, busy)
        problems: list[str] = []
        keyring = Keyring()
        try:
            keyring = keyring_of(server.api_keys)
        except ConfigError as error:
            problems += error.problems
        exposed = (refuse_exposed(host, keyring, setting) for host, setting in self._hosts.items())
        if not problems and (refused := next(filter(None, exposed), None)) is not None:
            problems.append(refused)
        elif not problems and not force:
            problems += self._likely_accidents(catalog, keyring)
        if problems:
            raise ConfigError(tuple(problems))
        for model in catalog.models.values():
            _ = model.capabilities  # for the views
        specs = specs_for_devices(catalog, devices, learned)
        return _Prepared(
            catalog, keyring, specs, tuple(needs_restart), warnings_of(catalog, specs, devices), removed_busy
        )

    def _likely_accidents(self, catalog: Catalog, keyring: Keyring) -> Iterator[str]:
        """Changes that look like an accident with a file rather than intended."""
        insist = "nothing was changed. If you mean it: llmux reload --force"
        for folder in set(catalog.models_from) & set(self._daemon.catalog.models_from):
            if not folder.exists() and (lost := len(self._daemon.catalog.models) - len(catalog.models)) > 0:
                yield f"{folder} is away, and {lost} models with it: they stay until it is back; {insist}"
        if (models := len(self._daemon.catalog.models)) and not (catalog.models or catalog.models_from):
            yield f"{self._configuration.base}: no models are left of {models}; {insist}"
        if (keys := len(self._daemon.keyring.keys)) and not keyring:
            path = self._daemon.catalog.server.api_keys
            yield f"{path}: no keys are left of {keys}, so every program here could use and stop your models; {insist}"

    # ------------------------------------------------------------------------------------------ in one turn of the loop

    def _apply(self, prepared: _Prepared) -> None:
        daemon, after = self._daemon, prepared.catalog
        for warning in prepared.keyring.warnings:
            log.warning("keys.exposed", message=warning)
        log_model_sizes(after, prepared.warnings, daemon.catalog)
        self._removed_busy = prepared.removed_busy
        rechecking.apply(daemon, after, prepared.keyring, prepared.specs)

    def _difference(self, prepared: _Prepared) -> Difference:
        daemon, before, after = self._daemon, self._daemon.catalog, prepared.catalog
        old, new = _meanings(before), _meanings(after)
        changed = tuple(name for name, about in new.items() if name in old and old[name] != about)
        settings = [f"server.{key}" for key in _changed_keys(before.server, after.server)]
        settings += [f"limits.{key}" for key in _changed_keys(before.limits, after.limits)]
        settings += [
            f"clients.{name}"
            for name in {**before.clients, **after.clients}
            if before.clients.get(name) != after.clients.get(name)
        ]
        if prepared.keyring.keys != daemon.keyring.keys and "server.api_keys" not in settings:
            settings.append("server.api_keys")
        stops = tuple(self._stops(prepared))
        stopping = {stop.model for stop in stops}
        return Difference(
            added=tuple(name for name in new if name not in old),
            removed=tuple(name for name in old if name not in new),
            changed=changed,
            restarted=tuple(model for model in after.models if model in changed and model in stopping),
            stops=stops,
            unchanged=sum(old.get(name) == about for name, about in new.items()),
            settings=tuple(settings),
            needs_restart=prepared.needs_restart,
            warnings=(
                *(f"{spec.id} can't run here: {spec.trouble}" for spec in prepared.specs if spec.trouble),
                *(f"{model}: {warning}" for model, warning in prepared.warnings),
                *prepared.catalog.unread,
            ),
        )

    def _stops(self, prepared: _Prepared) -> Iterator[Stop]:
        """The stops of workers whose definition changed or whose model was removed."""
        before, after = self._daemon.catalog.models, prepared.catalog.models
        limits = prepared.catalog.limits.limits()
        admission = policy_of(limits, prepared.catalog.limits.policy())
        specs = {spec.id: spec for spec in expanded(prepared.specs, limits)}
        for status in (each for model in self._daemon.engine.active() for each in model.replicas):
            model = base_of(status.id)
            if status.state is WorkerState.STOPPING or model not in before:
                continue
            if status.id in specs and (
                after[model].config == before[model].config
                or may_keep_worker(status.spec, status.devices, specs[status.id])
            ):
                continue
            drain_s = admission.ordered_drain_s(status.spec)
            yield Stop(status.id, status.state, status.in_flight, status.queued, status.pinned, drain_s)


def _with_kept_facts(catalog: Catalog, running: Catalog) -> Catalog:
    """The catalog in which unchanged models with missing files keep the facts from their files, so that their workers stay."""
    kept = {
        name: before.with_troubles_of(model)
        for name, model in catalog.models.items()
        if model.troubles
        and (before := running.models.get(name)) is not None
        and before.as_configured == model.as_configured
        and not before.troubles
    }
    return catalog.of({**catalog.models, **kept}) if kept else catalog


def _with_removed_busy(
    catalog: Catalog, running: Catalog, busy: frozenset[ModelId]
) -> tuple[Catalog, frozenset[ModelId]]:
    """The catalog that keeps busy models of folders although their files are gone. They are removed once idle."""
    removed = {
        name: model
        for name, model in running.models.items()
        if name in busy and name not in catalog.models and running.is_local(model)
    }
    if not removed:
        return catalog, frozenset()
    origins = {
        at: place
        for at, place in running.origins.items()
        if at[:1] == ("models",) and at[1:2] in {(name,) for name in removed}
    }
    kept = replace(catalog.of({**catalog.models, **removed}), origins={**catalog.origins, **origins})
    return kept, frozenset(removed)


def _meanings(catalog: Catalog) -> dict[str, tuple[object, ...]]:
    """Name → its meaning. A name of both a model and a virtual model has both meanings."""
    names: dict[str, tuple[object, ...]] = {model.id: (model.config,) for model in catalog.models.values()}
    for virtual in catalog.virtual.values():
        names[virtual.name] = (*names.get(virtual.name, ()), virtual.config)
    return names | {task.name: (task.config,) for task in catalog.tasks.values()}


def _changed_keys(before: BaseModel, after: BaseModel) -> Iterator[str]:
    return (key for key in type(before).model_fields if getattr(before, key) != getattr(after, key))


def _stamps(files: Iterable[Path]) -> Stamps:
    return {path: _stamp(path) for path in files}


def _stamp(path: Path) -> Stamp:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode
    return None
