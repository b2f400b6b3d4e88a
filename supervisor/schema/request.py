"""Requests in flight and ended, the queue, and decisions."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from supervisor.schema.operation import doc

_DEMAND = "[Who asked, and how urgently](#who-asks-and-how-urgently); `tenant` is null for nobody in particular."
_WAITS = (
    "The waits of those that a worker took within the last five minutes, at most the last 512, also of those that it took at "
    "once: their mean, and the limit within which all but a twentieth stayed. Null where there are none."
)
_DEPTH = "Requests that wait for a worker; how many may (`limits.queue_total`)."
_STEPS = "How many steps were made, of so many, where its worker makes pictures and tells; else null."
_WAIT = (
    "What it waited for before a worker took it, in order: `kind`, `what` (a sentence), `s`. The parts add up to the wait; a "
    "part of less than two milliseconds is left out."
)
_ERROR = "The message that its client got, at most 300 characters; null without an error. A worker's message may quote its client."


class Decision(Struct, gc=False):
    """A decision of the scheduler."""

    seq: Annotated[int, doc("Its number.")]
    at: Annotated[float, doc("Seconds since 1970.")]
    kind: str
    model: str | None
    reason: str


class DecisionList(Struct):
    """Decisions, the oldest first."""

    object: Literal["list"]
    data: list[Decision]


class WaitPart(Struct, gc=False):
    """A part of a request's wait."""

    kind: str
    what: str
    s: float


class Awaits(Struct, gc=False):
    """The part of its wait that a request is in."""

    kind: str
    what: str
    s: float
    eta_s: float | None
    eta: str | None


class Step(Struct, frozen=True, gc=False):
    """How far a request is: so many steps made, of so many."""

    step: int
    steps: int


class RequestLine(Struct, gc=False):
    """The line of a request in the log. The last four fields are UNSET where they are as usual."""

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
    tenant: str | UnsetType | None = UNSET
    trace_id: str | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET


class EndedRequest(RequestLine, kw_only=True):
    """A request that has ended."""

    priority: Annotated[int, doc(_DEMAND)]
    tenant: Annotated[str | None, doc(_DEMAND)]
    id: Annotated[str | None, doc("Its number; null if it was refused before it got one.")] = None
    at: Annotated[float, doc("When it arrived, in seconds since 1970.")] = 0.0
    stream: Annotated[bool, doc("Did the client ask for a stream?")] = False
    wait: Annotated[list[WaitPart], doc(_WAIT)] = []
    first_token_ms: Annotated[
        float | None, doc("From its arrival to the first piece of the answer; null if none came.")
    ] = None
    tokens_per_s: Annotated[
        float | None,
        doc("A stream's completion tokens over the time from the first piece to the end; null where that is unknown."),
    ] = None
    error_message: Annotated[str | None, doc(_ERROR)] = None


class FinishedRequest(EndedRequest):
    """The same as an event."""

    state: Literal["finished"] = "finished"


class Request(EndedRequest):
    """A request in flight, or one that has ended, with all that is known of it."""

    state: Literal["queued", "running", "finished"] = "finished"
    awaits: Annotated[
        Awaits | None,
        doc(
            "What a queued request waits for now: `kind`, `what`, `s` (how long already), `eta_s` (until the model is loaded, "
            "by its last load; null where nobody knows), `eta` (the same in words). Else null."
        ),
    ] = None
    progress: Annotated[Step | None, doc(_STEPS)] = None
    decisions: Annotated[
        list[Decision],
        doc(
            "What was decided meanwhile about its model and those it waited for, as from `GET /v1/admin/decisions`; as far as "
            "kept."
        ),
    ] = []


class EndedList(Struct):
    """Requests that have ended, the newest first."""

    object: Literal["list"]
    data: list[EndedRequest]


class ActiveRequest(Struct, gc=False):
    """A request that is queued or running."""

    id: str
    state: Literal["queued", "running"]
    request_id: str
    model: str | None
    path: str
    key: str | None
    tenant: Annotated[str | None, doc("Null: nobody in particular.")]
    priority: int
    stream: bool
    worker: str | None
    age_s: float
    bytes: Annotated[int, doc("Sent so far.")]
    progress: Annotated[Step | None, doc(_STEPS)]


class ActiveList(Struct):
    """Requests in flight, the oldest first."""

    object: Literal["list"]
    data: list[ActiveRequest]


class CancelledRequest(Struct):
    """A request that an operator cancelled."""

    id: str
    cancelled: bool


class KeptBody(Struct):
    """A request's body and its answer. `…_cut`: there was more."""

    request: str
    request_cut: bool
    answer: str
    answer_cut: bool
    answer_type: str


class ModelQueue(Struct, gc=False):
    """The requests that wait for a model."""

    name: str
    depth: int
    max_depth: int
    in_flight: int
    avg_wait_ms: int | None
    p95_wait_ms: int | None


class LimitUse(Struct, gc=False):
    """A limit of which a part is taken."""

    account: str
    counts: Literal["requests", "tokens", "concurrency"]
    limit: float
    period_s: float | None
    remaining: float
    reset_s: float | None


class Queue(Struct):
    """All requests that wait."""

    depth: Annotated[int, doc(_DEPTH)]
    max_depth: Annotated[int, doc(_DEPTH)]
    in_flight: Annotated[int, doc("Requests that workers have.")]
    avg_wait_ms: Annotated[int | None, doc(_WAITS)]
    p95_wait_ms: Annotated[int | None, doc(_WAITS)]
    models: Annotated[
        list[ModelQueue],
        doc(
            "The same for each model that somebody waits for, by `name`; `max_depth` is its `max_queue`, or "
            "`limits.queue_per_model`."
        ),
    ]
    limits: Annotated[
        list[LimitUse],
        doc(
            "The [limits](#how-much-a-client-may-ask-for) of which a part is taken: `account` (`tenant NAME` or `key NAME`), "
            "`counts` (`requests`, `tokens`, `concurrency`), `limit`, `remaining`; of a rate also `period_s` and `reset_s`, "
            "until all of it is there again."
        ),
    ]


class History(Struct):
    """The last half hour."""

    interval_s: float
    since: Annotated[float, doc("Seconds since 1970.")] = field(name="from")
    series: dict[str, list[float | None]]


_Limit = Annotated[int, Meta(ge=1, le=1000)]
_LIMIT = "How many at most; 100 by default."


class EndedQuery(Struct):
    """Which of the requests that have ended."""

    limit: Annotated[_Limit, doc(_LIMIT)] = 100
    model: Annotated[str | None, doc("Only of this: the name that was asked for, or the model behind it.")] = None
    key: Annotated[str | None, doc("Only of this key, by its name.")] = None
    tenant: Annotated[str | None, doc("Only of this tenant.")] = None
    failed: Annotated[bool | None, doc("Only those that failed; `false`: the others.")] = None


class DecisionQuery(Struct):
    """Which decisions."""

    limit: Annotated[_Limit, doc(_LIMIT)] = 100
    model: Annotated[str | None, doc("Only about this model.")] = None
    after: Annotated[Annotated[int, Meta(ge=0)] | None, doc("Those after this number, oldest first.")] = None


class EventQuery(Struct):
    """Which events."""

    types: Annotated[str | None, doc("Which, with commas between them.")] = None


class RecordingQuery(Struct):
    """How long to record."""

    seconds: Annotated[Annotated[int, Meta(ge=1, le=86_400)], doc("When it ends; a day by default.")] = 86_400
