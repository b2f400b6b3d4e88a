"""The planner's types: the demand, the snapshot it looks at, and the plans. Everything here is frozen."""

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
    """Why a resident can't be evicted now. PINNED stays; all others pass."""

    NONE = "none"
    PINNED = "pinned"
    BUSY = "busy"  # has requests in flight
    DRAINING = "draining"  # gets no new requests, and goes when those in flight have ended
    STARTING = "starting"
    STOPPING = "stopping"  # its memory is already on the way back
    RESERVED = "reserved"  # an earlier plan loads it for a request that still waits
    MIN_RESIDENCY = "young"  # within its minimum residency and in demand
    PROTECTED = "held"  # used within its hold_s
    LAST_USED = "used"  # a moment ago, by a more urgent request than those it would go for


PASSING = frozenset({EvictionBlock.MIN_RESIDENCY, EvictionBlock.PROTECTED, EvictionBlock.LAST_USED})
"""These blocks don't protect a resident against a model of higher priority."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that holds memory, as the planner sees it."""

    model: ModelId
    type: str
    priority: int
    devices: Devices
    reserved_mib: tuple[
        int, ...
    ]  # device by device, max(lease, measured): what evicting it is expected to return there
    block: EvictionBlock = EvictionBlock.NONE
    idle_s: float = 0.0
    reload_s: float = 1.0  # what loading it again is expected to cost
    in_flight: int = 0
    used_by: int = NORMAL  # the class that uses it, or used it last

    def reserved_on(self, device: DeviceId) -> int:
        """The MiB that it holds on the device; 0 where it is not."""
        return self.reserved_mib[self.devices.index(device)] if device in self.devices else 0


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device as the planner sees it; `free_mib` is what a new lease may take now, the margin already taken off."""

    id: DeviceId
    total_mib: int
    usable_mib: int  # total minus margin: the largest model that can fit
    free_mib: int
    blocked: str | None = None  # a reason why nothing may be loaded here now (quarantined, stale, another load)
    outage: RejectCode | None = None  # set iff nobody knows when that ends: what those get who can only go here
    title: str = ""

    @property
    def label(self) -> str:
        """As `DeviceSpec.label`."""
        return self.title or self.id


Standing = tuple[float, int]
"""The order of eviction: by priority, then by the class that used the model last, the least urgent first."""


class Idle(NamedTuple):
    """An idle model that could go: from `until` on for any model that may evict it."""

    standing: Standing  # as well as its value: at the time of the outline
    value: float
    model: ModelId
    reserved_mib: int
    reload_s: float
    last_used: float
    until: float
    kept_until: float  # for whoever is less urgent than the class that used it last
    used_by: int


Room = tuple[int, int, AbstractSet[ModelId]]
"""What waiters leave of a device: the MiB now, the MiB in the end, and the models that they claim."""


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """How much could be had of a device, whoever asks and whatever is promised: enough to choose which waiter looks closely."""

    free_mib: int
    coming_mib: int  # on its way back
    idle: tuple[Idle, ...]  # in eviction order
    evictable_mib: tuple[int, ...]  # what none of them holds, the first, the first two, and so on
    is_open: bool  # may a load begin there now?
    outage: RejectCode | None
    across: tuple[ModelId, ...] = ()  # who has something on other devices, too
    promised_before: list[tuple[object, Room]] = field(
        default_factory=list, compare=False
    )  # places and claims; what they leave


@dataclass(frozen=True, slots=True)
class Option:
    """A device set for the demanded model, and what the model would take of each device in it."""

    devices: Devices
    need_mib: Parts
    margin_mib: int = 0  # set iff the parts are in proportion to the room there, less so much


@dataclass(frozen=True, slots=True)
class LoadDemand:
    """A model that somebody wants loaded."""

    model: ModelId
    type: str
    priority: int
    options: tuple[Option, ...]
    spread: Spread | None = None  # set iff it may go over several devices where it can have none of the options

    @property
    def devices(self) -> Devices:
        """All devices where it may go."""
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
    """Load now, nothing has to go."""

    devices: Devices
    need_mib: Parts
    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Load on `devices` once `victims` (in eviction order) are gone."""

    devices: Devices
    need_mib: Parts
    victims: tuple[ModelId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Load once `waits_for` can go (or, when empty, once its devices are unblocked). No devices: anywhere."""

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
