"""Devices, and leases for programs that llmux doesn't run."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from supervisor.api.operation import Api
from supervisor.daemon.observability.views import device_views, memory_views
from supervisor.dialects.listed import listed
from supervisor.gateway.disconnect import CancelOnDisconnect
from supervisor.gateway.operation import Group
from supervisor.schema.memory import Lease, LeaseEnd, LeaseList, LeaseRenewal, LeaseRequest, MemoryReport
from supervisor.schema.operation import Example

_ID: Final = "/v1/admin/leases/train-1f2e3d"
_NEEDS: Final = "the id of a lease"
GROUP: Final = Group("Administration: memory", "Who has how much memory, and [leases](leases.md) for other programs.")


@GROUP.operation("GET", "/v1/admin/gpu-memory", answer=MemoryReport)
async def read_memory(api: Api) -> Response:
    """All devices, including host memory, and what each model needs.

    `devices` have `id`, `kind`, `name`, `driver`, `total_mib`, `margin_mib`, and the fields of the table. `models` have `name`,
    `device`, `devices`, `need` by device and `estimate`, each with `mib`, `source` and `detail`; `lease_mib`, `measured_mib`,
    `parts`, `learned`, `raised`. `source` is one of `explicit`, `learned`, `computed`, `file_size`, `name`, `default`; see
    [memory](architecture.md#memory).
    """
    # The devices show the state at the beginning: a model that loads meanwhile may use memory that they show as free.
    return await listed(memory_views(api.daemon), "models", devices=device_views(api.daemon))


@GROUP.operation(
    "POST",
    "/v1/admin/leases",
    status=HTTPStatus.CREATED,
    errors=(409, 503),
    example=Example({"vram_mib": 100, "holder": "train"}),
)
async def take_lease(api: Api, body: LeaseRequest, request: Request) -> Lease:
    """Lease memory for a program that llmux doesn't run: see [leases](leases.md).

    The answer comes when it is granted. A client that disconnects before has none.
    """
    with CancelOnDisconnect(request.scope):
        return await api.daemon.partners.take(body)


@GROUP.operation("GET", "/v1/admin/leases")
async def list_leases(api: Api) -> LeaseList:
    """All leases."""
    return LeaseList("list", api.daemon.partners.views())


@GROUP.operation("GET", "/v1/admin/leases/{id}", errors=(404,), example=Example(path=_ID, needs=_NEEDS))
async def get_lease(api: Api, id: str) -> Lease:
    """One of them."""
    return api.daemon.partners.view(id)


@GROUP.operation(
    "PUT",
    "/v1/admin/leases/{id}",
    is_body_optional=True,
    errors=(404,),
    example=Example({"ttl_s": 30}, path=_ID, needs=_NEEDS),
)
async def renew_lease(api: Api, id: str, body: LeaseRenewal) -> Lease:
    """A heartbeat: `ttl_s` begins anew.

    An optional body changes `ttl_s` and `pid`. 404 `lease_ended`: the program must free the memory.
    """
    return await api.daemon.partners.renew(id, body.ttl_s, body.pid)


@GROUP.operation("DELETE", "/v1/admin/leases/{id}", errors=(404,), example=Example(path=_ID, needs=_NEEDS))
async def end_lease(api: Api, id: str) -> LeaseEnd:
    """End it, also one that is waited for."""
    return api.daemon.partners.end(id)
