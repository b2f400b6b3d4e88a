"""The running and queued requests: their records, their observers, and their cancellation by an operator.

A request is added once its body was read and its model found, and removed at its end; the chunks of its response cost
nothing here. At its end one canonical record goes to the log, the event stream, the history, and the list of recent requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import structlog
from msgspec.structs import asdict

from supervisor.core.types import TicketId
from supervisor.engine.events import Hub
from supervisor.errors import RequestCancelledError
from supervisor.gateway.disconnect import CancelOnDisconnect
from supervisor.gateway.record import ENDED, RequestRecord
from supervisor.gateway.request import Request
from supervisor.schema.request import ActiveRequest, FinishedRequest

GROUP: Final = 64
GROUP_S: Final = 0.025
"""Requests are recorded in groups of this size, or after this time: some of the work is then done once for a group."""

logger = structlog.get_logger("llmux.request")


class InFlight:
    """All requests that are queued or running. Outlives a reload."""

    def __init__(self, hub: Hub, epoch: float) -> None:
        """`epoch`: the zero of the engine's clock, in Unix seconds."""
        self._hub = hub
        self._epoch = epoch
        self._requests: dict[TicketId, tuple[Request, CancelOnDisconnect]] = {}
        self._ended: list[Request] = []  # ended, but not recorded yet
        self._recording: asyncio.Handle | None = None  # set iff `_ended` isn't empty
        self._last: deque[RequestRecord] = deque(maxlen=ENDED)
        self.kept: list[RequestRecord] | None = None  # records for the history to take; None: no history is kept
        self.observers: list[Callable[[Request], None]] = []  # called at once for each request that ended
        self.listeners: list[Callable[[Sequence[Request]], None]] = []  # called for each group that is recorded

    def begin(self, request: Request, cancelling: CancelOnDisconnect) -> None:
        """Add a request. `finished` must follow."""
        assert request.ticket_id is not None
        self._requests[request.ticket_id] = (request, cancelling)
        if self._hub.wants("request"):
            self._hub.publish("request", {"id": request.ticket_id, "state": "started", **_request_fields(request)})

    def finished(self, request: Request) -> None:
        """Remove a request now and record it soon. Also for requests that were rejected before they were added."""
        if request.ticket_id is not None:
            self._requests.pop(request.ticket_id, None)
        loop = asyncio.get_running_loop()
        request.ended_at = loop.time()
        self._ended.append(request)
        if len(self._ended) == GROUP:  # in the next turn of the loop, after their responses were sent
            self._schedule_record(loop.call_soon(self._record_first, GROUP))
        elif self._recording is None:
            self._schedule_record(loop.call_later(GROUP_S, self._record_first, GROUP))
        for observer in self.observers:
            observer(request)

    def _schedule_record(self, handle: asyncio.Handle | None) -> None:
        if self._recording is not None:
            self._recording.cancel()
        self._recording = handle

    def record(self) -> None:
        """Record all requests that ended since the last call, in their order. Call this before reading records, counts or figures."""
        self._record_first(len(self._ended))

    async def recorded(self) -> None:
        """As `record`, but one group in each turn of the loop: thousands of requests may end in one turn."""
        for _ in range(0, len(self._ended), GROUP):
            self._record_first(GROUP)
            await asyncio.sleep(0)

    def _record_first(self, most: int) -> None:
        """Record the first `most` requests, and the others in the next turns of the loop."""
        ended, self._ended = self._ended[:most], self._ended[most:]
        if not ended:
            return
        self._schedule_record(asyncio.get_running_loop().call_soon(self._record_first, GROUP) if self._ended else None)
        log = logger.bind()  # bound once for all: an unbound logger looks everything up at every line
        is_followed = self._hub.wants("request")
        epoch = time.time() - asyncio.get_running_loop().time()  # now, as for all lines: a system's clock may be set
        for request in ended:
            request.counted()
            record = request.record(request.ended_at)
            self._last.append(record)
            if self.kept is not None:
                self.kept.append(record)
            log.info("request.finished", _line=record.line(), _at=epoch + request.ended_at)
            if is_followed:
                self._hub.publish("request", FinishedRequest(**asdict(record.view(self._epoch))))
        for listener in self.listeners:
            try:
                listener(ended)
            except Exception:
                log.exception("request.mishandled", count=len(ended))

    def restore(self, before: Iterable[RequestRecord]) -> None:
        """Add the requests that ended before this daemon began, oldest first. Call this once, at the start."""
        self._last.extendleft(reversed([*before]))

    def find(self, wanted: str) -> Request | RequestRecord | None:
        """The request with this id, else the latest with this x-request-id, among those in flight and the last that ended."""
        found = self._requests.get(TicketId(wanted))
        if found is not None:
            return found[0]
        self.record()
        ended = next((each for each in reversed(self._last) if each.id == wanted), None)
        if ended is not None:
            return ended
        name = wanted.encode("latin-1", "replace")
        running = (request for request, _ in reversed(self._requests.values()) if request.request_id == name)
        return next(running, None) or next((e for e in reversed(self._last) if e.request_id == wanted), None)

    def running(self) -> list[Request]:
        """The requests that a worker is answering."""
        return [request for request, _ in self._requests.values() if request.attempt.ticket is not None]

    def last(self) -> Iterator[RequestRecord]:
        """Recent requests, newest first."""
        self.record()
        return reversed(self._last)

    def cancel(self, ticket_id: str) -> bool:
        """Cancel a request for an operator: its client gets an error. False: no such request is in flight."""
        found = self._requests.get(TicketId(ticket_id))
        if found is None:
            return False
        found[1].interrupt(RequestCancelledError("The request was cancelled by an operator."))
        return True

    def by_tenant(self) -> Counter[str]:
        """The number of queued and running requests of each tenant."""
        return Counter([request.demand.tenant for request, _ in self._requests.values()])

    def views(self) -> Iterator[ActiveRequest]:
        """The requests for the admin API, oldest first, each in its state when the iterator reaches it, without those that ended."""
        now = asyncio.get_running_loop().time()
        for ticket_id, (request, _) in tuple(self._requests.items()):
            if ticket_id not in self._requests:
                continue
            attempt, ticket = request.attempt, request.attempt.ticket
            yield ActiveRequest(
                id=ticket_id,
                state="queued" if ticket is None else "running",
                **_request_fields(request),
                worker=None if ticket is None else f"{ticket.model}:{ticket.generation}",
                age_s=round(now - request.arrived_at, 3),
                bytes=attempt.outcome.bytes_sent,
                progress=attempt.step,
            )


def _request_fields(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id.decode("latin-1"),
        "model": request.name,
        "path": request.path,
        "key": request.key.name if request.key is not None else None,
        "tenant": request.demand.tenant or None,
        "priority": request.demand.priority,
        "stream": request.stream,
    }
