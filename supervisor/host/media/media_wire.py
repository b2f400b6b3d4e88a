"""One GET over TLS for `media`, by httpcore, which keeps no cookies, follows no redirects, reads no proxies from the
environment and unpacks nothing. Importing this takes 0.1 s.

A server may send endless informational answers before the real one, a few bytes each; the parser handles the bytes of one read
in one turn of the loop. Until the head is complete, reads are therefore small, and their total is bounded.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Sequence
from typing import Any, Final

import httpcore

CONNECT_S: Final = 3.0  # to one of several addresses
HEAD_LIMIT: Final = 16 * 1024
_HEAD_PIECE: Final = 2048  # at most a millisecond of parsing

TROUBLE: Final = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)
"""The errors that a connection may raise, also while reading the body."""
UNREACHED: Final = (httpcore.ConnectError, httpcore.ConnectTimeout)


def pool(tls: ssl.SSLContext) -> httpcore.AsyncConnectionPool:
    """A pool for one request to one of several addresses. The caller closes it."""
    return httpcore.AsyncConnectionPool(ssl_context=tls, network_backend=_Backend())


async def get(
    connections: httpcore.AsyncConnectionPool,
    host: str,
    address: str,
    port: int,
    target: str,
    fields: Sequence[tuple[bytes, bytes]],
) -> httpcore.Response:
    """GET from this IP address, which must prove to be `host`; returns once the head has arrived. Raises TROUBLE."""
    url = httpcore.URL(scheme=b"https", host=address.encode("ascii"), port=port, target=target.encode("ascii"))
    extensions = {"sni_hostname": host, "timeout": {"connect": CONNECT_S}}
    response = await connections.handle_async_request(
        httpcore.Request(b"GET", url, headers=fields, extensions=extensions)
    )
    wire = response.extensions["network_stream"]
    assert isinstance(wire, _Wire)
    wire.has_head = True
    return response


class _Backend(httpcore.AnyIOBackend):
    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # as httpcore calls it
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return _Wire(await super().connect_tcp(host, port, timeout, local_address, socket_options))


class _Wire(httpcore.AsyncNetworkStream):
    """A connection with small, bounded reads until it `has_head`."""

    has_head = False

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._left = HEAD_LIMIT

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        if self.has_head:
            return await self._stream.read(max_bytes, timeout)
        piece = await self._stream.read(min(max_bytes, _HEAD_PIECE), timeout)
        self._left -= len(piece)
        if self._left < 0:
            raise httpcore.RemoteProtocolError("the head is too long")
        await asyncio.sleep(0)  # reading does not wait if more bytes have arrived already
        return piece

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        return _Wire(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
