"""The admin API's views of models, devices and decisions, from the scheduler's state, the workers and the catalog.

A view may be one event old, so no decision uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from supervisor.catalog import CatalogModel, Route
from supervisor.catalog.models.fitting import memory_warnings, pins_warning
from supervisor.core import types as core
from supervisor.core.decisions import Decision
from supervisor.core.types import DeviceId, DeviceSpec, ModelId
from supervisor.engine.status import DeviceStatus, ModelStatus
from supervisor.gateway.route.thinking import thinking_modes
from supervisor.host.media.convert import documents
from supervisor.host.memory.memory import DeviceInfo
from supervisor.schema.memory import Device, DeviceLease
from supervisor.schema.model import (
    Capabilities,
    Crash,
    Footprint,
    Memory,
    ModelMemory,
    ModelView,
    Replica,
    Sizing,
    WorkerFacts,
)
from supervisor.schema.request import Decision as DecisionView

if TYPE_CHECKING:
    from supervisor.daemon.daemon import Daemon


def model_view(daemon: Daemon, model: ModelId) -> ModelView | None:
    """One model's whole state; None: the model isn't configured."""
    status = daemon.engine.model(model)
    if status is None or model not in daemon.catalog.models:
        return None
    effective = daemon.fleet.effective(model)
    override = daemon.fleet.override_of(model)
    return ModelView(
        name=model,
        virtual_models=list(daemon.catalog.names_of(model)),
        runtime=effective.config.runtime,
        type=status.spec.type,
        priority=status.spec.priority,
        pin=status.pinned,
        state=status.state.value,
        answering=status.answering,
        reason=status.reason,
        since_s=round(status.since_s, 3),
        retry_s=_rounded(status.retry_s, 1),
        eta_s=_rounded(status.eta_s, 1),
        idle_s=_rounded(status.idle_s, 3),
        keep_alive_s=status.spec.keep_alive_s,
        unload_s=_rounded(status.unload_s, 1),
        held_s=_rounded(status.protected_s, 1),
        in_flight=status.in_flight,
        queued=status.queued,
        waits_for=list(status.waits_for),
        drain_s=status.drain_s,
        device=_device_name(status),
        devices=list(status.devices),
        remote=status.spec.remote,
        memory=_memory(status, daemon.engine.device_specs()),
        sizing=_sizing(effective),
        warnings=_warnings(daemon, effective, status),
        worker=daemon.fleet.facts(status.worker, status.generation),
        replicas=[_replica(each, daemon.fleet.facts(each.id, each.generation)) for each in status.replicas],
        replica_max=status.spec.replica_max,
        generation=status.generation,
        load_s=_rounded(status.load_s, 3),
        crash=_crash(status),
        capabilities=capabilities(effective, daemon.catalog.resolve(model)),
        load_constraints={key: dict(constraint) for key, constraint in effective.load_constraints.items()},
        overrides=dict(override.values) if override is not None else {},
        definition=effective.shown,
    )


def _warnings(daemon: Daemon, model: CatalogModel, status: ModelStatus) -> list[str]:
    devices = [one.spec for one in daemon.sampler.devices()]
    warnings = [*memory_warnings(model, status.spec, devices)]
    if status.pinned:
        pins = pins_warning(daemon.engine.pinned(), devices)
        warnings += [pins[1]] if pins is not None and pins[0] == status.id else []
    return warnings


def _rounded(seconds: float | None, digits: int) -> float | None:
    return None if seconds is None else round(seconds, digits)


def _device_name(status: ModelStatus) -> str | None:
    """The worker's devices as one text; None without a worker."""
    return " + ".join(status.devices) or None


def _leases_by_device(status: ModelStatus) -> dict[str, int]:
    """Device → the memory that the worker leases there."""
    return {lease.device: lease.mib for lease in status.leases}


def _memory(status: ModelStatus, devices: Iterable[DeviceSpec]) -> Memory:
    """The model's memory. Its `need`: device on which the next load may run → the lease there."""
    return Memory(
        lease_mib=status.lease_mib,
        measured_mib=status.measured_mib,
        parts=_leases_by_device(status),
        estimate=_footprint(status.spec.footprint),
        learned={device: footprint.mib for device, footprint in status.spec.learned.items()},
        raised={device: mib for device, mib in status.spec.raised.items()},  # noqa: C416  # of another type
        need={
            device.id: _footprint(device.need(status.spec))
            for device in devices
            if not status.spec.devices or device.id in status.spec.devices
        },
    )


def _sizing(model: CatalogModel) -> Sizing | None:
    """Context and slots, with reasons; None: the runtime has neither, or the file can't be read now."""
    sizing = model.sizing
    if sizing is None:
        return None
    return Sizing(sizing.context, sizing.slots, sizing.trained or None, str(sizing))


def _replica(status: ModelStatus, worker: WorkerFacts | None) -> Replica:
    return Replica(
        worker=f"{status.id}:{status.generation}",
        state=status.state.value,
        answering=status.answering,
        device=_device_name(status),
        devices=list(status.devices),
        in_flight=status.in_flight,
        lease_mib=status.lease_mib,
        measured_mib=status.measured_mib,
        parts=_leases_by_device(status),
        **({} if worker is None else asdict(worker)),
    )


def _crash(status: ModelStatus) -> Crash | None:
    crash = status.crash
    return (
        None
        if crash is None
        else Crash(crash.kind.value, crash.operator_summary, crash.exit_code, list(crash.log_tail))
    )


def _footprint(footprint: core.Footprint) -> Footprint:
    return Footprint(footprint.mib, footprint.source.value, footprint.detail)


def capabilities(model: CatalogModel, route: Route) -> Capabilities | None:
    """The capabilities of `model` under the name of `route`; None before `Daemon.know_capabilities` read its metadata."""
    known = model.known_capabilities
    if known is None:
        return None
    return Capabilities(
        modalities=list(known.modalities),
        documents=list(documents()) if known.documents else [],
        tools=known.tools,
        thinking=known.thinking,
        thinking_modes=list(thinking_modes(route.rewrite, model)),
        multi_turn=known.multi_turn,
        context=known.context,
        endpoints=list(model.paths),
    )


def device_views(daemon: Daemon) -> list[Device]:
    """Every device: its totals, the memory of outside users, and the holders with their amounts."""
    known = {status.id: status for status in daemon.engine.devices()}
    return [_device_view(device, known[DeviceId(device.id)]) for device in daemon.sampler.devices()]


def _device_view(device: DeviceInfo, status: DeviceStatus) -> Device:
    totals = status.totals
    return Device(
        id=device.id,
        kind=device.kind.name,
        name=device.name,
        driver=device.driver,
        total_mib=device.total_mib,
        margin_mib=device.margin_mib,
        free_mib=totals.free_mib,
        available_mib=totals.available_mib,
        outside_mib=totals.outside_mib,
        others_mib=totals.others_mib,
        blocked=totals.blocked,
        quarantined=totals.quarantined,
        leases=[
            DeviceLease(
                model=lease.holder[0],
                partner=lease.is_partner,
                generation=lease.holder[1],
                phase=lease.phase.value,
                lease_mib=lease.mib,
                measured_mib=lease.measured_mib,
            )
            for lease in status.leases
        ],
    )


def memory_views(daemon: Daemon) -> Iterator[ModelMemory]:
    """Each model's held, possible and measured memory by device. Items may be read in later turns of the loop."""
    devices = daemon.engine.device_specs()
    for figures in daemon.engine.figures():
        if (status := daemon.engine.model(figures.id)) is not None:
            memory = asdict(_memory(status, devices))
            yield ModelMemory(**memory, name=status.id, device=_device_name(status), devices=list(status.devices))


def decision_view(daemon: Daemon, decision: Decision) -> DecisionView:
    """One decision, its time as seconds since the epoch."""
    at = round(daemon.wall_time(decision.at), 3)
    return DecisionView(decision.seq, at, decision.kind, decision.model, decision.reason)
