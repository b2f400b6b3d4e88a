"""Requests in flight and ended, the queue, decisions, events, recordings, and the last half hour."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Final

from msgspec.structs import asdict
from starlette.responses import Response

from supervisor.api.operation import Api
from supervisor.core.admission.limits import Counted, Standing
from supervisor.core.types import ModelId
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.observability.views import decision_view
from supervisor.dialects.listed import listed
from supervisor.engine.events import KINDS, Subscription
from supervisor.engine.recording import Recording
from supervisor.errors import InvalidRequestError, NotFoundError
from supervisor.gateway import request as gateway
from supervisor.gateway.filters.event_stream import KEEPALIVE_S, EventStream
from supervisor.gateway.operation import Group
from supervisor.gateway.record import ENDED, RequestRecord
from supervisor.schema.operation import EVENTS, Example
from supervisor.schema.request import (
    ActiveList,
    Awaits,
    CancelledRequest,
    Decision,
    DecisionList,
    DecisionQuery,
    EndedList,
    EndedQuery,
    EndedRequest,
    EventQuery,
    History,
    KeptBody,
    LimitUse,
    ModelQueue,
    Queue,
    RecordingQuery,
    Request,
)

_NO_TIME_S: Final = 0.0005
"""Tolerance in seconds for a wait without duration: decisions at the request's arrival still belong to it."""
GROUP: Final = Group("Administration: requests", "What is asked now, what was asked, and what was decided.")


@GROUP.operation("GET", "/v1/admin/requests", answer=ActiveList)
async def list_requests(api: Api) -> Response:
    """Requests in flight and queued, oldest first."""
    await api.daemon.steps.look(api.daemon.requests.running())
    await asyncio.sleep(0)
    return await listed(api.daemon.requests.views(), object="list")


@GROUP.operation("GET", "/v1/admin/queue")
async def read_queue(api: Api) -> Queue:
    """How many requests wait, and how long others have waited lately."""
    engine = api.daemon.engine
    queue, waits = engine.queue(), engine.waits()
    models = [
        ModelQueue(
            model.id,
            model.queued,
            queue.most_per_model if model.spec.max_queue is None else model.spec.max_queue,
            model.in_flight,
            engine.waits(model.id).mean_ms,
            engine.waits(model.id).p95_ms,
        )
        for model in engine.active()
        if model.queued
    ]
    limits = [_limit_use(standing) for standing in engine.limited()]
    return Queue(queue.waiting, queue.most, queue.in_flight, waits.mean_ms, waits.p95_ms, models, limits)


def _limit_use(standing: Standing) -> LimitUse:
    is_rate = standing.counted is not Counted.CONCURRENCY
    return LimitUse(
        account=standing.account,
        counts=standing.counted.value,
        limit=standing.limit,
        period_s=standing.period_s if is_rate else None,
        remaining=standing.remaining,
        reset_s=round(standing.reset_s, 1) if is_rate else None,
    )


@GROUP.operation("GET", "/v1/admin/requests/ended", example=Example(path="/v1/admin/requests/ended?limit=1"))
async def list_ended(api: Api, query: EndedQuery) -> EndedList:
    """The last 1000 requests that ended, newest first; never their bodies.

    They outlive reloads and restarts; one of an earlier daemon has an `id` with that daemon's mark before its number. Each has the
    fields of [the line in the log](log.md#log), and those of the table. `kind` in its `wait` is one of `body` (its body
    arrived and was read), `place` (the worker answered as many as it may), `turn` (other models came first), `drain` (requests of
    a worker that had to go), `unload` (a worker ended), `memory` (memory came back), `load`, `crash` (the pause after one),
    `health` (the worker did not answer), `retry` (the first worker ended), `handover`.
    """
    epoch = api.daemon.wall_time(0.0)
    data: list[EndedRequest] = []
    for ended in api.daemon.requests.last():
        if len(data) == query.limit:
            break
        if (
            (query.model is None or ended.is_about(query.model))
            and (query.key is None or ended.key == query.key)
            and (query.tenant is None or ended.demand.tenant == query.tenant)
            and (query.failed is None or ended.has_failed is query.failed)
        ):
            data.append(ended.view(epoch))
    return EndedList("list", data)


@GROUP.operation("GET", "/v1/admin/requests/{id}", errors=(404,), example=Example(path="/v1/admin/requests/1"))
async def get_request(api: Api, id: str) -> Request:
    """One request, in flight or among the last 1000 that ended.

    By its `id` or its `x-request-id` (the latest of several). It has the same fields, and `state`, `awaits` and `decisions`. 404
    `request_not_found` once a thousand others have ended after it.
    """
    daemon = api.daemon
    if isinstance(found := daemon.requests.find(id), gateway.Request):
        await daemon.steps.look([found])
    found, epoch = daemon.requests.find(id), daemon.wall_time(0.0)
    match found:
        case RequestRecord():
            return Request(**asdict(found.view(epoch)), decisions=_decisions_during_wait(daemon, found))
        case gateway.Request():
            record = found.record(daemon.engine.clock())
            return Request(
                **asdict(record.view(epoch)),
                state="queued" if found.attempt.ticket is None else "running",
                awaits=_current_wait(daemon, found),
                progress=found.attempt.step,
                decisions=_decisions_during_wait(daemon, record),
            )
    message = f"There is no request {id[:50]!r} in flight or among the last {ENDED} that ended."
    raise NotFoundError(f"{message} GET /v1/admin/requests/ended lists these.", code="request_not_found")


def _current_wait(daemon: Daemon, request: gateway.Request) -> Awaits | None:
    """The reason why a queued request waits now; None if it doesn't wait."""
    wait = request.waits[-1] if request.waits else None
    current = wait.current if wait is not None else None
    if wait is None or current is None:
        return None
    forecast = daemon.engine.forecast(wait.model)
    since_s = round(wait.parts(daemon.engine.clock())[-1][1], 3)
    eta_s = None if forecast.eta_s is None else round(forecast.eta_s, 1)
    return Awaits(current.kind.value, f"It waits for {current.what}.", since_s, eta_s, forecast.text or None)


def _decisions_during_wait(daemon: Daemon, record: RequestRecord) -> list[Decision]:
    """Decisions during the request's wait about its model and the models it waited for; oldest first, as far as kept."""
    since = record.arrived_at
    until = since + sum(took_s for _, took_s in record.waits)
    concerned = {record.model_id, *(other for awaited, _ in record.waits for other in awaited.others)} - {None}
    found = {
        decision.seq: decision
        for name in concerned
        for decision in daemon.engine.decisions(name)
        if since <= decision.at <= until + _NO_TIME_S
    }
    return [decision_view(daemon, found[seq]) for seq in sorted(found)]


@GROUP.operation(
    "GET",
    "/v1/admin/requests/{id}/body",
    errors=(404,),
    example=Example(path="/v1/admin/requests/1/body", needs="a model with `keep_bodies`"),
)
async def get_body(api: Api, id: str) -> KeptBody:
    """The body of a request that has ended, and the answer, where its model has [`keep_bodies`](operations.md#bodies-of-requests)."""
    if api.daemon.body_log is None:
        raise NotFoundError("No bodies are kept here.", code="body_not_found")
    return await api.daemon.body_log.find(id)


@GROUP.operation(
    "DELETE",
    "/v1/admin/requests/{id}",
    errors=(404,),
    example=Example(path="/v1/admin/requests/7", needs="a request under way"),
)
async def cancel_request(api: Api, id: str) -> CancelledRequest:
    """Cancel a request.

    Its client gets 410 `request_cancelled`. If its response has begun, a stream ends with that error, and the connection of any
    other response is cut.
    """
    if not api.daemon.requests.cancel(id):
        raise NotFoundError(f"There is no request {id[:50]!r} under way; GET /v1/admin/requests lists them.")
    return CancelledRequest(id, cancelled=True)


@GROUP.operation(
    "GET",
    "/v1/admin/decisions",
    answer=DecisionList,
    errors=(404,),
    example=Example(path="/v1/admin/decisions?limit=2"),
)
async def list_decisions(api: Api, query: DecisionQuery) -> Response:
    """The last decisions, oldest first.

    [Log and decisions](log.md#decisions) lists the kinds.
    """
    daemon = api.daemon
    about = None if query.model is None else _decision_subject(daemon, query.model)
    if query.after is not None:
        newer = daemon.engine.decisions_since(min(query.after, sys.maxsize))
        kept = [decision for decision in newer if about in {None, decision.model}][: query.limit]
    else:
        kept = [*daemon.engine.decisions(about, limit=query.limit)]
    return await listed((decision_view(daemon, decision) for decision in kept), object="list")


def _decision_subject(daemon: Daemon, name: str) -> ModelId:
    """The model or the partner's lease with this name. Raises NotFoundError."""
    is_lease = name not in daemon.catalog.models and bool(daemon.engine.decisions(ModelId(name), limit=1))
    return ModelId(name) if is_lease else daemon.catalog.resolve(name).model.id


@GROUP.operation(
    "GET",
    "/v1/admin/events",
    answer_type=EVENTS,
    errors=(503,),
    example=Example(path="/v1/admin/events?types=decision", needs="patience: it goes on until Ctrl-C"),
)
async def follow_events(api: Api, query: EventQuery) -> Response:
    """New events, as server-sent events.

    `id` grows by one with each event of any type. A comment comes after 10 s without an event. A client that reads too
    slowly is disconnected. After any lost connection, read the state again and reconnect. At most 64 clients may listen.

    | `event` | `data` |
    | --- | --- |
    | `decision` | As in `GET /v1/admin/decisions`. |
    | `model` | The model's view, when its state or its traffic changed; `{"name": …, "state": "removed"}` after a reload without it. |
    | `memory` | `devices` as in `GET /v1/admin/gpu-memory`, when they changed, at most once a second. |
    | `request` | `"state": "started"` with what is known so far, then `"state": "finished"` with what [`GET /v1/admin/requests/ended`](#get-v1adminrequestsended) has of it. |
    | `alert` | `at`, `code`, `message`, `device`, `model`. |
    | `reload` | What a reload changed. |
    | `load` | As in [`GET /v1/admin/loads`](#get-v1adminloads), when its state or its progress changed, at most once a second. |
    | `progress` | `id`, `request_id`, `model`, `step` and `steps` of a request that is made in steps, as pictures: how far it is, at most twice a second. |
    """
    wanted = KINDS if query.types is None else query.types.split(",")
    if unknown := [word for word in wanted if word not in KINDS]:
        raise InvalidRequestError(f"types: there is no {unknown[0]!r}, only {', '.join(KINDS)}.", param="types")
    kinds = [kind for kind in KINDS if kind in wanted]
    await api.daemon.know_capabilities()
    subscription = api.daemon.feed.subscribe(kinds)
    return EventStream(_event_stream(subscription), subscription)


async def _event_stream(subscription: Subscription) -> AsyncGenerator[bytes, None]:
    yield b": listening\n\n"
    while (events := await subscription.next(KEEPALIVE_S)) is not None:
        yield b"".join(event.encoded() for event in events)


@GROUP.operation(
    "GET",
    "/v1/admin/recording",
    answer_type=EVENTS,
    errors=(503,),
    example=Example(path="/v1/admin/recording?seconds=1", answer="event: end\ndata: end\n"),
)
async def record_scheduler(api: Api, query: RecordingQuery) -> Response:
    """Everything the scheduler gets and decides from now on, as server-sent events.

    Each `data` is one line of a recording, the first one is the scheduler's state. An event `end` closes a whole recording.
    `llmux record FILE` writes the lines into a file, `llmux replay FILE` decides them again. At most four at a time.
    """
    made = api.daemon.engine.recording()
    return EventStream(_recording_lines(made, query.seconds), made)


async def _recording_lines(recording: Recording, seconds: int) -> AsyncGenerator[bytes, None]:
    """All lines of a recording for `seconds`, then an end event, so that a reader knows that nothing is missing."""
    clock = asyncio.get_running_loop().time
    ends_at = clock() + seconds
    while (left_s := ends_at - clock()) > 0 and (lines := await recording.next(min(left_s, KEEPALIVE_S))) is not None:
        yield b"".join(b"data: %s\n\n" % line.rstrip() for line in lines)
    if not recording.broke_off:
        yield b"event: end\ndata: end\n\n"


@GROUP.operation("GET", "/v1/admin/history")
async def read_history(api: Api) -> History:
    """The last half hour.

    `series` are lists of equal length with one value per interval. `memory_used_mib:DEVICE`, `memory_free_mib:DEVICE`, `queued` and
    `in_flight` are samples (null if there is none), as is `worker_memory_mib:DEVICE/MODEL`, what a model's worker was measured to
    take there, or its lease before it was measured. `tokens_per_s` (a response's tokens, spread over its duration) and `swaps`
    (models evicted for others) are counts.
    """
    history = api.daemon.history
    began, series = history.series()
    return History(history.interval_s, round(api.daemon.wall_time(began), 3), series)
