"""Shares devices among several coordinators: each of our leases is also in a store that all coordinators check first.

The rules:
 1. A worker starts, and a partner gets its memory, only after the store has the lease.
 2. Leases of others in the store count as taken in our ledger. No load begins without free memory, whatever the store says.
 3. A lease stays in the store, and is renewed, until its memory is back.
 4. While the store can't be reached no worker or partner starts. Earlier holders continue until their lease is about to
    expire in the store; then they are stopped, because others may take their memory.
 5. An expired lease is taken again if there is room; if not, its holder is stopped.

The engine's ledger is compared with the store periodically, so a lost message does no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from supervisor.core.effects import StartWorker
from supervisor.core.events import LeaseLost, LeasesSeen
from supervisor.core.memory.device_ledger import Holder, Phase
from supervisor.core.types import Crash, CrashClass, DeviceId, Devices, Parts
from supervisor.engine.engine import Engine
from supervisor.host.memory.memory import DeviceInfo
from supervisor.host.store.lease_store import JUST_BEGUN, LeaseStore, Refusal, Share, StoreUnreachableError

log = structlog.get_logger("llmux.leases")

LOOK_S: Final = 1.0
RENEW_S: Final = 5.0
STOP_S: Final = 10.0
"""A worker is killed this long before its lease in the store expires. The kill of worker and shim takes up to 5 s."""

PARTNER_STOP_S: Final = 30.0
"""The same for a partner, which learns of the end at its next heartbeat, and then has a grace period."""

HOST_PREFIX: Final = "host:"


@dataclass(slots=True)
class _StoredLease:
    """One of our leases in the store."""

    shares: Mapping[str, Share]  # by the device's name in the store
    until: float  # its expiry on our clock; never later than in the store
    is_there: bool = True  # False: the store has forgotten it


class SharedLeases:
    """Our leases in a shared store. Create it before the engine plans anything."""

    def __init__(
        self,
        engine: Engine,
        store: LeaseStore,
        devices: Sequence[DeviceInfo],
        instance: str,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._store = store
        self._names = {DeviceId(device.id): shared_name(device) for device in devices}
        self._usable_mib = {DeviceId(device.id): device.spec.usable_mib for device in devices}
        self._prefix = f"{socket.gethostname()}:{instance}:"
        self._ttl_s = ttl_s
        self._clock = clock
        self._stored: dict[Holder, _StoredLease] = {}
        self._being_taken: set[Holder] = set()
        self._stopped: set[Holder] = set()  # holders that were stopped
        self._reported: LeasesSeen | None = None
        self._report_others(LeasesSeen(trouble="the lease store was not asked yet"))

    # ------------------------------------------------------------------------------------------------------- beginning

    async def lease_for_start(self, effect: StartWorker) -> Crash | None:
        """Lease a worker's memory before its start. A refusal doesn't count as the worker's fault, and is retried."""
        trouble = await self.take((effect.model, effect.generation), effect.devices, effect.lease_mib)
        return None if trouble is None else Crash(CrashClass.HOST, trouble)

    async def take(self, holder: Holder, devices: Devices, mib: Parts) -> str | None:
        """Lease in the store. Returns None, or the reason of a refusal; then others' leases were reported to the engine."""
        self._being_taken.add(holder)
        try:
            refusal = await self._take_in_store(holder, dict(zip(devices, mib, strict=True)), has_it=False)
            if refusal is None:
                return None
            await self._look_at_store()
        except StoreUnreachableError as error:
            self._report_others(LeasesSeen(trouble=str(error)))
            return str(error)
        finally:
            self._being_taken.discard(holder)
        return str(refusal)

    async def _take_in_store(self, holder: Holder, mib: Mapping[DeviceId, int], *, has_it: bool) -> Refusal | None:
        shares = {self._names[device]: Share(amount, self._usable_mib[device]) for device, amount in mib.items()}
        before = self._clock()
        refusal = await self._store.take(self._store_name(holder), shares, self._ttl_s, has_it=has_it)
        if refusal is None:
            self._stored[holder] = _StoredLease(shares, before + self._ttl_s)
        return refusal

    def _store_name(self, holder: Holder) -> str:
        return f"{self._prefix}{holder[0]}:{holder[1]}"

    # -------------------------------------------------------------------------------------------------------- keeping

    async def run(self) -> None:
        """Renew, release and compare, until cancelled."""
        while True:
            await self.run_once()
            await asyncio.sleep(LOOK_S)

    async def run_once(self) -> None:
        """One round of `run`. Doesn't raise if the store is unreachable."""
        try:
            await self._look_at_store()
            await self._reconcile()
        except StoreUnreachableError as error:
            if self._reported is None or self._reported.trouble is None:
                log.warning("leases.unreachable", reason=str(error))
            self._report_others(LeasesSeen(trouble=str(error)))
        self._stop_expired()

    async def _reconcile(self) -> None:
        """Make our leases in the store equal to those in our ledger."""
        own = self._own_leases()
        for holder, mib in own.items():
            stored = self._stored.get(holder)
            if holder in self._being_taken or self._is_fresh(stored):
                continue
            refusal = await self._take_in_store(holder, mib, has_it=True)
            if refusal is not None:
                self._stop_holder(holder, f"its lease in the lease store is gone, and {refusal}")
        self._stopped &= own.keys()
        for holder in [holder for holder in self._stored if holder not in own and holder not in self._being_taken]:
            await self._store.release(self._store_name(holder), tuple(self._stored[holder].shares))
            del self._stored[holder]

    def _is_fresh(self, stored: _StoredLease | None) -> bool:
        return stored is not None and stored.is_there and stored.until - self._clock() > self._ttl_s - RENEW_S

    def _own_leases(self) -> dict[Holder, dict[DeviceId, int]]:
        """Holder → its memory by device: all leases in our ledger, except starting ones not yet requested in the store."""
        own: dict[Holder, dict[DeviceId, int]] = {}
        for device in self._engine.devices():
            for lease in device.leases:
                was_requested = lease.phase is not Phase.STARTING or lease.holder in self._stored
                if device.id in self._names and was_requested:
                    own.setdefault(lease.holder, {})[device.id] = lease.mib
        return own

    async def _look_at_store(self) -> None:
        """Report others' leases to the engine, and release leases left by an earlier daemon of this instance."""
        is_open, seen = await self._store.look(list(self._names.values()))
        known = {self._store_name(holder) for holder in (*self._own_leases(), *self._stored, *self._being_taken)}
        others: dict[DeviceId, int] = {}
        for device, name in self._names.items():
            for left in [field for field in seen[name] if field.startswith(self._prefix) and field not in known]:
                await self._store.release(left, (name,))
            others[device] = sum(mib for field, mib in seen[name].items() if not field.startswith(self._prefix))
        for holder, stored in self._stored.items():
            stored.is_there = all(self._store_name(holder) in seen[name] for name in stored.shares)
        if is_open and self._reported is not None and self._reported.trouble is not None:
            log.info("leases.reachable")
        trouble = None if is_open else JUST_BEGUN
        self._report_others(LeasesSeen({device: mib for device, mib in others.items() if mib}, trouble))

    def _report_others(self, seen: LeasesSeen) -> None:
        if seen != self._reported:
            self._reported = seen
            self._engine.post(seen)

    # --------------------------------------------------------------------------------------------------------- losing

    def _stop_expired(self) -> None:
        partners = {status.id for status in self._engine.partners()}
        for holder, stored in list(self._stored.items()):
            if self._clock() >= stored.until - (PARTNER_STOP_S if holder[0] in partners else STOP_S):
                self._stop_holder(
                    holder, "its lease in the lease store could not be renewed, so others may take its memory"
                )

    def _stop_holder(self, holder: Holder, reason: str) -> None:
        self._stored.pop(holder, None)
        if holder in self._stopped:
            return
        self._stopped.add(holder)
        log.warning("leases.lost", model=holder[0], generation=holder[1], reason=reason)
        self._engine.post(LeaseLost(*holder, reason))

    async def close(self, *, released: bool) -> None:
        """Close the connection. `released`: first release the leases of workers, which have all ended."""
        if released:
            partners = {status.id for status in self._engine.partners()}
            with contextlib.suppress(StoreUnreachableError):
                for holder, stored in self._stored.items():
                    if holder[0] not in partners:
                        await self._store.release(self._store_name(holder), tuple(stored.shares))
        await self._store.close()


def shared_name(device: DeviceInfo) -> str:
    """The device's name for all coordinators: a GPU's UUID, or the name of the host for host memory."""
    return device.uuid or f"{HOST_PREFIX}{socket.gethostname()}"
