"""`GET /v1/admin/usage`: what each key used on each day, as JSON or CSV; and a test of the ways that alerts go."""

from __future__ import annotations

from datetime import date
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.daemon.usage import UsageList, as_csv, rows, today
from supervisor.errors import InvalidRequestError, UnavailableError
from supervisor.gateway.body.parameters import choices, flag
from supervisor.http.answer import answer

CSV: Final = "text/csv; charset=utf-8"
SHOWN_DAYS: Final = 30


def routes(daemon: Daemon) -> list[Route]:
    """For the scope admin."""

    async def alert(_request: Request) -> Response:
        if daemon.alerts is None:
            raise UnavailableError("Alerts go nowhere from here.")
        return answer(await daemon.alerts.test())

    async def usage(request: Request) -> Response:
        if daemon.request_log is None:
            raise UnavailableError("Usage isn't counted here.")
        last = _day(request, "to", today())
        first = _day(request, "from", date.fromordinal(max(1, last.toordinal() - SHOWN_DAYS + 1)))
        if first > last:
            raise InvalidRequestError(f"from: {first} is after {last}, the last day: change one of them.", param="from")
        key, model, by_model = (
            request.query_params.get("key"),
            request.query_params.get("model"),
            flag(request, "by_model"),
        )
        found = [
            one
            for one in await daemon.request_log.usage(first, last)
            if (key is None or key in (one.key, one.key_id)) and (model is None or model == one.model)
        ]
        data = rows(found, by_model=by_model)
        wants_csv = choices(request, "format", ("json", "csv")) == ("csv",) or (
            "format" not in request.query_params and request.headers.get("accept", "").startswith("text/csv")
        )
        if not wants_csv:
            return answer(UsageList(data))
        headers = {"content-disposition": f'attachment; filename="llmux-usage-{first}-{last}.csv"'}
        return Response(as_csv(data, by_model=by_model), headers=headers, media_type=CSV)

    return [
        Route("/v1/admin/usage", usage, methods=["GET"]),
        Route("/v1/admin/alerts/test", alert, methods=["POST"]),
    ]


def _day(request: Request, name: str, default: date) -> date:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequestError(
            f"{name}: expected a day such as {default}, got {text[:50]!r}.", param=name
        ) from error
