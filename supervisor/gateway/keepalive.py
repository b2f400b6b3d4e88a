"""Keeps a stream alive while its request waits for a model: by the dialect's keep-alive bytes, and by the status of the load.

The status is events of the dialect, each with a line of text. A new line is sent when the request waits for something else,
and every few seconds while the model loads. The text is that of `core.admission.waiting`; the estimate is the time of the model's
last load, and there is none before the first load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from supervisor.core.admission.waiting import WaitKind, WaitReason
from supervisor.engine.engine import Engine
from supervisor.gateway.dialect import Dialect, ReasoningEvent
from supervisor.gateway.disconnect import Send
from supervisor.gateway.request import Request
from supervisor.host.upstream.upstream import Headers

INTERVAL_S: Final = 10.0
LOAD_STATUS_AFTER_S: Final = 1.0  # a loaded model has answered by then
LOAD_STATUS_INTERVAL_S: Final = 0.25
PROGRESS_S: Final = 5.0  # between two lines of status while the model loads
_LOADED_KINDS: Final = frozenset({WaitKind.PLACE, WaitKind.HEALTH})  # the model has a worker, which is busy
SSE: Final = b"text/event-stream; charset=utf-8"


class Keepalive:
    """`async with keepalive:` sends the dialect's keep-alive bytes while the block waits for long.

    After `interval_s` in the block the response starts (200, `content_type` and `headers`), and the bytes go out
    every `interval_s`. From then on `started` is True: the headers are sent, and a failure is the stream's last event.

    From `LOAD_STATUS_AFTER_S` on, `load_status` is called every `LOAD_STATUS_INTERVAL_S`. It returns an event to send, or None; the
    first event starts the response as well.
    """

    __slots__ = (
        "_dialect",
        "_headers",
        "_interval_s",
        "_load_status",
        "_send",
        "_task",
        "_timer",
        "content_type",
        "started",
    )

    def __init__(
        self,
        send: Send,
        headers: Headers,
        dialect: Dialect,
        *,
        interval_s: float = INTERVAL_S,
        content_type: bytes = SSE,
        load_status: Callable[[], bytes | None] | None = None,
    ) -> None:
        self.started = False
        self._send = send
        self._headers = headers
        self._dialect = dialect
        self.content_type = content_type
        self._interval_s = interval_s
        self._load_status = load_status
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        first_s = self._interval_s if self._load_status is None else min(self._interval_s, LOAD_STATUS_AFTER_S)
        self._timer = asyncio.get_running_loop().call_later(first_s, self._start_task, self._interval_s, first_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def _start_task(self, interval_s: float, waited_s: float) -> None:
        self._task = asyncio.get_running_loop().create_task(self._send_until_cancelled(interval_s, waited_s))

    async def _send_until_cancelled(self, interval_s: float, waited_s: float) -> None:
        """Send status events and keep-alive bytes while the block waits. The block has already waited for `waited_s`."""
        clock = asyncio.get_running_loop().time
        next_at = clock() + interval_s - waited_s
        while True:
            if self._load_status is not None and (event := self._load_status()) is not None:
                await self._write(event)
            if clock() >= next_at:
                next_at = clock() + interval_s
                await self._write(self._dialect.keepalive)
            await asyncio.sleep(next_at - clock() if self._load_status is None else LOAD_STATUS_INTERVAL_S)

    async def _write(self, body: bytes) -> None:
        if not self.started:
            headers = [
                (b"content-type", self.content_type),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *self._headers,
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self.started = True  # after the send: a cancelled send may have written nothing
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


class LoadStatusEvents:
    """Status events for one waiting request. A call returns the next event; None: nothing changed since the last one."""

    def __init__(self, engine: Engine, request: Request, event: ReasoningEvent) -> None:
        self._engine = engine
        self._request = request
        self._event = event
        self._created = int(time.time())
        self._shown: WaitReason | None = None  # in the last line
        self._shown_at = 0.0

    def __call__(self) -> bytes | None:
        """The next event, or None."""
        waits = self._request.waits
        current = waits[-1].current if waits else None
        if current is None:
            return None
        now = self._engine.clock()
        loads_on = current.kind is WaitKind.LOAD and now - self._shown_at >= PROGRESS_S
        if current == self._shown and not loads_on:
            return None
        text = self._status_line(current, now)
        self._shown, self._shown_at = current, now
        name, request_id = self._request.name or "", self._request.request_id.decode("latin-1")
        return self._event(f"{text}\n", name, request_id, self._created)

    def _status_line(self, current: WaitReason, now: float) -> str:
        name, wait = self._request.name, self._request.waits[-1]
        if current.kind in _LOADED_KINDS:
            return f"{name} waits for {current.what}."
        estimate = self._engine.forecast(wait.model).text
        if current.kind is not WaitKind.LOAD:
            return f"Loading {name}: waits for {current.what}, {estimate}."
        so_far = f"; {wait.parts(now)[-1][1]:.0f} s so far" if current == self._shown else ""
        return f"Loading {name}: {estimate}{so_far}."
