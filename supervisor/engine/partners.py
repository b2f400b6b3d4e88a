"""Partners: other programs that use memory of our devices, such as a training job. Heartbeats keep a partner's lease alive.

A lease outlives the daemon: the next daemon on the same state directory restores it, and receives the heartbeats.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import structlog
from pydantic import JsonValue

from runtimes.device_kind import visibility
from supervisor.catalog.models.fitting import placement_problem
from supervisor.core.effects import Decided, Effect
from supervisor.core.events import Event, LeaseEnded, LeaseRenewed, LeaseRequested, LeaseRestored
from supervisor.core.types import (
    DEFAULT_PRIORITY,
    PARTNER,
    DeviceId,
    Devices,
    Footprint,
    FootprintSource,
    ModelId,
    ModelSpec,
    Partner,
    WorkerState,
)
from supervisor.engine.engine import Engine
from supervisor.engine.shared_leases import SharedLeases
from supervisor.engine.status import PartnerStatus
from supervisor.errors import InvalidRequestError, LeaseUnavailableError, LlmuxError, NotFoundError
from supervisor.host.memory.memory import MemorySampler
from supervisor.host.store.store import NotSavedError, Store
from supervisor.schema.memory import Lease, LeaseEnd, LeaseRequest

log = structlog.get_logger("llmux.partners")

TTL_S: Final = 30.0
"""Seconds that a lease lasts without a heartbeat, unless its holder chooses otherwise."""
_COLLECTION = "leases"
_STATES: Final[Mapping[WorkerState, Literal["waiting", "held", "ending"]]] = {
    WorkerState.STOPPED: "waiting",
    WorkerState.READY: "held",
    WorkerState.STOPPING: "ending",
}

Json = dict[str, JsonValue]


class Partners:
    """All partners' leases of a daemon."""

    def __init__(self, engine: Engine, sampler: MemorySampler) -> None:
        self._engine = engine
        self._sampler = sampler
        self._store: Store | None = None
        self.shared: SharedLeases | None = None  # set iff other coordinators share the devices
        self._tasks: set[asyncio.Task[None]] = set()
        engine.observers.append(self._delete_ended)

    def restore(self, store: Store) -> None:
        """Restore the leases in the store, and keep new ones there. Call this before the first reading of memory."""
        self._store = store
        known = {device.id for device in self._sampler.devices()}
        for name, kept in store.items(_COLLECTION).items():
            try:
                event = _parse_stored(ModelId(name), kept)
            except (LookupError, TypeError, ValueError) as error:
                log.warning("lease.unreadable", lease=name, reason=repr(error))
                continue
            if known.issuperset(event.devices):
                self._engine.post(event)

    # -------------------------------------------------------------------------------------------------------- requests

    async def take(self, wanted: LeaseRequest) -> Lease:
        """Wait for a lease, and return it. Cancelling leaves no lease.

        Raises InvalidRequestError for an impossible lease, LeaseUnavailableError, UnavailableError during the shutdown.
        """
        while True:
            try:
                return await self._take_once(wanted)
            except LeaseUnavailableError as error:
                if not wanted.wait or error.retry_after_s is None:
                    raise
                await asyncio.sleep(error.retry_after_s)

    async def _take_once(self, wanted: LeaseRequest) -> Lease:
        spec = self._model_spec(wanted)
        partner = Partner(wanted.holder, wanted.ttl_s or TTL_S, wanted.wait, wanted.pid)
        try:
            await self._engine.lease(LeaseRequested(spec, partner))
            await self._take_shared_lease(spec.id)
            await self._save_lease(spec.id)
        except BaseException as error:
            reason = "not granted" if isinstance(error, LlmuxError) else "its client disconnected"
            self._engine.post(LeaseEnded(spec.id, reason))
            raise
        return self.view(spec.id)

    async def _take_shared_lease(self, name: ModelId) -> None:
        """Lease in the shared store. Raises LeaseUnavailableError if another coordinator was faster."""
        if self.shared is None:
            return
        model = self._find_lease(name).model
        trouble = await self.shared.take(
            (name, model.generation), model.devices, tuple(lease.mib for lease in model.leases)
        )
        if trouble is not None:
            raise LeaseUnavailableError(f"{name} lost its lease: {trouble}. Try again.", retry_after_s=1.0)

    async def renew(self, name: str, ttl_s: float | None, pid: int | None) -> Lease:
        """Handle a heartbeat. Raises NotFoundError if the lease has ended: then the holder must stop."""
        if not self._find_lease(name).is_granted:
            raise _no_lease(name)
        self._engine.post(LeaseRenewed(ModelId(name), ttl_s, pid))
        if (ttl_s, pid) != (None, None):
            await self._save_lease(ModelId(name))
        return self.view(name)

    def end(self, name: str) -> LeaseEnd:
        """End a lease, because its holder has ended or no longer needs it. Raises NotFoundError."""
        self._find_lease(name)
        self._engine.post(LeaseEnded(ModelId(name), "its holder ended it"))
        return LeaseEnd(name, ended=True)

    def _model_spec(self, wanted: LeaseRequest) -> ModelSpec:
        known = {device.id: device.spec for device in self._sampler.devices()}
        named = [wanted.device] if isinstance(wanted.device, str) else wanted.device or []
        for device in named:
            if device not in known:
                message = f"There is no device {device[:50]!r}, only {', '.join(known)}."
                raise InvalidRequestError(message, param="device")
        name = ModelId(f"{wanted.holder}-{secrets.token_hex(3)}")
        footprint = Footprint(wanted.vram_mib, FootprintSource.EXPLICIT, "as asked for")
        devices = tuple(DeviceId(device) for device in named)
        priority = min(DEFAULT_PRIORITY.values())
        spec = ModelSpec(
            name, PARTNER, priority, footprint, devices=devices, gpus=wanted.gpus or 1, pin=True, drain_s=0.0
        )
        if (problem := placement_problem(spec, tuple(known.values()))) is not None:
            raise InvalidRequestError(f"{wanted.holder} can't have this lease: {problem[1]}.", param="vram_mib")
        return spec

    # -------------------------------------------------------------------------------------------------------- reading

    def views(self) -> list[Lease]:
        """All leases, oldest first."""
        return [self._lease_view(found) for found in self._engine.partners()]

    def view(self, name: str) -> Lease:
        """One lease. Raises NotFoundError."""
        return self._lease_view(self._find_lease(name))

    def _find_lease(self, name: str) -> PartnerStatus:
        for found in self._engine.partners():
            if found.id == name:
                return found
        raise _no_lease(name)

    def _lease_view(self, status: PartnerStatus) -> Lease:
        model, partner = status.model, status.partner
        return Lease(
            id=status.id,
            holder=partner.holder,
            state=_STATES[model.state],
            reason=model.reason,
            since_s=round(model.since_s, 3),
            vram_mib=model.spec.footprint.mib,
            devices=list(model.devices),
            measured_mib=model.measured_mib,
            ttl_s=partner.ttl_s,
            expires_s=None if status.expires_s is None else round(status.expires_s, 3),
            pid=partner.pid,
            waits_for=list(model.waits_for),
            env=dict(self._environment(model.devices)),
        )

    def _environment(self, devices: Devices) -> dict[str, str]:
        """The variables that limit the partner's process to its devices."""
        if not devices:
            return {}
        return visibility(device.assignment for device in self._sampler.devices() if device.id in devices)

    # -------------------------------------------------------------------------------------------------------- keeping

    async def _save_lease(self, name: ModelId) -> None:
        """Save the lease for the next daemon. If that fails, the lease is still valid in this daemon."""
        found = self._find_lease(name)
        kept: Json = {
            "holder": found.partner.holder,
            "vram_mib": found.model.spec.footprint.mib,
            "gpus": found.model.spec.gpus,
            "devices": list(found.model.devices),
            "mib": found.model.leases[0].mib,
            "ttl_s": found.partner.ttl_s,
            "pid": found.partner.pid,
        }
        await self._put_in_store(name, kept)

    def _delete_ended(self, _event: Event, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if type(effect) is Decided and effect.kind == "lease_ended" and effect.model is not None:
                self._tasks.add(task := asyncio.create_task(self._put_in_store(effect.model, None)))
                task.add_done_callback(self._tasks.discard)

    async def _put_in_store(self, name: ModelId, value: Json | None) -> None:
        if self._store is None:
            return
        try:
            await self._store.put(_COLLECTION, name, value)
        except NotSavedError as error:
            log.warning("lease.not_saved", lease=name, reason=error.message)


def _no_lease(name: str) -> NotFoundError:
    return NotFoundError(
        f"There is no lease {name[:100]!r}, or it has ended: its holder must stop.", code="lease_ended"
    )


def _parse_stored(name: ModelId, kept: JsonValue) -> LeaseRestored:
    """Parse a stored lease. Raises LookupError, TypeError or ValueError for malformed data."""
    if not isinstance(kept, dict):
        raise TypeError(kept)
    fields: dict[str, object] = dict(kept)
    devices = tuple(DeviceId(str(device)) for device in _require_list(fields["devices"]))
    footprint = Footprint(int(str(fields["vram_mib"])), FootprintSource.EXPLICIT, "as asked for")
    gpus, mib, pid = int(str(fields["gpus"])), int(str(fields["mib"])), fields["pid"]
    priority = min(DEFAULT_PRIORITY.values())
    spec = ModelSpec(name, PARTNER, priority, footprint, devices=devices, gpus=gpus, pin=True, drain_s=0.0)
    partner = Partner(str(fields["holder"]), float(str(fields["ttl_s"])), pid=None if pid is None else int(str(pid)))
    return LeaseRestored(spec, partner, devices, mib)


def _require_list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(value)
    return value
