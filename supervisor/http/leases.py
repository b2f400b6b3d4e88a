"""The admin API for partners: others who take memory of our devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.daemon.partners import Wanted
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.parameters import json_object
from supervisor.gateway.disconnect import CancelOnDisconnect

_KEYS: Final = ("vram_mib", "device", "gpus", "ttl_s", "holder", "pid", "wait")
_HOLDER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LEAST_TTL_S: Final = 5.0
MOST_TTL_S: Final = 86_400.0
MOST_PID: Final = 1 << 22
MOST_MIB: Final = 1 << 30
MOST_GPUS: Final = 64

_Body = Mapping[str, JsonValue]


def routes(daemon: Daemon) -> list[Route]:
    """`/v1/admin/leases`."""

    async def listed(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": daemon.partners.views()})

    async def take(request: Request) -> Response:
        wanted = _wanted(await json_object(request, _KEYS))
        with CancelOnDisconnect(request.scope):
            return JSONResponse(await daemon.partners.take(wanted), HTTPStatus.CREATED)

    async def one(request: Request) -> Response:
        return JSONResponse(daemon.partners.view(request.path_params["id"]))

    async def renew(request: Request) -> Response:
        body = await json_object(request, ("ttl_s", "pid"))
        return JSONResponse(await daemon.partners.renew(request.path_params["id"], _ttl_s(body), _pid(body)))

    async def end(request: Request) -> Response:
        return JSONResponse(daemon.partners.end(request.path_params["id"]))

    return [
        Route("/v1/admin/leases", listed, methods=["GET"]),
        Route("/v1/admin/leases", take, methods=["POST"]),
        Route("/v1/admin/leases/{id}", one, methods=["GET"]),
        Route("/v1/admin/leases/{id}", renew, methods=["PUT"]),
        Route("/v1/admin/leases/{id}", end, methods=["DELETE"]),
    ]


def _wanted(body: _Body) -> Wanted:
    vram_mib = _whole(body, "vram_mib", MOST_MIB)
    if vram_mib is None:
        raise InvalidRequestError('The body must have "vram_mib", the memory to lease in MiB.', param="vram_mib")
    holder, waits = body.get("holder", "partner"), body.get("wait", False)
    if not isinstance(holder, str) or _HOLDER.fullmatch(holder) is None:
        message = "holder: expected up to 64 letters, digits, dots, underscores and hyphens."
        raise InvalidRequestError(message, param="holder")
    if not isinstance(waits, bool):
        raise InvalidRequestError("wait: expected true or false.", param="wait")
    default = Wanted(holder, vram_mib)
    return Wanted(
        holder,
        vram_mib,
        _devices(body.get("device")),
        _whole(body, "gpus", MOST_GPUS) or default.gpus,
        _ttl_s(body) or default.ttl_s,
        _pid(body),
        waits,
    )


def _devices(value: JsonValue) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [] if value is None else [value]
    devices = tuple(name for name in names if isinstance(name, str))
    if len(devices) < len(names):
        raise InvalidRequestError("device: expected the name of a device, or a list of names.", param="device")
    return devices


def _ttl_s(body: _Body) -> float | None:
    value = body.get("ttl_s")
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not LEAST_TTL_S <= value <= MOST_TTL_S:
        message = f"ttl_s: expected seconds from {LEAST_TTL_S:g} to {MOST_TTL_S:g}."
        raise InvalidRequestError(message, param="ttl_s")
    return float(value)


def _pid(body: _Body) -> int | None:
    return _whole(body, "pid", MOST_PID)


def _whole(body: _Body, name: str, most: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidRequestError(f"{name}: expected a whole number from 1 to {most}.", param=name)
    return value
