"""The way of an inference request, in six steps whose numbers come back in the code:

1. Body: read, and opened once.
2. Target: who asks, which model is meant, may it be asked this, and what does its worker get?
3. Entry: the request gets a number and is entered among those in flight. From here on it can be cancelled.
4. Ticket: the engine admits it to a worker, at once or after a wait.
5. Forward: the bytes go through.
6. Release: the ticket is given back, the request leaves the list, one log line says what came of it.

The runtimes of the configured models define which paths exist, by exact path and method; everything else is not
inference. A request names its model in the body's `model` (JSON or multipart) or in `?model=`. Where only one configured
model serves the path, it may leave the name out.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import parse_qs

from runtimes.base import Endpoint
from runtimes.endpoints import OTHER, aliases_of
from supervisor.catalog import Catalog, Route
from supervisor.catalog.clients import ClientConfig
from supervisor.core.types import ModelId, TicketId, WorkerState
from supervisor.daemon.clients import Clients
from supervisor.daemon.engine import Engine
from supervisor.daemon.identity import PRIORITY_HEADER, identify
from supervisor.daemon.leaving import HandedOverError
from supervisor.daemon.load_news import LoadNews
from supervisor.daemon.requests import InFlight, RequestContext
from supervisor.daemon.ticket import Ticket
from supervisor.daemon.waits import Wait
from supervisor.errors import InvalidRequestError, LlmuxError, UnreachableError, UpstreamError
from supervisor.io.held_body import BodyBudget, HeldBody
from supervisor.proxy import load_feedback, permission
from supervisor.proxy.body import Body, Bytes, content_type_of, read_body, refuse_other_charset
from supervisor.proxy.dialect import Dialect
from supervisor.proxy.disconnect import CancelOnDisconnect, ClientDisconnectedError, Receive, Scope, Send
from supervisor.proxy.form import read_form
from supervisor.proxy.forward import break_off, forward, processing_ms
from supervisor.proxy.json_body import JsonBody
from supervisor.proxy.keepalive import NEWS_AFTER_S, SSE, Keepalive
from supervisor.proxy.model_name import Renaming, renaming
from supervisor.proxy.translation import StreamTranslation, Translation

Table = Mapping[tuple[str, str], Mapping[ModelId, Endpoint]]

PATIENCE_S: Final = 5.0
"""How long a busy machine may need to notice that an unreachable worker has ended. Nothing was sent to it, so the request
can be sent again."""

WHY_S: Final = 2.0  # within which it is known why a worker ended that broke a stream off

NAME_LIMIT: Final = 512  # of the name of a model


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes, and what is sent there."""

    model: ModelId
    path: bytes  # the worker's path and query
    body: HeldBody
    translation: Translation | None = None  # of the answer
    names: Renaming | None = None  # in the answer
    completion: StreamTranslation | None = None  # of what it lacks
    is_known: bool = True  # so that the form of a stream is known before the worker answers


class Pipeline:
    """Serves one catalog; a reload makes another."""

    _numbers = itertools.count(1)  # not the client's x-request-id, which may repeat

    def __init__(
        self, engine: Engine, catalog: Catalog, requests: InFlight, bodies: BodyBudget, clients: Clients
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._requests = requests
        self._clients = clients
        self._bodies = bodies
        self._inputs = {model.id: model.adapter.inputs(model.config) for model in catalog.models.values()}
        self._names = {model.id: model.adapter.answers_as(model.config, model.id) for model in catalog.models.values()}
        self._guarded = {model.id for model in catalog.models.values() if model.adapter.needs_permission(model.config)}
        self._table = endpoint_table(catalog)
        self._body_limit = catalog.limits.body_mib * 1024 * 1024
        self._keepalive_s = catalog.limits.keepalive_s
        self._first_byte_s = catalog.limits.first_byte_s

    def serves(self, method: str, path: str, dialect: Dialect) -> bool:
        """Does a configured model's runtime serve this path, or the one that the dialect maps it to?"""
        if (method, path) in self._table:
            return True
        translation = dialect.translation(method, path)
        return translation is not None and (method, translation.path) in self._table

    def methods(self, path: str, dialect: Dialect) -> tuple[str, ...]:
        """The methods this path is served with; for error messages."""
        return tuple(method for method in ("GET", "POST") if self.serves(method, path, dialect))

    async def __call__(self, scope: Scope, receive: Receive, send: Send, context: RequestContext) -> None:
        """Serve one request. Raises LlmuxError if nothing was sent yet; for later failures see `forward`."""
        context.path = scope["path"]
        held = HeldBody(self._bodies)
        try:
            # 1.
            raw = await read_body(scope, receive, self._body_limit, held)
            held.keep(raw)
            body = await _open(raw, scope)
            # 2.
            profile = self._identify(scope, body, context)
            target = await self._target(scope, body, context, held, profile)
            held = target.body
            del raw, body  # only what `held` has is kept
            # 3.
            context.ticket_id = TicketId(f"{next(self._numbers)}")
            context.entered_at, context.model = self._engine.clock(), target.model
            cancelling = CancelOnDisconnect(scope)
            self._requests.begin(context, cancelling)
            with cancelling:
                await self._answer(scope, send, context, target, cancelling)
        except LlmuxError as error:
            context.fail(error)
            if not context.answering:
                raise
            if not context.outcome.started:  # the keep-alive began a stream
                assert context.keepalive is not None
                context.outcome.stream_type = context.keepalive.content_type
            await break_off(send, context.outcome, error, context.dialect)
        except ClientDisconnectedError:
            context.failure, context.failed_message = "client_gone", "The client closed its connection."
            raise
        except HandedOverError:
            context.failure, context.failed_message = "handed_over", "Another daemon took over and answers it."
            context.waiting, held = held, HeldBody()  # who sends it there releases it
            raise
        finally:
            # 6.
            held.release()
            self._requests.finished(context)

    # ------------------------------------------------------------------------------------------------------------ target

    def _identify(self, scope: Scope, body: Body, context: RequestContext) -> ClientConfig:
        """Who asks, and how urgently; the client's profile. Raises InvalidRequestError, and RateLimitError in a pause."""
        context.demand, profile, is_lowered = identify(scope["headers"], body, context.key, self._catalog)
        if is_lowered:
            context.extra.append((PRIORITY_HEADER, b"%d" % context.demand.priority))
        if context.demand.tenant:
            self._clients.arrived(context.demand.tenant)
        return profile

    async def _target(
        self, scope: Scope, body: Body, context: RequestContext, held: HeldBody, profile: ClientConfig
    ) -> Target:
        """The model, whether this request is allowed for it, and what to send it. Raises LlmuxError."""
        translation = context.dialect.translation(scope["method"], context.path)
        public_path = context.path
        if translation is not None:
            public_path = translation.path
            body.translate(translation)
        name = body.name if body.name is not None else self._unnamed(scope, public_path, profile.model)
        if name is None:
            raise body.nameless(scope)
        if len(name) > NAME_LIMIT or not name.isprintable():  # it will be logged, and shown in terminals
            raise InvalidRequestError("`model` is not the name of a model.", param="model")
        context.name, context.stream = name, body.stream
        route = self._catalog.resolve(name)
        endpoint = self._endpoint(scope["method"], public_path, name, route)
        model = route.model.id
        if not (body.take_permission() or model not in self._guarded or permission.in_headers(scope["headers"])):
            raise permission.refuse(name)
        await body.check(name, self._inputs[model], endpoint)
        path = (endpoint.upstream_path or endpoint.path).encode()
        if query := scope["query_string"]:
            path += b"?" + query
            if b"autoload=" in query:
                self._refuse_load(query, name, model)
        theirs = self._names[model]
        names = renaming(theirs, name) if theirs != name and endpoint.meaning.role == "run" else None
        completion = context.dialect.completion(name, stream=body.stream)
        rewrite = route.rewrite.with_defaults(profile.parameters) if profile.parameters else route.rewrite
        rewritten = held.changed(await body.rewritten(rewrite, endpoint))
        is_known = translation is not None or endpoint.meaning is not OTHER
        return Target(model, path, rewritten, translation, names, completion, is_known)

    def _refuse_load(self, query: bytes, name: str, model: ModelId) -> None:
        """llama.cpp's `?autoload=false`: raises InvalidRequestError unless the model is loaded, or is being loaded."""
        found = self._engine.model(model)
        is_coming = found is not None and (found.answering or found.state is WorkerState.STARTING)
        if not is_coming and parse_qs(query.decode("latin-1")).get("autoload", ["true"])[0] not in {"true", "1"}:
            raise InvalidRequestError(
                f"{name} is not loaded, and the request says autoload=false.", code="model_not_loaded"
            )

    def _unnamed(self, scope: Scope, path: str, default: str | None) -> str | None:
        """The model of a request whose body names none. `default`: the client's, if it serves the path."""
        query: bytes = scope["query_string"]
        named = parse_qs(query.decode("latin-1")).get("model") if query else None
        if named:
            return named[0]
        serving = self._table[scope["method"], path]
        if default is not None and self._catalog.resolve(default).model.id in serving:
            return default
        if len(serving) != 1:
            return None
        names = [row.name for row in self._catalog.listing() if row.model.id in serving]
        return names[0] if len(names) == 1 else next(iter(serving))  # itself, not one of several virtual models

    def _endpoint(self, method: str, path: str, name: str, route: Route) -> Endpoint:
        serving = self._table[method, path]
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
        return endpoint

    # ------------------------------------------------------------------------------------------- demand, ticket, forward

    async def _answer(
        self, scope: Scope, send: Send, context: RequestContext, target: Target, client: CancelOnDisconnect
    ) -> None:
        """Wait for a worker and forward the request; retry once if the worker turns out to have ended.

        A stream's client gets keep-alives while it waits; after the first one, failures go in-band.
        """
        keepalive = context.keepalive = self._keepalive(scope, send, context, target)
        try:
            try:
                await self._attempt(scope, send, context, target, client, keepalive)
            except UnreachableError:
                if context.ticket is None or not await self._engine.may_go_to_another(context.ticket, PATIENCE_S):
                    raise
                context.waits.append(Wait.lost(target.model, context.ticket.admitted, self._engine.clock()))
                await self._attempt(scope, send, context, target, client, keepalive)
        except LlmuxError as error:
            if not keepalive.started:
                raise
            context.fail(error)
            await keepalive.fail(error)

    def _keepalive(self, scope: Scope, send: Send, context: RequestContext, target: Target) -> Keepalive:
        dialect, key = context.dialect, context.key
        if not (context.stream and target.is_known):
            return Keepalive(send, [], dialect, interval_s=None)
        news = None
        first_s = self._keepalive_s  # the response's headers go out then
        is_told = key is not None and key.load_feedback
        reasoning = dialect.reasoning(context.path)
        if reasoning is not None and load_feedback.is_wanted(scope["headers"], is_told):
            news, first_s = LoadNews(self._engine, context, reasoning), min(first_s, NEWS_AFTER_S)
        first_at = asyncio.get_running_loop().time() + first_s
        headers = [(b"x-request-id", context.request_id), processing_ms(context.arrived_at, first_at), *context.extra]
        content_type = SSE if target.translation is None else target.translation.stream_content_type
        return Keepalive(send, headers, dialect, interval_s=self._keepalive_s, content_type=content_type, news=news)

    async def _attempt(
        self,
        scope: Scope,
        send: Send,
        context: RequestContext,
        target: Target,
        client: CancelOnDisconnect,
        keepalive: Keepalive,
    ) -> None:
        # 4.
        ticket = context.ticket = await self._admitted(context, target, client, keepalive)
        assert ticket.upstream is not None
        try:
            # 5.
            await forward(
                scope,
                send,
                context.outcome,
                upstream=ticket.upstream,
                target=target.path,
                body=target.body,
                dialect=context.dialect,
                translation=target.translation,
                names=target.names,
                completion=target.completion,
                request_id=context.request_id,
                extra_headers=[(b"x-queue-wait-ms", b"%d" % (ticket.queued_s * 1000)), *context.extra],
                arrived_at=context.arrived_at,
                sse_started=keepalive.started,
                first_byte_s=self._first_byte_s,
                explain=partial(self._explained, context),
            )
        finally:
            # 6.
            self._engine.finish(ticket)

    async def _explained(self, context: RequestContext, error: LlmuxError) -> LlmuxError:
        """`error`, for a client that can read it with the reason why the worker ended, if it did."""
        if error.code != "upstream_broken" or not context.outcome.stream_type or context.ticket is None:
            return error
        why = await self._engine.why_ended(context.ticket, WHY_S)
        return error if why is None else UpstreamError(f"{error.message[:-1]}: {why}.", code=error.code)

    async def _admitted(
        self, context: RequestContext, target: Target, client: CancelOnDisconnect, keepalive: Keepalive
    ) -> Ticket:
        assert context.ticket_id is not None
        context.ticket = ticket = None
        body = target.body
        if body.may_spill:
            body.wait()
        try:
            async with keepalive:
                ticket = await self._engine.admit(
                    context.ticket_id,
                    target.model,
                    context.demand,
                    client=client,
                    waits=context.waits,
                    asked=context.name,
                )
        except BaseException:
            if ticket is not None:  # the client disconnected while the last keep-alive was being cancelled
                self._engine.finish(ticket)
            raise
        if body.may_spill:
            body.run()
        return ticket


async def _open(raw: Bytes, scope: Scope) -> Body:
    """The body as what it is said to be. Raises InvalidRequestError."""
    content_type = content_type_of(scope["headers"])
    if content_type[:10].lower() == b"multipart/":
        return await read_form(raw, content_type)
    if not raw:
        return Body()
    if b";" in content_type:
        refuse_other_charset(content_type)
    return await JsonBody.open(raw)


def endpoint_table(catalog: Catalog) -> Table:
    """(method, public path) → the models that serve it. Aliases stand there as well, so that they cost no request anything."""
    table: dict[tuple[str, str], dict[ModelId, Endpoint]] = {}
    for model in catalog.models.values():
        for endpoint in model.adapter.endpoints(model.config):
            table.setdefault((endpoint.method, endpoint.path), {})[model.id] = endpoint
    for (method, path), serving in [*table.items()]:
        for alias in aliases_of(path):
            table[method, alias] = {**serving, **table.get((method, alias), {})}
    return table
