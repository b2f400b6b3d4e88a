"""The memory leases of all devices, and the memory available to a new worker.

A *lease* belongs to one holder, a worker identified by (model, generation), on one device. Its phases are STARTING →
IN_USE → RETURNING. A worker that is split over several devices has a lease on each. These leases begin and settle
together; each ends when its own device shows the memory free.

A new worker may take the smaller of two figures, less the margin:

    measured:  free at the last sample - the parts of leases that workers may still take but had not taken by that sample
    by leases: total - sum of max(lease, measured) over all workers

The first includes outside use, the second future use by workers. A worker "may still take" its whole lease while it
starts, and until a sample taken after its readiness (or exit) has shown its use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from supervisor.core.effects import Alert
from supervisor.core.events import DeviceSample
from supervisor.core.memory.device_ledger import DeviceLedger, DeviceTotals, Holder, Lease, PendingRelease, Phase
from supervisor.core.planning.plans import DeviceSummary, DeviceView
from supervisor.core.types import DeviceId, Devices, DeviceSpec, Limits, ModelId, Parts

WRITE_OFF = 10
"""Missing memory without a known holder counts as outside use after this many times the quarantine's delay:
the worker's process tree has ended, and the free memory is measured."""


class Ledger:
    """The memory leases of all devices. Mutable; owned by one scheduler, which passes the time as an argument."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._devices: dict[DeviceId, DeviceLedger] = {}
        self._leases: dict[Holder, dict[DeviceId, Lease]] = {}  # none is empty
        self._alerts: list[Alert] = []
        self.unshared: str | None = None  # set iff the leases of other coordinators are unknown now: the reason
        self._changed: dict[DeviceId, None] = {}
        self._watched: dict[DeviceId, DeviceLedger] = {}  # devices with returning memory, and unreadable devices
        self._specs: tuple[DeviceSpec, ...] = ()

    def configure(self, devices: Iterable[DeviceSpec], limits: Limits) -> None:
        """Apply new devices and limits. A removed device gets no new leases, and is forgotten with its last lease."""
        self._limits = limits
        specs = {spec.id: spec for spec in devices}
        for device_id, device in list(self._devices.items()):
            device.configured = device_id in specs
            self._mark_altered(device)
            if device.configured:
                continue
            if not device.leases:
                self._forget_device(device_id)
            for holder in list(device.releases):  # no more readings of this device will come
                self._drop_lease(device.leases[holder])
        for device_id, spec in specs.items():
            known = self._devices.get(device_id)
            if known is None:
                self._devices[device_id] = DeviceLedger(spec, unshared=self.unshared)
            else:
                known.spec = spec
            self._changed[device_id] = None
        there = (device.spec for device in self._devices.values() if device.configured)
        self._specs = tuple(sorted(there, key=lambda spec: spec.id))

    # ------------------------------------------------------------------------------------------------- a lease's life

    def begin(self, holder: Holder, devices: Devices, mib: Parts, *, is_partner: bool = False) -> None:
        """Lease `mib` of each device to a holder whose worker starts now. Enough memory must be free."""
        assert all(part > 0 for part in mib), f"{holder} leases {mib} MiB"
        assert holder not in self._leases, f"{holder} has a lease already: {self._leases[holder]}"
        for device, part in zip(devices, mib, strict=True):
            view = self.view(device)
            assert view.blocked is None, f"{holder} begins on {device}, which is {view.blocked}"
            assert part <= view.free_mib, f"{holder} begins with {part} MiB on {device}, {view.free_mib} free"
        for device, part in zip(devices, mib, strict=True):
            self._put_lease(Lease(holder, device, Phase.STARTING, part, is_partner=is_partner))

    def adopt(self, holder: Holder, devices: Devices, mib: Parts, now: float, *, is_partner: bool = False) -> None:
        """Add the lease of a worker that was ready before this daemon started, even if too little memory is free."""
        assert holder not in self._leases, f"{holder} has a lease already: {self._leases[holder]}"
        for device, part in zip(devices, mib, strict=True):
            self._put_lease(Lease(holder, device, Phase.IN_USE, part, since=now, is_partner=is_partner))

    def share(self, others: Mapping[DeviceId, int], trouble: str | None) -> None:
        """Set the leases of other coordinators on shared devices. While they are unknown (`trouble`) all devices are blocked."""
        self.unshared = trouble
        for device_id, device in self._devices.items():
            if trouble is None or others:
                device.others_mib = others.get(device_id, 0)
            device.unshared = trouble
            self._mark_altered(device)

    def settle(self, holder: Holder, now: float) -> None:
        """The holder's worker is ready at `now`: the next sample's free memory includes its use."""
        for lease in self.leases_of(holder):
            assert lease.phase is Phase.STARTING, f"{lease} settles"
            self._put_lease(replace(lease, phase=Phase.IN_USE, since=now))

    def measure(self, holder: Holder, device: DeviceId, used_mib: int) -> None:
        """Set a worker's measured use of a device. Call this before `sample` of the same reading. Ignores unknown leases."""
        lease = self._leases.get(holder, {}).get(device)
        if lease is None or lease.phase is Phase.RETURNING or lease.measured_mib == used_mib:
            return
        assert used_mib >= 0
        measured = replace(lease, measured_mib=used_mib)
        if measured.reserved_mib != lease.reserved_mib:
            self._put_lease(measured)
        else:
            self._devices[device].leases[holder] = self._leases[holder][device] = measured

    def note_unused(self, holder: Holder, device: DeviceId, now: float) -> None:
        """Alert once that a ready worker takes no memory of its GPU: it computes elsewhere."""
        lease = self._leases.get(holder, {}).get(device)
        if lease is None or lease.phase is not Phase.IN_USE or lease.is_partner or lease.is_reported_unused:
            return
        if self._devices[device].spec.takes_whole or now < lease.since + self._limits.memory_warn_s:
            return
        self._devices[device].leases[holder] = self._leases[holder][device] = replace(lease, is_reported_unused=True)
        label = self._devices[device].spec.label
        message = (
            f"{holder[0]}'s worker is ready and has taken nothing of its {lease.mib} MiB on {label}: it computes on the "
            "processor, or elsewhere. Look at what its runtime was built for: llmux doctor"
        )
        self._alerts.append(Alert("memory.unused", message, device, holder[0]))

    def stopping(self, holder: Holder) -> None:
        """The holder's worker is about to stop. Keep the last snapshot in which it surely had its memory."""
        for lease in self.leases_of(holder):
            device = self._devices[lease.device]
            self.mark_changed(lease.device)
            if device.snapshots:
                device.stopping.setdefault(holder, device.snapshots[0])

    def returning(self, holder: Holder, now: float) -> None:
        """The holder's process tree has ended. A lease stays until a sample shows its memory free, if the device is still read."""
        for lease in self.leases_of(holder):
            assert lease.phase in {Phase.STARTING, Phase.IN_USE}, f"{lease} returns"
            device = self._devices[lease.device]
            if not device.configured:
                self._drop_lease(lease)
                continue
            alive = device.stopping.pop(holder, None)
            device.last_exit = holder[0], now
            device.releases[holder] = PendingRelease.from_snapshots(
                (alive,) if alive else tuple(device.snapshots), holder
            )
            self._put_lease(replace(lease, phase=Phase.RETURNING, since=now))

    def quarantine(self, holder: Holder, reason: str) -> None:
        """Block the holder's devices until its leases end. `reason` completes "its worker …"."""
        for lease in self.leases_of(holder):
            self._quarantine_device(lease, reason)

    def _quarantine_device(self, lease: Lease, reason: str) -> None:
        device = self._devices[lease.device]
        device.quarantine[lease.holder] = reason
        self._mark_altered(device)

    def _put_lease(self, lease: Lease) -> None:
        device = self._devices[lease.device]
        device.leases[lease.holder] = self._leases.setdefault(lease.holder, {})[lease.device] = lease
        self._mark_altered(device)

    def _drop_lease(self, lease: Lease) -> None:
        holder, device = lease.holder, self._devices[lease.device]
        del self._leases[holder][lease.device]
        if not self._leases[holder]:
            del self._leases[holder]
        del device.leases[holder]
        device.releases.pop(holder, None)
        device.stopping.pop(holder, None)
        self._mark_altered(device)
        if device.quarantine.pop(holder, None) is not None and not device.quarantine:
            message = f"{device.spec.label} takes models again: what {holder[0]} held is back, or others have it"
            self._alerts.append(Alert("device.lifted", message, lease.device, holder[0]))
        if not device.configured and not device.leases:
            self._forget_device(lease.device)

    # -------------------------------------------------------------------------------------------------------- samples

    def sample(self, sample: DeviceSample, taken_at: float) -> list[ModelId]:
        """Enter a reading that began at `taken_at`, and drop the leases whose memory it shows free. Returns their models.

        A stale reading only blocks the device. Readings older than the last one, or of unknown devices, are ignored.
        """
        device = self._devices.get(sample.id)
        if device is None or taken_at < device.taken_at:
            return []
        before = device.view()
        device.cached = None
        device.stale = sample.stale
        self._update_watched(device)
        if sample.stale:
            if sample.lost is not None:
                self._mark_lost(device, sample.lost)
            if device.view() != before:
                self._mark_altered(device)
            return []
        if any(device.is_unsampled(lease) for lease in device.leases.values()):
            self.mark_changed(sample.id)  # this sample may show their use: replan the waiters that wait for it
        if device.lost is not None:
            message = f"{device.spec.label} takes models again: it can be read"
            self._alerts.append(Alert("device.lifted", message, device.spec.id))
        device.stale_since = device.lost = None
        device.free_mib, device.outside_mib, device.taken_at = sample.free_mib, sample.outside_mib, taken_at
        for lease in list(device.leases.values()):
            if lease.seen_mib != lease.measured_mib:
                seen = replace(lease, seen_mib=lease.measured_mib)
                device.leases[lease.holder] = self._leases[lease.holder][sample.id] = seen
        back = []
        write_off_s = WRITE_OFF * self._limits.memory_quarantine_s
        for holder, release in list(device.releases.items()):
            if taken_at > device.leases[holder].since and release.is_back(device, write_off_s):
                self._drop_lease(device.leases[holder])
                back.append(holder[0])
        # After dropping the released leases: this snapshot shows their memory as free.
        device.snapshots.appendleft(device.snapshot(sample.free_mib))
        device.note_unseen()
        device.cached = None
        if device.view() != before:
            self._mark_altered(device)
        return back

    def _mark_lost(self, device: DeviceLedger, why: str) -> None:
        if device.lost is None:
            message = f"{device.spec.label} is lost: {why}; it takes no new models until it can be read"
            self._alerts.append(Alert("device.lost", message, device.spec.id))
        device.lost = why
        self._mark_altered(device)

    def overdue(self, now: float) -> list[Alert]:
        """The alerts that are due, each once: devices lost or quarantined, late memory, devices usable again."""
        for device in list(self._watched.values()):
            if device.stale and device.lost is None:
                device.stale_since = now if device.stale_since is None else device.stale_since
                if now >= device.stale_since + self._limits.memory_quarantine_s:
                    self._mark_lost(device, f"its memory could not be read for {now - device.stale_since:.0f} s")
        alerts, self._alerts = self._alerts, []
        for device in list(self._watched.values()):
            for holder, release in device.releases.items():
                since = device.leases[holder].since
                model_id, where = holder[0], device.spec.id
                back = f"{device.spec.label} does not show its {release.expected_mib} MiB back"
                why = f"ended {now - since:.0f} s ago and {back}"
                late = f"{model_id}'s worker {why}"
                if now >= since + self._limits.memory_warn_s and not release.warned:
                    release.warned = True
                    alerts.append(Alert("memory.late", late, where, model_id))
                if now >= since + self._limits.memory_quarantine_s and holder not in device.quarantine:
                    self._quarantine_device(device.leases[holder], why)
                    message = f"{late}; it takes no new models until it does"
                    alerts.append(Alert("device.quarantined", message, where, model_id))
        return alerts

    def deadline(self, now: float) -> float:
        """When `overdue` will have an alert; infinity when no memory is being returned and every device is readable."""
        if self._alerts:
            return now
        times = [math.inf]
        for device in self._watched.values():
            if device.stale_since is not None and device.lost is None:
                times.append(device.stale_since + self._limits.memory_quarantine_s)
            for holder, release in device.releases.items():
                since = device.leases[holder].since
                if not release.warned:
                    times.append(since + self._limits.memory_warn_s)
                if holder not in device.quarantine:
                    times.append(since + self._limits.memory_quarantine_s)
        return min(times)

    # ---------------------------------------------------------------------------------------------------- what changed

    def _mark_altered(self, device: DeviceLedger) -> None:
        """Drop the device's cached figures, and mark it as changed."""
        device.cached = None
        device.note_unseen()
        self._update_watched(device)
        self.mark_changed(device.spec.id)

    def _forget_device(self, device: DeviceId) -> None:
        del self._devices[device]
        self._watched.pop(device, None)

    def _update_watched(self, device: DeviceLedger) -> None:
        if device.releases or device.stale:
            self._watched[device.spec.id] = device
        else:
            self._watched.pop(device.spec.id, None)

    def mark_changed(self, device: DeviceId) -> None:
        """Mark a change on the device that may affect plans."""
        self._changed[device] = None
        self.forget_summaries((device,))

    def forget_summaries(self, devices: Iterable[DeviceId]) -> None:
        """Drop these devices' summaries. This is enough while no model waits: only later plans depend on the change."""
        for device in devices:
            if (ledger := self._devices.get(device)) is not None:
                ledger.summary = None

    def is_at_rest(self) -> bool:
        """Whether no change or alert is pending, no memory is being returned, and every device is readable."""
        return not (self._changed or self._watched or self._alerts)

    def has_changed(self) -> bool:
        """Whether anything has changed since `take_changed`."""
        return bool(self._changed)

    def take_changed(self) -> list[DeviceId]:
        """The devices marked since the last call, without forgotten ones."""
        changed = [device for device in self._changed if device in self._devices]
        self._changed.clear()
        return changed

    def summary(self, device: DeviceId) -> DeviceSummary | None:
        """The kept summary of the device; None when something has changed since."""
        return self._devices[device].summary

    def keep_summary(self, device: DeviceId, summary: DeviceSummary) -> None:
        """Keep the summary until something changes on the device."""
        self._devices[device].summary = summary

    # -------------------------------------------------------------------------------------------------------- reading

    def view(self, device: DeviceId) -> DeviceView:
        """The device in the planner's view."""
        return self._devices[device].view()

    def blocked(self, device: DeviceId, asker: ModelId) -> str | None:
        """Why no new load may start there, in a text that doesn't name `asker`; None: it may."""
        return self._devices[device].blocked(asker)

    def devices(self) -> tuple[DeviceSpec, ...]:
        """The configured devices, by id."""
        return self._specs

    def device_ids(self) -> Devices:
        """The ids of the configured devices, sorted."""
        return tuple(device.id for device in self.devices())

    def leases(self) -> tuple[Lease, ...]:
        """All leases, oldest first, those of one holder together."""
        return tuple(lease for leases in self._leases.values() for lease in leases.values())

    def leases_of(self, holder: Holder) -> tuple[Lease, ...]:
        """The holder's leases, one per device, without those already released."""
        return tuple(self._leases.get(holder, {}).values())

    def leases_on(self, device: DeviceId) -> tuple[Lease, ...]:
        """All leases on the device."""
        return tuple(self._devices[device].leases.values())

    def reserved_mib(self, model_id: ModelId, device: DeviceId) -> int:
        """How many MiB of the device the workers of the model hold."""
        return sum(lease.reserved_mib for lease in self.leases_on(device) if lease.holder[0] == model_id)

    def holds(self, holder: Holder) -> bool:
        """Whether the holder has a lease, on any device."""
        return holder in self._leases

    def holds_any(self, model_id: ModelId) -> bool:
        """Whether any worker of the model has a lease."""
        return any(holder[0] == model_id for holder in self._leases)

    def model_in_transition(self, device: DeviceId, now: float) -> ModelId | None:
        """A model whose load or end the device's figures may not fully show yet; None when the figures are complete.

        The return of never measured memory is invisible, so an end counts for at least `memory_warn_s`.
        """
        ledger = self._devices[device]
        for lease in ledger.leases.values():
            if lease.phase in {Phase.STARTING, Phase.RETURNING} or ledger.taken_at <= lease.since:
                return lease.holder[0]
        if ledger.last_exit is None or ledger.spec.returns_at_exit:
            return None
        model_id, at = ledger.last_exit
        return model_id if now - at < self._limits.memory_warn_s else None

    def transition_ends_at(self, device: DeviceId, now: float) -> float:
        """When `model_in_transition` ends by itself at the latest; infinity if only a reading can end it."""
        ledger = self._devices[device]
        if ledger.last_exit is None or now >= (at := ledger.last_exit[1] + self._limits.memory_warn_s):
            return math.inf
        return at

    def has_unsampled_worker(self, device: DeviceId) -> bool:
        """Whether a worker has loaded there since the last sample."""
        ledger = self._devices[device]
        return any(lease.phase is Phase.IN_USE and ledger.is_unsampled(lease) for lease in ledger.leases.values())

    def quarantined_by(self, holder: Holder) -> str | None:
        """Why this holder's device is quarantined ("its worker …"); None: no device is quarantined because of it."""
        reasons = (self._devices[lease.device].quarantine.get(holder) for lease in self.leases_of(holder))
        return next((reason for reason in reasons if reason is not None), None)

    def starting(self, device: DeviceId) -> int:
        """How many workers are loading on the device."""
        return sum(lease.phase is Phase.STARTING for lease in self._devices[device].leases.values())

    def is_waiting(self) -> bool:
        """Whether memory is being returned, so that frequent samples help."""
        return any(device.releases for device in self._watched.values())

    def totals(self, device: DeviceId) -> DeviceTotals:
        """The device's figures for people."""
        return self._devices[device].totals()

    def check(self) -> None:
        """Assert that the figures of all devices and leases agree."""
        placed = {(holder, at): lease for at, d in self._devices.items() for holder, lease in d.leases.items()}
        assert placed == {(lease.holder, lease.device): lease for lease in self.leases()}
        assert all(self._leases.values()), "a holder that holds nothing"
        for device_id, device in self._devices.items():
            assert device.configured or device.leases, f"{device_id} is neither configured nor in use"
            for holder, lease in device.leases.items():
                assert (lease.holder, lease.device) == (holder, device_id)
                assert lease.mib > 0
                assert (lease.phase is Phase.RETURNING) == (holder in device.releases), f"{lease}"
            assert device.releases.keys() <= device.leases.keys()
            assert (device_id in self._watched) == bool(device.releases or device.stale)
            assert device.stopping.keys() <= device.leases.keys()
            assert device.quarantine.keys() <= device.leases.keys(), "a quarantine that nothing can lift"
            device.check()
