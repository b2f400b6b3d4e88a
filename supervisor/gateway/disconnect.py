"""Notices that a client disconnected, even while llmux neither reads from it nor writes to it.

The server protocol notices at once (`connection_lost`) and reports through a `Disconnect` in the ASGI scope;
`CancelOnDisconnect` then cancels the current wait of the request. This needs no task or timer of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, Final, Self

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

EXTENSION: Final = "llmux.disconnect"


class ResponseOverError(Exception):
    """Nothing more can be sent to this client; the server cuts the connection. Never rendered as an error response."""


class ClientDisconnectedError(ResponseOverError):
    """The client closed its connection."""


class ResponseBrokenError(ResponseOverError):
    """The response has begun and can't be completed: it must not look complete."""


class Disconnect:
    """The end of one client connection, reported by the server protocol; one request at a time watches it."""

    __slots__ = ("_callback", "_resume_reading", "has_happened", "read_while_blocked", "task", "wait_long")

    def __init__(
        self,
        resume_reading: Callable[[], None],
        read_while_blocked: Callable[[], int | None] = lambda: None,
        wait_long: Callable[[], None] = lambda: None,
    ) -> None:
        self.has_happened = False
        self.wait_long = wait_long  # stop reading until the answer is sent; notice only the connection's end
        self.read_while_blocked = read_while_blocked  # see `CancelOnDisconnect.read_while_blocked`
        self.task: asyncio.Task[Any] | None = None  # serves the current request
        self._resume_reading = resume_reading
        self._callback: Callable[[], None] | None = None

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` from the loop at a disconnect. Resumes reading: a paused connection would not notice."""
        self._callback = callback
        self._resume_reading()

    def unwatch(self) -> None:
        self._callback = None

    def happened(self) -> None:
        """The connection is lost. Drops all references to the connection."""
        self.has_happened = True
        self.read_while_blocked = self.wait_long = self._resume_reading = lambda: None
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class CancelOnDisconnect:
    """`with CancelOnDisconnect(scope):` cancels the current task's wait when the client disconnects.

    The block then raises ClientDisconnectedError. `interrupt` ends the block in the same way, with the given error. Enter the block
    after the body was read. Blocks can't be nested.
    """

    __slots__ = ("_cancelling_before", "_disconnect", "_error", "_task")

    def __init__(self, scope: Scope) -> None:
        self._disconnect: Disconnect = scope["extensions"][EXTENSION]
        self._task: asyncio.Task[Any] | None = None
        self._cancelling_before = 0
        self._error: Exception | None = None  # the error that ends the block

    def __enter__(self) -> Self:
        disconnect = self._disconnect
        self._task = disconnect.task
        assert self._task is not None
        self._cancelling_before = self._task.cancelling()
        if disconnect.has_happened:
            raise ClientDisconnectedError
        disconnect.watch(self._interrupt_by_client)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disconnect.unwatch()
        task, self._task = self._task, None
        if self._error is not None:
            assert task is not None
            ours = task.uncancel() <= self._cancelling_before
            if ours and kind is not None and issubclass(kind, asyncio.CancelledError):
                raise self._take_error() from error
            self._error = None

    def interrupt(self, error: Exception) -> None:
        """End the block with `error`. Does nothing outside the block, or if the block is already ending."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def wait_long(self) -> None:
        """The request may wait for long: until the answer is sent, read nothing from its connection and only watch for its end."""
        self._disconnect.wait_long()

    def read_while_blocked(self) -> int | None:
        """The number of bytes that the client has read so far; None unless the answer waits for the client to read."""
        return self._disconnect.read_while_blocked()

    def _take_error(self) -> Exception:
        """Return the block's error and forget it: an error kept here or in a local variable would keep its traceback's frames."""
        assert self._error is not None
        try:
            return self._error
        finally:
            self._error = None

    def _interrupt_by_client(self) -> None:
        self.interrupt(ClientDisconnectedError())
