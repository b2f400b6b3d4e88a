"""The record of a request: shown while the request is in flight; at its end logged, counted, shown and kept.

A record has small values: no body, no exception, no ticket. Its JSON is made on demand.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import asdict, astuple, replace

from supervisor.core.admission.waiting import WaitKind, WaitReason
from supervisor.core.demand import DEFAULT_DEMAND, NORMAL, Demand
from supervisor.core.types import Devices, ModelId
from supervisor.engine.waits import WaitSegment
from supervisor.schema.request import EndedRequest, RequestLine, WaitPart

ENDED: Final = 1000  # the number of recent requests that are kept
MESSAGE_LIMIT: Final = 300  # characters of an error's message; a worker's message may quote a whole wrong field
BODY: Final = WaitReason(WaitKind.BODY, "its body to arrive and be read")
_SHORTEST_WAIT_S: Final = (
    0.002  # shorter waits are not shown: the loop's clock, which times an arrival, has milliseconds
)
_WAITED: Final = "It waited for "


class RequestRecord(RequestLine):
    """A request that has ended, or its state so far. Times (`…_at`) are on the engine's clock."""

    id: str | None = None  # an earlier daemon's id begins with its run; None: refused before it was in flight
    arrived_at: float = 0.0
    ended_at: float = 0.0
    stream: bool = False
    waits: tuple[WaitSegment, ...] = ()
    first_token_s: float | None = None  # from its arrival to the first piece of the answer; None: none came
    tokens_per_s: float | None = None  # of a stream: any other answer comes at once, so its rate is unknown
    error_message: str | None = None
    model_id: ModelId | None = None  # the model whose worker it waited for, or got
    demand: Demand = DEFAULT_DEMAND
    # The rest is counted, and neither shown nor written.
    key_id: str = ""
    devices: Devices = ()  # of its worker
    admitted_at: float | None = None  # the time at which its worker got it
    cached_tokens: int | None = None  # of the prompt's tokens

    @property
    def has_failed(self) -> bool:
        """Did its client get anything but a complete answer?"""
        return self.error is not None or not 200 <= self.status < 400

    def is_about(self, name: str) -> bool:
        """Did the request name this model, by this or another name?"""
        return name in {self.model, self.model_id}

    def line(self) -> RequestLine:
        """The fields of the log line."""
        return RequestLine(*astuple(self)[:_LINE_FIELDS])

    def view(self, epoch: float) -> EndedRequest:
        """The record for the API. `epoch`: the zero of the engine's clock, in Unix seconds."""
        first_s, rate = self.first_token_s, self.tokens_per_s
        line = asdict(self.line()) | {"tenant": self.demand.tenant or None, "priority": self.demand.priority}
        return EndedRequest(
            **line,
            id=self.id,
            at=round(self.arrived_at + epoch, 3),
            stream=self.stream,
            wait=[
                WaitPart(awaited.kind.value, f"{_WAITED}{awaited.what}.", round(took_s, 3))
                for awaited, took_s in self.waits
                if took_s >= _SHORTEST_WAIT_S
            ],
            first_token_ms=None if first_s is None else round(first_s * 1000, 1),
            tokens_per_s=None if rate is None else round(rate, 2),
            error_message=self.error_message,
        )


_LINE_FIELDS: Final = len(RequestLine.__struct_fields__)


class _DiskRecord(msgspec.Struct):
    """A record on disk."""

    model: ModelId | None
    view: dict[str, object]


class _ViewFields(msgspec.Struct):
    """The fields of a view that a record has in another form. Another version of llmux may have written fewer of them."""

    at: float
    tenant: str | None = None
    priority: int = NORMAL
    wait: list[WaitPart] = []
    first_token_ms: float | None = None


_KINDS: Final = frozenset(WaitKind)
_decode_record: Final = msgspec.json.Decoder(_DiskRecord).decode


def written(record: RequestRecord, epoch: float, run: str) -> str:
    """The record as text for the disk. `run` is the prefix of this daemon's request numbers."""
    number = None if record.id is None else f"{run}-{record.id}"
    return msgspec.json.encode({"model": record.model_id, "view": replace(record.view(epoch), id=number)}).decode()


def restored(text: str, epoch: float) -> RequestRecord | None:
    """The record of a text that `written` made, with an equal view; None for any other text."""
    try:
        found = _decode_record(text)
        shown = msgspec.convert(found.view, _ViewFields)
        found.view.pop("tenant", None), found.view.pop("priority", None)  # a record has only unusual ones
        record = msgspec.convert(found.view, RequestRecord)
    except (msgspec.DecodeError, RecursionError):
        return None
    if shown.priority != NORMAL:
        record.priority = shown.priority
    if shown.tenant is not None and shown.tenant != record.key:
        record.tenant = shown.tenant
    record.demand = Demand(shown.priority, shown.tenant or "")
    record.arrived_at = shown.at - epoch
    record.ended_at = record.arrived_at + record.total_ms / 1000
    record.waits = tuple(
        (WaitReason(WaitKind(part.kind), part.what.removeprefix(_WAITED).removesuffix(".")), part.s)
        for part in shown.wait
        if part.kind in _KINDS
    )
    record.first_token_s = None if shown.first_token_ms is None else shown.first_token_ms / 1000
    record.model_id = found.model
    return record
