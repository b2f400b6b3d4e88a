"""Requests that wait for a model while systemd restarts the unit: systemd keeps their connections for the next daemon.

The old daemon gives systemd (FDSTORE) the client's socket and, in a memory file, the request as it came. The new one gets
both with its sockets, sends the request to its own address, and copies bytes between the two connections from then on: so it
is authorised, queued and answered as any other. A client that has the head of an event stream already gets only the body.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import BinaryIO, Final

import structlog

from supervisor.dialects import dialect_of
from supervisor.errors import UnavailableError
from supervisor.io import notify
from supervisor.io.held_body import HeldBody
from supervisor.proxy.disconnect import EXTENSION, ClientDisconnectedError, Scope
from supervisor.proxy.error_response import error_event
from supervisor.proxy.upstream_error import worker_error

log = structlog.get_logger("llmux.http")

MOST: Final = 500
"""Twice that is FileDescriptorStoreMax in the unit: systemd closes what is above it without a word."""
_REPLACED: Final = frozenset((b"content-length", b"transfer-encoding", b"expect", b"x-request-id"))
_PIECE: Final = 64 * 1024
_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)\r\n")
_parked = 0
_own: Counter[str] = Counter()  # connections to ourselves, by the address that they come from
_resumed: dict[tuple[str, int], tuple[asyncio.StreamWriter, bool]] = {}
"""By the address that asks for it here: the client of a resumed request, and whether it had a head before."""


async def park(scope: Scope, body: HeldBody, request_id: bytes, *, is_started: bool) -> None:
    """Give the request to systemd. Raises ClientDisconnectedError: the connection isn't ours any more.

    `is_started`: the client has the head of an event stream already. Raises UnavailableError where it must stay here.
    """
    refusal = UnavailableError("llmux is shutting down.", code="shutting_down", retry_after_s=5.0)
    if _parked >= MOST:
        raise refusal
    line = b"%b %b HTTP/%b\r\n" % (scope["method"].encode(), _target(scope), scope["http_version"].encode())
    headers = [item for item in scope["headers"] if item[0] not in _REPLACED]
    headers += [(b"x-request-id", request_id), (b"content-length", b"%d" % body.size)]
    client, had_head = _resumed.get(tuple(scope["client"]), (None, False))
    facts = json.dumps(
        {"started": is_started or had_head, "path": scope["path"], "version": scope["http_version"]}
    ).encode()
    with contextlib.ExitStack() as ours:
        try:
            file = ours.enter_context(os.fdopen(os.memfd_create("request"), "wb"))
        except OSError as error:
            raise refusal from error
        file.write(b"%b\n%b%b\r\n" % (facts, line, b"".join(b"%b: %b\r\n" % item for item in headers)))
        async for piece in body.pieces():
            file.write(piece)
        file.flush()
        give = partial(_give, file.fileno())
        if not (
            scope["extensions"][EXTENSION].give_away(give) if client is None else given_away(client.transport, give)
        ):
            raise refusal
    raise ClientDisconnectedError


def _give(file: int, connection: int) -> None:
    """Raises OSError where systemd doesn't take it; then it is asked for no other one: that would stop us for too long."""
    global _parked  # noqa: PLW0603  # one number for the process
    try:
        notify.store(f"{notify.PARKED}{os.getpid()}-{_parked}", connection, file)
    except OSError:
        _parked = MOST
        raise
    _parked += 1


def given_away(transport: asyncio.WriteTransport, give: Callable[[int], None]) -> bool:
    """Call `give` with a descriptor of its connection, which then ends here and lives on there.

    False where it stays: something would be lost, or `give` raised OSError.
    """
    if transport.is_closing() or transport.get_write_buffer_size():
        return False
    try:
        descriptor = os.dup(transport.get_extra_info("socket").fileno())
        try:
            give(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    transport.abort()
    return True


def _target(scope: Scope) -> bytes:
    target: bytes = scope["raw_path"]
    return target + b"?" + scope["query_string"] if scope["query_string"] else target


def own_connections(address: str) -> int:
    """How many connections from this address are those of resumed requests: any client's."""
    return _own[address]


async def resume(parked: notify.Parked, host: str, port: int) -> None:
    """Have the request answered by the daemon at this address, to the end of the connection. Raises nothing."""
    try:
        facts = json.loads(parked.file.readline())
        reader, client = await asyncio.open_connection(sock=parked.connection)
    except (OSError, ValueError) as error:  # another version's
        parked.file.close()
        parked.connection.close()
        log.warning("request.lost", reason=str(error))
        return
    _own[host] += 1
    try:
        answers, daemon = await asyncio.open_connection(host, port)
        address = daemon.get_extra_info("sockname")[:2]
        _resumed[address] = client, facts["started"]
        asking = asyncio.create_task(_ask(parked.file, reader, daemon))
        try:
            if facts["started"]:
                await _skip_head(answers, client, facts["path"], is_chunked=facts["version"] != "1.0")
            await _copy(answers, client)
        finally:
            del _resumed[address]
            asking.cancel()
            daemon.transport.abort()
    except (OSError, asyncio.IncompleteReadError):  # one of the two has gone
        client.transport.abort()
    finally:
        _own[host] -= 1
        parked.file.close()
        client.close()


async def _ask(request: BinaryIO, reader: asyncio.StreamReader, daemon: asyncio.StreamWriter) -> None:
    """The request, piece by piece: 500 of them may be large. What its client sends later, and the end of it, reach the daemon, too."""
    try:
        with request:  # in memory
            while piece := request.read(_PIECE):
                daemon.write(piece)
                await daemon.drain()
        await _copy(reader, daemon)
        daemon.write_eof()
    except OSError:
        daemon.transport.abort()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while piece := await source.read(_PIECE):
        target.write(piece)
        await target.drain()


async def _skip_head(
    answers: asyncio.StreamReader, client: asyncio.StreamWriter, path: str, *, is_chunked: bool
) -> None:
    """The client has a head. An error that comes instead of a stream becomes an event of its stream."""
    while (head := await answers.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 1"):
        pass
    length = _LENGTH.search(head)
    if length is None:
        return
    error = worker_error(int(head.split(b" ", 2)[1]), b"application/json", await answers.readexactly(int(length[1])))
    event = error_event(error, dialect_of({"path": path, "headers": ()}))
    client.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event) if is_chunked else event)
    await client.drain()
