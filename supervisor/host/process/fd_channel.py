"""Messages between an old and a new daemon: JSON objects over a unix socket, and with each a few open descriptors.

SOCK_SEQPACKET keeps messages apart. A descriptor is passed as it is (SCM_RIGHTS): sender and receiver share one open file,
so a listening socket goes on listening, a lock is kept, and a pipe stays open while sender, receiver or message has it.
The socket lies in the state directory, which only its user may enter; the peer must be the same user. An invalid message
counts as the end of the connection.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

MESSAGE_BYTES: Final = 1024 * 1024
DESCRIPTORS: Final = 16  # in one message
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid

Json = dict[str, Any]


class ChannelClosedError(Exception):
    """The other side has ended, has closed the connection, or sent an invalid message."""


class Message(NamedTuple):
    content: Json
    descriptors: tuple[int, ...]  # the receiver must close these


class FdChannel:
    """One end of a connection. Use from the event loop's thread; one coroutine at a time receives, and one sends."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, side, MESSAGE_BYTES)
        self._socket = connection
        self.pid, self.uid = _peer_credentials(connection)

    async def send(self, content: Json, descriptors: Sequence[int] = ()) -> None:
        """Send a message with these descriptors. Raises ChannelClosedError."""
        data = json.dumps(content, separators=(",", ":")).encode()
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        while True:
            try:
                self._socket.sendmsg([data], passed)
            except BlockingIOError:
                await self._wait_until_ready(
                    asyncio.get_running_loop().add_writer, asyncio.get_running_loop().remove_writer
                )
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            else:
                return

    async def receive(self, most: int = 0) -> Message:
        """The next message, which has at most `most` descriptors. Cancelling loses no message. Raises ChannelClosedError."""
        space = socket.CMSG_SPACE(most * array.array("i").itemsize) if most else 0
        while True:
            try:
                data, passed, flags, _ = self._socket.recvmsg(MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await self._wait_until_ready(
                    asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader
                )
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            else:
                break
        descriptors = array.array("i")
        for _, _, packed in passed:
            descriptors.frombytes(packed[: len(packed) // descriptors.itemsize * descriptors.itemsize])
        try:
            return Message(_parse_content(data, flags, len(descriptors) <= most), tuple(descriptors))
        except ChannelClosedError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    async def _wait_until_ready(self, watch: Callable[..., object], unwatch: Callable[[int], object]) -> None:
        ready = asyncio.Event()
        watch(self._socket.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            unwatch(self._socket.fileno())

    def close(self) -> None:
        """Harmless when repeated."""
        self._socket.close()


def _parse_content(data: bytes, flags: int, has_room: bool) -> Json:
    """The JSON object of a message. Raises ChannelClosedError for anything else."""
    if not data:
        raise ChannelClosedError("end of messages")
    if flags & socket.MSG_TRUNC or flags & socket.MSG_CTRUNC or not has_room:
        raise ChannelClosedError("a message is too large, or has descriptors that nobody asked for")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ChannelClosedError("what was sent is not a JSON object")
    return content


def connect(path: Path) -> socket.socket | None:
    """A connection to the daemon that listens at this path; None: no daemon listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short_address(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        return None
    return connection


def goes_on_listening(path: Path, *, within_s: float = 1.0) -> bool:
    """Does a daemon still listen at this path after `within_s`? A killed process closes its files one by one. Blocks."""
    connection = connect(path)
    if connection is None:
        return False
    with connection:
        pid = _peer_credentials(connection)[0]
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        pass  # the daemon has ended meanwhile
    except OSError:
        return True  # in another container, for example: its end can't be observed
    else:
        ended = select.poll()
        ended.register(process, select.POLLIN)
        try:
            if not ended.poll(within_s * 1000):
                return True
        finally:
            os.close(process)
    # The pidfd shows the end once all files are closed, so a listener is now another process with this socket.
    connection = connect(path)
    if connection is not None:
        connection.close()
    return connection is not None


def _peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """The pid and uid of the other side; pid 0: the process isn't visible from here."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


class FdListener:
    """Listens on a unix socket; `accepted` gets a channel for each connection of our own user."""

    def __init__(self, path: Path, accepted: Callable[[FdChannel], object]) -> None:
        """Replaces an existing socket. Raises OSError."""
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        self._path: Path | None = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        path.unlink(missing_ok=True)
        with _short_address(path) as address:
            self._socket.bind(address)
        path.chmod(0o600)
        self._socket.listen(4)
        self._loop.add_reader(self._socket.fileno(), self._accept_connection)

    def _accept_connection(self) -> None:
        with contextlib.suppress(OSError):
            channel = FdChannel(self._socket.accept()[0])
            if channel.uid == os.getuid():
                self._accepted(channel)
            else:
                channel.close()

    def stop_listening(self) -> None:
        """Stop listening, and leave the path to the successor."""
        self._path = None
        self.close()

    def close(self) -> None:
        """Harmless when repeated."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def _short_address(path: Path) -> Iterator[str]:
    """A short name of the same path: a socket's address has at most 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
