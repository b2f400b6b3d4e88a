"""Pipeline requests, as a pure ASGI application: read the body, find the model, wait for a turn, pass it through.

Which paths exist is what the configured models' runtimes serve, exact path and method; everything else is not inference.
The model is named by the body's `model` (JSON or multipart), by `?model=` for requests that don't name one in their body,
or is the only one there is.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

from runtimes.base import Endpoint, RemoteAdapter
from supervisor.catalog import Catalog, CatalogModel, Route, model_of
from supervisor.catalog.rewrite import open_object
from supervisor.core.types import ModelId, TicketId
from supervisor.daemon.engine import Engine, Ticket
from supervisor.daemon.requests import InFlight, RequestContext
from supervisor.errors import InvalidRequestError, LlmuxError, NotFoundError, RequestCancelledError, UnreachableError
from supervisor.proxy import permission
from supervisor.proxy.body import NAME_LIMIT, content_type_of, read_body, refuse_other_charset
from supervisor.proxy.disconnect import CancelOnDisconnect, ClientDisconnectedError, Receive, Scope, Send
from supervisor.proxy.form import Form, read_form
from supervisor.proxy.forward import break_off, forward, processing_ms
from supervisor.proxy.keepalive import Keepalive
from supervisor.proxy.media import may_refer, refuse_remote_media
from supervisor.proxy.modality import refuse_modality
from supervisor.proxy.outline import Outline

Table = Mapping[tuple[str, str], Mapping[ModelId, Endpoint]]
Bytes = bytes | bytearray

PATIENCE_S = 5.0
"""How long it may take, on a busy machine, until a worker that can't be reached is found to have ended; nothing was sent,
so it can be again."""

_STREAM_WANTED = b"true"
_LARGE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the body says about where it wants to go."""

    name: str
    stream: bool = False
    is_json: bool = False
    form: Form | None = None


class Pipeline:
    """Serves one catalog; a reload makes another."""

    _numbers = itertools.count(1)  # tickets are ours: a client's x-request-id may repeat

    def __init__(self, engine: Engine, catalog: Catalog, requests: InFlight) -> None:
        self._engine = engine
        self._catalog = catalog
        self._requests = requests
        self._inputs = {model.id: model.adapter.inputs(model.config) for model in catalog.models.values()}
        self._guarded = {model.id for model in catalog.models.values() if _needs_permission(model)}
        self._table = endpoint_table(catalog)
        self._body_limit = catalog.limits.body_mib * 1024 * 1024
        self._keepalive_s = catalog.limits.keepalive_s
        self._first_byte_s = catalog.limits.first_byte_s

    def serves(self, method: str, path: str) -> bool:
        """Is this path one of a configured model's runtime?"""
        return (method, path) in self._table

    def methods(self, path: str) -> tuple[str, ...]:
        """The methods this path is served with; for error messages."""
        return tuple(sorted(method for method, served in self._table if served == path))

    async def __call__(self, scope: Scope, receive: Receive, send: Send, context: RequestContext) -> None:
        """Serve one request. Raises LlmuxError as long as nothing was sent; see `proxy.forward` for what follows."""
        try:
            await self._serve(scope, receive, send, context)
        except LlmuxError as error:
            context.failure, context.failed_status = error.code, int(error.status)
            raise
        except ClientDisconnectedError:
            context.failure = "client_gone"
            raise
        finally:
            self._requests.finished(context)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, context: RequestContext) -> None:
        context.path = scope["path"]
        body = await read_body(scope, receive, self._body_limit)
        content_type = content_type_of(scope["headers"])
        outline: Outline | None = None
        if content_type[:10].lower() == b"multipart/":
            asked = await self._asked_in_form(scope, body, content_type)
        else:
            if len(body) > _LARGE:
                outline = await Outline.of(body)
            asked = self._asked(scope, outline.text if outline is not None else body, content_type)
        if len(asked.name) > NAME_LIMIT or not asked.name.isprintable():  # it will be logged, and shown in terminals
            raise InvalidRequestError("`model` is not the name of a model.", param="model")
        context.name, context.stream = asked.name, asked.stream
        route, endpoint = self._route(scope, asked.name)
        path: str = scope["path"]
        text = outline.text if outline is not None else body
        allowed, kept = False, text
        if asked.is_json:
            allowed, kept = permission.taken_from(text)
        elif asked.form is not None:
            allowed = permission.in_form(asked.form.allow_remote)
        if route.model.id in self._guarded and not allowed and not permission.in_headers(scope["headers"]):
            raise permission.refuse(asked.name)
        if asked.is_json:
            if may_refer(text):
                await _refuse_references(text)
            refuse_modality(text, asked.name, self._inputs[route.model.id])
            if kept is not text or route.rewrite.touches(path):
                body = route.rewrite.apply(kept, path)
                if outline is not None:
                    body = await outline.restored(body)
        elif asked.form is not None:
            changed = route.rewrite.form_fields(asked.form.names, path)
            if asked.form.allow_remote is not None:
                changed[permission.FIELD] = ()
            body = asked.form.changed(body, changed)
        target = (endpoint.upstream_path or path).encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        context.ticket_id = TicketId(f"{next(self._numbers)}")
        cancelling = CancelOnDisconnect(scope, receive)
        self._requests.begin(context, cancelling)
        try:
            with cancelling:
                if asked.stream:
                    await self._stream(scope, send, context, route.model.id, target, body)
                    return
                context.ticket = await self._engine.admit(context.ticket_id, route.model.id)
                try:
                    await self._forward(scope, send, context, context.ticket, target, body)
                except UnreachableError:
                    if not await self._engine.may_go_to_another(context.ticket, PATIENCE_S):
                        raise
                    context.ticket = await self._engine.admit(context.ticket_id, route.model.id)
                    await self._forward(scope, send, context, context.ticket, target, body)
        except RequestCancelledError as error:
            if not context.answering:
                raise
            context.outcome.sse = context.outcome.sse or context.stream
            await break_off(send, context.outcome, error, path)

    async def _stream(
        self, scope: Scope, send: Send, context: RequestContext, model: ModelId, target: bytes, body: Bytes
    ) -> None:
        """Keep the client's connection alive while it waits; from its first comment on, failures are told in-band."""
        now = asyncio.get_running_loop().time()
        headers = [
            (b"x-request-id", context.request_id),
            processing_ms(context.arrived_at, now + self._keepalive_s),  # that is when it will go out
            *context.extra,
        ]
        keepalive = context.keepalive = Keepalive(send, headers, interval_s=self._keepalive_s)
        try:
            await self._wait(context, keepalive, model)
            assert context.ticket is not None
            try:
                await self._forward(scope, send, context, context.ticket, target, body, sse_started=keepalive.started)
            except UnreachableError:
                if not await self._engine.may_go_to_another(context.ticket, PATIENCE_S):
                    raise
                await self._wait(context, keepalive, model)
                await self._forward(scope, send, context, context.ticket, target, body, sse_started=keepalive.started)
        except LlmuxError as error:
            if not keepalive.started:
                raise
            context.failure, context.failed_status = error.code, int(error.status)
            await keepalive.fail(error, scope["path"])

    async def _wait(self, context: RequestContext, keepalive: Keepalive, model: ModelId) -> None:
        """For a ticket, with comments to the client meanwhile."""
        assert context.ticket_id is not None
        context.ticket = None
        try:
            async with keepalive:
                context.ticket = await self._engine.admit(context.ticket_id, model)
        except BaseException:
            if context.ticket is not None:  # the client left while the last comment was being taken back
                self._engine.finish(context.ticket)
            raise

    async def _forward(
        self,
        scope: Scope,
        send: Send,
        context: RequestContext,
        ticket: Ticket,
        target: bytes,
        body: Bytes,
        *,
        sse_started: bool = False,
    ) -> None:
        assert ticket.upstream is not None
        try:
            await forward(
                scope,
                send,
                context.outcome,
                upstream=ticket.upstream,
                target=target,
                body=body,
                request_id=context.request_id,
                extra_headers=[(b"x-queue-wait-ms", b"%d" % (ticket.queued_s * 1000)), *context.extra],
                arrived_at=context.arrived_at,
                sse_started=sse_started,
                first_byte_s=self._first_byte_s,
            )
        finally:
            self._engine.finish(ticket)

    # which model

    async def _asked_in_form(self, scope: Scope, body: Bytes, content_type: bytes) -> _Asked:
        form = await read_form(body, content_type)
        name = form.model or self._unnamed(scope)
        if name is None:
            raise InvalidRequestError("The form has no field `model`; GET /v1/models lists the choice.", param="model")
        return _Asked(name, form.stream, form=form)

    def _asked(self, scope: Scope, body: Bytes, content_type: bytes) -> _Asked:
        if not body and (name := self._unnamed(scope)) is not None:
            return _Asked(name)
        if not body and scope["method"] == "GET":
            raise InvalidRequestError(
                f"Name the model: {scope['path']}?model=NAME; GET /v1/models lists the choice.", param="model"
            )
        if b";" in content_type:
            refuse_other_charset(content_type)
        try:
            name, stream = model_of(body)
        except InvalidRequestError as error:
            if error.code != "missing_model" or (name := self._unnamed(scope)) is None:
                raise
            stream = open_object(body).get("stream") == _STREAM_WANTED
        return _Asked(name, stream, is_json=True)

    def _unnamed(self, scope: Scope) -> str | None:
        """The model meant by a request that does not name one in its body."""
        query: bytes = scope["query_string"]
        named = parse_qs(query.decode("latin-1")).get("model") if query else None
        if named:
            return named[0]
        listing = self._catalog.listing()
        return listing[0].name if len(listing) == 1 else None

    def _route(self, scope: Scope, name: str) -> tuple[Route, Endpoint]:
        route = self._catalog.route(name)
        if route is None:
            raise unknown_model(self._catalog, name)
        path: str = scope["path"]
        serving = self._table[scope["method"], path]
        endpoint = serving.get(route.model.id)
        if endpoint is None:
            config = route.model.config
            others = [listing.name for listing in self._catalog.listing() if listing.model.id in serving]
            hint = f" Models that do: {', '.join(others[:5])}." if others else ""
            raise InvalidRequestError(
                f"{name} ({config.type}, {config.runtime}) does not serve {path}.{hint}",
                code="endpoint_not_supported",
                param="model",
            )
        return route, endpoint


async def _refuse_references(text: Bytes) -> None:
    """Between two looks at what is still large, others get their turn."""
    if len(text) > _LARGE:
        await asyncio.sleep(0)
    fields = open_object(text)
    if len(text) > _LARGE:
        await asyncio.sleep(0)
    refuse_remote_media(fields)


def _needs_permission(model: CatalogModel) -> bool:
    return isinstance(model.adapter, RemoteAdapter) and not model.adapter.allows_all(model.config)


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
