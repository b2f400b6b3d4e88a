"""Makes the worker's request from the client's request, for the model of its route."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final
from urllib.parse import parse_qs

import msgspec

from runtimes.base import Endpoint
from runtimes.endpoints import OTHER
from supervisor.catalog import Route as Public
from supervisor.catalog import Task
from supervisor.catalog.models.rewrite import NO_REWRITE, Rewrite
from supervisor.catalog.sections.sections import MediaConfig
from supervisor.core.types import ModelId, TicketId, WorkerState
from supervisor.engine.engine import Engine
from supervisor.engine.ticket import rejection
from supervisor.errors import BudgetError, InvalidRequestError
from supervisor.gateway.attempt import Attempt
from supervisor.gateway.body import permission
from supervisor.gateway.body.body import RESPONSE_FORMAT, Body, Bytes
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.body.tolerance import ordered
from supervisor.gateway.body.typed import UNREADABLE
from supervisor.gateway.disconnect import CancelOnDisconnect
from supervisor.gateway.filters.counting import Counting
from supervisor.gateway.filters.picture_links import PATHS as PICTURE_PATHS
from supervisor.gateway.filters.picture_links import refuse_links
from supervisor.gateway.filters.translation import (
    Adapted,
    AnswerTranslation,
    Chained,
    TargetModel,
    called,
)
from supervisor.gateway.identity.identity import with_keep_alive
from supervisor.gateway.media.attachments import may_have_any, read_documents, without_pictures
from supervisor.gateway.media.media_loading import MediaLoader, Wanted
from supervisor.gateway.media.picture_form import BLANK, is_earlier, replaced, unreadable
from supervisor.gateway.prompts import Completions
from supervisor.gateway.response_cycle import ResponseCycle
from supervisor.gateway.route.caching import NO_FIELDS, CacheFields, CacheSalts
from supervisor.gateway.route.context_use import ContextUse, measured
from supervisor.gateway.route.ladder import Ladder
from supervisor.gateway.route.routes import Route, Routes
from supervisor.gateway.route.thinking import thinking_modes
from supervisor.gateway.tunnel import client_of
from supervisor.host.media.convert import Converter, Kind
from supervisor.host.store.picture_store import PictureStore
from supervisor.host.store.request_buffer import BodyBudget, RequestBuffer

_NONE: Final[Sequence[str]] = ()
_EMPTY_VALUES: Final = (None, b"null", b'""')
_MAX_TOKENS_FIELDS: Final = ("max_tokens", "max_completion_tokens", "n_predict")


class Preparing:
    """The stage that finds a request's model, and makes the worker's request. For one catalog."""

    def __init__(
        self,
        routes: Routes,
        engine: Engine,
        media: MediaConfig | None,
        bodies: BodyBudget,
        cache_salts: CacheSalts,
        pictures: PictureStore,
        contexts: ContextUse,
        may_fall_back: Callable[[], bool],
    ) -> None:
        """`may_fall_back`: may tasks fall back to remote models?"""
        self.strict: set[ModelId] = set()
        """Models whose chat templates require ordered messages: see `Mending`."""
        self._routes = routes
        self._may_fall_back = may_fall_back
        self._engine = engine
        self._bodies = bodies
        self._cache_salts = cache_salts
        self._pictures = pictures
        self._contexts = contexts
        self._media = MediaLoader(media, bodies)
        self._converter = Converter()

    async def __call__(self, cycle: ResponseCycle) -> None:
        """Set the request's attempt, and for a task its ladder. Raises LlmuxError."""
        request = cycle.request
        found = self._routes.find(cycle)
        cycle.is_permitted = cycle.body.take_permission()
        if not isinstance(found, Task):
            request.attempt = await self._make_attempt(cycle, found)
            return
        if found.config.budget_s is not None:
            request.budget_s = min(request.budget_s or found.config.budget_s, found.config.budget_s)
        candidate = partial(self._candidate_attempt, cycle)
        cycle.ladder = Ladder(found, self._engine, candidate, allow_cloud_fallback=self._may_fall_back())
        request.attempt = await cycle.ladder.first()

    async def _candidate_attempt(self, cycle: ResponseCycle, public: Public) -> Attempt:
        """The attempt for a candidate of a task. See `_make_attempt`."""
        return await self._make_attempt(cycle, self._routes.candidate(cycle, public))

    async def _make_attempt(self, cycle: ResponseCycle, route: Route) -> Attempt:
        """The attempt for the route's model. Raises InvalidRequestError, ForbiddenError, and the errors of `_load_media`."""
        request, body, facts, name = cycle.request, cycle.body, route.facts, route.name
        own = cycle.head.own
        model, dialect = route.model.id, request.dialect
        loading = cycle.loading or self._media.idle
        if self._media.is_on and cycle.loading is None:
            loading = cycle.loading = self._media.loading()
        # Fields without effect:
        unknown, unseen, unused = _NONE if body.is_silent else body.unknown_extensions, _NONE, _NONE
        if facts.inputs is not None and may_have_any(body.fields):
            body, unseen = await self._replace_unsupported_media(cycle, route, body)
        translation: AnswerTranslation | None = None
        if route.translation is not None or route.required is not None:
            route, body, translation, unused = await self._translate(cycle, route, body)
        endpoint = route.endpoint
        if endpoint is None:
            raise self._routes.not_served(cycle, route)
        ladder = cycle.ladder
        request.stream = body.stream
        if facts.is_guarded and not (
            cycle.is_permitted or (ladder is not None and ladder.task.config.allow_remote) or permission.in_headers(own)
        ):
            raise permission.refuse(name)
        if self.strict and model in self.strict and isinstance(body, JsonBody):
            changes = ordered(body.fields, endpoint.meaning)
            body = body.changed(changes) if changes else body
        attempt = request.attempt if ladder is None else Attempt()
        attempt.endpoint = endpoint
        attempt.headers = cycle.head.worker_headers(dialect.credential_headers)
        attempt.only_looks = endpoint.only_looks and client_of(cycle.scope) is None
        if facts.has_replicas:
            attempt.prefix = body.prefix()
        wanted = await body.check(name, facts.inputs, endpoint, loading, facts.texts)
        attempt.path = self._worker_path(cycle, route)
        if wanted:
            await self._load_media(cycle, wanted, body)
        rewrite, cached = self._rewrite(cycle, route, endpoint, body)
        if request.path in PICTURE_PATHS and not self._pictures.is_on:
            refuse_links(rewrite.value(RESPONSE_FORMAT, body.raw(RESPONSE_FORMAT)))
        if route.counts:
            body, counts = body.applied(rewrite, endpoint).translated(Counting(name))
            translation = counts if translation is None else Chained(counts, translation)
            rewrite = NO_REWRITE  # already applied to the body
        if route.writes_prompts:
            assert facts.prompts is not None
            body, chats = body.applied(rewrite, endpoint).translated(Completions(facts.prompts, name))
            translation = chats if translation is None else Chained(chats, translation)
            rewrite = NO_REWRITE  # already applied
        if translation is not None:
            attempt.translation = translation
        else:
            attempt.end = route.end
            attempt.is_known = endpoint.meaning is not OTHER
            if route.completes:
                attempt.repair = dialect.repair(name, body.fields, stream=body.stream)
        attempt.names = route.names
        data = await body.rewritten(rewrite, endpoint)
        if facts.inputs is not None and "image" in facts.inputs:
            data, unopened = await self._convert_pictures(cycle, data, route)
            unused = (*unused, *unopened)
        attempt.body = self._buffer(cycle, data)
        if facts.shared_context:
            attempt.tokens = self._needed_tokens(attempt, model, facts.shared_context, rewrite, body)
        if endpoint.passed_over and not endpoint.passed_over.isdisjoint(body.fields):
            passed = [each for each in body.fields if each in endpoint.passed_over and body.raw(each) != b"null"]
            unused = (*unused, *called(passed, attempt.called))
        translated = _NONE if translation is None else translation.ignored
        attempt.ignored = (*unknown, *unseen, *translated, *unused, *cached.ignored)
        attempt.reuses = cached.reuses
        attempt.model = model
        return attempt

    def _takes_images(self, model: ModelId) -> bool:
        return "image" in (self._routes.facts[model].inputs or ())

    async def _replace_unsupported_media(
        self, cycle: ResponseCycle, route: Route, body: Body
    ) -> tuple[Body, Sequence[str]]:
        """The body with text in place of pictures and documents that the model can't take, and the names of the pictures.

        Raises InvalidRequestError.
        """
        assert isinstance(body, JsonBody)  # only a JSON body has fields
        inputs = route.facts.inputs
        assert inputs is not None
        field = "messages" if "messages" in body.fields else "input"
        try:
            messages = msgspec.json.decode(body.fields[field])
        except UNREADABLE:
            return body, ()  # the worker or the translation reports that
        if not isinstance(messages, list):
            return body, ()
        restore = partial(body.whole_text, most=sys.maxsize)

        async def text_of(pdf: bytes) -> str:
            return (await self._convert(cycle, "pdf", pdf)).decode()

        has_documents = await read_documents(messages, field, restore, text_of)
        named: list[str] = []
        if "image" not in inputs:
            others_can = cycle.ladder is not None and cycle.ladder.has_another(self._takes_images)
            named = without_pictures(messages, field, self._no_vision_message(route), refused=others_can)
        if not has_documents and not named:
            return body, ()
        return body.changed({field: msgspec.json.encode(messages)}), named

    def _no_vision_message(self, route: Route) -> str:
        models = [model for model in self._routes.facts if self._takes_images(model)]
        hint = f" Models that see: {', '.join(models[:5])}." if models else ""
        return f"{route.name} takes {', '.join(sorted(route.facts.inputs or ()))}, no images.{hint}"

    async def _convert_pictures(self, cycle: ResponseCycle, data: Bytes, route: Route) -> tuple[Bytes, Sequence[str]]:
        """The body with its pictures in formats that the worker can open, and the names of earlier turns' unreadable pictures.

        Raises InvalidRequestError for an unreadable picture after the last answer.
        """
        found = unreadable(data, route.model.adapter.converts_pictures)
        converted: list[bytes] = []
        unopened: Sequence[str] = ()
        for picture in found:
            try:
                converted.append(await self._convert(cycle, "picture", picture.data))
            except InvalidRequestError:
                if not is_earlier(data, picture):
                    raise
                converted.append(BLANK)
                unopened = ("image",)
        return (replaced(data, found, converted) if found else data), unopened

    async def _convert(self, cycle: ResponseCycle, kind: Kind, data: bytes) -> bytes:
        """Convert a file in another process. Raises InvalidRequestError."""
        with _cancel_on_disconnect(cycle):
            return await self._converter.convert(kind, data)

    async def _translate(
        self, cycle: ResponseCycle, route: Route, body: Body
    ) -> tuple[Route, Body, AnswerTranslation | None, Sequence[str]]:
        """The route, the body, the translation of answers if the body was translated, and the fields without effect on this model.

        The translation itself lists other fields without effect.
        """
        request, endpoint, mapped = cycle.request, route.endpoint, route.translation
        if endpoint is not None and route.required is not None:
            required = route.required.of(await _target_model(route), request)
            translated, answers = body.translated(required)
            return route, translated, answers, ()
        if (
            mapped is not None
            and route.translated is not None
            and (endpoint is None or _has_unsupported_fields(cycle, route, body))
        ):
            target = await _target_model(route)
            if route.targeted is not None:
                mapped = route.targeted.of(target, request)
            adapted = Adapted(mapped, target)
            translated, answers = body.translated(adapted)
            translated.rename(route.name)
            request.demand = with_keep_alive(request.demand, translated)
            return route.translated, translated, answers, adapted.ignored
        return route, body, None, ()

    def _worker_path(self, cycle: ResponseCycle, route: Route) -> bytes:
        """The worker's path and query."""
        path = cycle.scope["raw_path"] if route.is_wild else route.upstream_path
        query: bytes = cycle.scope["query_string"]
        if not query:
            return path
        if b"autoload=" in query:
            self._refuse_load(query, route)
        return path + b"?" + query

    def _refuse_load(self, query: bytes, route: Route) -> None:
        """llama.cpp's `?autoload=false`: raises InvalidRequestError unless the model is loaded, or is being loaded."""
        found = self._engine.model(route.model.id)
        has_worker = found is not None and (found.answering or found.state is WorkerState.STARTING)
        if not has_worker and parse_qs(query.decode("latin-1")).get("autoload", ["true"])[0] not in {"true", "1"}:
            raise InvalidRequestError(
                f"{route.name} is not loaded, and the request says autoload=false.", code="model_not_loaded"
            )

    def _rewrite(
        self, cycle: ResponseCycle, route: Route, endpoint: Endpoint, body: Body
    ) -> tuple[Rewrite, CacheFields]:
        """The changes to the request by the configuration and the client's profile, and the fields for the prompt cache."""
        request, parameters = cycle.request, cycle.profile.parameters
        rewrite = route.rewrite if route.is_rewritten else NO_REWRITE
        if parameters:
            rewrite = route.rewrite.with_defaults(parameters)
        if request.cache is None and not self._cache_salts.are_any:  # nearly always
            return rewrite, NO_FIELDS
        path, tenant = endpoint.upstream_path or endpoint.path, request.demand.tenant
        cached = self._cache_salts.fields(
            request.cache, route.facts.cache, path, route.model.id, tenant, body.raw("cache_salt")
        )
        return rewrite.with_outside_body(cached.fields) if cached.fields else rewrite, cached

    def _buffer(self, cycle: ResponseCycle, data: Bytes) -> RequestBuffer:
        """The buffer with the worker's body. A task's request also keeps the original, for the next candidate's body."""
        if cycle.ladder is None:
            if cycle.loading is not None:
                cycle.loading.buffer.release()
            cycle.request_buffer = cycle.request_buffer.changed(data)
            return cycle.request_buffer
        buffer = RequestBuffer(self._bodies)
        buffer.keep(data)
        return buffer

    def _needed_tokens(self, attempt: Attempt, model: ModelId, shared: int, rewrite: Rewrite, body: Body) -> int:
        """The tokens that the request needs of a context of `shared` tokens, which its worker's requests share."""
        text_bytes, pictures = measured(attempt.body)
        attempt.text_bytes = 0 if pictures else text_bytes
        most: int | None = None
        for name in _MAX_TOKENS_FIELDS:
            limit = body.raw(name) if name in body.fields else None
            if rewrite is not NO_REWRITE:
                limit = rewrite.value(name, limit)
            if limit is not None and limit.isdigit() and len(limit) < 10 and (most is None or int(limit) < most):
                most = int(limit)
        count = (body.raw("n") if "n" in body.fields else None) or b"1"
        answers = int(count) if count.isdigit() and len(count) < 4 else 1
        return self._contexts.needed(model, shared, text_bytes, pictures, most, answers)

    async def _load_media(self, cycle: ResponseCycle, wanted: Sequence[Wanted], body: Body) -> None:
        """Load the media that the body refers to. Raises LlmuxError, also if the client's limits would refuse the request later."""
        request, loading = cycle.request, cycle.loading
        assert loading is not None
        if (refused := self._engine.limit_rejection(TicketId(""), request.demand.accounts)) is not None:
            raise rejection(refused, request.name or "")
        left_s = None
        if request.budget_s is not None:
            left_s = request.arrived_at + request.budget_s - self._engine.clock()
        try:
            with _cancel_on_disconnect(cycle):
                async with asyncio.timeout(left_s):
                    await body.load(wanted, loading)
        except TimeoutError as error:
            message = f"The budget of {request.budget_s:g} s was over before the request's media were loaded."
            raise BudgetError(message) from error


def _cancel_on_disconnect(cycle: ResponseCycle) -> contextlib.AbstractContextManager[object]:
    """Cancels slow work when the client disconnects. Once the request is in flight, the gateway does that."""
    is_in_flight = cycle.request.ticket_id is not None
    return contextlib.nullcontext() if is_in_flight else CancelOnDisconnect(cycle.scope)


def _has_unsupported_fields(cycle: ResponseCycle, route: Route, body: Body) -> bool:
    """Would the worker ignore a part of the request, or a setting that the configuration adds?"""
    assert route.endpoint is not None
    settings = cycle.request.dialect.unsupported_fields
    return any(
        (raw := body.raw(name)) not in _EMPTY_VALUES and part in raw for name, part in route.endpoint.unsupported_fields
    ) or (bool(settings) and (route.rewrite.may_set(settings) or not settings.isdisjoint(cycle.profile.parameters)))


async def _target_model(route: Route) -> TargetModel:
    """The facts about the model that a translation needs. May read the model's files in a thread."""
    model = route.model

    def target() -> TargetModel:
        capabilities = model.capabilities  # read first: `thinking_modes` depends on them
        modes = thinking_modes(route.rewrite, model)
        multi_turn, translates = capabilities.multi_turn, capabilities.translates
        return TargetModel(route.name, model.thinking, modes, multi_turn, model.adapter.decoding, translates)

    is_known = model.known_capabilities is not None
    return target() if is_known else await asyncio.to_thread(target)
