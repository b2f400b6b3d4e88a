"""The admin API's streams: events, recordings, and what the workers write into their logs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from supervisor.core.types import ModelId, base_of
from supervisor.daemon.daemon import Daemon
from supervisor.engine.events import KINDS, Subscription
from supervisor.engine.recording import Recording
from supervisor.gateway.body.parameters import choices, flag, number
from supervisor.gateway.filters.event_stream import KEEPALIVE_S, EventStream
from supervisor.io.logs import LogFollower, tail

MAX_LINES: Final = 10_000
LINE_BYTES: Final = 512  # longer lines are not shown in full anyway
FOLLOW_INTERVAL_S: Final = 0.3
LONGEST_RECORDING_S: Final = 24 * 3600
RESTARTED: Final = "[the daemon restarted; what follows was written since the connection broke]"


def routes(daemon: Daemon) -> list[Route]:
    """`GET /v1/admin/events`, `GET /v1/admin/recording` and `GET /v1/admin/models/{name}/logs`."""
    this = secrets.token_hex(4)  # in the id of a log's line: which daemon sent it

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
        name = ModelId(request.path_params["name"])
        first = daemon.catalog.resolve(base_of(name)).model.id
        known = daemon.engine.load_status(replica := ModelId(first + name.removeprefix(base_of(name))))
        model = first if known is None else replica
        lines = number(request, "lines", 200, MAX_LINES, least=0)
        path = daemon.fleet.log_path(model)
        if flag(request, "follow"):
            follower, after = LogFollower(path), request.headers.get("last-event-id")
            begin = partial(_resume, follower, after, this) if after else partial(follower.begin, lines)
            closing = daemon.hub.subscribe(())
            return EventStream(_follow(follower, begin, this, closing), closing)
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


def _resume(follower: LogFollower, after: str, this: str) -> list[str]:
    """What was added since a client got the line with the id `after`."""
    daemon, _, position = after.partition("-")
    lines = follower.resume(position)
    return lines if daemon == this else [RESTARTED, *lines]


async def _follow(
    follower: LogFollower, begin: Callable[[], list[str]], this: str, closing: Subscription
) -> AsyncGenerator[bytes, None]:
    """What `begin` finds, then every line that is added, until the daemon stops. The last line of each piece has an id."""
    found = await asyncio.to_thread(begin)
    yield b": following\n\n" + _data(found, f"{this}-{follower.position}")
    silent_s = 0.0
    while await closing.next(FOLLOW_INTERVAL_S) is not None:
        found = await asyncio.to_thread(follower.read)
        silent_s = 0.0 if found else silent_s + FOLLOW_INTERVAL_S
        if found or silent_s >= KEEPALIVE_S:
            silent_s = 0.0
            yield _data(found, f"{this}-{follower.position}")


def _data(lines: list[str], identity: str) -> bytes:
    events = [f"data: {line}\n\n" for line in lines]
    if events:
        events[-1] = f"id: {identity}\n{events[-1]}"
    return "".join(events).encode()
