"""Leases for partners: processes of other programs that take memory of our devices, such as a training job.

In the scheduler a partner is a model without requests whose process isn't ours. It is planned like a model, so idle models
are evicted for it and busy ones drained. Where a model's worker would start, a partner's lease is granted; then it is
pinned. The lease lasts until its holder ends it, or until no heartbeat has come for its time to live. Then the lease ends
with the next reading: memory that its process still uses counts as outside use, and no load begins without free memory.
"""

from __future__ import annotations

from dataclasses import replace

from supervisor.core.events import LeaseEnded, LeaseLost, LeaseRenewed, LeaseRequested, LeaseRestored
from supervisor.core.messages import seconds
from supervisor.core.model_state import Life, ModelState
from supervisor.core.planning.plans import Plan, Refuse, Wait
from supervisor.core.state import SchedulerState, Step
from supervisor.core.types import ModelSpec, Partner, StopCause, WorkerState, on_each
from supervisor.core.workers.lifecycle import Trigger, advance
from supervisor.core.workers.termination import remove, stop_worker


def request_lease(state: SchedulerState, step: Step, event: LeaseRequested) -> None:
    """Request a lease, like a load that an operator orders. Its id must be new."""
    if state.shutting_down:
        return
    model = _add_partner(state, step, event.spec, event.partner)
    model.request_load(step.now)
    state.update_wanted(model)


def restored(state: SchedulerState, step: Step, event: LeaseRestored) -> None:
    """Restore a lease that was granted before this daemon started; its heartbeats continue."""
    model = _add_partner(state, step, event.spec, event.partner)
    advance(model, Trigger.START, step.now, "restored", devices=event.devices)
    mib = on_each(event.mib, event.devices)
    state.ledger.adopt(model.holder, event.devices, mib, step.now, is_partner=True)
    _begin_lease(state, step, model, "restored")


def _add_partner(state: SchedulerState, step: Step, spec: ModelSpec, partner: Partner) -> ModelState:
    assert spec.id not in state.models, f"{spec.id} is there already"
    model = ModelState(spec, Life(step.now), generation=state.last_forgotten, last_used=step.now, partner=partner)
    model.life.reason = "asked for"
    state.models[spec.id] = model
    return model


def plan_for_partner(state: SchedulerState, partner: Partner, answer: Plan) -> Plan:
    """The plan for a partner. With `waits` it isn't refused because others hold memory; without it waits for no model in use.

    Any partner waits for memory that is already being returned: of idle models evicted for it, and of stopping models.
    """
    if partner.waits:
        if isinstance(answer, Refuse) and answer.outage is None and not answer.fits_nowhere:
            return Wait((), (), (), answer.reason)
        return answer
    if state.ledger.unshared is not None:
        return Refuse(state.ledger.unshared)
    if isinstance(answer, Wait):
        in_use = any(_is_in_use(state, state.models[name]) for name in answer.waits_for)
        loading = any(state.ledger.starting(device) for device in answer.devices or state.ledger.device_ids())
        if in_use or loading:
            return Refuse(answer.reason)
    return answer


def _is_in_use(state: SchedulerState, model: ModelState) -> bool:
    if model.state is WorkerState.READY:
        return bool(model.in_flight) or state.queue.count(model.id) > 0
    return model.state is not WorkerState.STOPPING


def grant(state: SchedulerState, step: Step, model: ModelState) -> None:
    """Grant the lease, whose memory is free, to the partner."""
    state.ledger.settle(model.holder, step.now)
    _begin_lease(state, step, model, f"granted after {seconds(step.now - (model.asked_at or step.now))}")


def _begin_lease(state: SchedulerState, step: Step, model: ModelState, reason: str) -> None:
    advance(model, Trigger.READY, step.now, reason)
    state.update_wanted(model)
    step.decide("lease_granted", model.id, f"{_leased_text(state, model)}: {reason}")
    _extend_lease(state, step, model)


def _leased_text(state: SchedulerState, model: ModelState) -> str:
    ledger = state.ledger
    return " + ".join(
        f"{lease.mib} MiB on {ledger.view(lease.device).label}" for lease in ledger.leases_of(model.holder)
    )


def renewed(state: SchedulerState, step: Step, event: LeaseRenewed) -> None:
    """Handle a heartbeat: the lease's time to live restarts."""
    model = state.models.get(event.lease)
    if model is None or model.partner is None or model.removed:
        return
    model.partner = replace(
        model.partner,
        ttl_s=model.partner.ttl_s if event.ttl_s is None else event.ttl_s,
        pid=model.partner.pid if event.pid is None else event.pid,
    )
    if model.state is WorkerState.READY:
        _extend_lease(state, step, model)


def _extend_lease(state: SchedulerState, step: Step, model: ModelState) -> None:
    """Extend the lease by its time to live. The lease has one timer at a time, however many heartbeats come."""
    partner = model.partner
    assert partner is not None
    until = step.now + partner.ttl_s
    model.partner = replace(partner, until=until)
    if partner.until is None or until < partner.until:
        state.wake(until, model.id)


def ended(state: SchedulerState, step: Step, event: LeaseEnded) -> None:
    """End a granted lease, so that its memory returns, or forget a requested one at once."""
    model = state.models.get(event.lease)
    if model is None or model.partner is None or model.removed:
        return
    step.decide("lease_ended", model.id, event.reason)
    remove(state, step, model, event.reason)


def lost(state: SchedulerState, step: Step, event: LeaseLost) -> None:
    """Stop a worker whose memory others may already use, and cut its requests. It is reloaded when it fits without an eviction."""
    model = state.current(event.model, event.generation)
    if model is None or model.exited:
        return
    step.decide("lease_ended", model.id, event.reason)
    if model.partner is not None:
        remove(state, step, model, event.reason)
        return
    stop_worker(state, step, model, StopCause.LEASE, event.reason, force=True)
    if not model.removed:
        model.request_restore()


def end_if_overdue(state: SchedulerState, step: Step, model: ModelState) -> None:
    """End the lease if no heartbeat has come in time."""
    partner = model.partner
    if partner is None or partner.until is None:
        return
    if step.now < partner.until:
        state.wake(partner.until, model.id)
    else:
        ended(state, step, LeaseEnded(model.id, f"no heartbeat came for {seconds(partner.ttl_s)}"))
