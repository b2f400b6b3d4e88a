"""One request: its client, the headers of its response, and everything that its record shows."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET

from supervisor.catalog.keys import Key
from supervisor.core.demand import DEFAULT_DEMAND, NORMAL, Demand
from supervisor.core.types import TicketId
from supervisor.engine.waits import WaitSegment, WaitTrace
from supervisor.errors import LlmuxError
from supervisor.gateway.attempt import NO_USAGE, Attempt, Usage
from supervisor.gateway.dialect import Dialect
from supervisor.gateway.filters.translation import shown
from supervisor.gateway.identity.trace_context import TraceContext
from supervisor.gateway.record import BODY, MESSAGE_LIMIT, RequestRecord
from supervisor.gateway.route.caching import CacheDirective
from supervisor.host.store.request_buffer import RequestBuffer
from supervisor.host.upstream.upstream import Headers


@dataclass(slots=True)
class Request:
    """One request: its client, the headers of its response, and everything that its record shows.

    The objects that serve the request may refer to it. The request itself refers only to its attempt, which
    `ResponseCycle.release` clears.
    """

    request_id: bytes
    arrived_at: float  # loop time
    dialect: Dialect  # the client's
    key: Key | None = None
    demand: Demand = DEFAULT_DEMAND
    extra: Headers = field(default_factory=list)  # for the response, besides x-request-id and openai-processing-ms
    path: str = ""
    response: str | None = None  # the name of the response that the request generates in the background
    waiting: RequestBuffer | None = None  # the body, set iff a successor or the daemon itself has to answer the request
    name: str | None = None
    stream: bool = False
    cache: CacheDirective | None = None  # about prompt caches
    budget_s: float | None = None  # from its arrival
    ticket_id: TicketId | None = None  # set once the request is in flight
    entered_at: float | None = None  # loop time; set with `ticket_id`
    trace: TraceContext | None = None  # the trace that the request belongs to
    span_id: str = ""  # of the worker's part of the trace; set iff spans are made
    attempt: Attempt = field(default_factory=Attempt)  # the last one
    waits: list[WaitTrace] = field(default_factory=list)  # for a worker, in order; none if a worker took it at once
    is_begun: bool = False  # does the client have the head of a stream before a worker answered? Set at a handover
    ended_at: float = 0.0  # loop time; set at the end
    usage: Usage = NO_USAGE  # set at the end
    failure: str | None = None  # an error's code
    failed_status: int = 0
    failed_message: str | None = None

    @property
    def admitted_at(self) -> float | None:
        """The time of its admission to a worker; None: not yet. `arrived_at`, `entered_at` and this are a translation's `Times`."""
        return None if self.attempt.ticket is None else self.attempt.ticket.admitted

    @property
    def answering(self) -> bool:
        """Has the client seen the beginning of a response?"""
        return self.attempt.outcome.started or self.is_begun

    def counted(self) -> Usage:
        """The token counts of its answer, once it has ended. The first call searches the answer for them."""
        if self.usage is NO_USAGE:
            self.usage = self.attempt.outcome.usage()
        return self.usage

    def fail(self, error: LlmuxError) -> None:
        """Record the error that ended the request. The error itself isn't kept: it would keep its traceback's frames."""
        self.failure, self.failed_status, self.failed_message = error.code, int(error.status), error.message

    def parts(self, now: float) -> tuple[WaitSegment, ...]:
        """Its waits so far: for its body, then for workers."""
        waits = self.waits
        entered_at = waits[0].since if waits else self.entered_at
        body = BODY, (now if entered_at is None else entered_at) - self.arrived_at
        return (body, *(part for wait in waits for part in wait.parts(now))) if waits else (body,)

    def record(self, until: float) -> RequestRecord:
        """Its record at the time `until` (loop time): at its end, or so far."""
        attempt, key, usage, demand = self.attempt, self.key, self.usage, self.demand
        ticket, outcome = attempt.ticket, attempt.outcome
        first_s, first_at, count = outcome.first_byte_s, outcome.first_byte_at, usage.completion
        rate = None
        if self.stream and first_at is not None and count is not None and until > first_at:
            rate = count / (until - first_at)
        return RequestRecord(
            self.request_id.decode("latin-1"),
            self.path,
            self.name,
            None if ticket is None else f"{ticket.model}:{ticket.generation}",
            None if key is None else key.name,
            outcome.status or self.failed_status,
            outcome.error or self.failure,
            None if ticket is None else ticket.cut_reason,
            None if ticket is None else round(ticket.queued_s * 1000, 1),
            None if first_s is None else round(first_s * 1000, 1),
            round((until - self.arrived_at) * 1000, 1),
            outcome.bytes_sent,
            usage.prompt,
            count,
            UNSET if demand.priority == NORMAL else demand.priority,
            UNSET if demand is DEFAULT_DEMAND or demand.tenant == ("" if key is None else key.name) else demand.tenant,
            UNSET if self.trace is None else self.trace.trace_id,
            shown((*attempt.ignored, *outcome.ignored)) if attempt.ignored or outcome.ignored else UNSET,
            self.ticket_id,
            self.arrived_at,
            until,
            self.stream,
            self.parts(until),
            None if first_at is None else first_at - self.arrived_at,
            rate,
            (outcome.error_message or self.failed_message or "")[:MESSAGE_LIMIT] or None,
            attempt.model,
            demand,
            "" if key is None else key.id,
            () if ticket is None else ticket.devices,
            None if ticket is None else ticket.admitted,
            usage.cached,
        )
