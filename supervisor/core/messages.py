"""Decisions as messages for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from supervisor.core.plans import EvictionBlock, Resident


def listed(things: Sequence[object]) -> str:
    """All of them: "gpu0, gpu1 and gpu2"."""
    words = [str(thing) for thing in things]
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def residents_listed(residents: Iterable[Resident]) -> str:
    """Each resident with its type, what it holds, and its condition."""
    return ", ".join(f"{r.model} ({r.type}, {held_in_mib(r)}, {_condition(r)})" for r in residents)


def _condition(resident: Resident) -> str:
    match resident.block:
        case EvictionBlock.BUSY:
            return f"{resident.in_flight} {'request' if resident.in_flight == 1 else 'requests'} in flight"
        case EvictionBlock.STARTING:
            return "still starting"
        case EvictionBlock.STOPPING:
            return "stopping"
        case EvictionBlock.RESERVED:
            return "reserved for a waiting request"
        case EvictionBlock.MIN_RESIDENCY:
            return "just loaded"
        case EvictionBlock.NONE | EvictionBlock.PINNED:
            return f"idle {seconds(resident.idle_s)}"


def held_in_mib(resident: Resident) -> str:
    """What it holds on each device: "12000 + 8000 MiB"."""
    return f"{' + '.join(map(str, resident.held_mib))} MiB"


def seconds(count: float) -> str:
    """A duration: "90 s", "10 min", "3 h"."""
    if count < 120:
        return f"{count:.0f} s"
    if count < 7200:
        return f"{count / 60:.0f} min"
    return f"{count / 3600:.0f} h"
