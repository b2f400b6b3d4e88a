"""Plans for a model split over several devices, with parts in proportion to the room on each device.

There are 65 000 ways to choose among 16 devices, so they aren't tried one by one. For given possible victims there is one
answer, in three steps:

1. The devices' room is one sum, each device less a margin, which a program needs there besides its part of the model.
   Residents are evicted from the lowest priority up until the sum suffices. Of the last priority, those that add most are
   evicted first. Unnecessary victims stay.
2. The devices with most room are taken until they suffice: fewer would not be enough.
3. Each gets a part in proportion to its room.

More devices only add to the sum, so step 1 finds room if there is any, and touches no higher priority than necessary.
The planner makes space for these parts as for any others (docs/adr/0020-parts-by-what-is-free.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from supervisor.core.memory.device_sets import MOST_PARTS, Spread
from supervisor.core.messages import devices_listed
from supervisor.core.planning.device_set_fit import DeviceSet
from supervisor.core.planning.plans import DeviceView, Option, Resident
from supervisor.core.types import DeviceId, Devices

RoomByDevice = dict[DeviceId, int]
"""MiB that a model could have on each device."""


class SplitPlan:
    """Plans the parts of one split model on its allowed devices."""

    def __init__(self, spread: Spread, views: Sequence[DeviceView]) -> None:
        self.spread = spread
        self.views = {view.id: view for view in sorted(views, key=lambda view: view.id)}

    def parts_when_empty(self) -> DeviceSet | None:
        """The parts if nothing else were loaded; None: the model never fits."""
        return self._parts_in({view.id: view.usable_mib for view in self.views.values()})

    def parts_now(self) -> DeviceSet | None:
        """The parts in the memory that is free now; None: the model doesn't fit."""
        return self._parts_in({view.id: view.free_mib for view in self.views.values() if view.blocked is None})

    def parts_after_evicting(
        self,
        pool: Sequence[Resident],
        first: Sequence[Resident],
        coming: Mapping[DeviceId, Iterable[Resident]],
        *,
        blocked: bool,
    ) -> list[DeviceSet]:
        """The parts after all of `first` and `coming` have ended, and as few of `pool` as needed, in this order.

        At most one device set. `blocked`: use blocked devices too, if the others don't suffice.
        """
        unblocked = [view for view in self.views.values() if view.blocked is None]
        for views in [unblocked, list(self.views.values())] if blocked else [unblocked]:
            room = {view.id: view.free_mib + _reserved_mib(coming.get(view.id, ()), view.id) for view in views}
            for resident in first:
                _add_memory(room, resident)
            if self._make_room(room, [resident for resident in pool if resident not in first]) and (
                found := self._parts_in(room)
            ):
                return [found]
        return []

    def too_large(self) -> str:
        """Why the model fits nowhere, for people."""
        if len(self.views) < 2:
            return f"needs {self.spread.whole_mib} MiB, and only one device could have a part of it"
        usable = sum(max(0, view.usable_mib - self.spread.margin_mib) for view in self.views.values())
        where = devices_listed(self.views.values()) if len(self.views) <= 4 else f"its {len(self.views)} devices"
        return (
            f"needs {self.spread.whole_mib} MiB, and {where} have {usable} usable together, "
            f"less {self.spread.margin_mib} MiB each"
        )

    def _make_room(self, room: RoomByDevice, pool: Sequence[Resident]) -> bool:
        """Add the memory of as few residents as needed to the room. False: all residents together don't suffice."""
        victims: list[Resident] = []
        for _, members in groupby(pool, key=lambda resident: resident.priority):
            if self._suffices(room):
                break
            group = [resident for resident in members if not room.keys().isdisjoint(resident.devices)]
            if group:
                victims += self._take_all(room, group) or self._take_largest(room, group)
        if not self._suffices(room):
            return False
        order = {id(resident): number for number, resident in enumerate(pool)}
        for resident in sorted(victims, key=lambda resident: -order[id(resident)]):
            _add_memory(room, resident, -1)
            if not self._suffices(room):
                _add_memory(room, resident)
        return True

    def _take_all(self, room: RoomByDevice, group: Sequence[Resident]) -> Sequence[Resident]:
        """Add the memory of all residents of a priority and return them; if a part of them suffices, do nothing."""
        after = dict(room)
        for resident in group:
            _add_memory(after, resident)
        if self._suffices(after):
            return ()
        room.update(after)
        return group

    def _take_largest(self, room: RoomByDevice, group: Sequence[Resident]) -> Sequence[Resident]:
        """Add the memory of residents of one priority, largest gain first, until it suffices. All together must suffice."""
        by_place: defaultdict[Devices, list[Resident]] = defaultdict(list)
        for _, resident in sorted(enumerate(group), key=lambda one: (sum(one[1].reserved_mib), -one[0])):
            by_place[resident.devices].append(resident)  # taken from the end
        taken: list[Resident] = []
        while not self._suffices(room):
            best = max((there[-1] for there in by_place.values() if there), key=lambda one: self._gain_of(room, one))
            by_place[best.devices].pop()
            taken.append(best)
            _add_memory(room, best)
        return taken

    def _gain_of(self, room: RoomByDevice, resident: Resident) -> tuple[int, int]:
        """A sort key: MiB that the resident adds to the sum, then MiB that it returns."""
        margin = self.spread.margin_mib
        gain = reserved_mib = 0
        for device, mib in zip(resident.devices, resident.reserved_mib, strict=True):
            if device in room:
                gain += max(0, room[device] + mib - margin) - max(0, room[device] - margin)
                reserved_mib += mib
        return gain, reserved_mib

    def _suffices(self, room: RoomByDevice) -> bool:
        return self.spread.fits(room.values())

    def _largest_devices(self, room: RoomByDevice) -> dict[DeviceId, int] | None:
        """The fewest sufficient devices, most room first, each with its room less the margin; None: all don't suffice."""
        left = {device: mib - self.spread.margin_mib for device, mib in room.items() if mib > self.spread.margin_mib}
        taken: dict[DeviceId, int] = {}
        for device in sorted(left, key=lambda device: (-left[device], device))[:MOST_PARTS]:
            taken[device] = left[device]
            if len(taken) > 1 and sum(taken.values()) >= self.spread.total_mib(len(taken)):
                return taken
        return None

    def _parts_in(self, room: RoomByDevice) -> DeviceSet | None:
        taken = self._largest_devices(room)
        if taken is None:
            return None
        devices = tuple(sorted(taken))
        parts = in_proportion(self.spread.total_mib(len(devices)), [taken[device] for device in devices])
        return DeviceSet(
            Option(devices, parts, self.spread.margin_mib), tuple(self.views[device] for device in devices)
        )


def in_proportion(total: int, room: Sequence[int]) -> tuple[int, ...]:
    """Divide `total` in proportion to `room`: each part is at least 1 and at most its room. The room must suffice."""
    whole = sum(room)
    parts = [max(1, total * mib // whole) for mib in room]
    number = 0
    while (rest := total - sum(parts)) != 0:
        step = 1 if rest > 0 else -1
        if 1 <= parts[number] + step <= room[number]:
            parts[number] += step
        number = (number + 1) % len(parts)
    return tuple(parts)


def _add_memory(room: RoomByDevice, resident: Resident, sign: int = 1) -> None:
    for device, mib in zip(resident.devices, resident.reserved_mib, strict=True):
        if device in room:
            room[device] += sign * mib


def _reserved_mib(residents: Iterable[Resident], device: DeviceId) -> int:
    return sum(resident.reserved_on(device) for resident in residents)
