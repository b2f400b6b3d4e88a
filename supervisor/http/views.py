"""What the admin API shows: plain JSON objects made from the scheduler's state, the running workers and the catalog.

Reading for display may be stale by an event; nothing here is used to decide.
"""

from __future__ import annotations

from pydantic import JsonValue

from runtimes.base import ModelConfig
from supervisor.catalog import CatalogModel
from supervisor.catalog.masking import masked
from supervisor.core.books import Lease
from supervisor.core.journal import Decision
from supervisor.core.placement import RELOAD_MIB_PER_S
from supervisor.core.types import DeviceId, Footprint, ModelId, State
from supervisor.core.world import Record
from supervisor.http.context import Context

Json = dict[str, JsonValue]


def model_view(context: Context, model: ModelId) -> Json | None:
    """One model's whole state; None when it isn't configured."""
    engine = context.engine
    world = engine.journal.scheduler.world
    record = world.records.get(model)
    if record is None or model not in context.catalog.models:
        return None
    now = engine.clock()
    effective = context.workers.effective(model)
    override = context.workers.override_of(model)
    leases = _leases(context, record)
    worker = context.workers.facts(model, record.generation)
    return {
        "name": model,
        "virtual_models": [name for name, virtual in context.catalog.virtual.items() if virtual.model.id == model],
        "runtime": effective.config.runtime,
        "type": record.spec.type,
        "priority": record.spec.priority,
        "pin": record.pinned,
        "state": record.state.value,
        "answering": record.answering,
        "reason": record.life.reason,
        "since_s": round(now - record.life.since, 3),
        "eta_s": _eta_s(record, leases, now),
        "idle_s": round(now - record.last_used, 3) if record.has_worker and not record.in_flight else None,
        "in_flight": len(record.in_flight),
        "queued": world.queue.count(model),
        "waits_for": list(record.claims) if model in world.wanted else [],
        **_place(record),
        "remote": record.spec.remote,
        "memory": _memory(record, leases),
        "worker": worker,
        "replicas": [_replica(record, leases, worker)] if record.has_worker else [],
        "generation": record.generation,
        "load_s": round(record.load_s, 3) if record.load_s is not None else None,
        "crash": _crash(record),
        "capabilities": _capabilities(effective),
        "load_constraints": {key: dict(constraint) for key, constraint in effective.load_constraints.items()},
        "overrides": dict(override.values) if override is not None else {},
        "definition": definition(effective.config),
    }


def _leases(context: Context, record: Record) -> tuple[Lease, ...]:
    return context.engine.journal.scheduler.world.ledger.leases_of(record.holder)


def _place(record: Record) -> Json:
    """Where its worker is: the devices in words, None without any, and one by one."""
    devices = record.devices if record.has_worker else ()
    return {"device": " + ".join(devices) or None, "devices": list(devices)}


def _eta_s(record: Record, leases: tuple[Lease, ...], now: float) -> float | None:
    """How long a load that is under way is expected to take still, by the last one, else by the size of the model."""
    if record.state is not State.STARTING:
        return None
    guess = max(1.0, sum(lease.mib for lease in leases) / RELOAD_MIB_PER_S)
    expected = record.load_s if record.load_s is not None else guess
    return round(max(0.0, expected - (now - record.life.since)), 1)


def _memory(record: Record, leases: tuple[Lease, ...]) -> Json:
    return {
        **_held(leases),
        "estimate": _footprint(record.spec.footprint),
        "learned": {device: footprint.mib for device, footprint in record.spec.learned.items()},
    }


def _held(leases: tuple[Lease, ...]) -> Json:
    """What it holds on all of its devices together."""
    measured = [lease.measured_mib for lease in leases if lease.measured_mib is not None]
    return {
        "lease_mib": sum(lease.mib for lease in leases) if leases else None,
        "measured_mib": sum(measured) if measured else None,
    }


def _replica(record: Record, leases: tuple[Lease, ...], worker: Json | None) -> Json:
    return {
        "worker": f"{record.id}:{record.generation}",
        "state": record.state.value,
        "answering": record.answering,
        **_place(record),
        "in_flight": len(record.in_flight),
        **_held(leases),
        **(worker or {}),
    }


def _crash(record: Record) -> Json | None:
    if record.crash is None:
        return None
    return {
        "class": record.crash.kind.value,
        "summary": record.crash.summary,
        "exit_code": record.crash.exit_code,
        "log_tail": list(record.crash.log_tail),
    }


def _footprint(footprint: Footprint) -> Json:
    return {"mib": footprint.mib, "source": footprint.source.value, "detail": footprint.detail}


def _capabilities(model: CatalogModel) -> Json | None:
    """None until the model's metadata was read: see `Context.know_capabilities`."""
    known = model.known_capabilities
    if known is None:
        return None
    endpoints = sorted(f"{endpoint.method} {endpoint.path}" for endpoint in model.adapter.endpoints(model.config))
    return {
        "modalities": list(known.modalities),
        "tools": known.tools,
        "thinking": known.thinking,
        "multi_turn": known.multi_turn,
        "context": known.context,
        "endpoints": list(endpoints),
    }


def definition(config: ModelConfig) -> Json:
    """The effective configuration; what looks like a secret is masked."""
    return {key: masked(value, key) for key, value in config.model_dump(mode="json").items()}


def device_views(context: Context) -> list[Json]:
    """Every device: totals, what others use, and who holds how much."""
    ledger = context.engine.journal.scheduler.world.ledger
    devices: list[Json] = []
    for info in context.sampler.devices():
        device = DeviceId(info.id)
        totals = ledger.totals(device)
        devices.append(
            {
                "id": info.id,
                "kind": info.kind.name,
                "name": info.name,
                "driver": info.driver,
                "total_mib": info.total_mib,
                "margin_mib": info.margin_mib,
                "free_mib": totals.free_mib,
                "available_mib": totals.available_mib,
                "outside_mib": totals.outside_mib,
                "blocked": totals.blocked,
                "quarantined": totals.quarantined,
                "leases": [
                    {
                        "model": lease.holder[0],
                        "generation": lease.holder[1],
                        "phase": lease.phase.value,
                        "lease_mib": lease.mib,
                        "measured_mib": lease.measured_mib,
                    }
                    for lease in ledger.leases()
                    if lease.device == device
                ],
            }
        )
    return devices


def memory_view(context: Context) -> Json:
    """Every device, and what each model holds, may take, and was measured to take there."""
    world = context.engine.journal.scheduler.world
    models: list[JsonValue] = [
        {
            "name": record.id,
            **_place(record),
            "need": {device.id: _footprint(device.need(record.spec)) for device in world.ledger.devices()},
            **_memory(record, _leases(context, record)),
        }
        for record in world.records.values()
    ]
    return {"devices": list(device_views(context)), "models": models}


def decision_view(context: Context, decision: Decision) -> Json:
    """One decision, its time as seconds since the epoch."""
    return {
        "seq": decision.seq,
        "at": round(context.wall_time(decision.at), 3),
        "kind": decision.kind,
        "model": decision.model,
        "reason": decision.reason,
    }
