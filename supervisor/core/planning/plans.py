"""The planner's types: its input (demand and snapshot) and its output (plans). All classes are frozen."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from supervisor.core.admission.admission import AdmissionPolicy
from supervisor.core.demand import NORMAL
from supervisor.core.memory.device_sets import Spread
from supervisor.core.types import DeviceId, Devices, ModelId, Parts, RejectCode


class EvictionBlock(StrEnum):
    """Why a resident can't be evicted now. All blocks except PINNED are temporary."""

    NONE = "none"
    PINNED = "pinned"
    BUSY = "busy"  # has requests in flight
    DRAINING = "draining"  # gets no new requests, and stops when those in flight have ended
    STARTING = "starting"
    STOPPING = "stopping"  # its memory is already being returned
    RESERVED = "reserved"  # an earlier plan will load it for a waiting request
    MIN_RESIDENCY = "young"  # within its minimum residency and in demand
    PROTECTED = "held"  # used within its hold_s
    LAST_USED = "used"  # recently, by a more urgent request than those of the waiter


PASSING = frozenset({EvictionBlock.MIN_RESIDENCY, EvictionBlock.PROTECTED, EvictionBlock.LAST_USED})
"""These blocks don't protect a resident against a model of higher priority."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that holds memory, in the planner's view."""

    model: ModelId
    type: str
    priority: int
    devices: Devices
    reserved_mib: tuple[int, ...]  # device by device, max(lease, measured): the memory that its eviction should return
    block: EvictionBlock = EvictionBlock.NONE
    idle_s: float = 0.0
    reload_s: float = 1.0  # expected seconds of a reload
    in_flight: int = 0
    used_by: int = NORMAL  # the class that uses it, or used it last

    def reserved_on(self, device: DeviceId) -> int:
        """The MiB that the resident holds on the device; 0 if it isn't there."""
        return self.reserved_mib[self.devices.index(device)] if device in self.devices else 0


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device in the planner's view. `free_mib`: the largest possible new lease now, less the margin."""

    id: DeviceId
    total_mib: int
    usable_mib: int  # total minus margin: the largest model that can fit
    free_mib: int
    blocked: str | None = None  # a reason why nothing may be loaded here now (quarantined, stale, another load)
    outage: RejectCode | None = (
        None  # set iff the block may never end: the rejection code of models that need this device
    )
    title: str = ""

    @property
    def label(self) -> str:
        """As `DeviceSpec.label`."""
        return self.title or self.id


EvictionRank = tuple[float, int]
"""The order of eviction: by priority, then by the class of the last use, least urgent first."""


class Idle(NamedTuple):
    """An idle model that could be evicted: from `until` on by any model that may evict it."""

    standing: EvictionRank  # like `value`, as of the time of the summary
    value: float
    model: ModelId
    reserved_mib: int
    reload_s: float
    last_used: float
    until: float
    kept_until: float  # until then protected from models less urgent than the class of its last use
    used_by: int


Room = tuple[int, int, AbstractSet[ModelId]]
"""A device's room after earlier waiters: MiB now, MiB after all returns, and the models that they claim."""


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """How much memory a device could provide, before promises to waiters: a rough figure to choose the waiters to plan."""

    free_mib: int
    coming_mib: int  # being returned
    idle: tuple[Idle, ...]  # in eviction order
    evictable_mib: tuple[int, ...]  # sums of `idle` memory: of none, the first, the first two, and so on
    is_open: bool  # whether a load may begin there now
    outage: RejectCode | None
    across: tuple[ModelId, ...] = ()  # models with memory on other devices, too
    promised_before: list[tuple[object, Room]] = field(
        default_factory=list, compare=False
    )  # cache: (places and claims, room after them)


@dataclass(frozen=True, slots=True)
class Option:
    """A device set for the demanded model, and the MiB that the model would take of each device."""

    devices: Devices
    need_mib: Parts
    margin_mib: int = 0  # set iff the parts are in proportion to the room on each device less this margin


@dataclass(frozen=True, slots=True)
class LoadDemand:
    """A model to load, with its possible device sets."""

    model: ModelId
    type: str
    priority: int
    options: tuple[Option, ...]
    spread: Spread | None = None  # set iff the model may be split over several devices when no option is possible

    @property
    def devices(self) -> Devices:
        """All devices where the model may run."""
        spread = () if self.spread is None else self.spread.devices
        return tuple(dict.fromkeys((*(device for option in self.options for device in option.devices), *spread)))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a plan depends on besides its demand: devices, residents, and the policy."""

    devices: tuple[DeviceView, ...]
    residents: tuple[Resident, ...]
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)


@dataclass(frozen=True, slots=True)
class Admit:
    """Load now, without an eviction."""

    devices: Devices
    need_mib: Parts
    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Load on `devices` after `victims` (in eviction order) have ended."""

    devices: Devices
    need_mib: Parts
    victims: tuple[ModelId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Load when `waits_for` can be evicted (or, if empty, when its devices are unblocked). No devices: anywhere."""

    devices: Devices
    need_mib: Parts
    waits_for: tuple[ModelId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Don't wait: the model is too large, pinned or protected residents are in the way, or its devices are out of service."""

    reason: str
    outage: RejectCode | None = None  # set iff its devices are out
    fits_nowhere: bool = False  # no device is large enough, so only another configuration helps


Plan = Admit | Evict | Wait | Refuse
