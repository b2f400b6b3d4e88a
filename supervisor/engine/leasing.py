"""The engine's part for partners: asking for memory on behalf of a process that isn't ours, and which processes to measure."""

from __future__ import annotations

from collections.abc import Callable

from supervisor.core.events import Event, LeaseAsked
from supervisor.core.types import WorkerState
from supervisor.engine.leaving import Leaving
from supervisor.engine.read_door import ReadDoor
from supervisor.errors import LeaseUnavailableError, UnavailableError
from supervisor.io.memory import HolderPids, WorkerKey


class Leasing(ReadDoor, Leaving):
    """See `partners` for what is asked, and by whom. Also all that the engine is besides deciding."""

    post: Callable[[Event], None]

    async def lease(self, asked: LeaseAsked) -> None:
        """Return when it is granted. Cancelling stops waiting only: whoever asked posts LeaseEnded, also after an error.

        Raises LeaseUnavailableError, or UnavailableError during the shutdown.
        """
        self.post(asked)
        while True:
            self._check_handed_over()
            found = self._scheduler.state.models.get(asked.spec.id)
            if found is None or self._scheduler.state.shutting_down:
                raise UnavailableError("llmux is shutting down; try again in a moment.", code="shutting_down")
            if found.state is WorkerState.READY:
                return
            if found.asked_at is None:
                raise LeaseUnavailableError(f"{asked.partner.holder} got no lease: {found.life.reason}")
            await self._change()

    def measured_partners(self) -> dict[WorkerKey, HolderPids]:
        """The processes of the partners that told theirs."""
        return {
            model.holder: HolderPids(model.devices, (model.partner.pid,), loading=False)
            for model in self._scheduler.state.models.values()
            if model.partner is not None and model.partner.pid is not None and model.state is WorkerState.READY
        }
