"""What operators and other programs ask about memory."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.operation import (
    Example,
    Operation,
    Section,
    anything,
    array,
    choice,
    flag,
    listing,
    mapping,
    named,
    number,
    record,
    request,
    text,
    whole,
)
from supervisor.http.leases import LEAST_TTL_S, MOST_GPUS, MOST_MIB, MOST_PID, MOST_TTL_S

_LEASE: Final = named(
    record(
        {
            "id": text(),
            "holder": text(),
            "state": choice("waiting", "held", "ending"),
            "reason": text(null=True),
            "since_s": number(),
            "vram_mib": whole(),
            "devices": array(),
            "measured_mib": whole(null=True),
            "ttl_s": number(),
            "expires_s": number("Until it ends without a heartbeat.", null=True),
            "pid": whole(null=True),
            "waits_for": array(None, "Models that have to go first."),
            "env": mapping(text(), "The variables that show a process its devices and no others."),
        }
    ),
    "Lease",
)
_ASKED: Final = {
    "vram_mib": whole("How much memory, on all its devices together.", minimum=1, maximum=MOST_MIB),
    "holder": text(
        "Whose it is: letters, digits, dots, underscores and hyphens, at most 64. Default: `partner`.",
        pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
    ),
    "device": anything("A device, or a list of devices that it may be on. Default: any."),
    "gpus": whole("How many GPUs share it equally. Default: 1.", null=True, minimum=1, maximum=MOST_GPUS),
    "wait": flag(
        "Wait also for busy models and other leases. Default: false; then 409 `lease_unavailable` says at once what is in the way."
    ),
    "ttl_s": number(
        "It ends when no heartbeat comes for so long: 5 to 86400. Default: 30.",
        null=True,
        minimum=LEAST_TTL_S,
        maximum=MOST_TTL_S,
    ),
    "pid": whole(
        "The process whose tree takes the memory, for its measurement.", null=True, minimum=1, maximum=MOST_PID
    ),
}
_DEVICE: Final = {
    "id": text(),
    "kind": text(),
    "name": text(),
    "driver": text(null=True),
    "total_mib": whole(),
    "margin_mib": whole(),
    "free_mib": whole("Free at the last reading.", null=True),
    "available_mib": whole("What a new model may take, after leases and margin.", null=True),
    "outside_mib": whole("What other programs use; null if unknown.", null=True),
    "others_mib": whole(
        "What others have leased in the [store](leases.md#several-daemons-on-the-same-gpus) that daemons share.",
        null=True,
    ),
    "blocked": text(
        "Why nothing may be loaded here now, and whether the reason is memory that did not come back.", null=True
    ),
    "quarantined": flag("Why nothing may be loaded here now, and whether the reason is memory that did not come back."),
    "leases": array(
        record(
            {
                "model": text(),
                "partner": flag(),
                "generation": whole(),
                "phase": choice("starting", "held", "returning"),
                "lease_mib": whole(),
                "measured_mib": whole(null=True),
            }
        ),
        "`model` (or the `id` of a [partner](leases.md)'s lease; then `partner` is true), `generation`, `phase` (`starting`, "
        "`held`, `returning`), `lease_mib`, `measured_mib`.",
    ),
}
_ID: Final = "/v1/admin/leases/train-1f2e3d"
_HELD: Final = {
    "id": "train-1f2e3d",
    "holder": "train",
    "state": "held",
    "reason": "",
    "since_s": 12.5,
    "vram_mib": 100,
    "devices": ["host"],
    "measured_mib": None,
    "ttl_s": 30.0,
    "expires_s": 17.5,
    "pid": None,
    "waits_for": [],
    "env": {},
}
SECTION: Final = Section(
    "Administration: memory",
    "Who has how much memory, and [leases](leases.md) for other programs.",
    (
        Operation(
            "GET",
            "/v1/admin/gpu-memory",
            "All devices, including host memory, and what each model needs.",
            """`devices` have `id`, `kind`, `name`, `driver`, `total_mib`, `margin_mib`, and the fields of the table. `models` have `name`, `device`, `devices`, `need` by device and `estimate`, each with
`mib`, `source` and `detail`; `lease_mib`, `measured_mib`, `parts`, `learned`, `raised`. `source` is one of `explicit`, `learned`,
`computed`, `file_size`, `name`, `default`; see [memory](architecture.md#memory).""",
            scope="admin",
            answer=record({"devices": array(record(_DEVICE)), "models": array(mapping(anything()))}),
        ),
        Operation(
            "POST",
            "/v1/admin/leases",
            "Lease memory for a program that llmux doesn't run: see [leases](leases.md).",
            "The answer comes when it is granted. A client that disconnects before has none.",
            scope="admin",
            request=request(_ASKED, "vram_mib"),
            answer=_LEASE,
            status=201,
            errors=(409, 503),
            example=Example({"vram_mib": 100, "holder": "train"}),
        ),
        Operation("GET", "/v1/admin/leases", "All leases.", scope="admin", answer=listing(_LEASE)),
        Operation(
            "GET",
            "/v1/admin/leases/{id}",
            "One of them.",
            scope="admin",
            answer=_LEASE,
            errors=(404,),
            example=Example(path=_ID, needs="the id of a lease", answer=_HELD),
        ),
        Operation(
            "PUT",
            "/v1/admin/leases/{id}",
            "A heartbeat: `ttl_s` begins anew.",
            "An optional body changes `ttl_s` and `pid`. 404 `lease_ended`: the program must free the memory.",
            scope="admin",
            request=request({name: _ASKED[name] for name in ("ttl_s", "pid")}),
            is_body_optional=True,
            answer=_LEASE,
            errors=(404,),
            example=Example({"ttl_s": 30}, path=_ID, needs="the id of a lease", answer=_HELD),
        ),
        Operation(
            "DELETE",
            "/v1/admin/leases/{id}",
            "End it, also one that is waited for.",
            scope="admin",
            answer=record({"id": text(), "ended": flag()}),
            errors=(404,),
            example=Example(path=_ID, needs="the id of a lease", answer={"id": "train-1f2e3d", "ended": True}),
        ),
    ),
)
