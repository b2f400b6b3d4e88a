"""The way of an inference request: one list of stages.

| Stage | What it does |
| --- | --- |
| body | reads the body within its limits, and opens it once |
| conversation | puts earlier turns in front of it; a request for the daemon itself leaves here |
| identity | finds out who asks, how urgently, and what else the headers say to llmux |
| target | finds the model, checks that it may be asked this, and makes what its worker gets: media, rewrite, translation |
| copy | begins the copy of both bodies, for models that keep one |
| admit | gets a place at a worker, at once or after a wait |
| forward | passes the request on, and its answer back through the filters |

Before them the server has checked the key, after them the request leaves the list in flight and is recorded, whatever ended
it. Between `copy` and `admit` it is entered: from then on it has a number, is shown, and can be cancelled. `admit` and `forward`
are an attempt: there is another one where a worker ended too early, or where a task has a further candidate and nothing was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from supervisor.catalog import Catalog, Task
from supervisor.catalog.keys import Scope as KeyScope
from supervisor.core.demand import Demand
from supervisor.core.types import TicketId
from supervisor.engine.engine import Engine
from supervisor.engine.leaving import HandedOverError
from supervisor.engine.ticket import Ticket
from supervisor.engine.waits import Wait
from supervisor.errors import BudgetError, InvalidRequestError, LlmuxError, UnreachableError, UpstreamError
from supervisor.gateway.answer_times import AnswerLog
from supervisor.gateway.attempt import Attempt
from supervisor.gateway.body.body import BUDGET, Body, read_body
from supervisor.gateway.body.form import read_form
from supervisor.gateway.body.json_body import open_json
from supervisor.gateway.dialect import ForDaemonError
from supervisor.gateway.disconnect import CancelOnDisconnect, ClientDisconnectedError, Receive, Scope, Send
from supervisor.gateway.exchange import Exchange, Stages
from supervisor.gateway.filters.body_log import BodyLog, Capture
from supervisor.gateway.filters.cache_report import NOTHING_REUSED, NOTHING_TOLD, CacheReport
from supervisor.gateway.filters.filters import Filter
from supervisor.gateway.filters.model_name import Rename
from supervisor.gateway.filters.picture_links import PATHS as PICTURE_PATHS
from supervisor.gateway.filters.picture_links import PictureLinks
from supervisor.gateway.filters.translation import Repair, Translate
from supervisor.gateway.filters.turn import Memory
from supervisor.gateway.forward import break_off, forward, processing_ms, send_refusal
from supervisor.gateway.head import PRIORITY, TRACE
from supervisor.gateway.identity import budget, load_feedback
from supervisor.gateway.identity.accounts import tokens_of
from supervisor.gateway.identity.identity import Identity, identify
from supervisor.gateway.identity.rate_headers import PREFIX as RATE_PREFIX
from supervisor.gateway.identity.rate_headers import rate_headers
from supervisor.gateway.identity.trace_context import begun, trace_of
from supervisor.gateway.in_flight import InFlight
from supervisor.gateway.keepalive import NEWS_AFTER_S, SSE, Keepalive
from supervisor.gateway.load_news import LoadNews
from supervisor.gateway.request import Request
from supervisor.gateway.route.caching import CacheWish, Salts, wish_of
from supervisor.gateway.route.context_use import ContextUse
from supervisor.gateway.route.ladder import Ladder
from supervisor.gateway.route.mending import Mending
from supervisor.gateway.route.prepare import Preparing
from supervisor.gateway.route.routes import Routes
from supervisor.gateway.tunnel import client_of, tunnel
from supervisor.gateway.upstream_error import WorkerAnswerError, is_crowded, is_overflow
from supervisor.io.held_body import BodyBudget, Gathered, HeldBody
from supervisor.io.picture_store import PictureStore
from supervisor.io.response_store import ResponseStore

PATIENCE_S: Final = 5.0
"""How long a busy machine may need to notice that an unreachable worker has ended. Nothing was sent to it, so the request
can be sent again."""

WHY_S: Final = 2.0  # within which it is known why a worker ended that broke a stream off


class Gateway:
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
        """`arrived` counts a tenant's request, and raises RateLimitError in a pause. `may_fall_back`: may tasks, to remotes?"""
        server, limits = catalog.server, catalog.limits
        self.routes = Routes(catalog)
        self.arrival: Stages = (self._body, self._conversation, self._identity, self._target)
        self.attempt: Stages = (self._admit, self._forward)
        self._engine = engine
        self._catalog = catalog
        self._requests = requests
        self._arrived = arrived
        self._answers = answers
        self._may_fall_back = may_fall_back
        self._bodies = bodies
        self._responses = responses
        self._pictures = pictures
        self._preparing = Preparing(self.routes, engine, server.media, bodies, salts, pictures, contexts)
        self._body_log = body_log
        keeping = () if body_log is None else (m.id for m in catalog.models.values() if m.config.keep_bodies)
        self._kept_models = frozenset(keeping)
        if self._kept_models:
            self.arrival = (*self.arrival, self._copy)
        self._body_limit = limits.body_mib * 1024 * 1024
        self._keepalive_s = limits.keepalive_s
        self._first_byte_s = limits.first_byte_s
        self._identities: dict[bytes | None, Identity] = {}  # of keys, for requests that say nothing else
        is_runner = server.health == "runner"  # whose clients look for them in every answer
        self._cache_wish = CacheWish() if is_runner else None
        self._cache_headers = NOTHING_TOLD if is_runner else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send, request: Request) -> None:
        """Serve one request. Raises LlmuxError if nothing was sent yet, else ResponseBrokenError: see `break_off`.

        Raises ForDaemonError for one that the daemon answers itself, by its body; `request.waiting` is that.
        """
        request.path = scope["path"]
        exchange = Exchange(scope, receive, send, request, HeldBody(self._bodies))
        is_for_daemon = False
        try:
            for stage in self.arrival:
                await stage(exchange)
            with self._entered(exchange):
                while True:
                    try:
                        for stage in self.attempt:
                            await stage(exchange)
                        break
                    except LlmuxError as error:
                        if await self._may_try_again(exchange, error):
                            continue
                        if not isinstance(error, WorkerAnswerError) or not self._may_pass(exchange, error):
                            raise
                        await send_refusal(exchange, error, self._last_filters(exchange))
                        break
        except ForDaemonError:
            is_for_daemon = True
            request.waiting, exchange.held = exchange.held, HeldBody()
            raise
        except LlmuxError as error:
            request.fail(error)
            if not (exchange.is_begun or request.attempt.outcome.started):
                raise
            await break_off(exchange, error, self._last_filters(exchange))
        except ClientDisconnectedError:
            request.failure, request.failed_message = "client_gone", "The client closed its connection."
            raise
        except HandedOverError:
            request.failure, request.failed_message = "handed_over", "Another daemon took over and answers it."
            request.is_begun = exchange.is_begun
            request.waiting, exchange.held = exchange.held, HeldBody()  # who sends it there releases it
            raise
        finally:
            exchange.release()
            if not is_for_daemon:
                self._requests.finished(request)
            if exchange.capture is not None and self._body_log is not None:
                model = request.attempt.model
                if model in self._kept_models:
                    self._body_log.keep(model, str(request.ticket_id), exchange.capture)

    # ------------------------------------------------------------------------------------------------------------ arrival

    async def _body(self, exchange: Exchange) -> None:
        """Raises TooLargeError, UnavailableError, InvalidRequestError and ClientDisconnectedError."""
        raw = await read_body(exchange.scope, exchange.receive, self._body_limit, exchange.held)
        exchange.held.keep(raw)
        content_type = exchange.head.media_type()
        if content_type[:10].lower() == b"multipart/":
            exchange.body = await read_form(raw, content_type)
        else:
            exchange.body = await open_json(raw, content_type) if raw else Body()

    async def _conversation(self, exchange: Exchange) -> None:
        """Raises ForDaemonError, InvalidRequestError."""
        request, key = exchange.request, exchange.request.key
        shape = self._catalog.server.responses if key is None or key.responses is None else key.responses
        dialect = request.dialect = request.dialect.spoken_with(shape)
        if not dialect.reads_fields:
            return
        fields = exchange.body.fields
        if (wanted := dialect.daemon_scope(request.path, fields)) is not None:
            raise ForDaemonError(wanted, fields)
        owner, is_admin = (None, True) if key is None else (key.id, KeyScope.ADMIN in key.scopes)
        memory = Memory(self._responses, self._bodies, owner, is_admin, request.response, request)
        exchange.body, exchange.turn = await dialect.turn(request.path, exchange.body, memory)

    async def _identity(self, exchange: Exchange) -> None:
        """Raises InvalidRequestError, and RateLimitError in a pause."""
        request, body, own = exchange.request, exchange.body, exchange.head.own
        key = request.key
        if own or not body.is_silent:
            request.demand, exchange.profile, is_lowered = identify(own, body, key, self._catalog)
            for name, value in own:
                if name == TRACE:
                    request.trace = trace_of(value)
            request.cache = wish_of(own) or self._cache_wish
            request.budget_s = budget.budget_s(own, body.said(BUDGET))
            if is_lowered:
                request.extra.append((PRIORITY, b"%d" % request.demand.priority))
        else:
            digest = None if key is None else key.digest
            known = self._identities.get(digest)
            if known is None:
                known = self._identities[digest] = identify(own, body, key, self._catalog)
            request.demand, exchange.profile, _ = known
            request.cache = self._cache_wish
        if self._catalog.server.traces:
            request.trace, request.span_id = request.trace or begun(), secrets.token_hex(8)
        if request.demand.tenant:
            self._arrived(request.demand.tenant)

    async def _target(self, exchange: Exchange) -> None:
        """Raises LlmuxError."""
        request = exchange.request
        found = self.routes.find(exchange)
        exchange.is_permitted = exchange.body.take_permission()
        if not isinstance(found, Task):
            request.attempt = await self._preparing.attempt(exchange, found)
            return
        if found.config.budget_s is not None:
            request.budget_s = min(request.budget_s or found.config.budget_s, found.config.budget_s)
        build = self._preparing.candidate
        exchange.ladder = Ladder(
            found, self._engine, lambda one: build(exchange, one), allow_cloud_fallback=self._may_fall_back()
        )
        request.attempt = await exchange.ladder.first()

    async def _copy(self, exchange: Exchange) -> None:
        attempt = exchange.request.attempt
        if attempt.model in self._kept_models or exchange.ladder is not None:
            exchange.capture = Capture((attempt.body.source or attempt.body).data)

    def _entered(self, exchange: Exchange) -> CancelOnDisconnect:
        """Enter it among those in flight. The block ends when the client leaves, or an operator cancels it."""
        request = exchange.request
        if exchange.ladder is None:
            del exchange.body  # only what a worker gets is kept, and what a task's next candidate may need
        request.ticket_id = TicketId(f"{next(self._numbers)}")
        request.entered_at = self._engine.clock()
        exchange.client = CancelOnDisconnect(exchange.scope)
        self._requests.begin(request, exchange.client)
        if request.demand.accounts:
            self._tell_limits(request, taking=1)
        may_wait = request.stream and request.attempt.is_known and exchange.head.own
        if may_wait and request.dialect.reasoning(request.path) is not None:
            exchange.wants_news = load_feedback.wish_of(exchange.head.own)
        return exchange.client

    # ------------------------------------------------------------------------------------------------------------ attempt

    async def _admit(self, exchange: Exchange) -> None:
        """Raises LlmuxError."""
        request = exchange.request
        attempt = request.attempt
        assert request.ticket_id is not None
        assert attempt.model is not None
        if attempt.only_looks:
            attempt.ticket = self._engine.look(request.ticket_id, attempt.model)
            if attempt.ticket is None:
                name = request.name
                message = (
                    f"{name} is not loaded, and GET {request.path} loads no model. Load it first: llmux load {name}"
                )
                raise InvalidRequestError(message, code="model_not_loaded")
            return
        try:
            demand = request.demand
            if (
                attempt.tokens
                or attempt.prefix is not None
                or request.budget_s is not None
                or exchange.ladder is not None
            ):
                demand = self._demand(exchange)
            ticket = self._engine.ask(request.ticket_id, attempt.model, demand, exchange.client)
            if ticket.upstream is None:
                await self._wait(exchange, ticket)
        except BaseException:
            if request.demand.accounts:
                self._tell_limits(request)
            raise
        attempt.ticket = ticket

    async def _wait(self, exchange: Exchange, ticket: Ticket) -> None:
        """The client of a stream gets keep-alives meanwhile; after the first one, failures go in-band."""
        request, body = exchange.request, exchange.request.attempt.body
        assert request.name is not None
        is_admitted = False
        if body.may_spill:
            body.wait()
        if exchange.keepalive is None and request.stream and request.attempt.is_known:
            exchange.keepalive = self._keepalive(exchange)
        try:
            async with exchange.keepalive or contextlib.nullcontext():
                await self._engine.admitted(ticket, request.waits, request.name)
                is_admitted = True
        except BaseException:
            if is_admitted:  # the client disconnected while the last keep-alive was being cancelled
                self._engine.finish(ticket)
            raise
        if body.may_spill:
            body.run()

    async def _forward(self, exchange: Exchange) -> None:
        """Raises LlmuxError."""
        request, attempt = exchange.request, exchange.request.attempt
        ticket, outcome = attempt.ticket, attempt.outcome
        assert ticket is not None
        assert ticket.upstream is not None
        if request.span_id and request.trace is not None:
            kept = [field for field in attempt.headers if field[0] != TRACE]
            attempt.headers = [*kept, (TRACE, request.trace.header(request.span_id))]
        attempt.own = [
            (b"x-queue-wait-ms", b"%d" % (ticket.queued_s * 1000)),
            *(() if exchange.ladder is None else exchange.ladder.headers),
            *(() if request.cache is None or attempt.reuses else NOTHING_REUSED),
            *request.extra,
        ]
        filters = self._filters(exchange)
        gathered = Gathered(self._bodies, self._body_limit) if filters else None
        is_served = True
        try:
            if exchange.scope["method"] == "GET" and (client := client_of(exchange.scope)) is not None:
                await tunnel(exchange, client, ticket.upstream, first_byte_s=self._first_byte_s)
            is_over = False
            while not is_over:
                try:
                    await forward(exchange, ticket.upstream, filters, gathered, first_byte_s=self._first_byte_s)
                    is_over = True
                except WorkerAnswerError as error:
                    if outcome.started or self._is_for_another(exchange, error):
                        raise
                    if exchange.mending is None:
                        exchange.mending = Mending(attempt, self._bodies, self._preparing.strict)
                    if not await exchange.mending.mend(attempt, error):
                        raise
        except LlmuxError as error:
            if outcome.started:
                if (why := await self._why(ticket, error, attempt)) is not None:
                    raise UpstreamError(f"{error.message[:-1]}: {why}.", code=error.code) from None
            else:  # whoever answers is charged for it
                is_served = not (self._is_for_another(exchange, error) or isinstance(error, UnreachableError))
            raise
        finally:
            if gathered is not None:
                gathered.release()
            if exchange.mending is not None:
                exchange.mending.end(attempt)
                exchange.mending = None
            if not attempt.only_looks:
                accounts = request.demand.accounts
                self._engine.finish(ticket, tokens_of(accounts, outcome) if accounts else 0, served=is_served)

    async def _may_try_again(self, exchange: Exchange, error: LlmuxError) -> bool:
        """Is it to be tried once more? Then the request has another attempt."""
        request, attempt = exchange.request, exchange.request.attempt
        ticket, model = attempt.ticket, attempt.model
        assert model is not None
        if attempt.outcome.started:
            return False
        if not attempt.was_sent_again:
            if is_crowded(error) and attempt.body.is_there:  # alone, it has room
                request.attempt = attempt.again()
                request.attempt.tokens = self.routes.facts[model].shared_context + 1
                return True
            is_lost = isinstance(error, UnreachableError)
            if ticket is not None and is_lost and await self._engine.may_go_to_another(ticket, PATIENCE_S):
                request.waits.append(Wait.lost(model, ticket.admitted, self._engine.clock()))
                request.attempt = attempt.again()
                return True
        if exchange.ladder is None:
            return False
        following = await exchange.ladder.after(error)
        attempt.body.release()
        if following is None:
            return False
        request.attempt = following
        if request.demand.accounts:
            self._tell_limits(request, taking=1)
        return True

    def _may_pass(self, exchange: Exchange, error: WorkerAnswerError) -> bool:
        """Does the client get the worker's answer as such?"""
        return error.refusal is not None and not (exchange.is_begun or self._is_for_another(exchange, error))

    def _is_for_another(self, exchange: Exchange, error: LlmuxError) -> bool:
        """May another candidate of the task answer what its worker refused so, or the same worker later?"""
        return is_crowded(error) or (exchange.ladder is not None and is_overflow(error))

    async def _why(self, ticket: Ticket, error: LlmuxError, attempt: Attempt) -> str | None:
        """Why the worker ended, if it did, for a client that can read it."""
        if error.code != "upstream_broken" or not attempt.outcome.stream_type:
            return None
        return await self._engine.why_ended(ticket, WHY_S)

    # ------------------------------------------------------------------------------------------------------------- answer

    def _filters(self, exchange: Exchange) -> Sequence[Filter]:
        """For an answer, in their order: each gets what the one before it made."""
        request, attempt = exchange.request, exchange.request.attempt
        filters: list[Filter] = []
        if request.cache is not None:
            filters.append(CacheReport(self._cache_headers, {name for name, _ in attempt.own}))
        if request.path in PICTURE_PATHS:
            filters.append(PictureLinks(self._pictures, exchange.scope, self._catalog.server.public_url))
        if attempt.names is not None:
            filters.append(Rename(attempt.names))
        if attempt.completion is not None:
            filters.append(Repair(attempt.completion))
        if attempt.translation is not None:
            filters.append(Translate(attempt.translation))
        if exchange.turn is not None or exchange.capture is not None:
            filters += self._last_filters(exchange)
        return filters

    def _last_filters(self, exchange: Exchange) -> Sequence[Filter]:
        """Those that get all that the client does, also errors."""
        return [each for each in (exchange.turn, exchange.capture) if each is not None]

    def _keepalive(self, exchange: Exchange) -> Keepalive:
        request, key = exchange.request, exchange.request.key
        dialect, attempt = request.dialect, request.attempt
        news = None
        first_s = self._keepalive_s  # the response's headers go out then
        by_default = self._catalog.server.load_feedback
        is_told = by_default if key is None or key.load_feedback is None else key.load_feedback
        reasoning = dialect.reasoning(request.path)
        if reasoning is not None and (is_told if exchange.wants_news is None else exchange.wants_news):
            news, first_s = LoadNews(self._engine, request, reasoning), min(first_s, NEWS_AFTER_S)
        first_at = asyncio.get_running_loop().time() + first_s
        headers = [(b"x-request-id", request.request_id), processing_ms(request.arrived_at, first_at), *request.extra]
        if self._cache_headers:
            headers += [*self._cache_headers, (b"x-queue-wait-ms", b"%d" % ((first_at - request.arrived_at) * 1000))]
        content_type = SSE if attempt.translation is None else attempt.translation.stream_content_type
        return Keepalive(
            exchange.send, headers, dialect, interval_s=self._keepalive_s, content_type=content_type, news=news
        )

    def _tell_limits(self, request: Request, taking: int = 0) -> None:
        """Let every response say what is left; a stream that waits for its model may begin before it is charged."""
        others = (header for header in request.extra if not header[0].startswith(RATE_PREFIX))
        told = rate_headers(self._engine.standings(request.demand.accounts), taking)
        request.extra = [*others, *told]

    def _demand(self, exchange: Exchange) -> Demand:
        """What it asks of this model now. Raises BudgetError when its time is over."""
        request, attempt = exchange.request, exchange.request.attempt
        demand = request.demand
        if attempt.prefix is not None:
            demand = replace(demand, prefix=attempt.prefix)
        if attempt.tokens:
            demand = replace(demand, tokens=attempt.tokens)
        if exchange.ladder is not None:
            times = (demand.keep_alive_s, exchange.ladder.task.config.keep_alive_s)
            longest_s = max((time_s for time_s in times if time_s is not None), default=None)
            demand = replace(demand, keep_alive_s=longest_s)
        if request.budget_s is None:
            return demand
        left_s = request.arrived_at + request.budget_s - self._engine.clock()
        if left_s <= 0:
            raise BudgetError(f"The budget of {request.budget_s:g} s was over before {request.name} could answer.")
        assert attempt.model is not None
        return replace(demand, budget_s=left_s, answers=self._answers.of(attempt.model, request.path))
