"""Devices and their memory, and leases for other programs."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from supervisor.schema.model import ModelMemory
from supervisor.schema.operation import doc


class DeviceLease(Struct, gc=False):
    """A holder's memory on a device."""

    model: str
    partner: bool
    generation: int
    phase: Literal["starting", "held", "returning"]
    lease_mib: int
    measured_mib: int | None


class Device(Struct, gc=False):
    """A device: its memory, and its holders."""

    id: str
    kind: str
    name: str
    driver: str | None
    total_mib: int
    margin_mib: int
    free_mib: Annotated[int | None, doc("Free at the last reading.")]
    available_mib: Annotated[int | None, doc("What a new model may take, after leases and margin.")]
    outside_mib: Annotated[int | None, doc("What other programs use; null if unknown.")]
    others_mib: Annotated[
        int | None,
        doc("What others have leased in the [store](leases.md#several-daemons-on-the-same-gpus) that daemons share."),
    ]
    blocked: Annotated[str | None, doc("Why nothing may be loaded here now; else null.")]
    quarantined: Annotated[bool, doc("Whether the reason is memory that did not come back.")]
    leases: Annotated[
        list[DeviceLease],
        doc(
            "`model` (or the `id` of a [partner](leases.md)'s lease; then `partner` is true), `generation`, `phase` "
            "(`starting`, `held`, `returning`), `lease_mib`, `measured_mib`."
        ),
    ]


class MemoryReport(Struct):
    """All devices, and each model's memory."""

    devices: list[Device]
    models: list[ModelMemory]


LEAST_TTL_S = 5.0
MOST_TTL_S = 86_400.0
_Ttl = Annotated[float, Meta(ge=LEAST_TTL_S, le=MOST_TTL_S)]
_Pid = Annotated[int, Meta(ge=1, le=1 << 22)]
_TTL = "It ends when no heartbeat comes for so long: 5 to 86400. Default: 30."
_PID = "The process whose tree takes the memory, for its measurement."


class LeaseRequest(Struct, forbid_unknown_fields=True):
    """Memory that another program wants."""

    vram_mib: Annotated[int, Meta(ge=1, le=1 << 30, description="How much memory in MiB, on all its devices together.")]
    holder: Annotated[
        str,
        Meta(
            pattern=r"^(?!.*\n)[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",  # Python's $ also matches before a newline at the end
            description="letters, digits, dots, underscores and hyphens, at most 64: whose it is. Default: `partner`.",
        ),
    ] = "partner"
    device: Annotated[
        str | list[str] | None,
        doc("The name of a device, or a list of names of devices that it may be on. Default: any."),
    ] = None
    gpus: Annotated[Annotated[int, Meta(ge=1, le=64)] | None, doc("How many GPUs share it equally. Default: 1.")] = None
    wait: Annotated[
        bool,
        doc(
            "Wait also for busy models and other leases. Default: false; then 409 `lease_unavailable` says at once what is in "
            "the way."
        ),
    ] = False
    ttl_s: Annotated[_Ttl | None, doc(_TTL)] = None
    pid: Annotated[_Pid | None, doc(_PID)] = None


class LeaseRenewal(Struct, forbid_unknown_fields=True):
    """What a heartbeat changes."""

    ttl_s: Annotated[_Ttl | None, doc(_TTL)] = None
    pid: Annotated[_Pid | None, doc(_PID)] = None


class Lease(Struct, gc=False):
    """Memory that another program has, or waits for."""

    id: str
    holder: str
    state: Literal["waiting", "held", "ending"]
    reason: str | None
    since_s: float
    vram_mib: int
    devices: list[str]
    measured_mib: int | None
    ttl_s: float
    expires_s: Annotated[float | None, doc("Until it ends without a heartbeat.")]
    pid: int | None
    waits_for: Annotated[list[str], doc("Models that have to go first.")]
    env: Annotated[dict[str, str], doc("The variables that show a process its devices and no others.")]


class LeaseList(Struct):
    """All leases, the oldest first."""

    object: Literal["list"]
    data: list[Lease]


class LeaseEnd(Struct):
    """A lease that has ended."""

    id: str
    ended: bool
