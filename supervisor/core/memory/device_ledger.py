"""One device's ledger: its leases, the memory in its samples, and whether an ended worker's memory is back.

A lease is RETURNING between the exit of its process and the sample that shows the memory free. Only a sample taken after
the exit can end the lease. If the device frees memory before the exit is visible, any such sample is enough; on other
devices the sample must show the memory. The expected amount comes from a snapshot of the time when the worker surely ran:
the exit is reported only after memory has begun to return. If no sample shows the memory, the device is quarantined until
the memory returns.

Figures are cached and recomputed after a change, so reading a hundred devices costs little.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from supervisor.core.planning.plans import DeviceSummary, DeviceView
from supervisor.core.types import DeviceId, DeviceSpec, Generation, ModelId, RejectCode, base_of

Holder = tuple[ModelId, Generation]

TOLERANCE_MIB = 64
TOLERANCE = 0.1
"""Memory counts as returned when at most this much, or this fraction, is missing: contexts and caches vary."""


class Phase(StrEnum):
    """The phase of a lease."""

    STARTING = "starting"  # its worker is loading and may take all of it
    IN_USE = "held"  # its worker is ready
    RETURNING = "returning"  # its worker has ended, but no sample shows the memory free


@dataclass(frozen=True, slots=True)
class Lease:
    """Memory of one device, reserved for one worker."""

    holder: Holder
    device: DeviceId
    phase: Phase
    mib: int
    since: float = -math.inf  # when its worker became ready or exited
    measured_mib: int | None = None  # the last measurement of its worker
    seen_mib: int | None = None  # the measurement at the device's last sample
    is_partner: bool = False  # for another program's process, which may take all of it at any time
    is_reported_unused: bool = False  # operators have an alert that its worker takes nothing

    @property
    def reserved_mib(self) -> int:
        """The MiB that count as taken: the lease, or the measured use if that is larger."""
        return max(self.mib, self.measured_mib or 0)

    @property
    def may_grow(self) -> bool:
        """Whether a partner may take the rest of the lease at any time."""
        return self.is_partner and self.phase is Phase.IN_USE

    @property
    def may_grow_unseen(self) -> bool:
        """Whether a partner with unmeasurable memory holds the lease."""
        return self.may_grow and self.seen_mib is None


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The memory of a device as one sample showed it."""

    free_mib: int
    seen: Mapping[Holder, int | None]  # of living workers
    exited: Mapping[Holder, int]  # use of each ended worker before its exit
    exited_mib: int  # upper bound of the memory that ended workers still held together

    def of(self, holder: Holder) -> int:
        return self.seen.get(holder) or 0


@dataclass(slots=True)
class PendingRelease:
    """Memory that an ended worker should return. The device's snapshot from before the exit shows how much to expect."""

    holder: Holder
    before: MemorySnapshot | None
    warned: bool = False

    @classmethod
    def from_snapshots(cls, snapshots: Sequence[MemorySnapshot], holder: Holder) -> PendingRelease:
        """Use the snapshot (latest first) that expects the least memory: a later one may already include returned memory."""
        with_it = [snapshot for snapshot in snapshots if snapshot.of(holder)] or snapshots[:1]
        return cls(holder, min(with_it, key=lambda snapshot: snapshot.free_mib + snapshot.of(holder), default=None))

    @property
    def expected_mib(self) -> int:
        return self.before.of(self.holder) if self.before else 0

    def is_back(self, device: DeviceLedger, write_off_s: float) -> bool:
        """Whether the device's last sample, which must be newer than the exit, shows the memory free."""
        if device.spec.returns_at_exit or self.before is None:
            return True
        if device.leases[
            self.holder
        ].is_partner:  # its process may still run: memory that it keeps counts as outside use
            return True
        free_mib = device.free_mib
        assert free_mib is not None
        tolerance = max(TOLERANCE_MIB, int(self.expected_mib * TOLERANCE))
        others = [lease for lease in device.leases.values() if lease.holder != self.holder]
        growth = self._growth_mib(self.before, others)
        if free_mib >= self.before.free_mib + self.expected_mib - growth - tolerance:
            return True
        if device.outside_mib is None:
            return device.taken_at - device.leases[self.holder].since >= write_off_s
        explained = sum(_largest_use_mib(lease) for lease in others) + device.outside_mib
        return device.spec.total_mib - free_mib <= explained + tolerance

    def _growth_mib(self, before: MemorySnapshot, others: Iterable[Lease]) -> int:
        """How much more memory the other leases may use than before the exit; unknown use counts as the maximum."""
        now = {lease.holder: lease for lease in others}
        growth = 0
        for holder, lease in now.items():
            if holder in before.exited:
                continue  # this one only returns memory
            never_measured = lease.seen_mib is None and not lease.is_partner
            if never_measured and holder in before.seen and lease.phase is not Phase.STARTING:
                continue  # never measured, and no reason to grow
            growth += _largest_use_mib(lease) - before.of(holder)
        ended = sum(before.of(holder) for holder in before.seen if holder != self.holder and holder not in now)
        # Workers that had ended before that snapshot had already returned a part of their memory.
        returned = min(before.exited_mib, sum(mib for holder, mib in before.exited.items() if holder not in now))
        return growth - ended - returned


def _largest_use_mib(lease: Lease) -> int:
    return lease.mib if lease.seen_mib is None else lease.seen_mib


@dataclass(frozen=True, slots=True)
class DeviceTotals:
    """A device's figures for people, in MiB. `available_mib`: the largest possible new lease."""

    id: DeviceId
    total_mib: int
    margin_mib: int
    free_mib: int | None  # at the last sample; None: never sampled
    outside_mib: int | None
    others_mib: int  # leased by other coordinators that share the device
    starting_mib: int
    reserved_mib: int
    returning_mib: int
    available_mib: int
    blocked: str | None
    quarantined: bool


@dataclass(slots=True)
class DeviceLedger:
    """The leases, samples and pending releases of one device."""

    spec: DeviceSpec
    configured: bool = True
    free_mib: int | None = None
    taken_at: float = -math.inf
    stale: bool = False
    stale_since: float | None = None  # set iff stale and `overdue` has noticed
    lost: str | None = None  # set iff stale, perhaps for ever: the reason
    outside_mib: int | None = None
    others_mib: int = 0  # leased by other coordinators that share the device
    before_unseen: tuple[int, int] | None = None  # set iff a partner's memory can't be measured: see `note_unseen`
    unshared: str | None = None  # set iff `others_mib` is unknown now: the reason
    leases: dict[Holder, Lease] = field(default_factory=dict)
    snapshots: deque[MemorySnapshot] = field(
        default_factory=lambda: deque(maxlen=2)
    )  # of the last samples, latest first
    stopping: dict[Holder, MemorySnapshot] = field(default_factory=dict)  # worker → last snapshot before its stop
    releases: dict[Holder, PendingRelease] = field(default_factory=dict)  # oldest exit first
    quarantine: dict[Holder, str] = field(
        default_factory=dict
    )  # lease that must end → reason why no new leases are allowed ("its worker …")
    last_exit: tuple[ModelId, float] | None = None
    cached: DeviceView | None = None
    summary: DeviceSummary | None = None  # computed by `planning.snapshots`

    UNRECORDED: ClassVar = ("cached", "summary")  # recomputed when needed

    def blocked(self, asker: ModelId | None = None) -> str | None:
        """Why no new load may start here, however much memory is free; None: it may. The text never names `asker`."""
        if not self.configured:
            return "no longer configured"
        if self.quarantine:
            (model, _), why = next(iter(self.quarantine.items()))
            whose = "its own" if asker is not None and base_of(model) == base_of(asker) else f"{model}'s"
            return f"quarantined: {whose} worker {why}"
        if self.unshared is not None:
            return self.unshared
        if self.lost is not None:
            return f"lost: {self.lost}"
        if self.free_mib is None:
            return "its memory has not been read yet"
        if self.stale:
            return "its memory can't be read"
        return None

    def outage(self) -> RejectCode | None:
        """The rejection code of requests that need this device; None unless it is out of service for an unknown time."""
        if self.quarantine:
            return RejectCode.DEVICE_QUARANTINED
        return None if self.lost is None else RejectCode.DEVICE_LOST

    def is_unsampled(self, lease: Lease) -> bool:
        """Whether no sample has shown yet how much memory the lease's worker takes."""
        return lease.phase is Phase.STARTING or self.taken_at <= lease.since

    def untaken_mib(self) -> int:
        """MiB shown free by the last sample that leases may still take."""
        unattributed_mib = self._unattributed_mib()
        unseen_mib = sum(lease.mib for lease in self.leases.values() if lease.may_grow_unseen)
        taken_mib = 0  # by partners with unmeasurable memory
        if self.before_unseen is not None:
            outside_mib, others_mib = self.before_unseen
            taken_mib = unattributed_mib - outside_mib - max(0, self.others_mib - others_mib)
            taken_mib = min(max(0, taken_mib), unseen_mib)
        unseen_mib += max(0, self.others_mib - (unattributed_mib - taken_mib)) - taken_mib
        return unseen_mib + sum(
            max(0, lease.mib - (lease.seen_mib or 0))
            for lease in self.leases.values()
            if not lease.may_grow_unseen and (lease.may_grow or self.is_unsampled(lease))
        )

    def _unattributed_mib(self) -> int:
        """Used memory at the last sample without a measured worker: that of unmeasured partners and of other programs."""
        known = sum(
            lease.mib if lease.seen_mib is None else lease.seen_mib
            for lease in self.leases.values()
            if not lease.may_grow_unseen
        )
        return 0 if self.free_mib is None else max(0, self.spec.total_mib - self.free_mib - known)

    def note_unseen(self) -> None:
        """Remember the unattributed use, and others' leases, from before the first partner with unmeasurable memory.

        Both figures shrink with the current use: the memory that was freed wasn't the partner's.
        """
        if not any(lease.may_grow_unseen for lease in self.leases.values()):
            self.before_unseen = None
            return
        now = (self._unattributed_mib(), self.others_mib)
        before = self.before_unseen or now
        self.before_unseen = (min(now[0], before[0]), min(now[1], before[1]))

    def snapshot(self, free_mib: int) -> MemorySnapshot:
        """The snapshot of the last sample, with `free_mib` free. Its missing memory is attributed to ended workers."""
        living = {lease.holder: lease.seen_mib for lease in self.leases.values() if lease.phase is not Phase.RETURNING}
        exited = {lease.holder: lease.seen_mib or 0 for lease in self.leases.values() if lease.holder not in living}
        shown_mib = free_mib + sum(seen or 0 for seen in living.values())
        before = (release.before for release in self.releases.values())
        known_mib = [it.free_mib + sum(seen or 0 for seen in it.seen.values()) + it.exited_mib for it in before if it]
        hidden_mib = max(known_mib, default=self.spec.total_mib) - shown_mib
        return MemorySnapshot(free_mib, living, exited, max(0, min(hidden_mib, sum(exited.values()))))

    def free(self) -> int:
        """The largest possible new lease in MiB; negative while more is leased than is free."""
        by_leases = self.spec.total_mib - self.others_mib - sum(lease.reserved_mib for lease in self.leases.values())
        free = by_leases if self.free_mib is None else min(self.free_mib - self.untaken_mib(), by_leases)
        return free - self.spec.margin_mib

    def view(self) -> DeviceView:
        if self.cached is None:
            spec = self.spec
            self.cached = DeviceView(
                spec.id, spec.total_mib, spec.usable_mib, self.free(), self.blocked(), self.outage(), spec.title
            )
        return self.cached

    def totals(self) -> DeviceTotals:
        """The figures for people."""
        by_phase = dict.fromkeys(Phase, 0)
        for lease in self.leases.values():
            by_phase[lease.phase] += lease.reserved_mib
        return DeviceTotals(
            id=self.spec.id,
            total_mib=self.spec.total_mib,
            margin_mib=self.spec.margin_mib,
            free_mib=self.free_mib,
            outside_mib=self.outside_mib,
            others_mib=self.others_mib,
            starting_mib=by_phase[Phase.STARTING],
            reserved_mib=by_phase[Phase.IN_USE],
            returning_mib=by_phase[Phase.RETURNING],
            available_mib=max(0, self.free()) if self.blocked() is None else 0,
            blocked=self.blocked(),
            quarantined=bool(self.quarantine),
        )

    def check(self) -> None:
        """Assert that the device's figures add up."""
        assert self.cached is None or self.cached == replace(self, cached=None).view(), "figures are out of date"
        totals = self.totals()
        leased = totals.starting_mib + totals.reserved_mib + totals.returning_mib
        slack = totals.total_mib - totals.margin_mib - leased - self.free()
        assert slack >= 0, f"{self.spec.id}: {self.free()} free and {leased} leased exceed the total by {-slack}"
        if self.free_mib is None:
            assert slack == self.others_mib
        else:
            unseen = totals.total_mib - self.free_mib + self.untaken_mib() - leased
            message = f"{self.spec.id}: {slack} MiB are neither free, leased nor used outside"
            assert slack == max(self.others_mib, unseen), message
