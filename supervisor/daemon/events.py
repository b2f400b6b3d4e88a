"""Events for subscribers: published from anywhere on the loop, read through bounded subscriptions.

Publishing never waits and costs nothing without subscribers. A subscriber that falls behind by more than its bound is
dropped: its stream ends. Its client has missed events, so it reconnects and reads the whole state.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self, get_args

import msgspec
from pydantic import JsonValue

from supervisor.errors import UnavailableError

Kind = Literal["decision", "model", "memory", "request", "alert", "reload"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
BACKLOG: Final = 1024
SUBSCRIBERS: Final = 64
CLIENTS: Final = 32  # of these, for streams that take no operator's key


@dataclass(frozen=True, slots=True)
class Published:
    """One event. `seq` grows by one with each event of any kind."""

    seq: int
    kind: Kind
    data: dict[str, JsonValue]

    def encoded(self) -> bytes:
        """As a server-sent event."""
        return b"event: %s\nid: %d\ndata: %s\n\n" % (self.kind.encode(), self.seq, msgspec.json.encode(self.data))


class Hub:
    """Distributes events to subscriptions. Use from the event loop's thread."""

    def __init__(self) -> None:
        self._seq = 0
        self._subscriptions: set[Subscription] = set()
        self._closed = False

    def wants(self, kind: Kind) -> bool:
        """Does a subscription want this kind?"""
        return bool(self._subscriptions) and any(kind in each.kinds for each in self._subscriptions)

    def publish(self, kind: Kind, data: dict[str, JsonValue]) -> None:
        """Give the event to every subscription that wants it."""
        self._seq += 1
        event = Published(self._seq, kind, data)
        for subscription in tuple(self._subscriptions):
            if kind in subscription.kinds:
                subscription.put(event)

    def subscribe(self, kinds: Iterable[Kind], *, most: int = SUBSCRIBERS) -> Subscription:
        """Listen, inside a `with` block. Raises UnavailableError if `most` clients listen already."""
        if self._closed or len(self._subscriptions) >= most:
            raise UnavailableError(
                f"{len(self._subscriptions)} clients listen to events already; close one.", retry_after_s=10.0
            )
        return Subscription(frozenset(kinds), self._subscriptions)

    def close(self) -> None:
        """End every subscription, because the daemon stops."""
        self._closed = True
        for subscription in tuple(self._subscriptions):
            subscription.end()


class Subscription:
    """One subscriber's events since the subscription was made."""

    __slots__ = ("_all", "_backlog", "_ended", "_something", "kinds")

    def __init__(self, kinds: frozenset[Kind], every: set[Subscription]) -> None:
        self.kinds = kinds
        self._all = every
        self._backlog: deque[Published] = deque()
        self._something = asyncio.Event()
        self._ended = False
        every.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def put(self, event: Published) -> None:
        """Keep the event for the subscriber, or drop the subscriber."""
        if len(self._backlog) >= BACKLOG:
            self.end()
            return
        self._backlog.append(event)
        self._something.set()

    def end(self) -> None:
        """End it; a pending `next` returns."""
        self._all.discard(self)
        self._ended = True
        self._something.set()

    async def next(self, timeout_s: float) -> list[Published] | None:
        """All events since the last call; an empty list if none came within `timeout_s`, None at the end."""
        if not self._something.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._something.wait()
            except TimeoutError:
                return []
        if self._ended:
            return None
        self._something.clear()
        events = list(self._backlog)
        self._backlog.clear()
        return events
