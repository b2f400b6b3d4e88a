"""The stage that admits a request to a worker, at once or after a wait."""

from __future__ import annotations

import asyncio
import contextlib

from supervisor.catalog import Catalog
from supervisor.core.demand import Demand
from supervisor.engine.engine import Engine
from supervisor.engine.ticket import Ticket
from supervisor.errors import BudgetError, InvalidRequestError
from supervisor.gateway.answer_times import AnswerLog
from supervisor.gateway.filters.cache_report import NO_CACHE_REPORT
from supervisor.gateway.forward import processing_ms
from supervisor.gateway.identity.rate_headers import PREFIX as RATE_PREFIX
from supervisor.gateway.identity.rate_headers import rate_headers
from supervisor.gateway.keepalive import LOAD_STATUS_AFTER_S, SSE, Keepalive, LoadStatusEvents
from supervisor.gateway.request import Request
from supervisor.gateway.response_cycle import ResponseCycle


class Admitting:
    """The stage for one catalog."""

    def __init__(self, engine: Engine, catalog: Catalog, answers: AnswerLog) -> None:
        self._engine = engine
        self._answers = answers
        self._load_feedback = catalog.server.load_feedback
        self._keepalive_s = catalog.limits.keepalive_s
        self._reports_caches = catalog.server.reports_caches

    async def __call__(self, cycle: ResponseCycle) -> None:
        """Set the attempt's ticket, once the model's worker has room for the request. Raises LlmuxError."""
        request = cycle.request
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
            if attempt.tokens or attempt.prefix is not None or request.budget_s is not None or cycle.ladder is not None:
                demand = self._demand_of(cycle)
            ticket = self._engine.ask(request.ticket_id, attempt.model, demand, cycle.client)
            if ticket.upstream is None:
                await self._wait_for_ticket(cycle, ticket)
        except BaseException:
            if request.demand.accounts:
                self.add_rate_headers(request)
            raise
        attempt.ticket = ticket

    async def _wait_for_ticket(self, cycle: ResponseCycle, ticket: Ticket) -> None:
        """Wait for the ticket. A stream's client gets keep-alives meanwhile; after the first one, errors are sent in the stream."""
        request, body = cycle.request, cycle.request.attempt.body
        assert request.name is not None
        is_admitted = False
        if cycle.keepalive is None and request.stream and request.attempt.is_known:
            cycle.keepalive = self._make_keepalive(cycle)
        cycle.client.wait_long()
        if body.may_spill:
            body.wait()
        try:
            async with cycle.keepalive or contextlib.nullcontext():
                await self._engine.admitted(ticket, request.waits, request.name)
                is_admitted = True
        except BaseException:
            if is_admitted:  # the client disconnected while the last keep-alive was being cancelled
                self._engine.finish(ticket)
            raise
        if body.may_spill:
            body.run()

    def _make_keepalive(self, cycle: ResponseCycle) -> Keepalive:
        request, key = cycle.request, cycle.request.key
        dialect, attempt = request.dialect, request.attempt
        load_status = None
        first_s = self._keepalive_s  # the response's headers go out then
        is_shown = self._load_feedback if key is None or key.load_feedback is None else key.load_feedback
        reasoning = dialect.reasoning(request.path)
        if reasoning is not None and (is_shown if cycle.wants_load_status is None else cycle.wants_load_status):
            load_status, first_s = LoadStatusEvents(self._engine, request, reasoning), min(first_s, LOAD_STATUS_AFTER_S)
        first_at = asyncio.get_running_loop().time() + first_s
        headers = [(b"x-request-id", request.request_id), processing_ms(request.arrived_at, first_at), *request.extra]
        if self._reports_caches:
            headers += [*NO_CACHE_REPORT, (b"x-queue-wait-ms", b"%d" % ((first_at - request.arrived_at) * 1000))]
        content_type = SSE if attempt.translation is None else attempt.translation.stream_content_type
        return Keepalive(
            cycle.send,
            headers,
            dialect,
            interval_s=self._keepalive_s,
            content_type=content_type,
            load_status=load_status,
        )

    def add_rate_headers(self, request: Request, taking: int = 0) -> None:
        """Set the response headers that report the rest of the client's limits.

        `taking`: requests that are not charged yet. The response to a stream may begin before its request is charged.
        """
        others = (header for header in request.extra if not header[0].startswith(RATE_PREFIX))
        rates = rate_headers(self._engine.standings(request.demand.accounts), taking)
        request.extra = [*others, *rates]

    def _demand_of(self, cycle: ResponseCycle) -> Demand:
        """The demand of this attempt on its model. Raises BudgetError when the request's time is over."""
        request, attempt = cycle.request, cycle.request.attempt
        demand = request.demand
        keep_alive_s, left_s, answers = demand.keep_alive_s, None, None
        if cycle.ladder is not None:
            times = (keep_alive_s, cycle.ladder.task.config.keep_alive_s)
            keep_alive_s = max((time_s for time_s in times if time_s is not None), default=None)
        if request.budget_s is not None:
            left_s = request.arrived_at + request.budget_s - self._engine.clock()
            if left_s <= 0:
                raise BudgetError(f"The budget of {request.budget_s:g} s was over before {request.name} could answer.")
            assert attempt.model is not None
            answers = self._answers.of(attempt.model, request.path)
        return Demand(
            demand.priority,
            demand.tenant,
            demand.accounts,
            keep_alive_s=keep_alive_s,
            budget_s=left_s,
            answers=answers,
            prefix=attempt.prefix,
            tokens=attempt.tokens,
            weight=demand.weight,
        )
