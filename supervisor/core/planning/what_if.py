"""A trial plan: the planner's answer for a hypothetical configuration of a model. Nothing is loaded or changed.

The model's own worker counts as stopped, since another definition replaces it. Temporary obstacles don't count: a running
load on a device, a minimum residency, a hold.
"""

from __future__ import annotations

from dataclasses import replace

from supervisor.core.memory.device_ledger import Lease
from supervisor.core.model_state import Life, ModelState
from supervisor.core.planning.planner import plan
from supervisor.core.planning.plans import DeviceView, EvictionBlock, LoadDemand, Plan, Resident, Snapshot
from supervisor.core.planning.snapshots import resident
from supervisor.core.state import SchedulerState
from supervisor.core.types import DeviceId, ModelId, ModelSpec, WorkerState, base_of

_BLOCKS = {
    WorkerState.STARTING: EvictionBlock.STARTING,
    WorkerState.STOPPING: EvictionBlock.STOPPING,
    WorkerState.DRAINING: EvictionBlock.DRAINING,
}


def what_if(state: SchedulerState, now: float, spec: ModelSpec) -> Plan:
    """The plan for loading `spec` next. Its model need not be configured."""
    devices = state.ledger.devices()
    model = ModelState(spec, Life(now))
    options = tuple(model.options(devices).values())
    demand = LoadDemand(spec.id, spec.type, spec.priority, options, model.spread(devices))
    own_model = base_of(spec.id)
    views = tuple(_view_without(state, device.id, own_model) for device in devices)
    holders = dict.fromkeys(lease.holder for lease in state.ledger.leases())
    residents = (
        _resident_of(now, state.models[holder[0]], state.ledger.leases_of(holder))
        for holder in holders
        if base_of(holder[0]) != own_model
    )
    return plan(demand, Snapshot(views, tuple(residents), state.admission))


def _view_without(state: SchedulerState, device: DeviceId, own_model: ModelId) -> DeviceView:
    view = state.ledger.view(device)
    returned = sum(
        lease.reserved_mib for lease in state.ledger.leases_on(device) if base_of(lease.holder[0]) == own_model
    )
    return replace(view, free_mib=min(view.usable_mib, view.free_mib + returned), blocked=None)


def _resident_of(now: float, model: ModelState, leases: tuple[Lease, ...]) -> Resident:
    block = _BLOCKS.get(model.state, EvictionBlock.BUSY if model.in_flight else EvictionBlock.NONE)
    is_pinned = model.pinned and not model.removed
    return resident(now, model, leases, EvictionBlock.PINNED if is_pinned else block)
