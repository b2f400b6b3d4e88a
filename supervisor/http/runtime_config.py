"""`GET` and `PUT /api/v1/config`: what operators change while the daemon runs, kept over restarts."""

from __future__ import annotations

import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.parameters import json_object

_CLOUD_FALLBACK = "allowCloudFallback"

log = structlog.get_logger("llmux.config")


def route(daemon: Daemon) -> Route:
    """Both, for the scope admin."""

    async def answer(request: Request) -> Response:
        if request.method == "PUT":
            wanted = (await json_object(request, (_CLOUD_FALLBACK,))).get(_CLOUD_FALLBACK)
            if not isinstance(wanted, bool):
                raise InvalidRequestError(
                    f'The body must be {{"{_CLOUD_FALLBACK}": true}} or {{"{_CLOUD_FALLBACK}": false}}.',
                    param=_CLOUD_FALLBACK,
                )
            await daemon.runtime.allow(cloud_fallback=wanted)
            log.info("config.changed", allow_cloud_fallback=wanted)
        return JSONResponse({_CLOUD_FALLBACK: daemon.runtime.allow_cloud_fallback})

    return Route("/api/v1/config", answer, methods=["GET", "PUT"])
