"""The running and queued requests: what is known of each, who observes them, and how an operator cancels one.

A request is added once its body was read and its model found, and removed at its end; the pieces of its response cost
nothing here. At its end one canonical record goes to the log, the event stream and the history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from pydantic import JsonValue

from supervisor.catalog.keys import Key
from supervisor.core.types import TicketId
from supervisor.daemon.events import Hub
from supervisor.daemon.history import History
from supervisor.daemon.leaving import HandedOverError
from supervisor.daemon.ticket import Ticket
from supervisor.errors import RequestCancelledError
from supervisor.io.held_body import HeldBody
from supervisor.io.upstream import Headers
from supervisor.proxy.dialect import Dialect
from supervisor.proxy.disconnect import CancelOnDisconnect
from supervisor.proxy.forward import NO_USAGE, Outcome, Usage
from supervisor.proxy.keepalive import Keepalive

logger = structlog.get_logger("llmux.request")

Json = dict[str, JsonValue]


@dataclass(slots=True)
class RequestContext:
    """One request: its client, what its response carries, and what the canonical log line contains."""

    request_id: bytes
    arrived_at: float  # loop time
    dialect: Dialect  # what the client speaks
    key: Key | None = None
    extra: Headers = field(default_factory=list)  # for the response, besides x-request-id and openai-processing-ms
    path: str = ""
    waiting: HeldBody | None = None  # its body, set iff a successor has to answer it
    name: str | None = None
    stream: bool = False
    ticket_id: TicketId | None = None  # once it is entered
    ticket: Ticket | None = None  # once it is admitted
    keepalive: Keepalive | None = None
    outcome: Outcome = field(default_factory=Outcome)
    ended_at: float = 0.0  # loop time; this and the usage once it has ended
    usage: Usage = NO_USAGE
    failure: str | None = None  # an error's code
    failed_status: int = 0

    @property
    def answering(self) -> bool:
        """Has the client seen the beginning of a response?"""
        return self.outcome.started or (self.keepalive is not None and self.keepalive.started)

    def record(self) -> Json:
        """The canonical record of it, when it has ended."""
        ticket, outcome = self.ticket, self.outcome
        return {
            "request_id": self.request_id.decode("latin-1"),
            "path": self.path,
            "model": self.name,
            "worker": f"{ticket.model}:{ticket.generation}" if ticket is not None else None,
            "key": self.key.name if self.key is not None else None,
            "status": outcome.status or self.failed_status,
            "error": outcome.error or self.failure,
            "cut": ticket.cut_reason if ticket is not None else None,
            "queue_ms": round(ticket.queued_s * 1000, 1) if ticket is not None else None,
            "first_byte_ms": round(outcome.first_byte_s * 1000, 1) if outcome.first_byte_s is not None else None,
            "total_ms": round((self.ended_at - self.arrived_at) * 1000, 1),
            "bytes": outcome.bytes_sent,
            "prompt_tokens": self.usage.prompt,
            "completion_tokens": self.usage.completion,
        }


class InFlight:
    """All requests that are queued or running. Outlives a reload."""

    def __init__(self, hub: Hub, history: History) -> None:
        self._hub = hub
        self._history = history
        self._calls: dict[TicketId, tuple[RequestContext, CancelOnDisconnect]] = {}
        self._ended: list[RequestContext] = []
        self.listeners: list[
            Callable[[RequestContext, float], None]
        ] = []  # called for each request that ended, with its seconds

    def begin(self, context: RequestContext, cancelling: CancelOnDisconnect) -> None:
        """Enter it. `finished` must follow."""
        assert context.ticket_id is not None
        self._calls[context.ticket_id] = (context, cancelling)
        if self._hub.wants("request"):
            self._hub.publish("request", {"id": context.ticket_id, "state": "started", **_about(context)})

    def hand_over(self) -> None:
        """End those that wait for a worker with HandedOverError: somebody else will answer them."""
        for context, cancelling in self._calls.values():
            if context.ticket is None:
                cancelling.interrupt(HandedOverError())

    def finished(self, context: RequestContext) -> None:
        """Remove it now and record it soon. Also for requests that were rejected before they were added."""
        if context.ticket_id is not None:
            self._calls.pop(context.ticket_id, None)
        loop = asyncio.get_running_loop()
        context.ended_at = loop.time()
        if not self._ended:
            loop.call_soon(self._tell)
        self._ended.append(context)

    def _tell(self) -> None:
        """Record all requests that ended in one turn of the loop, after their responses were sent."""
        ended, self._ended = self._ended, []
        log = logger.bind()  # bound once for all: an unbound logger looks everything up at every line
        quick_tokens = 0  # of responses no longer than a point of the history: added in one step
        for context in ended:
            context.usage = context.outcome.usage()
            record = context.record()
            log.info("request.finished", **record)
            for listener in self.listeners:
                listener(context, context.ended_at - context.arrived_at)
            if context.usage.completion is not None and context.ticket is not None:
                if context.ended_at - context.ticket.admitted < self._history.interval_s:
                    quick_tokens += context.usage.completion
                else:
                    self._history.spread(
                        "tokens_per_s", context.usage.completion, context.ticket.admitted, context.ended_at
                    )
            if self._hub.wants("request"):
                self._hub.publish("request", {"id": context.ticket_id, "state": "finished", **record})
        if quick_tokens:
            now = ended[-1].ended_at
            self._history.spread("tokens_per_s", quick_tokens, now, now)

    def cancel(self, ticket_id: str) -> bool:
        """Cancel it for an operator: its client gets an error. False: there is no such request, or no longer."""
        found = self._calls.get(TicketId(ticket_id))
        if found is None:
            return False
        found[1].interrupt(RequestCancelledError("The request was cancelled by an operator."))
        return True

    def views(self) -> list[Json]:
        """For the admin API, oldest first."""
        now = asyncio.get_running_loop().time()
        return [
            {
                "id": ticket_id,
                "state": "queued" if context.ticket is None else "running",
                **_about(context),
                "worker": f"{context.ticket.model}:{context.ticket.generation}" if context.ticket is not None else None,
                "age_s": round(now - context.arrived_at, 3),
                "bytes": context.outcome.bytes_sent,
            }
            for ticket_id, (context, _) in self._calls.items()
        ]


def _about(context: RequestContext) -> Json:
    return {
        "request_id": context.request_id.decode("latin-1"),
        "model": context.name,
        "path": context.path,
        "key": context.key.name if context.key is not None else None,
        "stream": context.stream,
    }
