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
from typing import Final

import structlog

from supervisor.dialects import dialect_of
from supervisor.errors import UnavailableError
from supervisor.io import notify
from supervisor.io.held_body import HeldBody
from supervisor.io.upstream import HOP_BY_HOP
from supervisor.proxy.disconnect import EXTENSION, ClientDisconnectedError, Scope
from supervisor.proxy.error_response import error_event
from supervisor.proxy.upstream_error import worker_error

log = structlog.get_logger("llmux.http")

MOST: Final = 500
"""Twice that is FileDescriptorStoreMax in the unit: systemd closes what is above it without a word."""
_FRAMING: Final = HOP_BY_HOP | {b"content-length", b"expect", b"x-request-id"}
_PIECE: Final = 64 * 1024
_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)\r\n")
_parked = 0
_resumed: dict[tuple[str, int], tuple[asyncio.StreamWriter, bool]] = {}
"""By the address that asks for it here: the client of a resumed request, and whether it had a head before."""


async def park(scope: Scope, body: HeldBody, request_id: bytes, *, is_started: bool) -> None:
    """Give the request to systemd. Raises ClientDisconnectedError: the connection isn't ours any more.

    `is_started`: the client has the head of an event stream already. Raises UnavailableError where it must stay here.
    """
    global _parked  # noqa: PLW0603  # one number for the process
    refusal = UnavailableError("llmux is shutting down.", code="shutting_down", retry_after_s=5.0)
    if _parked >= MOST:
        raise refusal
    line = b"%b %b HTTP/%b\r\n" % (scope["method"].encode(), _target(scope), scope["http_version"].encode())
    headers = [item for item in scope["headers"] if item[0] not in _FRAMING]
    headers += [(b"x-request-id", request_id), (b"content-length", b"%d" % body.size)]
    client, had_head = _resumed.get(tuple(scope["client"]), (None, False))
    facts = json.dumps({"started": is_started or had_head, "path": scope["path"]}).encode()
    with contextlib.ExitStack() as ours:
        try:
            file = ours.enter_context(os.fdopen(os.memfd_create("request"), "wb"))
        except OSError as error:
            raise refusal from error
        file.write(b"%b\n%b%b\r\n" % (facts, line, b"".join(b"%b: %b\r\n" % item for item in headers)))
        async for piece in body.pieces():
            file.write(piece)
        file.flush()
        connection = scope["extensions"][EXTENSION].detach() if client is None else detached(client.transport)
        if connection is None:
            raise refusal
        ours.callback(os.close, connection)
        _parked += 1
        notify.store(f"{notify.PARKED}{os.getpid()}-{_parked}", connection, file.fileno())
    raise ClientDisconnectedError


def detached(transport: asyncio.WriteTransport) -> int | None:
    """A descriptor of its connection, which ends here and lives on there. None where something would be lost."""
    if transport.is_closing() or transport.get_write_buffer_size():
        return None
    try:
        descriptor = os.dup(transport.get_extra_info("socket").fileno())
    except OSError:
        return None
    transport.abort()
    return descriptor


def _target(scope: Scope) -> bytes:
    target: bytes = scope["raw_path"]
    return target + b"?" + scope["query_string"] if scope["query_string"] else target


async def resume(parked: notify.Parked, host: str, port: int) -> None:
    """Have the request answered by the daemon at this address, to the end of the connection. Raises nothing."""
    try:
        with parked.file:
            facts = json.loads(parked.file.readline())
            request = parked.file.read()
        reader, client = await asyncio.open_connection(sock=parked.connection)
    except (OSError, ValueError) as error:  # another version's
        parked.connection.close()
        log.warning("request.lost", reason=str(error))
        return
    try:
        answers, daemon = await asyncio.open_connection(host, port)
        address = daemon.get_extra_info("sockname")[:2]
        _resumed[address] = client, facts["started"]
        asking = asyncio.create_task(_ask(request, reader, daemon))
        try:
            if facts["started"]:
                await _skip_head(answers, client, facts["path"])
            await _copy(answers, client)
        finally:
            del _resumed[address]
            asking.cancel()
            daemon.transport.abort()
    except (OSError, asyncio.IncompleteReadError):  # one of the two has gone
        client.transport.abort()
    finally:
        client.close()


async def _ask(request: bytes, reader: asyncio.StreamReader, daemon: asyncio.StreamWriter) -> None:
    """What the client sends later, and the end of it, reaches the daemon, which decides what that means."""
    try:
        daemon.write(request)
        await _copy(reader, daemon)
        daemon.write_eof()
    except OSError:
        daemon.transport.abort()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while piece := await source.read(_PIECE):
        target.write(piece)
        await target.drain()


async def _skip_head(answers: asyncio.StreamReader, client: asyncio.StreamWriter, path: str) -> None:
    """The client has a head. An error that comes instead of a stream becomes an event of its stream."""
    while (head := await answers.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 1"):
        pass
    length = _LENGTH.search(head)
    if length is None:
        return
    error = worker_error(int(head.split(b" ", 2)[1]), b"application/json", await answers.readexactly(int(length[1])))
    event = error_event(error, dialect_of({"path": path, "headers": ()}))
    client.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
    await client.drain()
