"""Relays a request to another daemon: the request is sent unchanged, and the response comes back unchanged.

After an upgrade the old daemon still has its clients' connections. Requests that arrive on these connections, or wait for a model,
go to the successor, which authorises and answers them.
"""

from __future__ import annotations

from typing import Final

from supervisor.errors import LlmuxError
from supervisor.gateway.dialect import Dialect
from supervisor.gateway.disconnect import CancelOnDisconnect, ResponseBrokenError, Scope, Send
from supervisor.gateway.error_response import error_event
from supervisor.gateway.filters.filters import EVENTS, STREAMS, TAIL_BYTES
from supervisor.gateway.forward import ERROR_LIMIT
from supervisor.gateway.upstream_error import upstream_error
from supervisor.host.store.request_buffer import RequestBuffer
from supervisor.host.upstream.upstream import HOP_BY_HOP, Headers, Upstream, UpstreamResponse

_FRAMING: Final = HOP_BY_HOP | {b"content-length", b"expect", b"x-request-id"}


async def relay(
    scope: Scope,
    send: Send,
    body: RequestBuffer,
    upstream: Upstream,
    request_id: bytes,
    dialect: Dialect,
    *,
    is_started: bool,
) -> None:
    """Send the request to `upstream`. `is_started`: the client already has the head of an event stream, so errors become events.

    Raises UpstreamError while nothing was sent, later ResponseBrokenError, unless a stream can end with the error;
    ClientDisconnectedError.
    """
    headers = [item for item in scope["headers"] if item[0] not in _FRAMING]
    headers.append((b"x-request-id", request_id))
    if all(name != b"host" for name, _ in headers):  # optional in HTTP/1.0, required in HTTP/1.1
        headers.append((b"host", b"localhost"))
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    stream_type, tail = EVENTS if is_started else b"", b""
    with CancelOnDisconnect(scope):
        response: UpstreamResponse | None = None
        try:
            response = await upstream.request(scope["method"], target, headers, body)
            if is_started and response.status >= 400:
                raise upstream_error(response.status, b"application/json", await response.read(ERROR_LIMIT))
            if not is_started:
                start = {"type": "http.response.start", "status": response.status, "headers": response.headers}
                await send(start)
                is_started, stream_type = True, _stream_type(response.headers)
            while chunk := await response.next_chunk():
                tail = chunk[-TAIL_BYTES:]
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except LlmuxError as error:
            if not is_started:
                raise
            if not stream_type:
                raise ResponseBrokenError(error.message) from error
            event = error_event(error, dialect, tail, stream_type)
            await send({"type": "http.response.body", "body": event, "more_body": False})
        finally:
            if response is not None:
                response.close()


def _stream_type(headers: Headers) -> bytes:
    """The content type of a stream; empty for any other answer."""
    return next((value for name, value in headers if name == b"content-type" and value.startswith(STREAMS)), b"")
