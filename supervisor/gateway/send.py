"""The stage that forwards an admitted request to its worker, and the answer back through the filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from supervisor.catalog import Catalog
from supervisor.core.types import ModelId
from supervisor.engine.engine import Engine
from supervisor.engine.ticket import Ticket
from supervisor.errors import LlmuxError, UnreachableError, UpstreamError
from supervisor.gateway.attempt import Attempt
from supervisor.gateway.filters.cache_report import NO_CACHE_REPORT, NOTHING_REUSED, CacheReport
from supervisor.gateway.filters.filters import Filter
from supervisor.gateway.filters.model_name import Rename
from supervisor.gateway.filters.picture_links import PATHS as PICTURE_PATHS
from supervisor.gateway.filters.picture_links import PictureLinks
from supervisor.gateway.filters.translation import Repair, Translate
from supervisor.gateway.forward import forward
from supervisor.gateway.head import TRACE
from supervisor.gateway.identity.accounts import tokens_of
from supervisor.gateway.response_cycle import ResponseCycle
from supervisor.gateway.route.mending import Mending
from supervisor.gateway.tunnel import client_of, tunnel
from supervisor.gateway.upstream_error import WorkerAnswerError, is_crowded, is_overflow
from supervisor.host.store.picture_store import PictureStore
from supervisor.host.store.request_buffer import BodyBudget, Gathered

WHY_S: Final = 2.0  # the time to find out why a worker ended that broke off a stream


class Sending:
    """The stage for one catalog."""

    def __init__(
        self, engine: Engine, catalog: Catalog, bodies: BodyBudget, pictures: PictureStore, strict: set[ModelId]
    ) -> None:
        """`strict`: see `Mending`."""
        self._engine = engine
        self._bodies = bodies
        self._pictures = pictures
        self._strict = strict
        self._public_url = catalog.server.public_url
        self._body_limit = catalog.limits.body_mib * 1024 * 1024
        self._first_byte_s = catalog.limits.first_byte_s
        self._cache_headers = NO_CACHE_REPORT if catalog.server.reports_caches else []

    async def __call__(self, cycle: ResponseCycle) -> None:
        """Send the request, mend it where its worker refuses it, and finish its ticket. Raises LlmuxError."""
        request, attempt = cycle.request, cycle.request.attempt
        ticket, outcome = attempt.ticket, attempt.outcome
        assert ticket is not None
        assert ticket.upstream is not None
        if request.span_id and request.trace is not None:
            kept = [field for field in attempt.headers if field[0] != TRACE]
            attempt.headers = [*kept, (TRACE, request.trace.header(request.span_id))]
        attempt.own = [
            (b"x-queue-wait-ms", b"%d" % (ticket.queued_s * 1000)),
            *(() if cycle.ladder is None else cycle.ladder.headers),
            *(() if request.cache is None or attempt.reuses else NOTHING_REUSED),
            *request.extra,
        ]
        filters = self._answer_filters(cycle)
        gathered = Gathered(self._bodies, self._body_limit) if filters else None
        is_served = True
        try:
            if cycle.scope["method"] == "GET" and (client := client_of(cycle.scope)) is not None:
                await tunnel(cycle, client, ticket.upstream, first_byte_s=self._first_byte_s)
            is_over = False
            while not is_over:
                try:
                    await forward(cycle, ticket.upstream, filters, gathered, first_byte_s=self._first_byte_s)
                    is_over = True
                except WorkerAnswerError as error:
                    if outcome.started or is_for_another(cycle, error):
                        raise
                    if cycle.mending is None:
                        cycle.mending = Mending(attempt, self._bodies, self._strict)
                    if not await cycle.mending.mend(attempt, error):
                        raise
        except LlmuxError as error:
            if outcome.started:
                if (why := await self._why_worker_ended(ticket, error, attempt)) is not None:
                    raise UpstreamError(f"{error.message[:-1]}: {why}.", code=error.code) from None
            else:  # the client is charged when another attempt answers
                is_served = not (is_for_another(cycle, error) or isinstance(error, UnreachableError))
            raise
        finally:
            if gathered is not None:
                gathered.release()
            if cycle.mending is not None:
                cycle.mending.end(attempt)
                cycle.mending = None
            if not attempt.only_looks:
                accounts = request.demand.accounts
                self._engine.finish(ticket, tokens_of(accounts, outcome) if accounts else 0, served=is_served)

    async def _why_worker_ended(self, ticket: Ticket, error: LlmuxError, attempt: Attempt) -> str | None:
        """The reason why the worker ended; None if it still runs, or if the client couldn't read the reason."""
        if error.code != "upstream_broken" or not attempt.outcome.stream_type:
            return None
        return await self._engine.why_ended(ticket, WHY_S)

    def _answer_filters(self, cycle: ResponseCycle) -> Sequence[Filter]:
        """The filters for the answer, in their order."""
        request, attempt = cycle.request, cycle.request.attempt
        filters: list[Filter] = []
        if request.cache is not None:
            filters.append(CacheReport(self._cache_headers, {name for name, _ in attempt.own}))
        if request.path in PICTURE_PATHS:
            filters.append(PictureLinks(self._pictures, cycle.scope, self._public_url))
        if attempt.names is not None:
            filters.append(Rename(attempt.names))
        if attempt.repair is not None:
            filters.append(Repair(attempt.repair))
        if attempt.translation is not None:
            filters.append(Translate(attempt.translation))
        return [*filters, *last_filters(cycle)]


def last_filters(cycle: ResponseCycle) -> Sequence[Filter]:
    """The filters that see the client's whole answer, also errors."""
    return [each for each in (cycle.stored_conversation, cycle.capture) if each is not None]


def is_for_another(cycle: ResponseCycle, error: LlmuxError) -> bool:
    """Did the worker refuse the request for lack of room, so that another model, or the same worker later, may answer it?

    Such a request is not mended and not charged, and its client doesn't get the refusal.
    """
    return is_crowded(error) or (cycle.ladder is not None and is_overflow(error))
