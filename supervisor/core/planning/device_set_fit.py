"""A device set for the planner: how much a model would take of each device, and texts about it for messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from supervisor.core.messages import devices_listed, listed
from supervisor.core.planning.plans import DeviceView, Option
from supervisor.core.types import DeviceId

SHOWN_DEVICES = 3
"""A refusal explains this many devices or device sets, and only counts the rest."""


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """One way to place a model: its devices, and how much it takes of each."""

    option: Option
    views: tuple[DeviceView, ...]

    @property
    def is_large_enough(self) -> bool:
        """Whether the model would fit if nothing else were loaded."""
        return all(mib <= view.usable_mib for mib, view in self.parts())

    @property
    def blocked(self) -> tuple[DeviceView, ...]:
        """Its devices that accept no load now."""
        return tuple(view for view in self.views if view.blocked is not None)

    def parts(self) -> zip[tuple[int, DeviceView]]:
        """The MiB that the model takes, device by device."""
        return zip(self.option.need_mib, self.views, strict=True)

    def short(self) -> dict[DeviceId, int]:
        """MiB missing on each device; zero or less where enough is free."""
        margin_mib = self.option.margin_mib
        return {view.id: mib + margin_mib - view.free_mib for mib, view in self.parts()}

    def needs(self) -> str:
        """The needed and the free memory, for people."""
        parts, free = self.option.need_mib, [max(view.free_mib, 0) for view in self.views]
        if len(free) == 1:
            return f"needs {parts[0]} MiB on {self.views[0].label}, {free[0]} free"
        if self.option.margin_mib:
            each = listed([f"{mib} MiB on {view.label}" for mib, view in self.parts()])
            how = f"in proportion to what it can have there, less {self.option.margin_mib} MiB each"
            return f"needs {sum(parts)} MiB: {each}, {how}; {listed(free)} free"
        return f"needs {parts[0]} MiB on each of {devices_listed(self.views)}, {listed(free)} free"


def too_large(known: Sequence[DeviceSet]) -> str:
    """Why a model fits on none of these device sets, for people."""
    if not known:
        return "no device that it may run on is there"
    small = {  # by device: several device sets may share one
        view.id: f"needs {mib} MiB on {view.label}, which has {view.usable_mib} usable"
        for device_set in known
        for mib, view in device_set.parts()
        if view.usable_mib < mib
    }
    shown = list(small.values())[:SHOWN_DEVICES]
    if len(small) > len(shown):
        shown.append(f"{len(small) - len(shown)} more are too small as well")
    return "; ".join(shown)
