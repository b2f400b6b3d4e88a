"""The way of an inference request: one list of stages.

| Stage | What it does |
| --- | --- |
| body | reads the body within its limits, and opens it once |
| conversation | puts earlier turns in front of it; a request for the daemon itself leaves here |
| identity | finds out who asks, how urgently, and what else the headers say to llmux |
| target | finds the model, checks that it may be asked this, and makes what its worker gets: media, rewrite, translation |
| copy | begins the copy of both bodies, for models that keep one |
| admit | gets a place at a worker, at once or after a wait |
| send | passes the request on, and its answer back through the filters |

Before them the server has checked the key, after them the request leaves the list in flight and is recorded, whatever ended
it. Between `copy` and `admit` it is entered: from then on it has a number, is shown, and can be cancelled. `admit` and `send`
are an attempt: there is another one where a worker ended too early, or where a task has a further candidate and nothing was sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

from supervisor.catalog import Catalog
from supervisor.catalog.keys import Scope as KeyScope
from supervisor.core.types import TicketId
from supervisor.engine.engine import Engine
from supervisor.engine.leaving import HandedOverError
from supervisor.engine.waits import Wait
from supervisor.errors import LlmuxError, UnreachableError
from supervisor.gateway.admit import Admitting
from supervisor.gateway.answer_times import AnswerLog
from supervisor.gateway.attempt import Attempt
from supervisor.gateway.body.body import Body, read_body
from supervisor.gateway.body.form import read_form
from supervisor.gateway.body.json_body import open_json
from supervisor.gateway.dialect import ForDaemonError
from supervisor.gateway.disconnect import CancelOnDisconnect, ClientDisconnectedError, Receive, Scope, Send
from supervisor.gateway.exchange import Exchange, Stages
from supervisor.gateway.filters.body_log import BodyLog, Capture
from supervisor.gateway.filters.turn import Memory
from supervisor.gateway.forward import break_off, send_refusal
from supervisor.gateway.identity import load_feedback
from supervisor.gateway.identity.identity import Identifying
from supervisor.gateway.in_flight import InFlight
from supervisor.gateway.request import Request
from supervisor.gateway.route.caching import Salts
from supervisor.gateway.route.context_use import ContextUse
from supervisor.gateway.route.prepare import Preparing
from supervisor.gateway.route.routes import Routes
from supervisor.gateway.send import Sending, is_for_another, last_filters
from supervisor.gateway.upstream_error import WorkerAnswerError, is_crowded
from supervisor.io.held_body import BodyBudget, HeldBody
from supervisor.io.picture_store import PictureStore
from supervisor.io.response_store import ResponseStore

PATIENCE_S: Final = 5.0
"""How long a busy machine may need to notice that an unreachable worker has ended. Nothing was sent to it, so the request
can be sent again."""


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
        self.routes = Routes(catalog)
        preparing = Preparing(
            self.routes, engine, catalog.server.media, bodies, salts, pictures, contexts, may_fall_back
        )
        self._admit = Admitting(engine, catalog, answers)
        self.arrival_stages: Stages = (self._body, self._conversation, Identifying(catalog, arrived), preparing)
        self.attempt_stages: Stages = (self._admit, Sending(engine, catalog, bodies, pictures, preparing.strict))
        self._engine = engine
        self._requests = requests
        self._bodies = bodies
        self._responses = responses
        self._body_limit = catalog.limits.body_mib * 1024 * 1024
        self._responses_as = catalog.server.responses
        self._body_log = body_log
        keeping = () if body_log is None else (m.id for m in catalog.models.values() if m.config.keep_bodies)
        self._kept_models = frozenset(keeping)
        if self._kept_models:
            self.arrival_stages = (*self.arrival_stages, self._copy)

    async def __call__(self, scope: Scope, receive: Receive, send: Send, request: Request) -> None:
        """Serve one request. Raises LlmuxError if nothing was sent yet, else ResponseBrokenError: see `break_off`.

        Raises ForDaemonError for one that the daemon answers itself, by its body; `request.waiting` is that.
        """
        request.path = scope["path"]
        exchange = Exchange(scope, receive, send, request, HeldBody(self._bodies))
        is_for_daemon = False
        try:
            for stage in self.arrival_stages:
                await stage(exchange)
            with self._entered(exchange):
                await self._answer(exchange)
        except ForDaemonError:
            is_for_daemon = True
            request.waiting, exchange.held = exchange.held, HeldBody()
            raise
        except LlmuxError as error:
            if not await self._broken_off(exchange, error):
                raise
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
        shape = self._responses_as if key is None or key.responses is None else key.responses
        dialect = request.dialect = request.dialect.spoken_with(shape)
        if not dialect.reads_fields:
            return
        fields = exchange.body.fields
        if (wanted := dialect.daemon_scope(request.path, fields)) is not None:
            raise ForDaemonError(wanted, fields)
        owner, is_admin = (None, True) if key is None else (key.id, KeyScope.ADMIN in key.scopes)
        memory = Memory(self._responses, self._bodies, owner, is_admin, request.response, request)
        exchange.body, exchange.turn = await dialect.turn(request.path, exchange.body, memory)

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
            self._admit.tell_limits(request, taking=1)
        may_wait = request.stream and request.attempt.is_known and exchange.head.own
        if may_wait and request.dialect.reasoning(request.path) is not None:
            exchange.wants_news = load_feedback.wish_of(exchange.head.own)
        return exchange.client

    async def _answer(self, exchange: Exchange) -> None:
        """Try until one attempt is answered, or there is no further one. Raises LlmuxError if nothing was sent."""
        request = exchange.request
        while True:
            try:
                for stage in self.attempt_stages:
                    await stage(exchange)
            except LlmuxError as error:
                following = None if request.attempt.outcome.started else await self._following(exchange, error)
                if following is not None:
                    request.attempt = following
                    continue
                if isinstance(error, WorkerAnswerError) and self._may_pass(exchange, error):
                    await send_refusal(exchange, error, last_filters(exchange))
                elif not await self._broken_off(exchange, error):
                    raise
            return

    async def _following(self, exchange: Exchange, error: LlmuxError) -> Attempt | None:
        """The next attempt after one that ended so and has sent nothing; None: there is none."""
        request, attempt = exchange.request, exchange.request.attempt
        ticket, model = attempt.ticket, attempt.model
        assert model is not None
        if not attempt.was_sent_again:
            if is_crowded(error) and attempt.body.is_there:  # alone, it has room
                alone = attempt.again()
                alone.tokens = self.routes.facts[model].shared_context + 1
                return alone
            is_lost = isinstance(error, UnreachableError)
            if ticket is not None and is_lost and await self._engine.may_go_to_another(ticket, PATIENCE_S):
                request.waits.append(Wait.lost(model, ticket.admitted, self._engine.clock()))
                return attempt.again()
        is_answer = isinstance(error, WorkerAnswerError) and not is_for_another(exchange, error)
        if exchange.ladder is None or is_answer:
            return None
        following = await exchange.ladder.after(error)
        if following is not None:
            attempt.body.release()
            if request.demand.accounts:
                self._admit.tell_limits(request, taking=1)
        return following

    async def _broken_off(self, exchange: Exchange, error: LlmuxError) -> bool:
        """Note the error, and end with it what the client has of an answer. False: it has nothing."""
        request = exchange.request
        request.fail(error)
        if not (exchange.is_begun or request.attempt.outcome.started):
            return False
        await break_off(exchange, error, last_filters(exchange))
        return True

    def _may_pass(self, exchange: Exchange, error: WorkerAnswerError) -> bool:
        """Does the client get the worker's answer as such?"""
        return error.refusal is not None and not (exchange.is_begun or is_for_another(exchange, error))
