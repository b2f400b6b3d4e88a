"""A request in the engine: its worker, or the reason of its rejection."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from supervisor.core.admission.limits import Counted, Standing
from supervisor.core.demand import Expected
from supervisor.core.effects import AskClients, QueueLoad, Reject
from supervisor.core.types import MODEL_PLACEHOLDER, Devices, Generation, ModelId, RejectCode, TicketId
from supervisor.errors import (
    MAX_RETRY_AFTER_S,
    BudgetError,
    LlmuxError,
    NotFoundError,
    QueueTimeoutError,
    RateLimitError,
    UnavailableError,
)
from supervisor.host.upstream.upstream import Upstream

_KINDS: Final[Mapping[RejectCode, type[LlmuxError]]] = {
    RejectCode.QUEUE_TIMEOUT: QueueTimeoutError,
    RejectCode.RATE_LIMIT_EXCEEDED: RateLimitError,
    RejectCode.BUDGET_TOO_SMALL: BudgetError,
    RejectCode.BUDGET_EXCEEDED: BudgetError,
}


class HandedOverError(Exception):
    """A successor answers this request, whose client has received no byte of an answer yet."""


class Client(Protocol):
    """The client that waits for the answer to a request."""

    def interrupt(self, error: Exception) -> None:
        """End its wait with `error`."""

    def read_while_blocked(self) -> int | None:
        """How many bytes of its connection the client has read so far; None unless it blocks the answer now."""


@dataclass(slots=True)
class Ticket:
    """A request: the worker to send it to, or its rejection, and whether it was cut."""

    id: TicketId
    model: ModelId
    arrived: float
    generation: Generation | None = None
    upstream: Upstream | None = None
    devices: Devices = ()
    admitted: float = 0.0
    client: Client | None = None  # waits for the answer; set until the answer has ended
    rejection: Reject | None = None  # not an exception: its traceback would keep frames, and these the ticket
    cut_reason: str | None = None
    waiter: asyncio.Future[None] | None = None

    @property
    def queued_s(self) -> float:
        """Seconds between arrival and admission."""
        return self.admitted - self.arrived

    def wake(self) -> None:
        """Wake the caller that waits for the admission."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def cut(self, reason: str) -> None:
        """End the request with an error, because its worker stops."""
        self.cut_reason = reason
        if self.client is not None:
            message = f"The model was stopped before the answer was complete: {reason}."
            code = RejectCode.MODEL_UNLOADED.value
            self.client.interrupt(UnavailableError(message, code=code, retry_after_s=5.0))


def rejection(effect: Reject, name: str) -> LlmuxError:
    """The error for the client, from the core's Reject. `name`: the model's name in the client's request."""
    message = effect.message.replace(MODEL_PLACEHOLDER, name)
    if effect.code is RejectCode.MODEL_NOT_FOUND:
        return NotFoundError(message, code="model_not_found", param="model")
    kind = _KINDS.get(effect.code, UnavailableError)
    error = kind(message, code=effect.code.value, retry_after_s=effect.retry_after_s)
    error.lasts = effect.retry_after_s is None or effect.retry_after_s > MAX_RETRY_AFTER_S
    error.figures = _error_figures(effect.about)
    return error


def _error_figures(about: Standing | QueueLoad | Expected | None) -> dict[str, float | None]:
    """Figures for a client's decision about a retry, under the field names that clients expect."""
    match about:
        case Standing():
            back_s = about.next_s if about.counted is Counted.CONCURRENCY else about.reset_s
            return {"limit": about.limit, "remaining": about.remaining, "resetAt": math.ceil(time.time() + back_s)}
        case QueueLoad(depth, mean_s):
            return {"queueDepth": depth, "avgWaitMs": None if mean_s is None else round(mean_s * 1000)}
        case Expected():
            return {"expected_s": round(about.total_s, 2)}
        case None:
            return {}


def blocking_reads(tickets: Iterable[Ticket], effect: AskClients) -> dict[TicketId, int]:
    """By ticket, the bytes read by each client that now blocks an answer of this worker."""
    running = (ticket for ticket in tickets if (ticket.model, ticket.generation) == (effect.model, effect.generation))
    read = {ticket.id: ticket.client.read_while_blocked() for ticket in running if ticket.client is not None}
    return {ticket: count for ticket, count in read.items() if count is not None}
