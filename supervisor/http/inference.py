"""Inference requests, as a pure ASGI application: read the body, find the model, wait for a turn, pass it through.

Which paths exist is what the configured models' runtimes serve, exact path and method; everything else is not inference.
The model is named by the body's `model` (JSON or multipart), by `?model=` for requests without a body of ours, or is the
only one there is.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from runtimes.base import Endpoint
from supervisor.catalog import Catalog, Route, model_of
from supervisor.catalog.keys import Key
from supervisor.core.types import ModelId, TicketId
from supervisor.departure import Receive, Scope, Send, UntilGone
from supervisor.engine import Engine, Ticket
from supervisor.errors import InvalidRequestError, LlmuxError, NotFoundError
from supervisor.http.body import model_of_multipart, read_body
from supervisor.http.sse import Keepalive
from supervisor.io.upstream import Headers
from supervisor.proxy import Outcome, forward

log = structlog.get_logger("llmux.request")

Table = Mapping[tuple[str, str], Mapping[ModelId, Endpoint]]


@dataclass(slots=True)
class _Request:
    """What the canonical log line tells of one request."""

    started: float
    name: str | None = None
    ticket: Ticket | None = None
    error: LlmuxError | None = None


class Inference:
    """Serves one catalog; a reload makes another."""

    _numbers = itertools.count(1)  # tickets are ours: a client's x-request-id may repeat

    def __init__(self, engine: Engine, catalog: Catalog) -> None:
        self._engine = engine
        self._catalog = catalog
        self._table = endpoint_table(catalog)
        self._body_limit = catalog.limits.body_mib * 1024 * 1024
        self._keepalive_s = catalog.limits.keepalive_s
        self._first_byte_s = catalog.limits.first_byte_s

    def serves(self, method: str, path: str) -> bool:
        """Is this path one of a configured model's runtime?"""
        return (method, path) in self._table

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, *, request_id: bytes, key: Key | None, extra: Headers
    ) -> None:
        """Serve one request. Raises LlmuxError as long as nothing was sent; see `proxy.forward` for what follows."""
        request = _Request(self._engine.clock())
        outcome = Outcome()
        try:
            await self._serve(scope, receive, send, request, outcome, request_id, extra)
        except LlmuxError as error:
            request.error = error
            raise
        finally:
            self._log(scope, request, outcome, request_id, key)

    async def _serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        request: _Request,
        outcome: Outcome,
        request_id: bytes,
        extra: Headers,
    ) -> None:
        body = await read_body(scope, receive, self._body_limit)
        request.name, stream, is_json = await self._name(scope, body)
        route, endpoint = self._route(scope, request.name)
        path: str = scope["path"]
        if is_json and route.rewrite.touches(path):
            body = route.rewrite.apply(bytes(body), path)
        ticket_id = TicketId(f"{next(self._numbers)}")
        target = (endpoint.upstream_path or path).encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        with UntilGone(scope, receive):
            if not stream:
                request.ticket = await self._engine.admit(ticket_id, route.model.id)
                await self._forward(scope, send, request.ticket, outcome, target, body, request_id, extra)
                return
            headers = [(b"x-request-id", request_id), *extra]
            keepalive = Keepalive(send, headers, interval_s=self._keepalive_s)
            try:
                async with keepalive:
                    request.ticket = await self._engine.admit(ticket_id, route.model.id)
                await self._forward(
                    scope, send, request.ticket, outcome, target, body, request_id, extra, sse_started=keepalive.started
                )
            except LlmuxError as error:
                if not keepalive.started:
                    raise
                request.error = error
                await keepalive.fail(error)

    async def _forward(
        self,
        scope: Scope,
        send: Send,
        ticket: Ticket,
        outcome: Outcome,
        target: bytes,
        body: bytes | bytearray,
        request_id: bytes,
        extra: Headers,
        *,
        sse_started: bool = False,
    ) -> None:
        assert ticket.upstream is not None
        try:
            await forward(
                scope,
                send,
                outcome,
                upstream=ticket.upstream,
                target=target,
                body=body,
                request_id=request_id,
                extra_headers=[(b"x-queue-wait-ms", b"%d" % (ticket.queued_s * 1000)), *extra],
                sse_started=sse_started,
                first_byte_s=self._first_byte_s,
            )
        finally:
            self._engine.finish(ticket)

    async def _name(self, scope: Scope, body: bytes | bytearray) -> tuple[str, bool, bool]:
        """The model's public name, whether a stream is wanted, and whether the body is JSON."""
        content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
        if content_type[:10].lower() == b"multipart/":
            name = await model_of_multipart(body, content_type)
            if name is None:
                raise InvalidRequestError(
                    "The form has no field `model`; GET /v1/models lists the choice.", param="model"
                )
            return name, False, False
        fallback = self._fallback(scope)
        if not body and fallback is not None:
            return fallback, False, False
        try:
            name, stream = model_of(bytes(body))
        except InvalidRequestError as error:
            if fallback is None or error.param != "model" or "missing" not in error.message:
                raise
            return fallback, False, True
        return name, stream, True

    def _fallback(self, scope: Scope) -> str | None:
        """The model meant by a request that does not name one in its body."""
        query: bytes = scope["query_string"]
        if query:
            from urllib.parse import parse_qs  # noqa: PLC0415  # rare, and not for the start-up

            named = parse_qs(query.decode("latin-1")).get("model")
            if named:
                return named[0]
        listing = self._catalog.listing()
        return listing[0].name if len(listing) == 1 else None

    def _route(self, scope: Scope, name: str) -> tuple[Route, Endpoint]:
        route = self._catalog.route(name)
        if route is None:
            raise unknown_model(self._catalog, name)
        path: str = scope["path"]
        endpoint = self._table[scope["method"], path].get(route.model.id)
        if endpoint is None:
            kind, runtime = route.model.config.type, route.model.config.runtime
            others = [
                listing.name
                for listing in self._catalog.listing()
                if listing.model.id in self._table[scope["method"], path]
            ]
            hint = f" Models that do: {', '.join(others[:5])}." if others else ""
            raise InvalidRequestError(
                f"{name} ({kind}, {runtime}) does not serve {path}.{hint}", code="endpoint_not_supported", param="model"
            )
        return route, endpoint

    def _log(self, scope: Scope, request: _Request, outcome: Outcome, request_id: bytes, key: Key | None) -> None:
        now = self._engine.clock()
        ticket = request.ticket
        error = request.error or outcome.error
        log.info(
            "request.finished",
            request_id=request_id.decode("latin-1"),
            path=scope["path"],
            model=request.name,
            worker=f"{ticket.model}:{ticket.generation}" if ticket is not None else None,
            key=key.name if key is not None else None,
            status=outcome.status or (int(error.status) if error is not None else 0),
            error=error.code if error is not None else None,
            cut=ticket.cut_reason if ticket is not None else None,
            queue_ms=round(ticket.queued_s * 1000, 1) if ticket is not None else None,
            first_byte_ms=round(outcome.first_byte_s * 1000, 1) if outcome.first_byte_s is not None else None,
            total_ms=round((now - request.started) * 1000, 1),
            bytes=outcome.bytes_sent,
            prompt_tokens=outcome.prompt_tokens,
            completion_tokens=outcome.completion_tokens,
        )


def endpoint_table(catalog: Catalog) -> Table:
    """(method, public path) → the models that serve it."""
    table: dict[tuple[str, str], dict[ModelId, Endpoint]] = {}
    for model in catalog.models.values():
        for endpoint in model.adapter.endpoints(model.config):
            table.setdefault((endpoint.method, endpoint.path), {})[model.id] = endpoint
    return table


def unknown_model(catalog: Catalog, name: str) -> NotFoundError:
    """404 with the name that was probably meant."""
    nearest = catalog.nearest(name)
    hint = f" Did you mean {nearest!r}?" if nearest is not None else " GET /v1/models lists the choice."
    return NotFoundError(f"There is no model {name[:200]!r}.{hint}", code="model_not_found", param="model")
