"""Clients: their requests so far, pauses and profiles."""

from __future__ import annotations

from typing import Final

from supervisor.api.operation import Api
from supervisor.gateway.operation import Group
from supervisor.schema.client import Client, ClientList, ForgottenClient, PauseRequest
from supervisor.schema.operation import Example

_ID: Final = "/v1/admin/clients/anna"
_NEEDS: Final = "a client"
GROUP: Final = Group("Administration: clients", "Who asks: [tenants](#who-asks-and-how-urgently).")


@GROUP.operation("GET", "/v1/admin/clients")
async def list_clients(api: Api) -> ClientList:
    """Every tenant that has sent a request since the daemon began.

    The last one comes first, then the configured ones that have not. Of those without a profile, the daemon keeps the thousand
    that came last.
    """
    return ClientList("list", api.daemon.clients.views())


@GROUP.operation("GET", "/v1/admin/clients/{id:path}", errors=(404,), example=Example(path=_ID, needs=_NEEDS))
async def get_client(api: Api, id: str) -> Client:
    """One of them.

    404 `client_not_found` if it has neither come nor a profile.
    """
    return api.daemon.clients.view(id)


@GROUP.operation(
    "PUT",
    "/v1/admin/clients/{id:path}",
    errors=(404,),
    example=Example({"cooldown_s": 60}, path=_ID, needs=_NEEDS),
)
async def pause_client(api: Api, id: str, body: PauseRequest) -> Client:
    """Let a client pause from now on.

    Its requests get 429 `client_cooldown`, those under way go on. 0 ends its pause.
    """
    api.daemon.clients.pause(id, body.cooldown_s)
    return api.daemon.clients.view(id)


@GROUP.operation("DELETE", "/v1/admin/clients/{id:path}", errors=(404,), example=Example(path=_ID, needs=_NEEDS))
async def forget_client(api: Api, id: str) -> ForgottenClient:
    """Forget what a client did, and its pause. The profile stays."""
    api.daemon.clients.forget(id)
    return ForgottenClient(id, forgotten=True)
