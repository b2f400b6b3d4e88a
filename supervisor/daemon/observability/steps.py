"""Progress of requests that are processed in steps, such as pictures. Workers are polled only while somebody looks.

A worker that reports progress has a path for it (`LaunchSpec.progress`). The daemon polls it when it shows a request or a
job, and twice a second while somebody subscribes to `progress` events. A late answer counts as none. Another module checks
that a worker still makes steps (`supervisor.fleet.worker`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from msgspec.structs import asdict

from supervisor.core.types import Generation, ModelId
from supervisor.fleet.steps import steps_of
from supervisor.gateway.request import Request
from supervisor.schema.request import Step

if TYPE_CHECKING:
    from supervisor.daemon.daemon import Daemon

INTERVAL_S: Final = 0.5

_Worker = tuple[ModelId, Generation]


class Steps:
    """A daemon's view of progress. Use from the event loop's thread."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._watching: asyncio.Task[None] | None = None

    async def look(self, requests: Iterable[Request]) -> list[Request]:
        """Poll the workers of these requests, and record the steps. Returns the requests with new steps."""
        by_worker: dict[_Worker, list[Request]] = {}
        for request in requests:
            if (ticket := request.attempt.ticket) is not None and ticket.generation is not None:
                by_worker.setdefault((ticket.model, ticket.generation), []).append(request)
        changed: list[Request] = []
        for worker, waiting in by_worker.items():
            if not (steps := await self._poll(worker)):
                continue
            for request in waiting:
                found = steps.get(request.request_id.decode("latin-1"))
                if found is not None and found != request.attempt.step:
                    request.attempt.step = found
                    changed.append(request)
        return changed

    def watch(self) -> None:
        """Publish `progress` events from now on, as long as somebody subscribes to them."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="steps")

    async def _watch(self) -> None:
        daemon = self._daemon
        while daemon.hub.wants("progress"):
            changed = await self.look(daemon.requests.running())
            left = {request.ticket_id for request in daemon.requests.running()}  # the others ended during the poll
            for request in (request for request in changed if request.ticket_id in left):
                about = {"id": request.ticket_id, "request_id": request.request_id.decode("latin-1")}
                assert request.attempt.step is not None
                daemon.hub.publish("progress", {**about, "model": request.name, **asdict(request.attempt.step)})
            await asyncio.sleep(INTERVAL_S)

    async def _poll(self, worker: _Worker) -> Mapping[str, Step]:
        found = self._daemon.fleet.steps_source(*worker)
        return {} if found is None else await steps_of(*found)
