"""Notices that a client disconnected, even while llmux neither reads from it nor writes to it.

The server protocol knows at once (`connection_lost`) and reports it through a `Disconnect` in the ASGI scope;
`CancelOnDisconnect` then cancels whatever the request is waiting for. A request that runs its course starts nothing for this.
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
    """Nothing more can be sent to this client; the server cuts the connection. Not an error to render."""


class ClientDisconnectedError(ResponseOverError):
    """The client closed its connection."""


class ResponseBrokenError(ResponseOverError):
    """The response had begun and can't be completed: it must not look complete."""


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
        self.wait_long = wait_long  # read no more until the answer is sent; only the connection's end is noticed
        self.read_while_blocked = read_while_blocked  # the bytes the client has read so far, if we wait for it to read
        self.task: asyncio.Task[Any] | None = None  # what serves the request now
        self._resume_reading = resume_reading
        self._callback: Callable[[], None] | None = None

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` from the loop at a disconnect. Resumes reading: a paused connection would not notice."""
        self._callback = callback
        self._resume_reading()

    def unwatch(self) -> None:
        self._callback = None

    def happened(self) -> None:
        """The connection is lost. Drops all references to it."""
        self.has_happened = True
        self.read_while_blocked = self.wait_long = self._resume_reading = lambda: None
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class CancelOnDisconnect:
    """`with CancelOnDisconnect(scope):` cancels what the current task awaits when the client disconnects.

    The block then raises ClientDisconnectedError. `interrupt` ends the block in the same way, with the given error. Enter the block
    after the body was read. Blocks can't be nested.
    """

    __slots__ = ("_cancelling", "_disconnect", "_ending", "_task")

    def __init__(self, scope: Scope) -> None:
        self._disconnect: Disconnect = scope["extensions"][EXTENSION]
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._ending: Exception | None = None  # what the block is being left with

    def __enter__(self) -> Self:
        disconnect = self._disconnect
        self._task = disconnect.task
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        if disconnect.has_happened:
            raise ClientDisconnectedError
        disconnect.watch(self._cancel)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disconnect.unwatch()
        task, self._task = self._task, None
        if self._ending is not None:
            assert task is not None
            ours = task.uncancel() <= self._cancelling
            if ours and kind is not None and issubclass(kind, asyncio.CancelledError):
                raise self._taken() from error
            self._ending = None

    def interrupt(self, error: Exception) -> None:
        """End the block with `error`. Does nothing outside the block, or if the block is already ending."""
        if self._task is not None and self._ending is None:
            self._ending = error
            self._task.cancel()

    def wait_long(self) -> None:
        """The request may wait for long: read nothing from its connection until the answer is sent, only notice its end."""
        self._disconnect.wait_long()

    def read_while_blocked(self) -> int | None:
        """How many bytes of its connection the client has read so far; None unless it holds the answer up now."""
        return self._disconnect.read_while_blocked()

    def _taken(self) -> Exception:
        """The error that the block raises, once: kept here or in a local variable, it would keep the frames that it passes."""
        assert self._ending is not None
        try:
            return self._ending
        finally:
            self._ending = None

    def _cancel(self) -> None:
        self.interrupt(ClientDisconnectedError())
