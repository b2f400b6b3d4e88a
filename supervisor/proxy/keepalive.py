"""Keeping a streaming client's connection alive while its model is queued for or loading."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

from supervisor.dialects.error_shapes import error_event
from supervisor.errors import LlmuxError
from supervisor.io.upstream import Headers
from supervisor.proxy.disconnect import Send

COMMENT: Final = b": keepalive\n\n"
INTERVAL_S: Final = 10.0


class Keepalive:
    """`async with Keepalive(send, headers) as keepalive:` sends comments while the block waits for long.

    After `interval_s` in the block the response starts (200, text/event-stream, plus `headers`) and one comment goes out
    each `interval_s`. From then on `started` is True: the response's head is spent, and a failure is told by `fail`.
    """

    __slots__ = ("_beat_task", "_headers", "_interval_s", "_send", "_timer", "started")

    def __init__(self, send: Send, headers: Headers, *, interval_s: float = INTERVAL_S) -> None:
        self.started = False
        self._send = send
        self._headers = headers
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None
        self._beat_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._begin)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._beat_task is not None:
            self._beat_task.cancel()
            await asyncio.wait((self._beat_task,))

    async def fail(self, error: LlmuxError, path: str) -> None:
        """Tell the client of `path` in-band, once, and end the stream. Only when `started`."""
        assert self.started
        await self._send({"type": "http.response.body", "body": error_event(error, path), "more_body": False})

    def _begin(self) -> None:
        self._beat_task = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self._headers,
        ]
        if not self.started:
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self.started = True  # only now: a send that is cancelled while the connection is full has written nothing
        while True:
            await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
            await asyncio.sleep(self._interval_s)
