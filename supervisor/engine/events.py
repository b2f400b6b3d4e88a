"""Events for subscribers: published by any code on the loop, read through bounded subscriptions.

Publishing never waits and costs nothing without subscribers. The hub drops a subscriber that has `BACKLOG` events unread:
the stream ends. The client has missed events, so it must reconnect and read the whole state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, get_args

import msgspec

from supervisor.engine.listener import Listener
from supervisor.errors import UnavailableError

Kind = Literal["decision", "model", "memory", "request", "alert", "reload", "load", "progress"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
BACKLOG: Final = 1024
SUBSCRIBERS: Final = 64
CLIENTS: Final = 32  # limit for streams without an operator's key, within SUBSCRIBERS


@dataclass(frozen=True, slots=True)
class Published:
    """One event. `seq` grows by one with each event of any kind."""

    seq: int
    kind: Kind
    data: object

    def encoded(self) -> bytes:
        """The event in the format of server-sent events."""
        return b"event: %s\nid: %d\ndata: %s\n\n" % (self.kind.encode(), self.seq, msgspec.json.encode(self.data))


class Hub:
    """Distributes events to subscriptions. Use from the event loop's thread."""

    def __init__(self) -> None:
        self._seq = 0
        self._subscriptions: set[Subscription] = set()
        self._closed = False

    def wants(self, kind: Kind) -> bool:
        """Whether a subscription includes this kind."""
        return bool(self._subscriptions) and any(kind in each.kinds for each in self._subscriptions)

    def publish(self, kind: Kind, data: object) -> None:
        """Add the event to every subscription that includes its kind. `data` is encoded as JSON when it is read."""
        self._seq += 1
        event = Published(self._seq, kind, data)
        for subscription in tuple(self._subscriptions):
            if kind in subscription.kinds:
                subscription.put(event)

    def subscribe(self, kinds: Iterable[Kind], *, most: int = SUBSCRIBERS) -> Subscription:
        """A subscription to these kinds, for a `with` block. Raises UnavailableError if `most` clients listen already."""
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


class Subscription(Listener[Published]):
    """One listener's events."""

    def __init__(self, kinds: frozenset[Kind], every: set[Subscription]) -> None:
        super().__init__(every)
        self.kinds = kinds

    def put(self, event: Published) -> None:
        """Keep the event for the subscriber, or drop the subscriber."""
        if len(self._backlog) >= BACKLOG:
            self._backlog.clear()
            self.end()
        else:
            super().put(event)
