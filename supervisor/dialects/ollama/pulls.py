"""`POST /api/pull` where files of a configured model are missing and clients may have them fetched: see `daemon.pulls`.

The answer tells how far it is, as Ollama's, until it is over. A client that leaves ends its answer alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from pydantic import JsonValue
from starlette.responses import JSONResponse, Response, StreamingResponse

from supervisor.core.types import ModelId
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.pulls import Pull
from supervisor.dialects.ollama.answers import LINES
from supervisor.dialects.ollama.fields import encode
from supervisor.errors import UnavailableError

LOOK_S: Final = 0.5
_SUCCESS: Final = {"status": "success"}


async def pulled(daemon: Daemon, model: ModelId, *, is_stream: bool) -> Response:
    """Fetch its files and tell how far that is, or return when they are there. Raises UnavailableError."""
    pull = daemon.pulls.begin(model, _nothing)
    if is_stream:
        return StreamingResponse(_lines(pull), media_type=LINES.decode())
    async for _ in _lines(pull):
        pass
    if pull.state == "failed":
        raise UnavailableError(pull.error)
    return JSONResponse(_SUCCESS)


def there(*, is_stream: bool) -> Response:
    """The answer for a model whose files are there already."""
    return Response(_line(_SUCCESS), media_type=LINES.decode()) if is_stream else JSONResponse(_SUCCESS)


async def _nothing() -> None:
    """What is done with the files: a request for the model loads it."""


async def _lines(pull: Pull) -> AsyncIterator[bytes]:
    yield _line({"status": "pulling manifest"})
    while pull.took_s is None:
        if pull.total_bytes:  # Ollama's command shows a bar for each digest
            amount: dict[str, JsonValue] = {"total": pull.total_bytes, "completed": pull.done_bytes}
            yield _line({"status": f"pulling {pull.model}", "digest": pull.model, **amount})
        else:
            yield _line({"status": "pulling manifest"})
        await asyncio.sleep(LOOK_S)
    yield _line({"error": pull.error} if pull.state == "failed" else _SUCCESS)


def _line(said: object) -> bytes:
    return encode(said) + b"\n"
