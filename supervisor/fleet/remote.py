"""A remote model as a replica: connected, watched, disconnected; there is no worker.

A remote is ready while its probes succeed: a failure of the first probe, or of three probes in a row later, makes it unready until
a probe succeeds. Without probes it counts as ready. A remote that can't be used as configured (no key in the environment) ends
with a crash that names the missing setting.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import urlsplit

import structlog

from runtimes.adapters.remote_adapter import RemoteAdapter
from runtimes.base import ModelUnusableError, RemoteSpec
from runtimes.model_config import ModelConfig
from supervisor.catalog import CatalogModel
from supervisor.catalog.sections.sections import LimitsConfig
from supervisor.core.events import WorkerReady, WorkerUnready
from supervisor.core.types import Crash, CrashClass
from supervisor.fleet.replica import Post
from supervisor.host.memory.memory import WorkerKey
from supervisor.host.upstream.probe import Readiness
from supervisor.schema.model import WorkerFacts

if TYPE_CHECKING:
    from supervisor.host.upstream.remote import RemotePool

log = structlog.get_logger("llmux.remote")

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Remote:
    """The `Replica` for a model that another API runs."""

    def __init__(self, key: WorkerKey, model: CatalogModel, limits: LimitsConfig, post: Post) -> None:
        self.upstream: RemotePool | None = None
        self.metrics: None = None
        self.steps: None = None
        self.progress: None = None
        self._key = key
        self._model = model
        self._limits = limits
        self._post = post
        self._started_at = time.monotonic()
        self._stop_requested = asyncio.Event()

    def stop(self, *, force: bool) -> None:
        """Stop at once: running answers break off."""
        self._stop_requested.set()

    def holder(self) -> None:
        """See `Replica`."""

    def facts(self) -> WorkerFacts:
        return WorkerFacts(
            pid=None,
            address=self.upstream.spec.base_url if self.upstream is not None else None,
            upstream_model=self._model.adapter.upstream_model(self._model.config),
            uptime_s=round(time.monotonic() - self._started_at, 3),
            connections=self.upstream.open_responses if self.upstream is not None else 0,
        )

    async def run(self) -> Crash | None:
        adapter = cast("RemoteAdapter[ModelConfig]", self._model.adapter)
        try:
            spec = adapter.connect(self._model.config, os.environ)
        except ModelUnusableError as error:
            return Crash(CrashClass.BAD_ARGUMENTS, str(error))
        self._warn_of_plain_text(spec)
        try:
            upstream = self.upstream = await asyncio.to_thread(self._make_pool, spec, asyncio.get_running_loop())
        except OSError as error:  # ssl.SSLError is one
            return Crash(CrashClass.BAD_ARGUMENTS, f"ca_file: {spec.ca_file}: {error}")
        probing = asyncio.create_task(self._watch_probes(upstream))
        stopped = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait({probing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return (
                None if stopped.done() else Crash(CrashClass.UNKNOWN, f"llmux can't watch it: {probing.exception()!r}")
            )
        finally:
            for task in (probing, stopped):
                task.cancel()
            await asyncio.wait({probing, stopped})
            await upstream.close()

    def _make_pool(self, spec: RemoteSpec, loop: asyncio.AbstractEventLoop) -> RemotePool:
        from supervisor.host.upstream.remote import RemotePool  # noqa: PLC0415  # takes 0.1 s, only with remotes

        limits = self._limits
        return RemotePool(spec, loop, first_byte_s=limits.first_byte_s, idle_s=limits.stream_idle_s)

    def _warn_of_plain_text(self, spec: RemoteSpec) -> None:
        address = urlsplit(spec.base_url)
        if address.scheme == "http" and spec.key is not None and address.hostname not in _LOOPBACK:
            log.warning("remote.key_in_plain_text", model=self._key[0], address=spec.base_url)

    async def _watch_probes(self, upstream: RemotePool) -> None:
        """Probe the remote and report the results. Runs until cancelled."""
        interval_s = upstream.spec.probe_interval_s
        if interval_s is None:
            self._post(WorkerReady(*self._key))
            await asyncio.Event().wait()
            return
        first = await upstream.probe()
        ready = first.ok or first.inconclusive
        self._post(WorkerReady(*self._key) if ready else WorkerUnready(*self._key, first.detail))
        readiness = Readiness(ready=ready)
        while True:
            await asyncio.sleep(interval_s)
            probe = await upstream.probe()
            if readiness.observe(probe):
                self._post(WorkerReady(*self._key) if readiness.ready else WorkerUnready(*self._key, probe.detail))
