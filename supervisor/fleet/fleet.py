"""All workers, by model and generation: what the engine starts, stops and asks for (`engine.Fleet`).

A remote model is among them as far as the engine is concerned: it has a generation and an end, but no process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import structlog
from pydantic import JsonValue

from runtimes.base import RemoteAdapter
from supervisor.catalog import CatalogModel
from supervisor.catalog.overrides import Override
from supervisor.catalog.sections import LimitsConfig
from supervisor.core.effects import StartWorker, StopWorker
from supervisor.core.events import WorkerExited
from supervisor.core.types import Crash, CrashClass, Generation, ModelId
from supervisor.fleet.remote import Remote
from supervisor.fleet.worker import Key, Post, Surroundings, Worker, log_path
from supervisor.io.memory import HolderPids
from supervisor.io.upstream import Upstream, UpstreamPool

log = structlog.get_logger("llmux.worker")


class Workers:
    """All workers, by model and generation. `catalog` may be replaced; running workers keep what they were started with."""

    def __init__(
        self, surroundings: Surroundings, models: Mapping[ModelId, CatalogModel], limits: LimitsConfig
    ) -> None:
        self._models = models
        self._overrides: dict[ModelId, Override] = {}
        self.limits = limits
        self._surroundings = surroundings
        self._workers: dict[Key, Worker | Remote] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def models(self) -> Mapping[ModelId, CatalogModel]:
        """The catalog's. Setting them drops the overrides of models that are configured otherwise now."""
        return self._models

    @models.setter
    def models(self, models: Mapping[ModelId, CatalogModel]) -> None:
        same = (
            model for model in models if model in self._models and models[model].config == self._models[model].config
        )
        self._overrides = {model: self._overrides[model] for model in same if model in self._overrides}
        self._models = models

    def override(self, model: ModelId, override: Override | None) -> None:
        """Start the model with other settings from now on; None: as in the catalog again. The core must hear of it too."""
        if override is None:
            self._overrides.pop(model, None)
        else:
            self._overrides[model] = override

    def override_of(self, model: ModelId) -> Override | None:
        """An operator's settings for it, if there are any."""
        return self._overrides.get(model)

    def effective(self, model: ModelId) -> CatalogModel:
        """The model as its next worker will be started. Raises KeyError."""
        override = self._overrides.get(model)
        return self._models[model] if override is None else override.model

    def start(self, effect: StartWorker, post: Post) -> None:
        """See `engine.Fleet`."""
        key = (effect.model, effect.generation)
        model = self.effective(effect.model)
        worker = (
            Remote(key, model, self.limits, post)
            if isinstance(model.adapter, RemoteAdapter)
            else Worker(key, model, effect.devices, self._surroundings, self.limits, post)
        )
        self._workers[key] = worker
        task = asyncio.create_task(self._run(key, worker), name=f"worker {effect.model}:{effect.generation}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, key: Key, worker: Worker | Remote) -> None:
        try:
            crash = await worker.run()
        except Exception as error:
            # A mistake in an adapter, say: the model must not stay STARTING for ever.
            log.exception("worker.mishandled", model=key[0], generation=key[1])
            crash = Crash(CrashClass.UNKNOWN, f"llmux failed to run it: {error!r}")
        del self._workers[key]
        worker.post(WorkerExited(*key, crash))

    def stop(self, effect: StopWorker) -> None:
        """See `engine.Fleet`."""
        worker = self._workers.get((effect.model, effect.generation))
        if isinstance(worker, Worker):
            worker.stop(force=effect.force)
        elif worker is not None:
            worker.stop()

    def upstream(self, model: ModelId, generation: Generation) -> Upstream:
        """See `engine.Fleet`."""
        upstream = self._workers[model, generation].upstream
        assert upstream is not None, f"{model}:{generation} is not ready"
        return upstream

    def holders(self) -> dict[Key, HolderPids]:
        """See `engine.Fleet`."""
        return {key: worker.holder() for key, worker in self._workers.items() if isinstance(worker, Worker)}

    def facts(self, model: ModelId, generation: Generation) -> dict[str, JsonValue] | None:
        """Pid, port and the like, for the admin API; None when there is no such worker."""
        worker = self._workers.get((model, generation))
        return None if worker is None else worker.facts()

    def metrics_source(self, model: ModelId, generation: Generation) -> tuple[UpstreamPool, str] | None:
        """Where the worker's own metrics are; None where it has none, or isn't ready."""
        worker = self._workers.get((model, generation))
        return worker.metrics if isinstance(worker, Worker) else None

    def log_path(self, model: ModelId) -> Path:
        """Where the model's workers log."""
        return log_path(self._surroundings.log_dir, model)
