"""A WebSocket between a client and a worker. After the handshake llmux forwards the bytes without parsing them.

The server protocol puts a `Client` into the scope of a request for a WebSocket. The WebSocket counts as one request until
either side ends it.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final, NoReturn, Protocol

from supervisor.errors import InvalidRequestError, UpstreamError
from supervisor.gateway.disconnect import ResponseOverError, Scope
from supervisor.gateway.forward import ERROR_LIMIT
from supervisor.gateway.response_cycle import ResponseCycle
from supervisor.gateway.upstream_error import upstream_error
from supervisor.host.upstream.upstream import Headers, Upstream, UpstreamPool

EXTENSION: Final = "llmux.tunnel"
PIECE: Final = 64 * 1024
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d{1,9})\r\n", re.IGNORECASE)
_UPGRADE_HEADERS: Final[Headers] = [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]


class Client(Protocol):
    """The client's side of a WebSocket."""

    def begin(self, head: bytes) -> asyncio.StreamReader:
        """Answer the client's handshake with `head`. Returns the bytes that the client sends from now on."""

    async def write(self, data: bytes) -> None:
        """Send bytes to the client, as fast as it reads."""


def client_of(scope: Scope) -> Client | None:
    """The client's side of a request for a WebSocket; None for any other request."""
    found: Client | None = scope["extensions"].get(EXTENSION)
    return found


def refuse(path: str) -> InvalidRequestError:
    """The error for a WebSocket on a path without one."""
    return InvalidRequestError(
        f"There is no WebSocket at {path[:200]}. A model of the runtime `command` has those that its `endpoints` list, such as "
        '"GET /ws"; name the model with ?model=NAME.',
        code="no_websocket",
    )


async def tunnel(cycle: ResponseCycle, client: Client, upstream: Upstream, *, first_byte_s: float) -> NoReturn:
    """Connect client and worker until either side ends the WebSocket.

    Raises LlmuxError while the client has no answer, later ResponseOverError. Cancellation closes the worker's connection.
    """
    request, path = cycle.request, cycle.scope["path"]
    attempt = request.attempt
    outcome = attempt.outcome
    if not isinstance(upstream, UpstreamPool):
        raise refuse(path)
    headers = [*attempt.headers, (b"x-request-id", request.request_id), *_UPGRADE_HEADERS]
    reader, writer = await upstream.open(attempt.path, headers)
    try:
        try:
            async with asyncio.timeout(first_byte_s):
                head = await reader.readuntil(b"\r\n\r\n")
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            raise UpstreamError("The worker did not answer the WebSocket's handshake.") from error
        status = int(found[1]) if (found := _STATUS.match(head)) else 502
        if status != 101:
            length = _LENGTH.search(head)
            data = b"" if length is None else await reader.read(min(int(length[1]), ERROR_LIMIT))
            raise refuse(path) if status < 400 else upstream_error(status, b"", data)
        outcome.status, outcome.started = status, True
        received = client.begin(head)
        sending = asyncio.ensure_future(_copy_to_worker(received, writer))
        try:
            while data := await reader.read(PIECE):
                outcome.keep(data)
                await client.write(data)
        except OSError:
            pass  # as at the end of the stream
        finally:
            sending.cancel()
    finally:
        writer.close()
    raise ResponseOverError


async def _copy_to_worker(received: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await received.read(PIECE):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        pass  # the worker has ended; the reader of its answers notices that
