"""The pipeline of an inference request: one list of stages.

| Stage | Work |
| --- | --- |
| body | reads the body within its limits, and parses it once |
| conversation | puts earlier turns in front of the request; a request that the daemon answers itself leaves here |
| identity | finds the request's tenant and priority, and reads llmux's other headers |
| target | finds the model, checks the request, and makes the worker's request: media, rewrite, translation |
| copy | begins the copy of both bodies, for models with `keep_bodies` |
| admit | waits until a worker has room, if need be |
| send | forwards the request, and its answer back through the filters |

The server checks the key before the first stage. The request enters the list of requests in flight between `copy` and `admit`:
from then on it has a number, is shown, and can be cancelled. After the last stage it leaves the list and is recorded,
even if it failed. `admit` and `send` are an attempt. There is another attempt if a worker ended too early, or if a task has a
further candidate and nothing was sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

from supervisor.catalog import Catalog
from supervisor.catalog.keys import Scope as KeyScope
from supervisor.core.types import TicketId
from supervisor.engine.engine import Engine
from supervisor.engine.ticket import HandedOverError
from supervisor.engine.waits import WaitTrace
from supervisor.errors import LlmuxError, UnreachableError
from supervisor.gateway.admit import Admitting
from supervisor.gateway.answer_times import AnswerLog
from supervisor.gateway.attempt import Attempt
from supervisor.gateway.body.body import Body, read_body
from supervisor.gateway.body.form import read_form
from supervisor.gateway.body.json_body import open_json
from supervisor.gateway.dialect import ForDaemonError
from supervisor.gateway.disconnect import CancelOnDisconnect, ClientDisconnectedError, Receive, Scope, Send
from supervisor.gateway.filters.body_log import BodyLog, Capture
from supervisor.gateway.filters.stored_conversation import ConversationStore
from supervisor.gateway.forward import break_off, send_refusal
from supervisor.gateway.identity.identity import Identifying, wants_load_feedback
from supervisor.gateway.in_flight import InFlight
from supervisor.gateway.request import Request
from supervisor.gateway.response_cycle import ResponseCycle, Stages
from supervisor.gateway.route.caching import CacheSalts
from supervisor.gateway.route.context_use import ContextUse
from supervisor.gateway.route.prepare import Preparing
from supervisor.gateway.route.routes import Routes
from supervisor.gateway.send import Sending, is_for_another, last_filters
from supervisor.gateway.upstream_error import WorkerAnswerError, is_crowded
from supervisor.host.store.picture_store import PictureStore
from supervisor.host.store.request_buffer import BodyBudget, RequestBuffer
from supervisor.host.store.response_store import ResponseStore

PATIENCE_S: Final = 5.0
"""The longest time in which a busy machine notices that an unreachable worker has ended. Nothing was sent to that worker, so
the request can be sent again."""


class Gateway:
    """Serves one catalog; a reload makes another gateway."""

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
        cache_salts: CacheSalts,
        responses: ResponseStore,
        pictures: PictureStore,
        contexts: ContextUse,
        body_log: BodyLog | None = None,
    ) -> None:
        """`arrived` counts a tenant's request, and raises RateLimitError while the tenant has to pause.

        `may_fall_back`: may tasks fall back to remote models?
        """
        self.routes = Routes(catalog)
        preparing = Preparing(
            self.routes, engine, catalog.server.media, bodies, cache_salts, pictures, contexts, may_fall_back
        )
        self._admit = Admitting(engine, catalog, answers)
        self.arrival_stages: Stages = (
            self._read_body,
            self._prepend_conversation,
            Identifying(catalog, arrived),
            preparing,
        )
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
            self.arrival_stages = (*self.arrival_stages, self._start_capture)

    async def __call__(self, scope: Scope, receive: Receive, send: Send, request: Request) -> None:
        """Serve one request. Raises LlmuxError if nothing was sent yet, else ResponseBrokenError: see `break_off`.

        Raises ForDaemonError for a request that the daemon answers itself; `request.waiting` then has its body.
        """
        request.path = scope["path"]
        cycle = ResponseCycle(scope, receive, send, request, RequestBuffer(self._bodies))
        is_for_daemon = False
        try:
            for stage in self.arrival_stages:
                await stage(cycle)
            with self._register(cycle):
                await self._run_attempts(cycle)
        except ForDaemonError:
            is_for_daemon = True
            request.waiting, cycle.request_buffer = cycle.request_buffer, RequestBuffer()
            raise
        except LlmuxError as error:
            if not await self._break_off(cycle, error):
                raise
        except ClientDisconnectedError:
            request.failure, request.failed_message = "client_gone", "The client closed its connection."
            raise
        except HandedOverError:
            request.failure, request.failed_message = "handed_over", "Another daemon took over and answers it."
            request.is_begun = cycle.is_begun
            # The server relays the body, and then releases it.
            request.waiting, cycle.request_buffer = cycle.request_buffer, RequestBuffer()
            raise
        finally:
            cycle.release()
            if not is_for_daemon:
                self._requests.finished(request)
            if cycle.capture is not None and self._body_log is not None:
                model = request.attempt.model
                if model in self._kept_models:
                    self._body_log.keep(model, str(request.ticket_id), cycle.capture)

    # ------------------------------------------------------------------------------------------------------------ arrival

    async def _read_body(self, cycle: ResponseCycle) -> None:
        """Read and parse the body. Raises TooLargeError, UnavailableError, InvalidRequestError and ClientDisconnectedError."""
        raw = await read_body(cycle.scope, cycle.receive, self._body_limit, cycle.request_buffer)
        cycle.request_buffer.keep(raw)
        content_type = cycle.head.media_type()
        if content_type[:10].lower() == b"multipart/":
            cycle.body = await read_form(raw, content_type)
        else:
            cycle.body = await open_json(raw, content_type) if raw else Body()

    async def _prepend_conversation(self, cycle: ResponseCycle) -> None:
        """Put earlier turns in front of the request. Raises ForDaemonError, InvalidRequestError."""
        request, key = cycle.request, cycle.request.key
        shape = self._responses_as if key is None or key.responses is None else key.responses
        dialect = request.dialect = request.dialect.spoken_with(shape)
        if not dialect.reads_fields:
            return
        fields = cycle.body.fields
        if (wanted := dialect.daemon_scope(request.path, fields)) is not None:
            raise ForDaemonError(wanted, fields)
        owner, is_admin = (None, True) if key is None else (key.id, KeyScope.ADMIN in key.scopes)
        conversations = ConversationStore(self._responses, self._bodies, owner, is_admin, request.response, request)
        cycle.body, cycle.stored_conversation = await dialect.conversation(request.path, cycle.body, conversations)

    async def _start_capture(self, cycle: ResponseCycle) -> None:
        attempt = cycle.request.attempt
        if attempt.model in self._kept_models or cycle.ladder is not None:
            cycle.capture = Capture((attempt.body.source or attempt.body).data)

    def _register(self, cycle: ResponseCycle) -> CancelOnDisconnect:
        """Add the request to those in flight. The block ends when the client disconnects, or an operator cancels the request."""
        request = cycle.request
        if cycle.ladder is None:
            del cycle.body  # only a task's next candidate would need it besides the worker's request
        request.ticket_id = TicketId(f"{next(self._numbers)}")
        request.entered_at = self._engine.clock()
        cycle.client = CancelOnDisconnect(cycle.scope)
        self._requests.begin(request, cycle.client)
        if request.demand.accounts:
            self._admit.add_rate_headers(request, taking=1)
        may_wait = request.stream and request.attempt.is_known and cycle.head.own
        if may_wait and request.dialect.reasoning(request.path) is not None:
            cycle.wants_load_status = wants_load_feedback(cycle.head.own)
        return cycle.client

    async def _run_attempts(self, cycle: ResponseCycle) -> None:
        """Make attempts until one is answered, or no other is possible. Raises LlmuxError if nothing was sent."""
        request = cycle.request
        while True:
            try:
                for stage in self.attempt_stages:
                    await stage(cycle)
            except LlmuxError as error:
                following = None if request.attempt.outcome.started else await self._next_attempt(cycle, error)
                if following is not None:
                    request.attempt = following
                    continue
                if isinstance(error, WorkerAnswerError) and self._may_send_refusal(cycle, error):
                    await send_refusal(cycle, error, last_filters(cycle))
                elif not await self._break_off(cycle, error):
                    raise
            return

    async def _next_attempt(self, cycle: ResponseCycle, error: LlmuxError) -> Attempt | None:
        """The next attempt after one that failed with `error` and sent nothing; None: no other is possible."""
        request, attempt = cycle.request, cycle.request.attempt
        ticket, model = attempt.ticket, attempt.model
        assert model is not None
        if not attempt.was_sent_again:
            if is_crowded(error) and attempt.body.is_there:  # running alone, the request has room
                alone = attempt.again()
                alone.tokens = self.routes.facts[model].shared_context + 1
                return alone
            is_lost = isinstance(error, UnreachableError)
            if ticket is not None and is_lost and await self._engine.may_go_to_another(ticket, PATIENCE_S):
                request.waits.append(WaitTrace.lost(model, ticket.admitted, self._engine.clock()))
                return attempt.again()
        is_answer = isinstance(error, WorkerAnswerError) and not is_for_another(cycle, error)
        if cycle.ladder is None or is_answer:
            return None
        following = await cycle.ladder.after(error)
        if following is not None:
            attempt.body.release()
            if request.demand.accounts:
                self._admit.add_rate_headers(request, taking=1)
        return following

    async def _break_off(self, cycle: ResponseCycle, error: LlmuxError) -> bool:
        """Record the error, and end a response that has begun with it. False: the response hasn't begun."""
        request = cycle.request
        request.fail(error)
        if not (cycle.is_begun or request.attempt.outcome.started):
            return False
        await break_off(cycle, error, last_filters(cycle))
        return True

    def _may_send_refusal(self, cycle: ResponseCycle, error: WorkerAnswerError) -> bool:
        """Does the client get the worker's error answer itself?"""
        return error.refusal is not None and not (cycle.is_begun or is_for_another(cycle, error))
