"""The state machine: `handle(event, now) -> [Effect]`.

One object owns all state and is called from one place; nothing here waits, reads a clock, or touches a process. Each event
changes its models; then `placement` replans the affected waiters. So every decision sees the state at the end of the event.
The same events at the same times give the same effects: a replay relies on this.

A request's way:
 1. arrives → refused at once (unknown, failed, beyond a limit, shutting down), or
 2. dispatched at once to a ready worker with room, or
 3. queued, which makes its model wanted; the worker's READY dispatches it *in the same step*, so that nothing can evict
    the model between becoming ready and its first request;
 4. finished, with or without success.

The modules that decide: `requests` (1 to 4), `admission` (order and limits), `placement` and `planner` (which model is loaded
where, and which are evicted for it), `eviction` (claims and drains), `reports` (of workers and devices), `termination` (stops,
crashes, a worker's end), `operators` (orders of people, configurations), `partners` (other processes), `timers` (the end of
backoffs, drains and keep-alives). All of them change the one `SchedulerState`. `plain` handles most requests of a ready worker at once.
"""

from __future__ import annotations

from typing import assert_never

from supervisor.core import operators, timers
from supervisor.core.admission import plain, requests
from supervisor.core.admission.admission import AdmissionPolicy
from supervisor.core.admission.dispatch import serve_heads
from supervisor.core.effects import Effect, Reject
from supervisor.core.events import (
    ClientsRead,
    Configured,
    Event,
    HandoverEnded,
    HandoverRequested,
    LeaseEnded,
    LeaseLost,
    LeaseRenewed,
    LeaseRequested,
    LeaseRestored,
    LeasesSeen,
    LoadCancelled,
    LoadRequested,
    MemorySampled,
    Mishandled,
    PinRequested,
    RequestArrived,
    RequestFinished,
    Respecified,
    ShutdownRequested,
    Tick,
    UnloadRequested,
    WorkerAdopted,
    WorkerExited,
    WorkerReady,
    WorkerUnkillable,
    WorkerUnready,
)
from supervisor.core.memory import partners
from supervisor.core.planning import eviction
from supervisor.core.planning.placement import place_wanted
from supervisor.core.state import MishandledError, SchedulerState, Step
from supervisor.core.types import ModelId
from supervisor.core.workers import replicas, reports, termination


class Scheduler:
    """Decides which model runs on which device, and which request is served. Not thread-safe: one writer."""

    def __init__(self, admission: AdmissionPolicy | None = None) -> None:
        self.state = SchedulerState(admission or AdmissionPolicy())

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event at `now` (monotonic seconds, never going back). Returns the effects to carry out, in order.

        Raises MishandledError, and leaves the state half changed: `recovery` restores it.
        """
        running = self.state.tickets.get(event.ticket) if type(event) is RequestFinished else None
        step, is_taken = Step(now), False
        try:
            if (effects := plain.handle_if_plain(self.state, event, now)) is not None:
                return effects
            self._apply_event(step, event)
            step.about, is_taken = None, True
            timers.fire(self.state, step)
            if isinstance(event, Tick | Mishandled) or self.state.ledger.has_changed():
                reports.watch_memory(self.state, step)
            if self.state.groups:
                replicas.balance(self.state, step, event, running)
            place_wanted(self.state, step)
            if self.state.groups and replicas.balance(self.state, step, event, running):
                place_wanted(self.state, step)
            while len(self.state.queue) and serve_heads(self.state, step):
                place_wanted(self.state, step)
            for effect in step.effects:
                if type(effect) is Reject:  # no rejection is charged to its tenant
                    self.state.admission.accounts.refused(effect.ticket, now)
        except Exception as mistake:
            about = step.about if is_taken else step.about or running or _model_of(event)
            raise MishandledError(str(mistake), about) from mistake
        return step.effects

    def deadline(self, now: float) -> float:
        """When `Tick` is needed at the latest; infinity when nothing is due."""
        return min(self.state.next_wake(), self.state.queue.deadline(), self.state.ledger.deadline(now))

    def is_impatient(self) -> bool:
        """Whether a load waits for memory, or memory is being returned, so that readings should be frequent."""
        return bool(self.state.wanted) or self.state.ledger.is_waiting()

    def _apply_event(self, step: Step, event: Event) -> None:
        """Apply the event."""
        state = self.state
        match event:
            case RequestArrived():
                requests.arrived(state, step, event)
            case RequestFinished():
                requests.finished(state, step, event)
            case WorkerReady():
                reports.ready(state, step, event)
            case WorkerUnready():
                reports.unready(state, step, event)
            case ClientsRead():
                eviction.clients_read(state, step, event)
            case WorkerExited():
                termination.exited(state, step, event)
            case WorkerUnkillable():
                termination.unkillable(state, step, event)
            case MemorySampled():
                reports.sampled(state, step, event)
            case LoadRequested():
                operators.load(state, step, event)
            case UnloadRequested():
                operators.unload(state, step, event)
            case LoadCancelled():
                operators.cancel_load(state, step, event)
            case PinRequested():
                operators.pin(state, step, event)
            case Respecified():
                operators.respecify(state, step, event)
            case Configured():
                operators.configure(state, step, event)
            case ShutdownRequested():
                operators.shut_down(state, step)
            case HandoverRequested():
                state.handing_over = True
            case HandoverEnded():
                state.handing_over = False
                state.wanted.plan_all_again()
            case WorkerAdopted():
                reports.adopted(state, step, event)
            case LeaseRequested():
                partners.request_lease(state, step, event)
            case LeaseRenewed():
                partners.renewed(state, step, event)
            case LeaseEnded():
                partners.ended(state, step, event)
            case LeaseRestored():
                partners.restored(state, step, event)
            case LeasesSeen(others, trouble):
                state.ledger.share(others, trouble)
            case LeaseLost():
                partners.lost(state, step, event)
            case Mishandled(inner, models, why):
                termination.mishandled(state, step, models, why)
                if inner is not None:
                    step.about = _model_of(inner)
                    self._apply_event(step, inner)
                    termination.mishandled(state, step, models, why)
            case Tick():
                pass
            case _:
                assert_never(event)


def _model_of(event: Event) -> ModelId | None:
    """The model that the event names, if any."""
    match event:
        case RequestArrived(model=model):
            return model
        case Respecified(spec) | LeaseRequested(spec) | LeaseRestored(spec):
            return spec.id
        case LeaseRenewed(lease) | LeaseEnded(lease):
            return lease
    return getattr(event, "model", None)
