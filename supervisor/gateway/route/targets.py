"""Step 2 of a request's way: which model is meant, may it be asked this, and what does its worker get?

A request names its model in the body's `model` (JSON or multipart) or in `?model=`. Where only one configured model serves
the path, it may leave the name out. A task stands for several models: `ladder` says whom to ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final
from urllib.parse import parse_qs

import msgspec

from runtimes.base import Endpoint
from runtimes.endpoints import OTHER, aliases_of
from runtimes.model_config import Modality
from runtimes.path_pattern import leaves_its_folder, pattern_of
from supervisor.catalog import Catalog, Route, Task
from supervisor.catalog.clients import ClientConfig
from supervisor.catalog.rewrite import Rewrite
from supervisor.core.types import ModelId, TicketId, WorkerState
from supervisor.engine.engine import Engine
from supervisor.engine.ticket import rejection
from supervisor.errors import BudgetError, InvalidRequestError
from supervisor.gateway.body import permission
from supervisor.gateway.body.body import RESPONSE_FORMAT, Body, Bytes
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.body.tolerance import ordered
from supervisor.gateway.disconnect import CancelOnDisconnect, Scope
from supervisor.gateway.filters.counting import CHAT, COUNT, Counting, by_answer, is_by_answer
from supervisor.gateway.filters.model_name import Renaming, renaming
from supervisor.gateway.filters.picture_links import PATHS as PICTURE_PATHS
from supervisor.gateway.filters.picture_links import refuse_links
from supervisor.gateway.filters.translation import (
    CANONICAL,
    Adapted,
    AnswerTranslation,
    Chained,
    StreamTranslation,
    TargetedTranslation,
    TargetModel,
    Translation,
    called,
)
from supervisor.gateway.head import head_of
from supervisor.gateway.identity.identity import staying
from supervisor.gateway.media.attachments import may_have_any, read_documents, without_pictures
from supervisor.gateway.media.media_loading import Loading, MediaLoader, Wanted
from supervisor.gateway.media.picture_form import BLANK, is_earlier, replaced, unreadable
from supervisor.gateway.prompts import Completions
from supervisor.gateway.requests import RequestContext
from supervisor.gateway.route.caching import NO_FIELDS, CacheFields, Salts
from supervisor.gateway.route.context_use import ContextUse, measured
from supervisor.gateway.route.ladder import Ladder
from supervisor.gateway.route.mending import Mending
from supervisor.gateway.route.thinking import thinking_modes
from supervisor.gateway.stream_end import END_OF
from supervisor.gateway.upstream_error import WorkerAnswerError
from supervisor.io.convert import Converter, Kind
from supervisor.io.held_body import BodyBudget, HeldBody
from supervisor.io.picture_store import PictureStore

Table = Mapping[tuple[str, str], Mapping[ModelId, Endpoint]]


NAME_LIMIT: Final = 512  # of the name of a model
_NONE: Final[Mapping[ModelId, Endpoint]] = {}


_NOTHING: Final = (None, b"null", b'""')
_MOST_TOKENS: Final = ("max_tokens", "max_completion_tokens", "n_predict")


@dataclass(slots=True)
class Target:
    """Where a request goes, and what is sent there. Not frozen, as the next: that would cost each request a microsecond."""

    model: ModelId
    path: bytes  # the worker's path and query
    body: HeldBody
    endpoint: Endpoint
    translation: AnswerTranslation | None = None  # of the answer
    names: Renaming | None = None  # in the answer
    completion: StreamTranslation | None = None  # of what it lacks
    is_known: bool = True  # so that the form of a stream is known before the worker answers
    ladder: Ladder | None = None  # set iff a task was asked: who is asked next
    prefix: int | None = None  # of its conversation, where several replicas could answer
    tokens: int = 0  # of the context that its worker's requests share
    ignored: Sequence[str] = ()  # fields and headers of the request that have no effect on it
    end: re.Pattern[bytes] | None = None  # what says that a stream which passes untranslated is complete
    reuses: bool = True  # may its worker use prompts that it keeps?
    mending: Mending | None = None  # set iff its worker refused it, in this try


@dataclass(slots=True)
class Asked:
    """What a request wants, whoever answers it."""

    scope: Scope
    context: RequestContext
    held: HeldBody  # as it came
    body: Body
    name: str
    translation: Translation | None  # for models that don't serve the path
    required: TargetedTranslation | None  # for all models; then there is no other
    profile: ClientConfig  # its client's
    is_permitted: bool  # by its body, to leave this machine
    loading: Loading  # of the media that it refers to
    unseen: Sequence[str] = ()  # parts of it that the model can't take, of which it is told that they were there


class Targets:
    """Finds them in one catalog."""

    def __init__(
        self,
        engine: Engine,
        catalog: Catalog,
        bodies: BodyBudget,
        may_fall_back: Callable[[], bool],
        salts: Salts,
        pictures: PictureStore,
        contexts: ContextUse,
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._bodies = bodies
        self._may_fall_back = may_fall_back
        self._salts = salts
        self._pictures = pictures
        self._contexts = contexts
        self.shared_contexts = {
            model.id: tokens
            for model in catalog.models.values()
            if (tokens := model.adapter.shared_context(model.config))
        }
        self._media = MediaLoader(catalog.server.media, bodies)
        self._caches = {model.id: model.adapter.prompt_cache(model.config) for model in catalog.models.values()}
        self._inputs = {model.id: model.inputs for model in catalog.models.values()}
        self._texts = {model.id: model.adapter.text_references(model.config) for model in catalog.models.values()}
        self._prompts = {model.id: model.prompts for model in catalog.models.values()}
        self._names = {model.id: model.adapter.answers_as(model.config, model.id) for model in catalog.models.values()}
        self._guarded = {model.id for model in catalog.models.values() if model.adapter.needs_permission(model.config)}
        self._with_replicas = {model.id for model in catalog.models.values() if model.config.most_replicas > 1}
        self._strict: set[ModelId] = set()  # see `Mending`
        self._converter = Converter()
        self.table = endpoint_table(catalog)
        found = ((method, path, pattern_of(path)) for method, path in self.table)
        wild = [(method, path, pattern) for method, path, pattern in found if pattern is not None]
        self._patterns = sorted(wild, key=lambda one: (one[1].endswith("*"), one[1].count("{"), -len(one[1])))
        self._wild = {path for _, path, _ in wild}

    def pattern(self, scope: Scope) -> str | None:
        """The most particular path with a pattern that a request's path fits as it came, and that the model in its query serves."""
        method, raw_path = scope["method"], scope["raw_path"]
        fitting = [path for its, path, pattern in self._patterns if its == method and pattern.fullmatch(raw_path)]
        if not fitting or leaves_its_folder(raw_path):
            return None
        named = parse_qs(scope["query_string"].decode("latin-1")).get("model")
        route = self._catalog.route(named[0]) if named else None
        served = (path for path in fitting if route is not None and route.model.id in self.table[method, path])
        return next(served, fitting[0])

    async def find(
        self, scope: Scope, body: Body, context: RequestContext, held: HeldBody, profile: ClientConfig
    ) -> Target:
        """The model, or a task's first candidate, and what to send it. Raises LlmuxError."""
        method, dialect = scope["method"], context.dialect
        required = dialect.required_translation(method, context.path, body.fields) if dialect.reads_fields else None
        translation = dialect.translation(method, context.path) if required is None else None
        name = body.name
        if name is None:
            serving = self._serving(method, context.path, translation, required)
            own = serving if required is not None else self.table.get((method, context.path), serving)
            name = self._unnamed(scope, serving, own, profile.model)
        if name is None:
            raise body.nameless(scope)
        if len(name) > NAME_LIMIT or not name.isprintable():  # it will be logged, and shown in terminals
            raise InvalidRequestError("`model` is not the name of a model.", param="model")
        route = self._catalog.route(name)
        if route is None:
            context.name = name = dialect.model_name(name, lambda one: self._catalog.route(one) is not None)
            route = self._catalog.resolve(name)
        context.name = name
        is_permitted = body.take_permission()
        asked = Asked(
            scope, context, held, body, name, translation, required, profile, is_permitted, self._media.loading()
        )
        if not isinstance(route, Task):
            return await self._target(asked, route)
        if route.config.budget_s is not None:
            context.budget_s = min(context.budget_s or math.inf, route.config.budget_s)
        build = partial(self._target, asked)
        return await Ladder(route, self._engine, build, allow_cloud_fallback=self._may_fall_back()).target()

    async def mend(self, target: Target, error: WorkerAnswerError) -> bool:
        """Can what its worker refused with this be sent again, changed? Then the target has the change, until `Mending.end`."""
        if target.mending is None:
            target.mending = Mending(target, self._bodies, self._strict)
        return await target.mending.mend(error)

    async def _target(self, asked: Asked, route: Route, ladder: Ladder | None = None) -> Target:
        """Whether this request is allowed for the model, and what to send it. Raises LlmuxError."""
        context, name, model = asked.context, asked.name, route.model.id
        path = context.path if asked.required is None else asked.required.path
        endpoint = self.table.get((asked.scope["method"], path), _NONE).get(model)
        inputs = self._inputs[model]
        if inputs is not None and may_have_any(asked.body.fields):
            asked = await self._readable(asked, inputs, ladder)
        body: Body = asked.body
        translation: AnswerTranslation | None = None
        unused: Sequence[str] = ()
        if asked.translation is not None or asked.required is not None:
            endpoint, body, translation, unused = await self._translated(asked, route, endpoint)
        if endpoint is None:
            raise self._not_served(asked, route)
        context.stream = body.stream
        is_permitted = asked.is_permitted or (ladder is not None and ladder.task.config.allow_remote)
        if not (is_permitted or model not in self._guarded or permission.in_headers(head_of(asked.scope).own)):
            raise permission.refuse(name)
        if model in self._strict and isinstance(body, JsonBody):
            changes = ordered(body.fields, endpoint.meaning)
            body = body.changed(changes) if changes else body
        prefix = body.prefix() if model in self._with_replicas else None
        wanted = await body.check(name, inputs, endpoint, asked.loading, self._texts[model])
        upstream_path = self._upstream_path(asked, endpoint, model)
        if wanted:
            await self._load(asked, wanted, body)
        rewrite, cached = self._rewrite(asked, route, endpoint, body)
        if context.path in PICTURE_PATHS and not self._pictures.is_on:
            refuse_links(rewrite.value(RESPONSE_FORMAT, body.raw(RESPONSE_FORMAT)))
        if is_by_answer(endpoint):
            body, counts = body.applied(rewrite, endpoint).translated(Counting(name))
            translation = counts if translation is None else Chained(counts, translation)
            rewrite = Rewrite()  # it is in the body
        prompts = self._prompts[model]
        if prompts is not None and endpoint.meaning.prompt is not None:
            body, chats = body.applied(rewrite, endpoint).translated(Completions(prompts, name))
            translation = chats if translation is None else Chained(chats, translation)
            rewrite = Rewrite()  # it is in the prompt
        theirs = self._names[model]
        names = renaming(theirs, name) if theirs != name and endpoint.meaning.role == "run" else None
        completion = context.dialect.completion(name, body.fields, stream=body.stream) if translation is None else None
        data = await body.rewritten(rewrite, endpoint)
        if inputs is not None and "image" in inputs:
            data, unopened = await self._with_pictures(asked, data, route)
            unused = (*unused, *unopened)
        sent = self._kept(asked, data, ladder)
        tokens = self._tokens(context, model, sent, rewrite, body) if model in self.shared_contexts else 0
        if endpoint.passed_over and not endpoint.passed_over.isdisjoint(body.fields):
            passed = [name for name in body.fields if name in endpoint.passed_over and body.raw(name) != b"null"]
            unused = (*unused, *called(passed, CANONICAL if translation is None else translation.names))
        translated = () if translation is None else translation.ignored
        context.ignored = (*asked.body.unsaid, *asked.unseen, *translated, *unused, *cached.ignored)
        return Target(
            model,
            upstream_path,
            sent,
            endpoint,
            translation,
            names,
            completion,
            is_known=translation is not None or endpoint.meaning is not OTHER,
            ladder=ladder,
            prefix=prefix,
            tokens=tokens,
            ignored=context.ignored,
            end=END_OF.get(endpoint.path) if translation is None else None,
            reuses=cached.reuses,
        )

    def _sees(self, model: ModelId) -> bool:
        return "image" in (self._inputs[model] or ())

    async def _readable(self, asked: Asked, inputs: frozenset[Modality], ladder: Ladder | None) -> Asked:
        """With text for pictures and documents of its conversation that the model can't take. Raises InvalidRequestError."""
        body = asked.body
        assert isinstance(body, JsonBody)  # no other has fields
        field = "messages" if "messages" in body.fields else "input"
        try:
            messages = msgspec.json.decode(body.fields[field])
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return asked  # whoever reads it says so
        if not isinstance(messages, list):
            return asked
        whole = partial(body.whole_text, most=sys.maxsize)

        async def text_of(pdf: bytes) -> str:
            return (await self._convert(asked, "pdf", pdf)).decode()

        is_read = await read_documents(messages, field, whole, text_of)
        named: list[str] = []
        if "image" not in inputs:
            others_see = ladder is not None and ladder.has_another(self._sees)
            named = without_pictures(messages, field, self._blind(asked.name, inputs), refused=others_see)
        if not is_read and not named:
            return asked
        return replace(asked, body=body.changed({field: msgspec.json.encode(messages)}), unseen=named)

    def _blind(self, name: str, inputs: frozenset[Modality]) -> str:
        seeing = [each for each in self._inputs if self._sees(each)]
        hint = f" Models that see: {', '.join(seeing[:5])}." if seeing else ""
        return f"{name} takes {', '.join(sorted(inputs))}, no images.{hint}"

    async def _with_pictures(self, asked: Asked, data: Bytes, route: Route) -> tuple[Bytes, Sequence[str]]:
        """With pictures as its worker can open them, and how one of an earlier turn that can't be is named. Raises InvalidRequestError."""
        found = unreadable(data, route.model.adapter.converts_pictures)
        by: list[bytes] = []
        unopened: Sequence[str] = ()
        for each in found:
            try:
                by.append(await self._convert(asked, "picture", each.data))
            except InvalidRequestError:
                if not is_earlier(data, each):
                    raise
                by.append(BLANK)
                unopened = ("image",)
        return (replaced(data, found, by) if found else data), unopened

    async def _convert(self, asked: Asked, kind: Kind, data: bytes) -> bytes:
        """Raises InvalidRequestError."""
        is_watched = asked.context.ticket_id is not None  # by the pipeline, once it is entered
        with contextlib.nullcontext() if is_watched else CancelOnDisconnect(asked.scope):
            return await self._converter.convert(kind, data)

    async def _translated(
        self, asked: Asked, route: Route, endpoint: Endpoint | None
    ) -> tuple[Endpoint | None, Body, AnswerTranslation | None, Sequence[str]]:
        """Where this model is asked, what, what its answers become where that isn't what the client sent, and the fields
        that have no effect on it, besides those that the translation names. `endpoint`: where it could be asked as it is.
        """
        body, model = asked.body, route.model.id
        if endpoint is not None and asked.required is not None:
            required = asked.required.of(await _target_model(asked.name, route), asked.context)
            translated, answers = body.translated(required)
            return endpoint, translated, answers, ()
        mapped = asked.translation
        if mapped is not None and (endpoint is None or self._is_unheard(asked, route, endpoint)):
            canonical = self.table.get((asked.scope["method"], mapped.path), _NONE).get(model)
            if canonical is not None:
                target = await _target_model(asked.name, route)
                if isinstance(mapped, TargetedTranslation):
                    mapped = mapped.of(target, asked.context)
                adapted = Adapted(mapped, target)
                translated, answers = body.translated(adapted)
                translated.rename(asked.name)
                asked.context.demand = staying(asked.context.demand, translated)
                return canonical, translated, answers, adapted.ignored
        return endpoint, body, None, ()

    def _is_unheard(self, asked: Asked, route: Route, endpoint: Endpoint) -> bool:
        """Would the worker pass over a part of the request, or of what the configuration adds to it?"""
        body, settings = asked.body, asked.context.dialect.unheard_settings
        return any((raw := body.raw(name)) not in _NOTHING and part in raw for name, part in endpoint.unheard) or (
            bool(settings) and (route.rewrite.gives(settings) or not settings.isdisjoint(asked.profile.parameters))
        )

    def _upstream_path(self, asked: Asked, endpoint: Endpoint, model: ModelId) -> bytes:
        """The worker's path and query."""
        path = (endpoint.upstream_path or endpoint.path).encode()
        if endpoint.path in self._wild:
            path = asked.scope["raw_path"]
        query: bytes = asked.scope["query_string"]
        if not query:
            return path
        if b"autoload=" in query:
            self._refuse_load(query, asked.name, model)
        return path + b"?" + query

    def _rewrite(self, asked: Asked, route: Route, endpoint: Endpoint, body: Body) -> tuple[Rewrite, CacheFields]:
        """What changes on the way to the model: by its configuration, the client's, and what is said of caches."""
        context, model, parameters = asked.context, route.model.id, asked.profile.parameters
        rewrite = route.rewrite.with_defaults(parameters) if parameters else route.rewrite
        if context.cache is None and not self._salts.are_any:  # nearly always
            return rewrite, NO_FIELDS
        path, tenant = endpoint.upstream_path or endpoint.path, context.demand.tenant
        cached = self._salts.fields(context.cache, self._caches[model], path, model, tenant, body.raw("cache_salt"))
        return rewrite.with_asked(cached.fields) if cached.fields else rewrite, cached

    def _kept(self, asked: Asked, data: Bytes, ladder: Ladder | None) -> HeldBody:
        """What is sent. Of a task's request all stays as it came: the next candidate's is made of it."""
        if ladder is None:
            if asked.context.media is not None:
                asked.context.media.release()
            return asked.held.changed(data)
        held = HeldBody(self._bodies)
        held.keep(data)
        return held

    def _tokens(self, context: RequestContext, model: ModelId, sent: HeldBody, rewrite: Rewrite, body: Body) -> int:
        """What it will need of the context that its worker's requests share."""
        text_bytes, pictures = measured(sent)
        context.text_bytes = 0 if pictures else text_bytes
        said = (rewrite.value(name, body.raw(name)) for name in _MOST_TOKENS)
        most = min((int(each) for each in said if each is not None and each.isdigit() and len(each) < 10), default=None)
        count = body.raw("n") or b"1"
        answers = int(count) if count.isdigit() and len(count) < 4 else 1
        return self._contexts.needed(model, self.shared_contexts[model], text_bytes, pictures, most, answers)

    async def _load(self, asked: Asked, wanted: Sequence[Wanted], body: Body) -> None:
        """Let the body have the media that it refers to. Raises LlmuxError, also where it would be refused afterwards."""
        context = asked.context
        if (refused := self._engine.over(TicketId(""), context.demand.accounts)) is not None:
            raise rejection(refused, asked.name)
        context.media = asked.loading.held
        is_watched = context.ticket_id is not None  # by the pipeline, once it is entered
        left_s = None
        if context.budget_s is not None:
            left_s = context.arrived_at + context.budget_s - self._engine.clock()
        try:
            with contextlib.nullcontext() if is_watched else CancelOnDisconnect(asked.scope):
                async with asyncio.timeout(left_s):
                    await body.load(wanted, asked.loading)
        except TimeoutError as error:
            message = f"The budget of {context.budget_s:g} s was over before the request's media were loaded."
            raise BudgetError(message) from error

    def _refuse_load(self, query: bytes, name: str, model: ModelId) -> None:
        """llama.cpp's `?autoload=false`: raises InvalidRequestError unless the model is loaded, or is being loaded."""
        found = self._engine.model(model)
        is_coming = found is not None and (found.answering or found.state is WorkerState.STARTING)
        if not is_coming and parse_qs(query.decode("latin-1")).get("autoload", ["true"])[0] not in {"true", "1"}:
            raise InvalidRequestError(
                f"{name} is not loaded, and the request says autoload=false.", code="model_not_loaded"
            )

    def _unnamed(
        self,
        scope: Scope,
        serving: Mapping[ModelId, Endpoint],
        own: Mapping[ModelId, Endpoint],
        default: str | None,
    ) -> str | None:
        """The model of a request whose body names none. `default`: the client's, if it is one of those `serving`.

        `own`: those of them that come first, since they need no translation.
        """
        query: bytes = scope["query_string"]
        named = parse_qs(query.decode("latin-1")).get("model") if query else None
        if named:
            return named[0]
        if default is not None and self._catalog.resolve(default).model.id in serving:
            return default
        if len(own) != 1:
            return None
        rows = (row for row in self._catalog.listing() if not isinstance(row, Task))
        names = [row.name for row in rows if row.model.id in own]
        return names[0] if len(names) == 1 else next(iter(own))  # itself, not one of several virtual models

    def _serving(
        self, method: str, path: str, translation: Translation | None, required: TargetedTranslation | None
    ) -> Mapping[ModelId, Endpoint]:
        """The models that can be asked there."""
        serving = self.table.get((method, path if required is None else required.path), _NONE)
        return serving if translation is None else {**self.table.get((method, translation.path), _NONE), **serving}

    def _not_served(self, asked: Asked, route: Route) -> InvalidRequestError:
        serving = self._serving(asked.scope["method"], asked.context.path, asked.translation, asked.required)
        config = route.model.config
        others = [listing.name for listing in self._catalog.listing() if listing.model.id in serving]
        hint = f" Models that do: {', '.join(others[:5])}." if others else ""
        if asked.required is not None and asked.required.path == "/infill":
            message = f"{asked.name} does not support insert: it knows nothing of a suffix. Leave that out.{hint}"
            return InvalidRequestError(message, code="endpoint_not_supported", param="suffix")
        why = ""
        path = asked.context.path
        is_count = COUNT in (path, None if asked.translation is None else asked.translation.path)
        if is_count and route.model.id in self.table.get(("POST", CHAT), _NONE):
            why = ": a program answers each of its requests, in full whatever `max_tokens` says, so that none is just counted"
        return InvalidRequestError(
            f"{asked.name} ({config.type}, {config.runtime}) does not serve {path}{why}.{hint}",
            code="endpoint_not_supported",
            param="model",
        )


async def _target_model(name: str, route: Route) -> TargetModel:
    """What a translation has to know of the model."""

    def known() -> TargetModel:
        model = route.model
        capabilities = model.capabilities  # first: the modes depend on what is known
        modes = thinking_modes(route, model)
        multi_turn, translates = capabilities.multi_turn, capabilities.translates
        return TargetModel(name, model.thinking, modes, multi_turn, model.adapter.decoding, translates)

    is_known = route.model.known_capabilities is not None
    return known() if is_known else await asyncio.to_thread(known)  # its files have to be read


def endpoint_table(catalog: Catalog) -> Table:
    """(method, public path) → the models that serve it. Aliases stand there as well, so that they cost no request anything,
    and chats' counts of tokens for all models that chat.
    """
    table: dict[tuple[str, str], dict[ModelId, Endpoint]] = {}
    for model in catalog.models.values():
        for endpoint in model.endpoints:
            table.setdefault((endpoint.method, endpoint.path), {})[model.id] = endpoint
        chat = table.get(("POST", CHAT), _NONE).get(model.id)
        if chat is not None and model.adapter.heeds_max_tokens:
            table.setdefault(("POST", COUNT), {}).setdefault(model.id, by_answer(chat))
    for (method, path), serving in [*table.items()]:
        for alias in aliases_of(path):
            table[method, alias] = {**serving, **table.get((method, alias), {})}
    return table
