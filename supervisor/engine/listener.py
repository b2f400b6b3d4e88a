"""A listener's buffer of items that it has not taken yet. Use from the event loop's thread."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


class Listener(Generic[T]):
    """Gets every item from its creation to the end of the `with` block. `every`: the set of all listeners; includes this one."""

    def __init__(self, every: set[Any]) -> None:
        self._every = every
        self._backlog: list[T] = []
        self._ended = False
        self._something = asyncio.Event()
        every.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def put(self, item: T) -> None:
        """Keep the item until the listener takes it."""
        self._backlog.append(item)
        self._something.set()

    def end(self) -> None:
        """End the stream of items, and leave the set of listeners."""
        self._every.discard(self)
        self._ended = True
        self._something.set()

    def take(self) -> list[T]:
        """The items since the last call."""
        taken, self._backlog = self._backlog, []
        return taken

    async def next(self, timeout_s: float) -> list[T] | None:
        """Wait up to `timeout_s` for items, and take them. Empty list: a timeout. None: the listener has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._something.wait()
        if not self._ended:
            self._something.clear()
        return self.take() or (None if self._ended else [])
