"""One device's books: the leases on it, what its samples showed, and whether memory is back.

RETURNING bridges the gap between a process that is gone and a device that shows its memory back. Only a sample taken
after the exit ends it: any on a device whose memory is back at the exit, one that shows the memory on the others. What
it has to show follows from a picture of the device from when the worker surely lived: we hear of an exit later than its
memory does. Where it never shows it the device is quarantined, and freed again if the memory does return.

Figures are cached and recomputed after a change, so looking at a hundred devices costs little.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from supervisor.core.plans import DeviceView
from supervisor.core.types import DeviceId, DeviceSpec, Generation, ModelId

Holder = tuple[ModelId, Generation]

TOLERANCE_MIB = 64
TOLERANCE = 0.1
"""Memory counts as back when at most this much, or this part of it, is missing: contexts and caches come and go."""


class Phase(StrEnum):
    """Where a lease stands."""

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
class Picture:
    """What one sample showed of a device."""

    free_mib: int
    seen: Mapping[Holder, int | None]

    def of(self, holder: Holder) -> int:
        return self.seen.get(holder) or 0


@dataclass(slots=True)
class Return:
    """What the device looked like before a worker's exit, to tell when its memory is back."""

    free_mib: int | None
    expected_mib: int
    others: Mapping[Holder, int | None]
    warned: bool = False

    @classmethod
    def after(cls, pictures: Sequence[Picture], holder: Holder) -> Return:
        """By the one of `pictures`, latest first, that promises least: later the worker's memory may be back already."""
        if not pictures:
            return cls(None, 0, {})
        with_it = [picture for picture in pictures if picture.of(holder)] or pictures[:1]
        picture = min(with_it, key=lambda picture: picture.free_mib + picture.of(holder))
        others = {other: seen for other, seen in picture.seen.items() if other != holder}
        return cls(picture.free_mib, picture.of(holder), others)

    def is_back(self, device: Books, holder: Holder, write_off_s: float) -> bool:
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
        now = {lease.holder: lease for lease in others}
        growth = 0
        for holder, lease in now.items():
            before = self.others.get(holder)
            if lease.seen_mib is None and holder in self.others and lease.phase is not Phase.STARTING:
                continue  # never measured and nothing that would make it grow
            growth += _most(lease) - (before or 0)
        return growth - sum(before or 0 for holder, before in self.others.items() if holder not in now)


def _most(lease: Lease) -> int:
    return lease.mib if lease.seen_mib is None else lease.seen_mib


@dataclass(slots=True)
class Books:
    """One device's books."""

    spec: DeviceSpec
    configured: bool = True
    free_mib: int | None = None
    taken_at: float = -math.inf
    stale: bool = False
    outside_mib: int | None = None
    leases: dict[Holder, Lease] = field(default_factory=dict)
    pictures: deque[Picture] = field(default_factory=lambda: deque(maxlen=2))  # of the last samples, latest first
    stopping: dict[Holder, Picture] = field(default_factory=dict)  # the last one before their stop
    returns: dict[Holder, Return] = field(default_factory=dict)  # oldest exit first
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

    def untaken(self) -> int:
        """What workers may still take although the last sample shows it as free."""
        return sum(
            max(0, lease.mib - (lease.seen_mib or 0))
            for lease in self.leases.values()
            if lease.phase is Phase.STARTING or self.taken_at <= lease.since
        )

    def free(self) -> int:
        """What a new lease may take; negative when more is promised than is there yet."""
        by_leases = self.spec.total_mib - sum(lease.held_mib for lease in self.leases.values())
        free = by_leases if self.free_mib is None else min(self.free_mib - self.untaken(), by_leases)
        return free - self.spec.margin_mib

    def view(self) -> DeviceView:
        if self.cached is None:
            total = self.spec.total_mib
            self.cached = DeviceView(self.spec.id, total, self.spec.usable_mib, self.free(), self.blocked())
        return self.cached
