"""The admin API's streams: events, recordings, and what the workers write into their logs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.daemon.events import KINDS, Subscription
from supervisor.daemon.recording import Recording
from supervisor.io.logs import LogFollower, tail
from supervisor.proxy.event_stream import KEEPALIVE_S, EventStream
from supervisor.proxy.parameters import choices, flag, number

MAX_LINES: Final = 10_000
LINE_BYTES: Final = 512  # longer lines are not shown in full anyway
FOLLOW_INTERVAL_S: Final = 0.3
LONGEST_RECORDING_S: Final = 24 * 3600


def routes(daemon: Daemon) -> list[Route]:
    """`GET /v1/admin/events`, `GET /v1/admin/recording` and `GET /v1/admin/models/{name}/logs`."""

    async def events(request: Request) -> Response:
        kinds = choices(request, "types", KINDS)
        await daemon.know_capabilities()
        subscription = daemon.feed.subscribe(kinds)
        return EventStream(_events(subscription), subscription)

    async def recording(request: Request) -> Response:
        seconds = number(request, "seconds", LONGEST_RECORDING_S, LONGEST_RECORDING_S)
        made = daemon.engine.recording()
        return EventStream(_lines(made, seconds), made)

    async def logs(request: Request) -> Response:
        model = daemon.catalog.resolve(request.path_params["name"]).model.id
        lines = number(request, "lines", 200, MAX_LINES, least=0)
        path = daemon.fleet.log_path(model)
        if flag(request, "follow"):
            closing = daemon.hub.subscribe(())
            return EventStream(_follow(LogFollower(path), lines, closing), closing)
        kept = await asyncio.to_thread(tail, path, lines, lines * LINE_BYTES) if lines else ()
        return PlainTextResponse("".join(f"{line}\n" for line in kept))

    return [
        Route("/v1/admin/events", events, methods=["GET"]),
        Route("/v1/admin/recording", recording, methods=["GET"]),
        Route("/v1/admin/models/{name:path}/logs", logs, methods=["GET"]),
    ]


async def _events(subscription: Subscription) -> AsyncGenerator[bytes, None]:
    yield b": listening\n\n"
    while (events := await subscription.next(KEEPALIVE_S)) is not None:
        yield b"".join(event.encoded() for event in events)


async def _lines(recording: Recording, seconds: int) -> AsyncGenerator[bytes, None]:
    """Every line of it, and then an end, so that a reader knows that nothing is missing."""
    clock = asyncio.get_running_loop().time
    ends_at = clock() + seconds
    while (left_s := ends_at - clock()) > 0 and (lines := await recording.next(min(left_s, KEEPALIVE_S))) is not None:
        yield b"".join(b"data: %s\n\n" % line.rstrip() for line in lines)
    if not recording.broke_off:
        yield b"event: end\ndata: end\n\n"


async def _follow(follower: LogFollower, lines: int, closing: Subscription) -> AsyncGenerator[bytes, None]:
    """The end of the log, then every line that is added, until the daemon stops."""
    yield b": following\n\n" + _data(await asyncio.to_thread(follower.begin, lines))
    silent_s = 0.0
    while await closing.next(FOLLOW_INTERVAL_S) is not None:
        found = await asyncio.to_thread(follower.read)
        silent_s = 0.0 if found else silent_s + FOLLOW_INTERVAL_S
        if found or silent_s >= KEEPALIVE_S:
            silent_s = 0.0
            yield _data(found)


def _data(lines: list[str]) -> bytes:
    return "".join(f"data: {line}\n\n" for line in lines).encode()
