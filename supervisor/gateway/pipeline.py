"""The way of an inference request, in six steps whose numbers come back in the code:

1. Body: read, and opened once.
2. Target: who asks, which model is meant, may it be asked this, and what does its worker get?
3. Entry: the request gets a number and is entered among those in flight. From here on it can be cancelled.
4. Ticket: the engine admits it to a worker, at once or after a wait.
5. Forward: the bytes go through.
6. Release: the ticket is given back, the request leaves the list, one log line says what came of it.

The runtimes of the configured models define which paths exist, by exact path and method; everything else is not
inference. `targets` has step 2. Where a task is asked, steps 4 to 6 are done anew for its next candidate (`ladder`) when one
can't answer and has sent nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from supervisor.catalog import Catalog
from supervisor.catalog.clients import ClientConfig
from supervisor.catalog.keys import Scope as KeyScope
from supervisor.core.demand import Demand
from supervisor.core.types import TicketId
from supervisor.engine.engine import Engine
from supervisor.engine.leaving import HandedOverError
from supervisor.engine.ticket import Ticket
from supervisor.engine.waits import Wait
from supervisor.errors import BudgetError, InvalidRequestError, LlmuxError, UnreachableError, UpstreamError
from supervisor.gateway.answer_times import AnswerLog
from supervisor.gateway.body.body import BUDGET, Body, Bytes, read_body
from supervisor.gateway.body.form import read_form
from supervisor.gateway.body.json_body import open_json
from supervisor.gateway.dialect import Dialect, ForDaemonError
from supervisor.gateway.disconnect import CancelOnDisconnect, ClientDisconnectedError, Receive, Scope, Send
from supervisor.gateway.filters.body_log import BodyLog, Capture
from supervisor.gateway.filters.cache_report import NOTHING_REUSED, NOTHING_TOLD, CacheReport
from supervisor.gateway.filters.filters import Filter
from supervisor.gateway.filters.model_name import Rename
from supervisor.gateway.filters.picture_links import PATHS as PICTURE_PATHS
from supervisor.gateway.filters.picture_links import PictureLinks
from supervisor.gateway.filters.translation import CANONICAL, Repair, Translate
from supervisor.gateway.filters.turn import Memory, Turn
from supervisor.gateway.forward import Outcome, break_off, forward, processing_ms
from supervisor.gateway.head import PRIORITY, TRACE, head_of
from supervisor.gateway.identity import budget, load_feedback
from supervisor.gateway.identity.accounts import tokens_of
from supervisor.gateway.identity.identity import Identity, identify
from supervisor.gateway.identity.rate_headers import PREFIX as RATE_PREFIX
from supervisor.gateway.identity.rate_headers import rate_headers
from supervisor.gateway.identity.trace_context import begun, trace_of
from supervisor.gateway.keepalive import NEWS_AFTER_S, SSE, Keepalive
from supervisor.gateway.load_news import LoadNews
from supervisor.gateway.requests import InFlight, RequestContext
from supervisor.gateway.route.caching import CacheWish, Salts, wish_of
from supervisor.gateway.route.context_use import ContextUse
from supervisor.gateway.route.targets import Target, Targets
from supervisor.gateway.tunnel import client_of, tunnel
from supervisor.gateway.upstream_error import WorkerAnswerError, is_crowded, is_overflow
from supervisor.io.held_body import BodyBudget, Gathered, HeldBody
from supervisor.io.picture_store import PictureStore
from supervisor.io.response_store import ResponseStore
from supervisor.io.upstream import Headers

PATIENCE_S: Final = 5.0
"""How long a busy machine may need to notice that an unreachable worker has ended. Nothing was sent to it, so the request
can be sent again."""

WHY_S: Final = 2.0  # within which it is known why a worker ended that broke a stream off


class Pipeline:
    """Serves one catalog; a reload makes another."""

    _numbers = itertools.count(1)  # not the client's x-request-id, which may repeat

    def __init__(
        self,
        engine: Engine,
        catalog: Catalog,
        requests: InFlight,
        bodies: BodyBudget,
        arrived: Callable[[str], None],
        answers: AnswerLog,
        may_fall_back: Callable[[], bool],
        salts: Salts,
        responses: ResponseStore,
        pictures: PictureStore,
        contexts: ContextUse,
        body_log: BodyLog | None = None,
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._requests = requests
        self._arrived = arrived
        self._answers = answers
        self._bodies = bodies
        self._responses = responses
        self._pictures = pictures
        self._public_url = catalog.server.public_url
        self._body_log = body_log
        self._kept_models = (
            frozenset()
            if body_log is None
            else frozenset(m.id for m in catalog.models.values() if m.config.keep_bodies)
        )
        self._traces = catalog.server.traces
        self._targets = Targets(engine, catalog, bodies, may_fall_back, salts, pictures, contexts)
        self._table = self._targets.table
        self._body_limit = catalog.limits.body_mib * 1024 * 1024
        self._keepalive_s = catalog.limits.keepalive_s
        self._first_byte_s = catalog.limits.first_byte_s
        is_runner = catalog.server.health == "runner"  # whose clients look for them in every answer
        self._cache_wish = CacheWish() if is_runner else None
        self._identities: dict[bytes | None, Identity] = {}  # of keys, for requests that say nothing else
        self._cache_headers = NOTHING_TOLD if is_runner else []

    def serves(self, method: str, path: str, dialect: Dialect) -> bool:
        """Does a configured model's runtime serve this path, or the one that the dialect maps it to?"""
        if (method, path) in self._table:
            return True
        translation = dialect.translation(method, path)
        return translation is not None and (method, translation.path) in self._table

    def is_served_by(self, name: str | None, method: str, path: str) -> bool:
        """Does this model serve the path itself, or, of a request that names none, any model?"""
        route = None if name is None else self._catalog.route(name)
        serving = self._table.get((method, path), {})
        return bool(serving) if route is None else route.model.id in serving

    def pattern(self, scope: Scope) -> str | None:
        """See `Targets`."""
        return self._targets.pattern(scope)

    def methods(self, path: str, dialect: Dialect) -> tuple[str, ...]:
        """The methods this path is served with; for error messages."""
        return tuple(method for method in ("GET", "POST") if self.serves(method, path, dialect))

    async def __call__(self, scope: Scope, receive: Receive, send: Send, context: RequestContext) -> None:
        """Serve one request. Raises LlmuxError if nothing was sent yet; for later failures see `forward`.

        Raises ForDaemonError for one that the daemon answers itself, by its body; `context.waiting` is that.
        """
        context.path = scope["path"]
        key, server = context.key, self._catalog.server
        shape = server.responses if key is None or key.responses is None else key.responses
        context.dialect = context.dialect.spoken_with(shape)
        held = HeldBody(self._bodies)
        target: Target | None = None
        turn: Turn | None = None
        capture: Capture | None = None
        is_for_daemon = False
        try:
            # 1.
            raw = await read_body(scope, receive, self._body_limit, held)
            held.keep(raw)
            body = await _open(raw, scope)
            if context.dialect.reads_fields:
                if (wanted := context.dialect.daemon_scope(context.path, body.fields)) is not None:
                    is_for_daemon, context.waiting, held = True, held, HeldBody()
                    raise ForDaemonError(wanted, body.fields)
                body, turn = await context.dialect.turn(context.path, body, self._memory(context))
                if turn is not None:
                    send = turn.observed(send)
            # 2.
            profile = self._identify(scope, body, context)
            target = await self._targets.find(scope, body, context, held, profile)
            if target.ladder is None:
                held = target.body
            if self._kept_models and (target.model in self._kept_models or target.ladder is not None):
                capture = Capture(send, (target.body.source or target.body).data)
                send = capture.send
            del raw, body  # only what `held` has is kept, and what a task's next candidate may need
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
                assert context.begun is not None
                context.outcome.stream_type = context.begun
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
            if context.media is not None:
                context.media.release()
            if turn is not None:
                turn.release()
            if target is not None and target.ladder is not None:  # else it is `held`, which may be somebody else's now
                target.body.release()
            if not is_for_daemon:
                self._requests.finished(context)
            if capture is not None and self._body_log is not None and context.model in self._kept_models:
                assert context.model is not None
                self._body_log.keep(context.model, str(context.ticket_id), capture)

    # ------------------------------------------------------------------------------------------------------------ target

    def _identify(self, scope: Scope, body: Body, context: RequestContext) -> ClientConfig:
        """Who asks, how urgently, and what else its headers say to llmux; the client's profile.

        Raises InvalidRequestError, and RateLimitError in a pause.
        """
        own, key = head_of(scope).own, context.key
        if own or not body.is_silent:
            context.demand, profile, is_lowered = identify(own, body, key, self._catalog)
            for name, value in own:
                if name == TRACE:
                    context.trace = trace_of(value)
            context.cache = wish_of(own) or self._cache_wish
            context.budget_s = budget.budget_s(own, body.said(BUDGET))
            if is_lowered:
                context.extra.append((PRIORITY, b"%d" % context.demand.priority))
        else:
            digest = None if key is None else key.digest
            known = self._identities.get(digest)
            if known is None:
                known = self._identities[digest] = identify(own, body, key, self._catalog)
            context.demand, profile, _ = known
            context.cache = self._cache_wish
        if self._traces:
            context.trace, context.span_id = context.trace or begun(), secrets.token_hex(8)
        if context.demand.tenant:
            self._arrived(context.demand.tenant)
        return profile

    def _memory(self, context: RequestContext) -> Memory:
        key = context.key
        owner, is_admin = (None, True) if key is None else (key.id, KeyScope.ADMIN in key.scopes)
        return Memory(self._responses, self._bodies, self._body_limit, owner, is_admin, context.response, context)

    def _tell_limits(self, context: RequestContext, taking: int = 0) -> None:
        """Let every response say what is left; a stream that waits for its model may begin before it is charged."""
        others = (header for header in context.extra if not header[0].startswith(RATE_PREFIX))
        told = rate_headers(self._engine.standings(context.demand.accounts), taking)
        context.extra = [*others, *told]

    # ------------------------------------------------------------------------------------------- demand, ticket, forward

    async def _answer(
        self, scope: Scope, send: Send, context: RequestContext, target: Target, client: CancelOnDisconnect
    ) -> None:
        """Wait for a worker and forward the request; retry once if the worker turns out to have ended.

        A stream's client gets keep-alives while it waits; after the first one, failures go in-band.
        """
        if context.demand.accounts:
            self._tell_limits(context, taking=1)
        keepalive = self._keepalive(scope, send, context, target)
        following: Target | None = target
        try:
            while following is not None:
                following = await self._try(scope, send, context, following, client, keepalive)
        except LlmuxError as error:
            if keepalive is None or not keepalive.started:
                raise
            context.fail(error)
            await keepalive.fail(error)
        finally:
            if keepalive is not None and keepalive.started:
                context.begun = keepalive.content_type

    async def _try(
        self,
        scope: Scope,
        send: Send,
        context: RequestContext,
        target: Target,
        client: CancelOnDisconnect,
        keepalive: Keepalive | None,
    ) -> Target | None:
        """Let this model answer. Returns whom to ask instead if it can't and a task says who else may; None: it is over."""
        try:
            try:
                await self._attempt(scope, send, context, target, client, keepalive)
            except WorkerAnswerError as error:
                alone = self._targets.shared_contexts.get(target.model, 0) + 1
                if not is_crowded(error) or target.tokens == alone or not target.body.is_there:
                    raise
                target.tokens = alone
                await self._attempt(scope, send, context, target, client, keepalive)
            except UnreachableError:
                if context.ticket is None or not await self._engine.may_go_to_another(context.ticket, PATIENCE_S):
                    raise
                context.waits.append(Wait.lost(target.model, context.ticket.admitted, self._engine.clock()))
                await self._attempt(scope, send, context, target, client, keepalive)
        except LlmuxError as error:
            ladder = target.ladder
            if ladder is None or context.outcome.started or (following := await ladder.after(error)) is None:
                raise
            context.outcome, context.model = Outcome(), following.model
            if context.demand.accounts:
                self._tell_limits(context, taking=1)
            return following
        finally:
            if target.ladder is not None:
                target.body.release()
        return None

    def _keepalive(self, scope: Scope, send: Send, context: RequestContext, target: Target) -> Keepalive | None:
        dialect, key = context.dialect, context.key
        if not (context.stream and target.is_known):
            return None
        news = None
        first_s = self._keepalive_s  # the response's headers go out then
        by_default = self._catalog.server.load_feedback
        is_told = by_default if key is None or key.load_feedback is None else key.load_feedback
        reasoning = dialect.reasoning(context.path)
        if reasoning is not None and load_feedback.is_wanted(head_of(scope).own, is_told):
            news, first_s = LoadNews(self._engine, context, reasoning), min(first_s, NEWS_AFTER_S)
        first_at = asyncio.get_running_loop().time() + first_s
        headers = [(b"x-request-id", context.request_id), processing_ms(context.arrived_at, first_at), *context.extra]
        if self._cache_headers:
            headers += [*self._cache_headers, (b"x-queue-wait-ms", b"%d" % ((first_at - context.arrived_at) * 1000))]
        content_type = SSE if target.translation is None else target.translation.stream_content_type
        return Keepalive(send, headers, dialect, interval_s=self._keepalive_s, content_type=content_type, news=news)

    async def _attempt(
        self,
        scope: Scope,
        send: Send,
        context: RequestContext,
        target: Target,
        client: CancelOnDisconnect,
        keepalive: Keepalive | None,
    ) -> None:
        # 4.
        if scope["method"] == "GET" and target.endpoint.only_looks and client_of(scope) is None:
            await self._look(scope, send, context, target, keepalive)
            return
        ticket = context.ticket = await self._admitted(context, target, client, keepalive)
        assert ticket.upstream is not None
        gathered = Gathered(self._bodies, self._body_limit)
        served = True
        try:
            # 5.
            while await self._forward(scope, send, context, target, ticket, gathered, keepalive):
                pass
        except LlmuxError as error:
            is_refused = is_crowded(error) or (target.ladder is not None and is_overflow(error))
            served = not (is_refused or isinstance(error, UnreachableError))  # whoever answers is charged for it
            raise
        finally:
            # 6.
            gathered.release()
            if target.mending is not None:
                target.mending.end(context.outcome.status)
                target.mending = None
            self._engine.finish(ticket, tokens_of(context.demand.accounts, context.outcome), served=served)

    async def _look(
        self, scope: Scope, send: Send, context: RequestContext, target: Target, keepalive: Keepalive | None
    ) -> None:
        """Let a worker that is there say what it does. Raises InvalidRequestError where none is."""
        assert context.ticket_id is not None
        context.ticket = self._engine.look(context.ticket_id, target.model)
        if context.ticket is None:
            message = f"{context.name} is not loaded, and GET {context.path} loads no model. Load it first: llmux load {context.name}"
            raise InvalidRequestError(message, code="model_not_loaded")
        gathered = Gathered(self._bodies, self._body_limit)
        try:
            await self._forward(scope, send, context, target, context.ticket, gathered, keepalive)
        finally:
            gathered.release()

    def _forward(
        self,
        scope: Scope,
        send: Send,
        context: RequestContext,
        target: Target,
        ticket: Ticket,
        gathered: Gathered,
        keepalive: Keepalive | None,
    ) -> Awaitable[bool]:
        """Send it. True: its worker refuses it, and it can be sent again, changed."""
        assert ticket.upstream is not None
        headers = head_of(scope).worker_headers(context.dialect.credential_headers)
        if context.span_id and context.trace is not None:
            kept = [field for field in headers if field[0] != TRACE]
            headers = [*kept, (TRACE, context.trace.header(context.span_id))]
        if scope["method"] == "GET" and (tunnelled := client_of(scope)) is not None:
            return tunnel(
                scope,
                tunnelled,
                context.outcome,
                upstream=ticket.upstream,
                target=target.path,
                headers=headers,
                request_id=context.request_id,
                first_byte_s=self._first_byte_s,
            )
        sent = target if target.mending is None else target.mending
        own = [
            (b"x-queue-wait-ms", b"%d" % (ticket.queued_s * 1000)),
            *(() if target.ladder is None else target.ladder.headers),
            *(() if context.cache is None or target.reuses else NOTHING_REUSED),
            *context.extra,
        ]
        return forward(
            scope,
            send,
            context.outcome,
            upstream=ticket.upstream,
            target=target.path,
            headers=headers,
            body=sent.body,
            dialect=context.dialect,
            filters=self._filters(scope, context, target, own),
            gathered=gathered,
            as_called=CANONICAL if target.translation is None else target.translation.names,
            request_id=context.request_id,
            extra_headers=own,
            ignored=sent.ignored,
            arrived_at=context.arrived_at,
            sse_started=keepalive is not None and keepalive.started,
            first_byte_s=self._first_byte_s,
            explain=partial(self._explained, context),
            raises=is_crowded if target.ladder is None else _is_for_another,
            mend=partial(self._targets.mend, target),
            end=target.end,
        )

    def _filters(self, scope: Scope, context: RequestContext, target: Target, own: Headers) -> Sequence[Filter]:
        """For an answer, in their order; `own` are its other headers."""
        filters: list[Filter] = []
        if context.cache is not None:
            filters.append(CacheReport(self._cache_headers, {name for name, _ in own}))
        if context.path in PICTURE_PATHS:
            filters.append(PictureLinks(self._pictures, scope, self._public_url))
        if target.names is not None:
            filters.append(Rename(target.names))
        if target.completion is not None:
            filters.append(Repair(target.completion))
        if target.translation is not None:
            filters.append(Translate(target.translation))
        return filters

    async def _explained(self, context: RequestContext, error: LlmuxError) -> LlmuxError:
        """`error`, for a client that can read it with the reason why the worker ended, if it did."""
        if error.code != "upstream_broken" or not context.outcome.stream_type or context.ticket is None:
            return error
        why = await self._engine.why_ended(context.ticket, WHY_S)
        return error if why is None else UpstreamError(f"{error.message[:-1]}: {why}.", code=error.code)

    async def _admitted(
        self, context: RequestContext, target: Target, client: CancelOnDisconnect, keepalive: Keepalive | None
    ) -> Ticket:
        """Its place at a worker, at once or after a wait. Raises LlmuxError."""
        assert context.ticket_id is not None
        context.ticket = None
        try:
            ticket = self._engine.ask(context.ticket_id, target.model, self._demand(context, target), client)
            if ticket.upstream is None:
                await self._wait(ticket, context, target.body, keepalive)
        except BaseException:
            if context.demand.accounts:
                self._tell_limits(context)
            raise
        return ticket

    async def _wait(self, ticket: Ticket, context: RequestContext, body: HeldBody, keepalive: Keepalive | None) -> None:
        assert context.name is not None
        is_admitted = False
        if body.may_spill:
            body.wait()
        try:
            async with keepalive or contextlib.nullcontext():
                await self._engine.admitted(ticket, context.waits, context.name)
                is_admitted = True
        except BaseException:
            if is_admitted:  # the client disconnected while the last keep-alive was being cancelled
                self._engine.finish(ticket)
            raise
        if body.may_spill:
            body.run()

    def _demand(self, context: RequestContext, target: Target) -> Demand:
        """What it asks of this model now. Raises BudgetError when its time is over."""
        demand = context.demand
        if target.prefix is not None:
            demand = replace(demand, prefix=target.prefix)
        if target.tokens:
            demand = replace(demand, tokens=target.tokens)
        if target.ladder is not None:
            times = (demand.keep_alive_s, target.ladder.task.config.keep_alive_s)
            longest_s = max((time_s for time_s in times if time_s is not None), default=None)
            demand = replace(demand, keep_alive_s=longest_s)
        if context.budget_s is None:
            return demand
        left_s = context.arrived_at + context.budget_s - self._engine.clock()
        if left_s <= 0:
            raise BudgetError(f"The budget of {context.budget_s:g} s was over before {context.name} could answer.")
        return replace(demand, budget_s=left_s, answers=self._answers.of(target.model, context.path))


def _is_for_another(error: LlmuxError) -> bool:
    """May another candidate of the task answer what its worker refused so, or the same worker later?"""
    return is_overflow(error) or is_crowded(error)


async def _open(raw: Bytes, scope: Scope) -> Body:
    """The body as what it is said to be. Raises InvalidRequestError."""
    content_type = head_of(scope).media_type()
    if content_type[:10].lower() == b"multipart/":
        return await read_form(raw, content_type)
    if not raw:
        return Body()
    return await open_json(raw, content_type)
