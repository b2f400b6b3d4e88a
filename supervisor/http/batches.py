"""`/v1/batches`: files of requests whose clients don't wait, as OpenAI's API has them; see `daemon.batches`."""

from __future__ import annotations

import re
from typing import Any, Final

from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from supervisor.daemon.batch import ENDPOINTS, Batch
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.job import KEPT_HEADERS, owner_of
from supervisor.dialects import dialect_of
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.parameters import json_object, number
from supervisor.http.files import found_file, listed, page_of

PATH: Final = "/v1/batches"
_FIELDS: Final = ("input_file_id", "endpoint", "completion_window", "metadata")
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST_S: Final = 30 * 86_400
METADATA_MOST, KEY_LIMIT, VALUE_LIMIT = 16, 64, 512


def routes(daemon: Daemon) -> list[Route]:
    """Create, list, look at and cancel batches."""

    async def create(request: Request) -> Response:
        asked = await json_object(request, _FIELDS)
        endpoint = _endpoint(daemon, asked.get("endpoint"))
        window, window_s = _window(asked.get("completion_window"))
        metadata, file_id = _metadata(asked.get("metadata")), asked.get("input_file_id")
        if not isinstance(file_id, str):
            message = "input_file_id must be the id of a file: POST /v1/files with purpose=batch."
            raise InvalidRequestError(message, param="input_file_id")
        file = await found_file(daemon, request, file_id)
        if file.purpose != "batch":
            raise InvalidRequestError(f"{file.id} has the purpose {file.purpose}, not batch.", param="input_file_id")
        owner, _ = owner_of(request.scope["state"])
        headers = {name: value for name in KEPT_HEADERS if (value := request.headers.get(name)) is not None}
        batch = await daemon.batches.add(
            endpoint, file, owner, window=window, window_s=window_s, headers=headers, metadata=metadata
        )
        return JSONResponse(await _view(daemon, batch))

    async def listing(request: Request) -> Response:
        await daemon.batches.expire()
        owner, is_admin = owner_of(request.scope["state"])
        found = daemon.batches.listing(owner, is_admin=is_admin)
        page, more = page_of(request, found, number(request, "limit", 20, 100))
        return listed([await _view(daemon, batch) for batch in page], more=more)

    async def one(request: Request) -> Response:
        return JSONResponse(await _view(daemon, await _found(daemon, request)))

    async def cancel(request: Request) -> Response:
        batch = await _found(daemon, request)
        await daemon.batches.cancel(batch)
        return JSONResponse(await _view(daemon, batch))

    return [
        Route(PATH, create, methods=["POST"]),
        Route(PATH, listing, methods=["GET"]),
        Route(f"{PATH}/{{id}}", one, methods=["GET"]),
        Route(f"{PATH}/{{id}}/cancel", cancel, methods=["POST"]),
    ]


async def _found(daemon: Daemon, request: Request) -> Batch:
    await daemon.batches.expire()
    owner, is_admin = owner_of(request.scope["state"])
    return daemon.batches.find(request.path_params["id"], owner, is_admin=is_admin)


def _endpoint(daemon: Daemon, asked: JsonValue) -> str:
    """Raises InvalidRequestError, which names those that work."""
    served = [
        path
        for path in ENDPOINTS
        if daemon.gateway.routes.serves("POST", path, dialect_of({"method": "POST", "path": path, "headers": []}))
    ]
    if not isinstance(asked, str) or asked not in served:
        choice = f"one of {', '.join(served)}" if served else "one that a configured model serves; there is none"
        raise InvalidRequestError(f"endpoint must be {choice}.", param="endpoint")
    return asked


def _window(asked: JsonValue) -> tuple[str, float]:
    """As it was said, and in seconds. Raises InvalidRequestError."""
    found = _WINDOW.fullmatch(asked) if isinstance(asked, str) else None
    window_s = int(found[1]) * _SECONDS[found[2]] if found is not None else 0
    if not isinstance(asked, str) or not 0 < window_s <= LONGEST_S:
        message = "completion_window must be 24h, or another time up to 30d, such as 30m or 7d."
        raise InvalidRequestError(message, param="completion_window")
    return asked, window_s


def _metadata(asked: JsonValue) -> dict[str, str] | None:
    """Raises InvalidRequestError."""
    if asked is None:
        return None
    found = {key: value for key, value in asked.items() if isinstance(value, str)} if isinstance(asked, dict) else {}
    is_right = isinstance(asked, dict) and len(found) == len(asked) <= METADATA_MOST
    if not is_right or any(len(key) > KEY_LIMIT or len(value) > VALUE_LIMIT for key, value in found.items()):
        message = (
            f"metadata must be an object of at most {METADATA_MOST} texts, with keys of at most {KEY_LIMIT} and values of at "
            f"most {VALUE_LIMIT} characters."
        )
        raise InvalidRequestError(message, param="metadata")
    return found


async def _view(daemon: Daemon, batch: Batch) -> dict[str, Any]:
    """A batch as OpenAI's clients get it."""
    completed, failed = await daemon.batches.counts(batch)
    problems = [
        {"code": each.code, "message": each.message, "param": each.param, "line": each.line} for each in batch.problems
    ]

    def when(seconds: float | None) -> int | None:
        return None if seconds is None else int(seconds)

    def ended(state: str) -> int | None:
        return when(batch.ended_at) if batch.state == state else None

    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": batch.input_file,
        "completion_window": batch.window,
        "status": batch.state,
        "output_file_id": batch.output_file if batch.has_output else None,
        "error_file_id": batch.error_file if batch.has_errors else None,
        "created_at": when(batch.created_at),
        "in_progress_at": when(batch.started_at),
        "expires_at": when(batch.expires_at),
        "finalizing_at": when(batch.finalizing_at),
        "completed_at": ended("completed"),
        "failed_at": ended("failed"),
        "expired_at": ended("expired"),
        "cancelling_at": when(batch.cancelling_at),
        "cancelled_at": ended("cancelled"),
        "request_counts": {"total": batch.total, "completed": completed, "failed": failed},
        "metadata": batch.metadata,
    }
