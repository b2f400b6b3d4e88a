"""What the admin API shows: plain JSON objects made from the scheduler's state, the running workers and the catalog.

Reading for display may be stale by an event; nothing here is used to decide.
"""

from __future__ import annotations

from pydantic import JsonValue

from supervisor.core.journal import Decision
from supervisor.core.types import DeviceId, Footprint, ModelId
from supervisor.core.world import Record
from supervisor.http.context import Context

Json = dict[str, JsonValue]


def model_view(context: Context, model: ModelId) -> Json | None:
    """One model's whole state; None when it isn't configured."""
    engine = context.engine
    world = engine.journal.scheduler.world
    record = world.records.get(model)
    entry = context.catalog.models.get(model)
    if record is None or entry is None:
        return None
    now = engine.clock()
    lease = next((lease for lease in world.ledger.leases() if lease.holder == record.holder), None)
    worker = context.workers.facts(model, record.generation)
    return {
        "name": model,
        "virtual_models": [name for name, virtual in context.catalog.virtual.items() if virtual.model.id == model],
        "runtime": entry.config.runtime,
        "type": record.spec.type,
        "priority": record.spec.priority,
        "pin": record.spec.pin,
        "state": record.state.value,
        "answering": record.answering,
        "reason": record.life.reason,
        "since_s": round(now - record.life.since, 3),
        "idle_s": round(now - record.last_used, 3) if record.has_worker and not record.in_flight else None,
        "in_flight": len(record.in_flight),
        "queued": world.queue.count(model),
        "waits_for": list(record.claims) if model in world.wanted else [],
        "device": record.device,
        "memory": {
            "lease_mib": lease.mib if lease is not None else None,
            "measured_mib": lease.measured_mib if lease is not None else None,
            "estimate": _footprint(record.spec.footprint),
            "learned": {device: footprint.mib for device, footprint in record.spec.learned.items()},
        },
        "worker": worker,
        "generation": record.generation,
        "load_s": round(record.load_s, 3) if record.load_s is not None else None,
        "crash": _crash(record),
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


def memory_view(context: Context) -> Json:
    """Every device with its totals, and what each model holds, may take, and was measured to take there."""
    engine = context.engine
    world = engine.journal.scheduler.world
    devices: list[JsonValue] = []
    for info in context.sampler.devices():
        device = DeviceId(info.id)
        leases = [lease for lease in world.ledger.leases() if lease.device == device]
        totals = world.ledger.totals(device)
        devices.append(
            {
                "id": info.id,
                "kind": info.kind,
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
                    for lease in leases
                ],
            }
        )
    models = [
        {
            "name": record.id,
            "device": record.device,
            "need": {device: _footprint(record.spec.need_on(device)) for device in world.ledger.device_ids()},
            "estimate": _footprint(record.spec.footprint),
        }
        for record in world.records.values()
    ]
    return {"devices": devices, "models": models}  # type: ignore[dict-item]  # JsonValue is invariant in its lists


def decision_view(context: Context, decision: Decision) -> Json:
    """One decision, its time as seconds since the epoch."""
    return {
        "seq": decision.seq,
        "at": round(context.wall_time(decision.at), 3),
        "kind": decision.kind,
        "model": decision.model,
        "reason": decision.reason,
    }
