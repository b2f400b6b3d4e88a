"""A request as the engine knows it: where it goes, or why it can't."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from supervisor.core.effects import Reject
from supervisor.core.types import Generation, ModelId, RejectCode, TicketId
from supervisor.errors import LlmuxError, NotFoundError, UnavailableError
from supervisor.io.upstream import Upstream


@dataclass(slots=True)
class Ticket:
    """An admitted request: where to send it, and whether it was cut short."""

    id: TicketId
    model: ModelId
    arrived: float
    generation: Generation | None = None
    upstream: Upstream | None = None
    admitted: float = 0.0
    rejection: Reject | None = None  # no exception: that would keep the frames it passes, and they keep the ticket
    cut_reason: str | None = None
    waiter: asyncio.Future[None] | None = None

    @property
    def queued_s(self) -> float:
        """Seconds between arrival and admission."""
        return self.admitted - self.arrived


def rejection(effect: Reject) -> LlmuxError:
    """The error a client gets for a core's Reject."""
    if effect.code is RejectCode.MODEL_NOT_FOUND:
        return NotFoundError(effect.message, code="model_not_found", param="model")
    return UnavailableError(
        effect.message, code=effect.code.value, retry_after_s=effect.retry_after_s, detail=effect.detail
    )
