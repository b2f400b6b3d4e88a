"""The fleet: all replicas, by model and generation. The engine starts and stops replicas here, and gets their upstreams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import structlog

from runtimes.adapters.remote_adapter import RemoteAdapter
from supervisor.catalog import CatalogModel
from supervisor.catalog.models.overrides import Override
from supervisor.catalog.sections.sections import LimitsConfig
from supervisor.core.effects import StartWorker, StopWorker
from supervisor.core.events import WorkerExited
from supervisor.core.types import REMOTE, Crash, CrashClass, Devices, Generation, ModelId, base_of
from supervisor.fleet.launcher import Launcher, Started
from supervisor.fleet.remote import Remote
from supervisor.fleet.replica import Post, Replica
from supervisor.fleet.worker import Worker
from supervisor.host.memory.memory import HolderPids, WorkerKey
from supervisor.host.process.progress import Progress
from supervisor.host.upstream.upstream import Upstream
from supervisor.schema.model import WorkerFacts

log = structlog.get_logger("llmux.worker")


class Fleet:
    """`models` and `limits` may be replaced; running replicas keep those of their start."""

    def __init__(self, launcher: Launcher, models: Mapping[ModelId, CatalogModel], limits: LimitsConfig) -> None:
        self._models = models
        self._overrides: dict[ModelId, Override] = {}
        self.limits = limits
        self.before_start: Callable[[StartWorker], Awaitable[Crash | None]] | None = (
            None  # its crash prevents the start
        )
        self._launcher = launcher
        self._replicas: dict[WorkerKey, Replica] = {}
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}

    @property
    def models(self) -> Mapping[ModelId, CatalogModel]:
        """The catalog's models. Setting them drops the overrides of models whose configuration has changed."""
        return self._models

    @models.setter
    def models(self, models: Mapping[ModelId, CatalogModel]) -> None:
        same = (
            model for model in models if model in self._models and models[model].config == self._models[model].config
        )
        self._overrides = {model: self._overrides[model] for model in same if model in self._overrides}
        self._models = models

    def override(self, model: ModelId, override: Override | None) -> None:
        """Start the model with other settings from now on; None: with the catalog's. The caller must also post Respecified."""
        if override is None:
            self._overrides.pop(model, None)
        else:
            self._overrides[model] = override

    def override_of(self, model: ModelId) -> Override | None:
        """An operator's settings for the model, if there are any."""
        return self._overrides.get(model)

    def effective(self, model: ModelId) -> CatalogModel:
        """The model with the settings of its next start. `model` may be a replica's. Raises KeyError."""
        model = base_of(model)
        override = self._overrides.get(model)
        return self._models[model] if override is None else override.model

    def overrides(self) -> dict[ModelId, Override]:
        """All operators' settings, by model."""
        return dict(self._overrides)

    def start(self, effect: StartWorker, post: Post) -> None:
        """Begin to start a replica. It reports by events; the last one is WorkerExited."""
        key, replica = (effect.model, effect.generation), self._make_replica(effect, post)
        lease = self.before_start(effect) if self.before_start is not None and effect.devices != REMOTE else None
        self._start_task(key, replica, post, lease)

    def adopt(self, key: WorkerKey, model: CatalogModel | None, devices: Devices, started: Started, post: Post) -> None:
        """Supervise a ready worker that was handed over. Events as after `start`, without the first WorkerReady.

        `model`: the model as configured now; None: no longer configured.
        """
        self._start_task(key, Worker(key, model, devices, self._launcher, self.limits, post, started), post)

    def let_go(self) -> None:
        """Stop supervising all workers: they belong to a successor now. Running requests go on, also those of remotes."""
        for key, task in self._tasks.items():
            if isinstance(self._replicas.get(key), Worker):
                task.cancel()

    def _start_task(
        self, key: WorkerKey, replica: Replica, post: Post, lease: Awaitable[Crash | None] | None = None
    ) -> None:
        self._replicas[key] = replica
        task = asyncio.create_task(self._run(key, replica, post, lease), name=f"worker {key[0]}:{key[1]}")
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key))

    def _make_replica(self, effect: StartWorker, post: Post) -> Replica:
        key, model = (effect.model, effect.generation), self.effective(effect.model)
        if isinstance(model.adapter, RemoteAdapter):
            return Remote(key, model, self.limits, post)
        return Worker(key, model, effect.devices, self._launcher, self.limits, post, parts_mib=effect.lease_mib)

    async def _run(self, key: WorkerKey, replica: Replica, post: Post, lease: Awaitable[Crash | None] | None) -> None:
        try:
            crash = await lease if lease is not None else None
            if crash is None:
                crash = await replica.run()
        except Exception as error:
            # For example a bug in an adapter: the model must not stay STARTING for ever.
            log.exception("worker.mishandled", model=key[0], generation=key[1])
            crash = Crash(CrashClass.UNKNOWN, f"llmux failed to run it: {error!r}")
        del self._replicas[key]
        post(WorkerExited(*key, crash))

    def stop(self, effect: StopWorker) -> bool:
        """Begin to stop a replica. False: it has already ended, and its last event was posted."""
        replica = self._replicas.get((effect.model, effect.generation))
        if replica is not None:
            replica.stop(force=effect.force)
        return replica is not None

    def upstream(self, model: ModelId, generation: Generation) -> Upstream:
        """The upstream of a replica that is ready."""
        upstream = self._replicas[model, generation].upstream
        assert upstream is not None, f"{model}:{generation} is not ready"
        return upstream

    def holders(self) -> dict[WorkerKey, HolderPids]:
        """The processes of every replica that may hold memory here."""
        holders = ((key, replica.holder()) for key, replica in self._replicas.items())
        return {key: holder for key, holder in holders if holder is not None}

    def facts(self, model: ModelId, generation: Generation) -> WorkerFacts | None:
        """Pid, port and the like, for the admin API; None if there is no such replica."""
        replica = self._replicas.get((model, generation))
        return None if replica is None else replica.facts()

    def progress(self, model: ModelId, generation: Generation) -> Progress | None:
        """The progress of the replica's start; None if unknown."""
        replica = self._replicas.get((model, generation))
        return None if replica is None else replica.progress

    def metrics_source(self, model: ModelId, generation: Generation) -> tuple[Upstream, str] | None:
        """The upstream and the path of the replica's own metrics; None if it has none, or isn't ready."""
        replica = self._replicas.get((model, generation))
        return None if replica is None else replica.metrics

    def steps_source(self, model: ModelId, generation: Generation) -> tuple[Upstream, str] | None:
        """The upstream and the path of the replica's reports of its requests' progress; None if it has none, or isn't ready."""
        replica = self._replicas.get((model, generation))
        return None if replica is None else replica.steps

    def log_path(self, model: ModelId) -> Path:
        """The log file of the model's workers."""
        return self._launcher.log_path(model)
