"""One request as the admin API tells it: its record, what it waited for, and the decisions that this followed from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import JsonValue

from supervisor.daemon.views import Json, decision_view
from supervisor.errors import NotFoundError
from supervisor.gateway.record import ENDED, RequestRecord
from supervisor.gateway.request import Request

if TYPE_CHECKING:
    from supervisor.daemon.daemon import Daemon

_NO_TIME_S = 0.0005
"""A model of the wait is told of from a moment before it: what a request's arrival decides has the same time."""


def request_view(daemon: Daemon, wanted: str) -> Json:
    """The request in flight, or one of the last that ended, with this id or x-request-id. Raises NotFoundError."""
    found = daemon.requests.find(wanted)
    epoch = daemon.wall_time(0.0)
    match found:
        case RequestRecord():
            record = found
            told = {"state": "finished", **record.view(epoch), "awaits": None, "progress": None}
        case Request():
            record = found.record(daemon.engine.clock())
            state = "queued" if found.attempt.ticket is None else "running"
            progress = None if found.attempt.step is None else found.attempt.step.view()
            told = {**record.view(epoch, state), "progress": progress, "awaits": _awaits(daemon, found)}
        case None:
            message = f"There is no request {wanted[:50]!r} in flight or among the last {ENDED} that ended."
            raise NotFoundError(f"{message} GET /v1/admin/requests/ended lists these.", code="request_not_found")
    return {**told, "decisions": _decisions(daemon, record)}


def ended_views(
    daemon: Daemon, *, limit: int, model: str | None, key: str | None, tenant: str | None, failed: bool | None
) -> Json:
    """The last requests that ended, newest first; only those of a model, key or tenant, or that failed (or didn't)."""
    epoch = daemon.wall_time(0.0)
    data: list[JsonValue] = []
    for ended in daemon.requests.last():
        if len(data) == limit:
            break
        if (
            (model is None or ended.is_about(model))
            and (key is None or ended.key == key)
            and (tenant is None or ended.demand.tenant == tenant)
            and (failed is None or ended.has_failed is failed)
        ):
            data.append(ended.view(epoch))
    return {"object": "list", "data": data}


def _awaits(daemon: Daemon, request: Request) -> Json | None:
    """What a queued request waits for right now; None when it waits for nothing."""
    wait = request.waits[-1] if request.waits else None
    current = wait.current if wait is not None else None
    if wait is None or current is None:
        return None
    forecast = daemon.engine.forecast(wait.model)
    eta_s = None if forecast.eta_s is None else round(forecast.eta_s, 1)
    since_s = round(wait.parts(daemon.engine.clock())[-1][1], 3)
    what = f"It waits for {current.what}."
    return {"kind": current.kind.value, "what": what, "s": since_s, "eta_s": eta_s, "eta": forecast.told or None}


def _decisions(daemon: Daemon, record: RequestRecord) -> list[JsonValue]:
    """What was decided about its model, and those it waited for, while it waited; oldest first, as far as still kept."""
    since = record.arrived_at
    until = since + sum(took_s for _, took_s in record.waits)
    concerned = {record.model_id, *(other for awaited, _ in record.waits for other in awaited.others)} - {None}
    told = {
        decision.seq: decision
        for name in concerned
        for decision in daemon.engine.decisions(name)
        if since <= decision.at <= until + _NO_TIME_S
    }
    return [decision_view(daemon, told[seq]) for seq in sorted(told)]
