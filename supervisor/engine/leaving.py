"""How the engine rests: how others wait for what it does, and how it gives its workers to a successor.

What is left of it then decides nothing, and waits for requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from supervisor.core.events import Event, RequestFinished, WorkerAdopted
from supervisor.core.model_state import ModelState
from supervisor.core.scheduler import Scheduler
from supervisor.core.types import SERVES, ModelId, StopCause, TicketId
from supervisor.engine.recording import Recording
from supervisor.engine.sampling import Sampling
from supervisor.engine.ticket import Ticket
from supervisor.errors import UnavailableError


class HandedOverError(Exception):
    """A successor answers this request, to which nothing was sent yet."""


class Leaving:
    """The engine's part for a hand-over. See `handover` for the steps."""

    _scheduler: Scheduler
    _sampling: Sampling
    _recordings: set[Recording]
    _tickets: dict[TicketId, Ticket]
    _events: deque[Event]
    _tick: asyncio.TimerHandle | None
    _watchers: list[asyncio.Future[None]]
    _finished: Callable[[TicketId], None] | None  # set iff a successor schedules

    async def calm(self) -> None:
        """Until no worker is starting or stopping, after HandoverAsked. Raises UnavailableError when one can't be stopped."""
        while True:
            busy = [
                found
                for found in self._scheduler.state.models.values()
                if found.has_worker and found.state not in SERVES and not found.spec.is_elsewhere
            ]
            if not busy:
                return
            for found in busy:
                self._check_quarantine(found, found.id)
            await self._change()

    def adoptions(self) -> tuple[WorkerAdopted, ...]:
        """What a successor must know of every worker that serves now."""
        state = self._scheduler.state
        return tuple(
            WorkerAdopted(
                replace(model.spec, preload=False),
                model.generation,
                model.devices,
                tuple(lease.mib for lease in state.ledger.leases_of(model.holder)),
                tuple(model.in_flight),
                model.ready_at,
                model.last_used,
                model.load_s,
                model.drain is not None and model.drain.cause is StopCause.OPERATOR,
                model.kept_until,
                tuple(model.in_flight.values()),
                model.last_priority,
            )
            for model in state.models.values()
            if model.state in SERVES and not model.spec.is_elsewhere and model.partner is None
        )

    def pins(self) -> dict[ModelId, bool]:
        """The models that an operator pinned or unpinned."""
        return {model.id: model.pin for model in self._scheduler.state.models.values() if model.pin is not None}

    def dismissed(self) -> tuple[ModelId, ...]:
        """The models that stay away because an operator unloaded them."""
        models = self._scheduler.state.models.values()
        return tuple(model.id for model in models if model.dismissed and model.spec.replica_of is None)

    def leave(self, finished: Callable[[TicketId], None]) -> None:
        """A successor schedules from now on: decide nothing any more, and tell `finished` of each request that ends.

        Requests that wait for a worker get HandedOverError, and so does everybody else who waits.
        """
        self._finished = finished
        self._rest()
        for event in self._events:
            if type(event) is RequestFinished:
                finished(event.ticket)
        self._events.clear()
        for ticket in list(self._tickets.values()):
            ticket.wake()
        self._wake_watchers()

    def _rest(self) -> None:
        """Read no memory, set no timer, record nothing any more."""
        self._sampling.stop()
        if self._tick is not None:
            self._tick.cancel()
        for recording in tuple(self._recordings):
            recording.end()

    # ------------------------------------------------------------------------------------------ who waits for a change

    async def why_ended(self, ticket: Ticket, within_s: float) -> str | None:
        """Why the ticket's worker ended, in words for everybody; None if it doesn't turn out within that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while (
                    self._finished is None
                    and (found := self._scheduler.state.models.get(ticket.model)) is not None
                    and found.generation == ticket.generation
                    and not found.spec.is_elsewhere
                ):
                    if found.crash is not None and not found.has_worker:
                        return found.crash.summary
                    await self._change()
        return None

    async def _change(self) -> None:
        """Until the next event has been handled."""
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        await watcher

    def _wake_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    def _check_quarantine(self, found: ModelState, name: str) -> None:
        """A worker can't be killed, or its memory is long overdue: nobody can say when that ends."""
        reason = self._scheduler.state.ledger.quarantined_by(found.holder)
        if reason is not None:
            raise UnavailableError(f"{name}'s worker {reason}", code="device_quarantined")

    def _check_handed_over(self) -> None:
        if self._finished is not None:
            raise HandedOverError
