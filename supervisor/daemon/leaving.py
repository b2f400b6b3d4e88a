"""How the engine gives its workers to a successor, and what is left of it then: it decides nothing, and waits for requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from supervisor.core.events import Event, RequestFinished, WorkerAdopted
from supervisor.core.scheduler import Scheduler
from supervisor.core.state import ModelState
from supervisor.core.types import SERVES, ModelId, StopCause, TicketId
from supervisor.daemon.recording import Recording
from supervisor.daemon.sampling import Sampling
from supervisor.daemon.ticket import Ticket


class HandedOverError(Exception):
    """A successor answers this request, to which nothing was sent yet."""


class Leaving:
    """The engine's part for a hand-over. See `handover` for the steps."""

    _scheduler: Scheduler
    _sampling: Sampling
    _recordings: set[Recording]
    _tickets: dict[TicketId, Ticket]
    _events: deque[Event]
    _handling: bool
    _tick: asyncio.TimerHandle | None
    _finished: Callable[[TicketId], None] | None  # set iff a successor schedules

    async def calm(self) -> None:
        """Until no worker is starting or stopping, after HandoverAsked. Raises UnavailableError when one can't be stopped."""
        while True:
            busy = [
                found
                for found in self._scheduler.state.models.values()
                if found.has_worker and found.state not in SERVES and not found.spec.remote
            ]
            if not busy:
                return
            for found in busy:
                self._check_quarantine(found)
            await self._change()

    def adoptions(self) -> tuple[WorkerAdopted, ...]:
        """What a successor must know of every worker that serves now."""
        state = self._scheduler.state
        return tuple(
            WorkerAdopted(
                replace(model.spec, preload=False),
                model.generation,
                model.devices,
                state.ledger.leases_of(model.holder)[0].mib,
                tuple(model.in_flight),
                model.ready_at,
                model.last_used,
                model.load_s,
                model.drain is not None and model.drain.cause is StopCause.OPERATOR,
            )
            for model in state.models.values()
            if model.state in SERVES and not model.spec.remote
        )

    def pins(self) -> dict[ModelId, bool]:
        """The models that an operator pinned or unpinned."""
        return {model.id: model.pin for model in self._scheduler.state.models.values() if model.pin is not None}

    def freeze(self) -> None:
        """Handle nothing until `thaw` or `leave`: what is posted waits. Call it outside of events."""
        assert not self._handling
        self._handling = True

    def thaw(self) -> None:
        """Handle what was posted meanwhile, and all that follows. Harmless when it is not frozen."""
        self._handle(None)

    def leave(self, finished: Callable[[TicketId], None]) -> None:
        """A successor schedules from now on: decide nothing any more, and tell `finished` of each request that ends.

        Requests that wait for a worker get HandedOverError, and so does everybody else who waits.
        """
        self._finished = finished
        self._sampling.stop()
        if self._tick is not None:
            self._tick.cancel()
        for recording in tuple(self._recordings):
            recording.end()
        for event in self._events:
            if type(event) is RequestFinished:
                finished(event.ticket)
        self._events.clear()
        for ticket in list(self._tickets.values()):
            ticket.wake()
        self._wake_watchers()

    def _check_handed_over(self) -> None:
        if self._finished is not None:
            raise HandedOverError

    def _handle(self, event: Event | None) -> None:
        raise NotImplementedError

    async def _change(self) -> None:
        raise NotImplementedError

    def _check_quarantine(self, found: ModelState) -> None:
        raise NotImplementedError

    def _wake_watchers(self) -> None:
        raise NotImplementedError
