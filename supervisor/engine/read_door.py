"""The read door: what everybody may ask the engine, as frozen values made when asked.

Nothing here changes anything. An answer may be old by the time it is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from supervisor.core.decisions import DECISIONS, Decision, DecisionLog
from supervisor.core.effects import Reject
from supervisor.core.limits import Account, Standing
from supervisor.core.model_state import ModelState
from supervisor.core.plans import Plan
from supervisor.core.requests import over
from supervisor.core.scheduler import Scheduler
from supervisor.core.state import SchedulerState
from supervisor.core.types import DeviceSpec, ModelId, ModelSpec, TicketId
from supervisor.core.waiting import Forecast, forecast
from supervisor.core.what_if import what_if
from supervisor.engine.status import (
    DeviceStatus,
    LoadStatus,
    Mark,
    ModelFigures,
    ModelStatus,
    PartnerStatus,
    QueueStatus,
    WaitFigures,
    is_active,
    load_status,
    mark,
    model_figures,
    model_status,
    partner_status,
)


class ReadDoor:
    """The engine's part for those who only look."""

    _scheduler: Scheduler
    _decisions: DecisionLog
    clock: Callable[[], float]

    def model(self, model: ModelId) -> ModelStatus | None:
        """The model's current status; None if it is not configured."""
        state = self._scheduler.state
        found = state.models.get(model)
        return None if found is None else model_status(state, found, self.clock())

    def load_status(self, model: ModelId) -> LoadStatus | None:
        """What there is to know of the load of a model or replica; None if it isn't configured."""
        state = self._scheduler.state
        found = state.models.get(model)
        return None if found is None or found.partner is not None else load_status(state, found, self.clock())

    def models(self) -> tuple[ModelStatus, ...]:
        """Every model, in the order of the configuration; each with its replicas."""
        state, now = self._scheduler.state, self.clock()
        return tuple(model_status(state, found, now) for found in _configured(state))

    def active(self) -> tuple[ModelStatus, ...]:
        """Every model that has a worker, or whose load or worker somebody waits for. Costs next to nothing for the others."""
        state, now = self._scheduler.state, self.clock()
        return tuple(model_status(state, found, now) for found in state.models.values() if is_active(state, found))

    def answering(self) -> list[ModelId]:
        """The models that have a worker which takes new requests."""
        models = self._scheduler.state.models.values()
        return [*dict.fromkeys(found.line for found in models if found.answering and found.partner is None)]

    def figures(self) -> list[ModelFigures]:
        """Of every model, see `models`."""
        state, now = self._scheduler.state, self.clock()
        return [model_figures(state, found, now) for found in _configured(state)]

    def figures_of(self, model: ModelId) -> ModelFigures | None:
        """Of this one; None if it is not configured."""
        state = self._scheduler.state
        found = state.models.get(model)
        return None if found is None else model_figures(state, found, self.clock())

    def marks(self) -> dict[ModelId, Mark]:
        """By which it is seen what changed: see `status.mark`."""
        state, now = self._scheduler.state, self.clock()
        return {found.id: mark(state, found, now) for found in _configured(state)}

    def partners(self) -> tuple[PartnerStatus, ...]:
        """The leases of partners, oldest first, also those that are waited for."""
        state, now = self._scheduler.state, self.clock()
        return tuple(partner_status(state, found, now) for found in state.models.values() if found.partner is not None)

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Every configured device, by id."""
        ledger = self._scheduler.state.ledger
        return tuple(
            DeviceStatus(device, ledger.totals(device.id), ledger.leases_on(device.id)) for device in ledger.devices()
        )

    def device_specs(self) -> tuple[DeviceSpec, ...]:
        """What the devices are, by id."""
        return self._scheduler.state.ledger.devices()

    def pinned(self) -> list[ModelSpec]:
        """Every model that is pinned now, whatever its configuration says."""
        pinned = (found.spec for found in _configured(self._scheduler.state) if found.pinned)
        return [spec if spec.pin else replace(spec, pin=True) for spec in pinned]

    def forecast(self, model: ModelId) -> Forecast:
        """How long a request of the model that is queued now will wait."""
        state = self._scheduler.state
        found = state.models.get(model)
        return Forecast(None, "") if found is None else forecast(state, found, self.clock())

    def what_if(self, spec: ModelSpec) -> Plan:
        """What loading this would mean now."""
        return what_if(self._scheduler.state, self.clock(), spec)

    def queue(self) -> QueueStatus:
        """All requests together."""
        world = self._scheduler.state
        limits, waiting, running = world.limits, len(world.queue), len(world.tickets)
        return QueueStatus(waiting, running, world.shutting_down, limits.queue_total, limits.queue_per_model)

    def waits(self, model: ModelId | None = None) -> WaitFigures:
        """How long requests waited that were dispatched lately, those of one model if named. Costs more than the rest."""
        recent, now = self._scheduler.state.queue.recent, self.clock()
        return WaitFigures(recent.mean_s(now, model), recent.p95_s(now, model))

    def standings(self, accounts: Sequence[Account]) -> list[Standing]:
        """How much is left of each limit of these accounts."""
        return self._scheduler.state.admission.accounts.standings(accounts, self.clock())

    def over(self, ticket: TicketId, accounts: Sequence[Account]) -> Reject | None:
        """What a request of these accounts would be refused with if it were admitted now; None: no limit is reached."""
        reached = self._scheduler.state.admission.accounts.reached(accounts, self.clock())
        return None if reached is None else over(ticket, reached)

    def limited(self) -> list[Standing]:
        """Every limit of which a part is taken."""
        return self._scheduler.state.admission.accounts.taken(self.clock())

    def decisions(self, model: ModelId | None = None, *, limit: int = DECISIONS) -> list[Decision]:
        """The last decisions, oldest first; those about one model if named."""
        return self._decisions.last(model, limit=limit)

    def decisions_since(self, seq: int) -> list[Decision]:
        """All kept decisions after number `seq`, oldest first."""
        return self._decisions.since(seq)


def _configured(state: SchedulerState) -> Iterator[ModelState]:
    """Every model; neither replicas nor partners."""
    return (found for found in state.models.values() if found.partner is None and found.spec.replica_of is None)
