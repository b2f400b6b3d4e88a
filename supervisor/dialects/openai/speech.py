"""Lists of speech models: `GET /v1/audio/voices` and `GET /v1/audio/models`, also without `/v1`, loaded or not.

Both are open to all, like `/health`: Open WebUI requests them without its key and without naming a model. They contain only
names of voices and models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from supervisor import catalog
from supervisor.daemon.daemon import Daemon
from supervisor.errors import NotFoundError

PATHS: Final = frozenset({"/v1/audio/voices", "/v1/audio/models", "/audio/voices", "/audio/models"})


def routes(daemon: Daemon) -> list[Route]:
    """The listings."""

    def speakers(request: Request) -> list[catalog.Route]:
        """All of them, or the one that the query names. Raises NotFoundError."""
        found = [entry for entry in daemon.catalog.listing() if entry.model.config.type == "tts"]
        if (wanted := request.query_params.get("model")) is None:
            return found
        chosen = [entry for entry in found if entry.name == wanted]
        if not chosen:
            raise NotFoundError(f"There is no speech model {wanted[:200]!r}.", code="model_not_found", param="model")
        return chosen

    async def voices(request: Request) -> Response:
        names = await asyncio.to_thread(_names, speakers(request))  # reads folders
        return JSONResponse({"voices": [{"id": name, "name": name} for name in names]})

    async def models(request: Request) -> Response:
        return JSONResponse({"models": [{"id": entry.name, "name": entry.name} for entry in speakers(request)]})

    return [
        Route("/v1/audio/voices", voices, methods=["GET"]),
        Route("/v1/audio/models", models, methods=["GET"]),
        Route("/audio/voices", voices, methods=["GET"]),
        Route("/audio/models", models, methods=["GET"]),
    ]


def _names(speakers: Iterable[catalog.Route]) -> list[str]:
    models = {entry.model.id: entry.model for entry in speakers}.values()
    return sorted({name for model in models for name in model.adapter.voices(model.config)})
