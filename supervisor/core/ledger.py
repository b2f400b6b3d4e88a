"""Who holds how much memory of which device, and how much of it a new worker may take.

A *lease* belongs to one holder, a worker named by (model, generation), and goes RESERVED → STARTING → HELD → RETURNING.
What a device has free is believed only as far as both of two views allow, less what is reserved and the margin:

    measured:  free at the last sample - what workers may still take of their leases but had not taken by that sample
    by leases: total - sum of max(lease, measured) over all workers

The first sees users outside, the second what workers may come to use. A worker "may still take" its whole lease while
it starts, and until a sample taken after it was ready (or had exited) has shown what it took.

RETURNING bridges the gap between a process that is gone and a device that shows its memory back. Only a sample taken
after the exit ends it: any on a device whose memory is back at the exit, one that shows the memory on the others. What
it has to show follows from a picture of the device from when the worker surely lived: we hear of an exit later than its
memory does. Where it never shows it the device is quarantined, and freed again if the memory does return.

Figures are cached per device and recomputed after a change there, so looking at a hundred devices costs little.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from supervisor.core.types import (
    Alert,
    DeviceId,
    DeviceSample,
    DeviceSpec,
    DeviceView,
    Generation,
    Limits,
    ModelId,
)

Holder = tuple[ModelId, Generation]

WRITE_OFF = 10
"""Where nobody can tell whose memory is missing, it counts as somebody else's after this many times the quarantine's
delay: our worker's tree is gone, and what is really free is measured."""

TOLERANCE_MIB = 64
TOLERANCE = 0.1
"""Memory counts as back when at most this much, or this part of it, is missing: contexts and caches come and go."""


class Phase(StrEnum):
    """Where a lease stands."""

    RESERVED = "reserved"  # promised to a waiter; counts for everybody but its holder
    STARTING = "starting"  # its worker is loading and may take the whole of it
    HELD = "held"  # its worker is ready
    RETURNING = "returning"  # its worker is gone, the memory not yet seen back


@dataclass(frozen=True, slots=True)
class Lease:
    """Memory of one device in the name of one worker."""

    holder: Holder
    device: DeviceId
    phase: Phase
    mib: int
    since: float = -math.inf  # when it was settled or its worker exited
    measured_mib: int | None = None  # the last measurement of its worker
    seen_mib: int | None = None  # the measurement that belongs to the device's last sample

    @property
    def held_mib(self) -> int:
        """What it takes by the books: the lease, or more where the worker grew beyond it."""
        return max(self.mib, self.measured_mib or 0)


@dataclass(frozen=True, slots=True)
class DeviceTotals:
    """A device's books for people. All MiB; `available_mib` is what a new lease may take."""

    id: DeviceId
    total_mib: int
    margin_mib: int
    free_mib: int | None  # at the last sample; None: never sampled
    outside_mib: int | None
    reserved_mib: int
    starting_mib: int
    held_mib: int
    returning_mib: int
    available_mib: int
    blocked: str | None
    quarantined: bool


@dataclass(frozen=True, slots=True)
class _Picture:
    """What one sample showed of a device."""

    free_mib: int
    seen: Mapping[Holder, int | None]

    def of(self, holder: Holder) -> int:
        return self.seen.get(holder) or 0


@dataclass(slots=True)
class _Return:
    """What the device looked like before a worker's exit, to tell when its memory is back."""

    free_mib: int | None
    expected_mib: int
    others: Mapping[Holder, int | None]
    warned: bool = False

    @classmethod
    def after(cls, pictures: Sequence[_Picture], holder: Holder) -> _Return:
        """By the one of `pictures`, latest first, that promises least: later the worker's memory may be back already."""
        if not pictures:
            return cls(None, 0, {})
        with_it = [picture for picture in pictures if picture.of(holder)] or pictures[:1]
        picture = min(with_it, key=lambda picture: picture.free_mib + picture.of(holder))
        others = {other: seen for other, seen in picture.seen.items() if other != holder}
        return cls(picture.free_mib, picture.of(holder), others)

    def is_back(self, device: _Device, holder: Holder, write_off_s: float) -> bool:
        """Does the device's last sample, which must be newer than the exit, show the memory?"""
        if device.spec.returns_at_exit:
            return True
        free_mib = device.free_mib
        assert free_mib is not None
        tolerance = max(TOLERANCE_MIB, int(self.expected_mib * TOLERANCE))
        others = [lease for lease in device.leases.values() if lease.holder != holder]
        if self.free_mib is None or free_mib >= self.free_mib + self.expected_mib - self._growth(others) - tolerance:
            return True
        if device.outside_mib is None:
            return device.taken_at - device.leases[holder].since >= write_off_s
        explained = sum(_most(lease) for lease in others) + device.outside_mib
        return device.spec.total_mib - free_mib <= explained + tolerance

    def _growth(self, others: Iterable[Lease]) -> int:
        """How much more the others may use than before the exit; unknown use counts as the most it may be."""
        now = {lease.holder: lease for lease in others if lease.phase is not Phase.RESERVED}
        growth = 0
        for holder, lease in now.items():
            before = self.others.get(holder)
            if lease.seen_mib is None and holder in self.others and lease.phase is not Phase.STARTING:
                continue  # never measured and nothing that would make it grow
            growth += _most(lease) - (before or 0)
        return growth - sum(before or 0 for holder, before in self.others.items() if holder not in now)


def _most(lease: Lease) -> int:
    if lease.phase is Phase.RESERVED:
        return 0
    return lease.mib if lease.seen_mib is None else lease.seen_mib


@dataclass(slots=True)
class _Device:
    """One device's books."""

    spec: DeviceSpec
    configured: bool = True
    free_mib: int | None = None
    taken_at: float = -math.inf
    stale: bool = False
    outside_mib: int | None = None
    leases: dict[Holder, Lease] = field(default_factory=dict)
    pictures: deque[_Picture] = field(default_factory=lambda: deque(maxlen=2))  # of the last samples, latest first
    stopping: dict[Holder, _Picture] = field(default_factory=dict)  # the last one before their stop
    returns: dict[Holder, _Return] = field(default_factory=dict)  # oldest exit first
    quarantine: dict[Holder, str] = field(default_factory=dict)  # reasons by the lease that has to go first
    last_exit: tuple[ModelId, float] | None = None
    cached: DeviceView | None = None

    def blocked(self) -> str | None:
        """Why nothing new may be placed here, whatever is free."""
        if not self.configured:
            return "no longer configured"
        if self.quarantine:
            return f"quarantined: {next(iter(self.quarantine.values()))}"
        if self.free_mib is None:
            return "its memory has not been read yet"
        if self.stale:
            return "its memory can't be read"
        return None

    def reserved(self) -> int:
        return sum(lease.mib for lease in self.leases.values() if lease.phase is Phase.RESERVED)

    def untaken(self) -> int:
        """What workers may still take although the last sample shows it as free."""
        return sum(
            max(0, lease.mib - (lease.seen_mib or 0))
            for lease in self.leases.values()
            if lease.phase is Phase.STARTING or (lease.phase is not Phase.RESERVED and self.taken_at <= lease.since)
        )

    def free(self) -> int:
        """What a new lease may take; negative when more is promised than is there yet."""
        by_leases = self.spec.total_mib - sum(
            lease.held_mib for lease in self.leases.values() if lease.phase is not Phase.RESERVED
        )
        free = by_leases if self.free_mib is None else min(self.free_mib - self.untaken(), by_leases)
        return free - self.reserved() - self.spec.margin_mib

    def view(self) -> DeviceView:
        if self.cached is None:
            total = self.spec.total_mib
            self.cached = DeviceView(self.spec.id, total, total - self.spec.margin_mib, self.free(), self.blocked())
        return self.cached


class Ledger:
    """The memory leases of all devices. Mutable; owned by one scheduler, which passes in the time."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._devices: dict[DeviceId, _Device] = {}
        self._leases: dict[Holder, Lease] = {}
        self._alerts: list[Alert] = []

    def configure(self, devices: Iterable[DeviceSpec], limits: Limits) -> None:
        """New devices and limits. A device that is no longer named takes nothing new and goes with its last worker."""
        self._limits = limits
        specs = {spec.id: spec for spec in devices}
        for device_id, device in list(self._devices.items()):
            device.configured = device_id in specs
            device.cached = None
            if device.configured:
                continue
            if not device.leases:
                del self._devices[device_id]
            for holder in list(device.returns):  # nobody reads this device any more
                self.release(holder)
        for device_id, spec in specs.items():
            known = self._devices.get(device_id)
            if known is None:
                self._devices[device_id] = _Device(spec)
            else:
                known.spec = spec

    # ------------------------------------------------------------------------------------------------- a lease's life

    def reserve(self, holder: Holder, device: DeviceId, mib: int) -> None:
        """Promise `mib` to `holder`. It need not be free yet; until it is, `free_for` others is negative."""
        assert mib > 0, f"{holder} reserves {mib} MiB"
        assert holder not in self._leases, f"{holder} has a lease already: {self._leases[holder]}"
        self._put(Lease(holder, device, Phase.RESERVED, mib))

    def begin(self, holder: Holder, device: DeviceId, mib: int) -> None:
        """Its worker starts now, on what it reserved here or without a reservation. The memory must be free."""
        reserved = self._leases.get(holder)
        assert reserved is None or (reserved.phase, reserved.device) == (Phase.RESERVED, device), f"{reserved} begins"
        assert mib > 0, f"{holder} leases {mib} MiB"
        place = self._devices[device]
        assert place.blocked() is None, f"{holder} begins on {device}, which is {place.blocked()}"
        free = self.free_for(device, holder)
        assert mib <= free, f"{holder} begins with {mib} MiB on {device}, {free} free"
        self._put(Lease(holder, device, Phase.STARTING, mib))

    def settle(self, holder: Holder, now: float) -> None:
        """Its worker is ready at `now`: from the next sample on, the device's free memory shows what it took."""
        lease = self._leases[holder]
        assert lease.phase is Phase.STARTING, f"{lease} settles"
        self._put(replace(lease, phase=Phase.HELD, since=now))

    def measure(self, holder: Holder, used_mib: int) -> None:
        """What its worker takes now. To be called before `sample` of the same reading; unknown holders are ignored."""
        lease = self._leases.get(holder)
        if lease is None or lease.phase is Phase.RETURNING or lease.measured_mib == used_mib:
            return
        assert lease.phase is not Phase.RESERVED, f"{lease} has no worker to measure"
        assert used_mib >= 0
        self._put(replace(lease, measured_mib=used_mib))

    def stopping(self, holder: Holder) -> None:
        """Its worker is told to end. Until then it had its memory."""
        device = self._devices[self._leases[holder].device]
        if device.pictures:
            device.stopping.setdefault(holder, device.pictures[0])

    def returning(self, holder: Holder, now: float) -> None:
        """Its process tree is gone; its lease stays until a sample shows the memory, if anybody still reads the device."""
        lease = self._leases[holder]
        assert lease.phase in {Phase.STARTING, Phase.HELD}, f"{lease} returns"
        device = self._devices[lease.device]
        if not device.configured:
            self.release(holder)
            return
        alive = device.stopping.pop(holder, None)
        device.last_exit = holder[0], now
        device.returns[holder] = _Return.after((alive,) if alive else tuple(device.pictures), holder)
        self._put(replace(lease, phase=Phase.RETURNING, since=now))

    def release(self, holder: Holder) -> None:
        """Drop the lease, in whatever phase; a quarantine that it caused is over."""
        lease = self._leases.pop(holder)
        device = self._devices[lease.device]
        del device.leases[holder]
        device.returns.pop(holder, None)
        device.stopping.pop(holder, None)
        device.cached = None
        if device.quarantine.pop(holder, None) is not None and not device.quarantine:
            message = f"{lease.device} takes models again: what {holder[0]} held is back, or others have it"
            self._alerts.append(Alert("device.lifted", message, lease.device, holder[0]))
        if not device.configured and not device.leases:
            del self._devices[lease.device]

    def quarantine(self, holder: Holder, reason: str) -> None:
        """Nothing new on the holder's device until this lease is released (its process can't be killed)."""
        device = self._devices[self._leases[holder].device]
        device.quarantine[holder] = reason
        device.cached = None

    def _put(self, lease: Lease) -> None:
        device = self._devices[lease.device]
        device.leases[lease.holder] = self._leases[lease.holder] = lease
        device.cached = None

    # -------------------------------------------------------------------------------------------------------- samples

    def sample(self, sample: DeviceSample, taken_at: float) -> list[Holder]:
        """Take a reading that began at `taken_at`; returns the leases that it released.

        A stale one only blocks the device. Readings older than the last one, or of unknown devices, are ignored.
        """
        device = self._devices.get(sample.id)
        if device is None or taken_at < device.taken_at:
            return []
        device.cached = None
        device.stale = sample.stale
        if sample.stale:
            return []
        device.free_mib, device.outside_mib, device.taken_at = sample.free_mib, sample.outside_mib, taken_at
        for lease in list(device.leases.values()):
            if lease.seen_mib != lease.measured_mib:
                self._put(replace(lease, seen_mib=lease.measured_mib))
        released: list[Holder] = []
        write_off_s = WRITE_OFF * self._limits.memory_quarantine_s
        for holder, back in list(device.returns.items()):
            if taken_at > device.leases[holder].since and back.is_back(device, holder, write_off_s):
                self.release(holder)
                released.append(holder)
        # Without those just released: what they held is in the free memory of this picture.
        seen = {lease.holder: lease.seen_mib for lease in device.leases.values() if lease.phase is not Phase.RESERVED}
        device.pictures.appendleft(_Picture(sample.free_mib, seen))
        return released

    def overdue(self, now: float) -> list[Alert]:
        """What an operator should see, each once: memory that is late, devices quarantined for it or freed again."""
        alerts, self._alerts = self._alerts, []
        for device in self._devices.values():
            for holder, back in device.returns.items():
                since = device.leases[holder].since
                model, where = holder[0], device.spec.id
                late = (
                    f"{model} ended {now - since:.0f} s ago and {where} does not show its {back.expected_mib} MiB back"
                )
                if now >= since + self._limits.memory_warn_s and not back.warned:
                    back.warned = True
                    alerts.append(Alert("memory.late", late, where, model))
                if now >= since + self._limits.memory_quarantine_s and holder not in device.quarantine:
                    self.quarantine(holder, late)
                    message = f"{late}; it takes no new models until it does"
                    alerts.append(Alert("device.quarantined", message, where, model))
        return alerts

    def deadline(self, now: float) -> float:
        """When `overdue` will have something to say; infinity when nothing is on its way back."""
        if self._alerts:
            return now
        times = [math.inf]
        for device in self._devices.values():
            for holder, back in device.returns.items():
                since = device.leases[holder].since
                if not back.warned:
                    times.append(since + self._limits.memory_warn_s)
                if holder not in device.quarantine:
                    times.append(since + self._limits.memory_quarantine_s)
        return min(times)

    # -------------------------------------------------------------------------------------------------------- reading

    def free_for(self, device: DeviceId, holder: Holder | None = None) -> int:
        """MiB that a lease of `holder` may take now; its own reservation counts as free. Negative: promised beyond."""
        own = None if holder is None else self._leases.get(holder)
        is_own = own is not None and own.phase is Phase.RESERVED and own.device == device
        return self._devices[device].view().free_mib + (own.mib if own is not None and is_own else 0)

    def view(self, device: DeviceId, holder: Holder | None = None) -> DeviceView:
        """The device as the planner sees it, with what is free for `holder`."""
        view = self._devices[device].view()
        return view if holder is None else replace(view, free_mib=self.free_for(device, holder))

    def device_ids(self) -> tuple[DeviceId, ...]:
        """The configured devices, sorted."""
        return tuple(sorted(device_id for device_id, device in self._devices.items() if device.configured))

    def leases(self) -> tuple[Lease, ...]:
        """All leases, oldest first."""
        return tuple(self._leases.values())

    def holds(self, holder: Holder) -> bool:
        """Has it a lease?"""
        return holder in self._leases

    def holds_any(self, model: ModelId) -> bool:
        """Has any worker of the model a lease?"""
        return any(holder[0] == model for holder in self._leases)

    def in_motion(self, device: DeviceId, now: float) -> ModelId | None:
        """A model whose load or end the device's figures may not show in full yet; None when they are what they are.

        What was never measured can't be seen to come back, so that an end counts for `memory_warn_s` at least.
        """
        books = self._devices[device]
        for lease in books.leases.values():
            if lease.phase in {Phase.STARTING, Phase.RETURNING} or books.taken_at <= lease.since:
                return lease.holder[0]
        if books.last_exit is None or books.spec.returns_at_exit:
            return None
        model, at = books.last_exit
        return model if now - at < self._limits.memory_warn_s else None

    def quarantined_by(self, holder: Holder) -> str | None:
        """Why the holder's device takes nothing new on its account; None when it does."""
        lease = self._leases.get(holder)
        return None if lease is None else self._devices[lease.device].quarantine.get(holder)

    def starting(self, device: DeviceId) -> int:
        """How many workers are loading there."""
        return sum(lease.phase is Phase.STARTING for lease in self._devices[device].leases.values())

    def is_waiting(self) -> bool:
        """Is memory on its way back, so that sampling often pays?"""
        return any(device.returns for device in self._devices.values())

    def totals(self, device: DeviceId) -> DeviceTotals:
        """The device's books for people."""
        books = self._devices[device]
        by_phase = dict.fromkeys(Phase, 0)
        for lease in books.leases.values():
            by_phase[lease.phase] += lease.held_mib
        return DeviceTotals(
            id=device,
            total_mib=books.spec.total_mib,
            margin_mib=books.spec.margin_mib,
            free_mib=books.free_mib,
            outside_mib=books.outside_mib,
            reserved_mib=by_phase[Phase.RESERVED],
            starting_mib=by_phase[Phase.STARTING],
            held_mib=by_phase[Phase.HELD],
            returning_mib=by_phase[Phase.RETURNING],
            available_mib=max(0, books.free()) if books.blocked() is None else 0,
            blocked=books.blocked(),
            quarantined=bool(books.quarantine),
        )

    def check(self) -> None:
        """Assert the conservation laws."""
        assert {holder: lease for d in self._devices.values() for holder, lease in d.leases.items()} == self._leases
        for device_id, device in self._devices.items():
            assert device.configured or device.leases, f"{device_id} is neither configured nor in use"
            for holder, lease in device.leases.items():
                assert (lease.holder, lease.device) == (holder, device_id)
                assert lease.mib > 0
                assert (lease.phase is Phase.RETURNING) == (holder in device.returns), f"{lease}"
            assert device.returns.keys() <= device.leases.keys()
            assert device.stopping.keys() <= device.leases.keys()
            assert device.quarantine.keys() <= device.leases.keys(), "a quarantine that nothing can lift"
            assert device.cached is None or device.cached == replace(device).view(), "figures are out of date"
            totals = self.totals(device_id)
            books = totals.reserved_mib + totals.starting_mib + totals.held_mib + totals.returning_mib
            slack = totals.total_mib - totals.margin_mib - books - device.free()
            assert slack >= 0, f"{device_id}: {device.free()} free and {books} leased exceed the total by {-slack}"
            if device.free_mib is None:
                assert slack == 0
            else:
                unseen = totals.total_mib - device.free_mib + device.untaken() - (books - totals.reserved_mib)
                assert slack == max(0, unseen), f"{device_id}: {slack} MiB are neither free, leased nor used outside"
