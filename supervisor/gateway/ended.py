"""The requests that ended last: what an operator asks about afterwards.

Each is kept as small values: no body, no exception, no ticket. The JSON is made when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import JsonValue

from supervisor.core.demand import ANY, Demand
from supervisor.core.types import Devices, ModelId, TicketId
from supervisor.core.waiting import Awaited, WaitKind
from supervisor.engine.waits import Part

Json = dict[str, JsonValue]

ENDED: Final = 1000
MESSAGE_LIMIT: Final = 300  # characters of an error's message; a worker's, about a wrong field, may quote all of it
BODY: Final = Awaited(WaitKind.BODY, "its body to arrive and be read")
_SHORTEST_S: Final = 0.002  # of a part that is told; the clock of the loop, which notes an arrival, has milliseconds


class RequestLine(msgspec.Struct, gc=False):
    """What the log says of a request: its canonical record. What is unusual is UNSET where it is as usual."""

    request_id: str
    path: str
    model: str | None  # as it was asked for
    worker: str | None
    key: str | None
    status: int  # 0: the client left before it got one
    error: str | None
    cut: str | None
    queue_ms: float | None
    first_byte_ms: float | None
    total_ms: float
    bytes: int
    prompt_tokens: int | None
    completion_tokens: int | None
    priority: int | UnsetType = UNSET
    tenant: str | UnsetType = UNSET
    trace_id: str | UnsetType = UNSET
    ignored: list[JsonValue] | UnsetType = UNSET

    def view(self) -> Json:
        """As JSON."""
        found: Json = msgspec.to_builtins(self)
        return found


class Ended(NamedTuple):
    """One request that has ended. Times are of the engine's clock."""

    id: TicketId | None  # None: it was refused before it was entered
    line: RequestLine
    arrived_at: float
    first_at: float | None  # when the first piece of the answer came; None: none did
    ended_at: float
    stream: bool
    waits: tuple[Part, ...]
    model: ModelId | None  # the model whose worker it waited for, or got
    message: str | None  # of the error
    demand: Demand = ANY
    key_id: str = ""  # of its key
    devices: Devices = ()  # of its worker
    admitted_at: float | None = None  # when its worker got it
    cached_tokens: int | None = None  # of the prompt's

    @property
    def has_failed(self) -> bool:
        """Did its client get anything but a whole answer?"""
        return _has_failed(self.line.error, self.line.status)

    @property
    def request_id(self) -> JsonValue:
        """Its x-request-id."""
        return self.line.request_id

    @property
    def key(self) -> JsonValue:
        """The name of its key."""
        return self.line.key

    @property
    def tenant(self) -> str:
        """For whom it came."""
        return self.demand.tenant

    def is_about(self, name: str) -> bool:
        """Was this model asked for, by this name or another?"""
        return name in {self.line.model, self.model}

    def view(self, epoch: float) -> Json:
        """Its record and what else is known. `epoch`: when the engine's clock was zero, in Unix seconds."""
        return {
            **self.line.view(),
            **demanded(self.demand),
            **details(self.id, self.arrived_at + epoch, self.waits, stream=self.stream),
            "first_token_ms": milliseconds(self.arrived_at, self.first_at),
            "tokens_per_s": self._tokens_per_s(),
            "error_message": self.message,
        }

    def _tokens_per_s(self) -> float | None:
        """Of a stream: any other answer comes as one piece, whose beginning says nothing about its tokens."""
        count = self.line.completion_tokens
        if not self.stream or self.first_at is None or count is None or self.ended_at <= self.first_at:
            return None
        return round(count / (self.ended_at - self.first_at), 2)


class EndedBefore(NamedTuple):
    """One that an earlier daemon answered, as that kept it."""

    record: Json  # what the view was
    model: ModelId | None

    @property
    def id(self) -> JsonValue:
        return self.record.get("id")

    @property
    def request_id(self) -> JsonValue:
        """As of Ended; as are the next."""
        return self.record["request_id"]

    @property
    def key(self) -> JsonValue:
        return self.record.get("key")

    @property
    def tenant(self) -> str:
        return str(self.record.get("tenant") or "")

    @property
    def has_failed(self) -> bool:
        return _has_failed(self.record.get("error"), self.record.get("status"))

    def is_about(self, name: str) -> bool:
        return name in {self.record.get("model"), self.model}

    def view(self, _epoch: float) -> Json:
        return self.record


def _has_failed(error: JsonValue, status: JsonValue) -> bool:
    return error is not None or not isinstance(status, int) or not 200 <= status < 400


def demanded(demand: Demand) -> Json:
    """For whom it came, and how urgent it was."""
    return {"tenant": demand.tenant or None, "priority": demand.priority}


def details(ticket: TicketId | None, at: float, waits: Iterable[Part], *, stream: bool) -> Json:
    """What is the same for a request in flight and one that has ended."""
    return {
        "id": ticket,
        "at": round(at, 3),
        "stream": stream,
        "wait": [_part(part) for part in waits if is_told(part)],
    }


def is_told(part: Part) -> bool:
    """Did it take long enough to be shown?"""
    return part[1] >= _SHORTEST_S


def milliseconds(since: float, until: float | None) -> float | None:
    """Between the two."""
    return None if until is None else round((until - since) * 1000, 1)


def _part(part: Part) -> Json:
    awaited, took_s = part
    return {"kind": awaited.kind.value, "what": f"It waited for {awaited.what}.", "s": round(took_s, 3)}
