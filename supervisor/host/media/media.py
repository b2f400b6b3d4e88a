"""Gets media for prompts: from network addresses that were checked before, and from files below one folder.

A connection goes to exactly the given address, even if the name resolves to another one by then; the certificate must be
valid for the name. `media_wire` connects so; only a daemon that fetches media imports that module.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from supervisor.host.upstream.probe import causes

if TYPE_CHECKING:
    import httpcore

MOST_ADDRESSES: Final = 4  # so many addresses of a name are tried
_THREADS: Final = 8
_AT_ONCE: Final = 32  # pieces in one turn of the loop
PIECE: Final = 96 * 1024  # of a file: a multiple of three bytes, as base64 takes them
_FIELDS: Final = [
    (b"user-agent", b"llmux"),
    (b"accept", b"image/*, audio/*, video/*"),
    (b"accept-encoding", b"identity"),
    (b"connection", b"close"),
]


@dataclass(frozen=True, slots=True)
class MediaResponse:
    """The head of an answer, and its body in pieces; iterating raises OSError if the body breaks off."""

    status: int
    location: str | None
    content_type: str
    content_encoding: str
    content_length: int | None
    pieces: AsyncIterator[bytes]


class MediaSource:
    """Use it from one event loop."""

    def __init__(self, ca_file: Path | None = None) -> None:
        self._ca_file = ca_file
        self._tls: ssl.SSLContext | None = None
        self._threads = ThreadPoolExecutor(
            _THREADS, "media"
        )  # separate threads, so that a hanging name server or disk delays nothing else

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """The IP addresses of a name. Raises OSError."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._threads, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            )
        except UnicodeError as error:  # a label that is too long or empty
            raise OSError(errno.EINVAL, "no name") from error
        return [*dict.fromkeys(str(entry[4][0]) for entry in found)]

    @contextlib.asynccontextmanager
    async def response(
        self, host: str, authority: str, addresses: Sequence[str], port: int, target: str
    ) -> AsyncIterator[MediaResponse]:
        """GET over TLS from one of these IP addresses as `host`, with the Host header `authority`. Raises OSError."""
        if self._tls is None:
            self._tls = await asyncio.get_running_loop().run_in_executor(self._threads, _tls, self._ca_file)
        from supervisor.host.media import media_wire  # noqa: PLC0415

        async with media_wire.pool(self._tls) as connections:
            try:
                found = await _send_request(connections, host, authority, addresses, port, target)
            except media_wire.TROUBLE as error:
                raise _public_error(error) from error
            length = _header_of(found, b"content-length") or ""
            async with contextlib.aclosing(found), contextlib.aclosing(_body_pieces(found.aiter_stream())) as pieces:
                yield MediaResponse(
                    found.status,
                    _header_of(found, b"location"),
                    _header_of(found, b"content-type") or "",
                    (_header_of(found, b"content-encoding") or "").strip().lower(),
                    int(length) if length.isascii() and length.isdecimal() and len(length) < 20 else None,
                    pieces,
                )

    async def file(self, folder: Path, path: Path) -> MediaFile:
        """Open a file, still unread. Raises OSError; PermissionError if it may not be read.

        It must be a regular file that lies below `folder` after all symbolic links.
        """
        loop = asyncio.get_running_loop()
        return MediaFile(await loop.run_in_executor(self._threads, _Opened, folder, path), self._threads)


class MediaFile:
    """A file in pieces, up to the `size` that it had at opening; iterating raises OSError."""

    def __init__(self, opened: _Opened, threads: ThreadPoolExecutor) -> None:
        self.size = self._left = opened.size
        self._opened = opened
        self._threads = threads

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        loop = asyncio.get_running_loop()
        piece = await loop.run_in_executor(self._threads, self._opened.read, min(PIECE, self._left))
        if not piece:
            raise StopAsyncIteration
        self._left -= len(piece)
        return piece


class _Opened:
    """An open file, closed with the last reference, since a thread may still read it after the caller has left.

    Opening and reading block. The checked file is the file that is read: an open descriptor follows no changed link.
    """

    fd = -1

    def __init__(self, folder: Path, path: Path) -> None:
        root = os.path.realpath(folder)
        _refuse_outside(os.path.realpath(path), root, path)  # before an error could show whether the file exists
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)  # O_PATH opens no device and wakes no pipe
        try:
            _refuse_outside(str(Path(f"/proc/self/fd/{found}").readlink()), root, path)
            about = os.fstat(found)
            if not stat.S_ISREG(about.st_mode):
                raise PermissionError(errno.EACCES, "no file", str(path))
            self.size = about.st_size
            # Without O_NONBLOCK another process's lease on the file would block this thread.
            self.fd = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        finally:
            os.close(found)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def read(self, most: int) -> bytes:
        return os.read(self.fd, most)


async def _send_request(
    connections: httpcore.AsyncConnectionPool,
    host: str,
    authority: str,
    addresses: Sequence[str],
    port: int,
    target: str,
) -> httpcore.Response:
    from supervisor.host.media import media_wire  # noqa: PLC0415

    fields = [(b"host", authority.encode("ascii")), *_FIELDS]
    tried = addresses[:MOST_ADDRESSES]
    for number, address in enumerate(tried, 1):
        try:
            return await media_wire.get(connections, host, address, port, target, fields)
        except media_wire.UNREACHED:
            if number == len(tried):
                raise
    raise OSError(errno.EHOSTUNREACH, "the name has no address")


def _header_of(response: httpcore.Response, name: bytes) -> str | None:
    """The header field; a field that came twice is joined by a comma, so that every check refuses it."""
    found = [value for each, value in response.headers if each.lower() == name]
    return b", ".join(found).decode("latin-1") if found else None


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    """The TLS settings. Blocks, also for importing `media_wire`, so that later imports don't. Raises OSError."""
    import supervisor.host.media.media_wire  # noqa: F401, PLC0415

    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # as ssl.SSLError is, too
        raise OSError(errno.EINVAL, "the certificates in server.media.ca_file can't be read") from error


async def _body_pieces(stream: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    from supervisor.host.media import media_wire  # noqa: PLC0415

    number = 0
    try:
        async for piece in stream:
            number += 1
            if number % _AT_ONCE == 0:  # a server that sends single bytes may have queued thousands of pieces
                await asyncio.sleep(0)
            yield piece
    except media_wire.TROUBLE as error:
        raise OSError(errno.ECONNRESET, "it broke off") from error


def _public_error(error: Exception) -> OSError:
    """The error with a message that reveals nothing about this machine's network."""
    from supervisor.host.media import media_wire  # noqa: PLC0415

    for cause in causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return OSError(errno.EPROTO, f"it does not prove who it is: {cause.verify_message}")
        if isinstance(cause, ssl.SSLError):
            return OSError(errno.EPROTO, "it does not speak TLS as it should")
    if isinstance(error, media_wire.UNREACHED):
        return OSError(errno.EHOSTUNREACH, "it can't be reached")
    return OSError(errno.EPROTO, "it does not answer as it should")


def _refuse_outside(real: str, root: str, path: Path) -> None:
    if not real.startswith(f"{root.rstrip('/')}/"):
        raise PermissionError(errno.EACCES, "outside", str(path))
