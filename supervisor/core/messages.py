"""Texts for people: lists, counts and times in the reasons of decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from supervisor.core.demand import NORMAL
from supervisor.core.planning.plans import DeviceView, EvictionBlock, Resident
from supervisor.core.types import DeviceSpec


def listed(things: Sequence[object]) -> str:
    """The things as a list in a sentence: "gpu0, gpu1 and gpu2"."""
    words = [str(thing) for thing in things]
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def devices_listed(devices: Iterable[DeviceSpec | DeviceView]) -> str:
    """The devices by their labels: "RTX 4080 (gpu0) and RTX 3060 (gpu1)"."""
    return listed([device.label for device in devices])


def residents_listed(residents: Iterable[Resident]) -> str:
    """Each resident with its type, its memory, and its condition."""
    return ", ".join(f"{r.model} ({r.type}, {reserved_text(r)}, {_condition_text(r)})" for r in residents)


def _condition_text(resident: Resident) -> str:
    match resident.block:
        case EvictionBlock.BUSY:
            return f"{requests_counted(resident.in_flight)} in flight"
        case EvictionBlock.DRAINING:
            return f"draining, {requests_counted(resident.in_flight)} in flight"
        case EvictionBlock.STARTING:
            return "still starting"
        case EvictionBlock.STOPPING:
            return "stopping"
        case EvictionBlock.RESERVED:
            return "reserved for a waiting request"
        case EvictionBlock.MIN_RESIDENCY:
            return "just loaded"
        case EvictionBlock.PROTECTED:
            return "held for its next request"
        case EvictionBlock.LAST_USED:
            return f"last used by a more urgent request, {seconds(resident.idle_s)} ago"
        case EvictionBlock.NONE | EvictionBlock.PINNED:
            last = "" if resident.used_by == NORMAL else f", last used with priority {resident.used_by}"
            return f"idle {seconds(resident.idle_s)}{last}"


def outages_listed(shown: Iterable[DeviceView], count: int) -> str:
    """The devices that are out of service, with their reasons: `shown` of `count`."""
    parts = [f"{view.label} is {view.blocked}" for view in shown]
    return "; ".join(parts if len(parts) == count else [*parts, f"{count - len(parts)} more are out, too"])


def requests_counted(count: int) -> str:
    """A number of requests: "1 request"."""
    return f"{count} {'request' if count == 1 else 'requests'}"


def reserved_text(resident: Resident) -> str:
    """The memory that the resident holds on each device: "12000 + 8000 MiB"."""
    return f"{' + '.join(map(str, resident.reserved_mib))} MiB"


def seconds(count: float) -> str:
    """A duration: "90 s", "10 min", "3 h"."""
    if count < 120:
        return f"{count:.0f} s"
    if count < 7200:
        return f"{count / 60:.0f} min"
    return f"{count / 3600:.0f} h"
