"""Finds a request's model, and compiles the configuration for the model's name and the request's path into a `Route`.

Each model name's route is compiled at the first request and kept, but not for tasks, and not if a request's fields decide.

A request names its model in the body's `model` (JSON or multipart) or in `?model=`. If only one configured model serves
the path, the request may leave the name out. A task stands for several models: `ladder` selects one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import parse_qs

from runtimes.base import Endpoint, TextReferences
from runtimes.endpoints import aliases_of
from runtimes.model_config import Modality
from runtimes.path_pattern import leaves_its_folder, pattern_of
from runtimes.prompt_cache import PromptCache
from supervisor.catalog import Catalog, CatalogModel, Task
from supervisor.catalog import Route as Public
from supervisor.catalog.models.prompt_format import PromptFormat
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.core.types import ModelId
from supervisor.errors import InvalidRequestError
from supervisor.gateway.dialect import Dialect
from supervisor.gateway.disconnect import Scope
from supervisor.gateway.filters.counting import CHAT, COUNT, by_answer, is_by_answer
from supervisor.gateway.filters.model_name import Renaming, renaming
from supervisor.gateway.filters.stream_end import END_OF
from supervisor.gateway.filters.translation import TargetedTranslation, Translation
from supervisor.gateway.response_cycle import ResponseCycle

Table = Mapping[tuple[str, str], Mapping[ModelId, Endpoint]]

NAME_LIMIT: Final = 512  # characters of a model's name
MOST_KEPT: Final = 4096  # compiled routes
_NONE: Final[Mapping[ModelId, Endpoint]] = {}


class ModelFacts(NamedTuple):
    """Facts about a model that are the same for all requests."""

    inputs: frozenset[Modality] | None  # None: only its worker knows
    texts: TextReferences | None
    prompts: PromptFormat | None
    cache: PromptCache | None
    called: str  # its name in its worker's answers
    is_guarded: bool  # does a request leave this machine?
    has_replicas: bool
    shared_context: int  # tokens that its worker's requests share; 0: they share none

    @classmethod
    def of(cls, model: CatalogModel) -> ModelFacts:
        """The facts of a model. May read the heads of its files."""
        adapter, config = model.adapter, model.config
        return cls(
            model.inputs,
            adapter.text_references(config),
            model.prompts,
            adapter.prompt_cache(config),
            adapter.answers_as(config, model.id),
            adapter.needs_permission(config),
            config.most_replicas > 1,
            adapter.shared_context(config) or 0,
        )


@dataclass(slots=True, eq=False)
class Route:
    """A public name on a path. Nothing in it depends on the request."""

    name: str  # the requested name
    model: CatalogModel
    facts: ModelFacts
    rewrite: Rewrite
    path: str  # public
    endpoint: Endpoint | None  # set iff the worker serves the path itself
    translation: Translation | None  # of the dialect
    targeted: TargetedTranslation | None  # the same translation, iff it depends on the model
    required: TargetedTranslation | None  # for every model; then `translation` is None
    translated: Route | None  # the route of the translation's path, if the worker serves that path
    completes: bool  # may the dialect add fields to answers that workers leave out?
    names: Renaming | None  # in answers
    end: re.Pattern[bytes] | None  # see `END_OF`
    upstream_path: bytes  # the worker's own path
    is_rewritten: bool  # does the configuration change requests?
    is_wild: bool  # is the path a pattern, so that the worker gets the client's path unchanged?
    counts: bool  # is it a token count that the worker makes by a chat completion?
    writes_prompts: bool  # does llmux write its prompts?


class Routes:
    """The routes of one catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._table = endpoint_table(catalog)
        self.facts = {model.id: ModelFacts.of(model) for model in catalog.models.values()}
        self._kept: dict[tuple[Dialect, str, str, str], Route] = {}
        found = ((method, path, pattern_of(path)) for method, path in self._table)
        wild = [(method, path, pattern) for method, path, pattern in found if pattern is not None]
        self._patterns = sorted(wild, key=lambda row: (row[1].endswith("*"), row[1].count("{"), -len(row[1])))
        self._wild = {path for _, path, _ in wild}

    def serves(self, method: str, path: str, dialect: Dialect) -> bool:
        """Does a configured model's runtime serve this path, or the one that the dialect maps it to?"""
        if (method, path) in self._table:
            return True
        translation = dialect.translation(method, path)
        return translation is not None and (method, translation.path) in self._table

    def is_served_by(self, name: str | None, method: str, path: str) -> bool:
        """Does the model of this name serve the path itself? Without a name: does any model?"""
        route = None if name is None else self._catalog.route(name)
        serving = self._table.get((method, path), _NONE)
        return bool(serving) if route is None else route.model.id in serving

    def methods(self, path: str, dialect: Dialect) -> tuple[str, ...]:
        """The methods with which this path is served; for error messages."""
        return tuple(method for method in ("GET", "POST") if self.serves(method, path, dialect))

    def pattern(self, scope: Scope) -> str | None:
        """The most specific path pattern that fits a request's raw path and, if possible, is served by the model in its query."""
        method, raw_path = scope["method"], scope["raw_path"]
        fitting = [path for verb, path, pattern in self._patterns if verb == method and pattern.fullmatch(raw_path)]
        if not fitting or leaves_its_folder(raw_path):
            return None
        named = parse_qs(scope["query_string"].decode("latin-1")).get("model")
        route = self._catalog.route(named[0]) if named else None
        served = (path for path in fitting if route is not None and route.model.id in self._table[method, path])
        return next(served, fitting[0])

    def find(self, cycle: ResponseCycle) -> Route | Task:
        """The route or task that a request means. Raises InvalidRequestError, NotFoundError."""
        request, body, method = cycle.request, cycle.body, cycle.scope["method"]
        dialect, path = request.dialect, request.path
        required = _required_translation(cycle)
        name = body.name
        if name is not None and required is None:
            kept = self._kept.get((dialect, method, path, name))
            if kept is not None:
                request.name = name
                return kept
        if name is None:
            name = self._default_name(cycle, required)
        if name is None:
            raise body.nameless(cycle.scope)
        if len(name) > NAME_LIMIT or not name.isprintable():  # logs and terminals show the name
            raise InvalidRequestError("`model` is not the name of a model.", param="model")
        public, requested = self._catalog.route(name), name
        if public is None:
            request.name = name = dialect.model_name(name, lambda known: self._catalog.route(known) is not None)
            public = self._catalog.resolve(name)
        request.name = name
        if isinstance(public, Task):
            return public
        route = self.route(cycle, public, required)
        if required is None and requested == name:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[dialect, method, path, name] = route
        return route

    def candidate(self, cycle: ResponseCycle, public: Public) -> Route:
        """The route of the request's path at a candidate of its task."""
        return self.route(cycle, public, _required_translation(cycle))

    def route(self, cycle: ResponseCycle, public: Public, required: TargetedTranslation | None) -> Route:
        """The route of the request's path at this model. `required`: see `Dialect.required_translation`."""
        request, method = cycle.request, cycle.scope["method"]
        dialect, name = request.dialect, request.name
        assert name is not None
        translation = dialect.translation(method, request.path) if required is None else None
        path = request.path if required is None else required.path
        translated = None
        if translation is not None and public.model.id in self._table.get((method, translation.path), _NONE):
            translated = self._compile(dialect, method, translation.path, name, public)
        return self._compile(dialect, method, path, name, public, translation, required, translated)

    def _compile(
        self,
        dialect: Dialect,
        method: str,
        path: str,
        name: str,
        public: Public,
        translation: Translation | None = None,
        required: TargetedTranslation | None = None,
        translated: Route | None = None,
    ) -> Route:
        model, facts = public.model, self.facts[public.model.id]
        endpoint = self._table.get((method, path), _NONE).get(model.id)
        runs = endpoint is not None and endpoint.meaning.role == "run"
        has_prompt = endpoint is not None and endpoint.meaning.prompt is not None
        return Route(
            name,
            model,
            facts,
            public.rewrite,
            path,
            endpoint,
            translation,
            translation if isinstance(translation, TargetedTranslation) else None,
            required,
            translated,
            completes=type(dialect).repair is not Dialect.repair,
            names=renaming(facts.called, name) if facts.called != name and runs else None,
            end=None if endpoint is None else END_OF.get(endpoint.path),
            upstream_path=b"" if endpoint is None else (endpoint.upstream_path or endpoint.path).encode(),
            is_rewritten=endpoint is not None and public.rewrite.touches(endpoint),
            is_wild=endpoint is not None and endpoint.path in self._wild,
            counts=endpoint is not None and is_by_answer(endpoint),
            writes_prompts=has_prompt and facts.prompts is not None,
        )

    def _default_name(self, cycle: ResponseCycle, required: TargetedTranslation | None) -> str | None:
        """The model name for a request whose body has none: its query's, its client's, or the only model that serves the path.

        Models that need no translation come first. None: there is no such model.
        """
        query: bytes = cycle.scope["query_string"]
        named = parse_qs(query.decode("latin-1")).get("model") if query else None
        if named:
            return named[0]
        method, request, default = cycle.scope["method"], cycle.request, cycle.profile.model
        translation = request.dialect.translation(method, request.path) if required is None else None
        serving = self._models_serving(method, request.path, translation, required)
        if default is not None and self._catalog.resolve(default).model.id in serving:
            return default
        own = serving if required is not None else self._table.get((method, request.path), serving)
        if len(own) != 1:
            return None
        rows = (row for row in self._catalog.listing() if not isinstance(row, Task))
        names = [row.name for row in rows if row.model.id in own]
        return (
            names[0] if len(names) == 1 else next(iter(own))
        )  # the model's own name, not one of several virtual names

    def _models_serving(
        self, method: str, path: str, translation: Translation | None, required: TargetedTranslation | None
    ) -> Mapping[ModelId, Endpoint]:
        """The models that serve this path, themselves or by a translation."""
        serving = self._table.get((method, path if required is None else required.path), _NONE)
        return serving if translation is None else {**self._table.get((method, translation.path), _NONE), **serving}

    def not_served(self, cycle: ResponseCycle, route: Route) -> InvalidRequestError:
        """The error for a model that doesn't serve the request's path."""
        method, path = cycle.scope["method"], cycle.request.path
        serving = self._models_serving(method, path, route.translation, route.required)
        config = route.model.config
        others = [listing.name for listing in self._catalog.listing() if listing.model.id in serving]
        hint = f" Models that do: {', '.join(others[:5])}." if others else ""
        if route.required is not None and route.required.path == "/infill":
            message = f"{route.name} does not support insert: it knows nothing of a suffix. Leave that out.{hint}"
            return InvalidRequestError(message, code="endpoint_not_supported", param="suffix")
        why = ""
        is_count = COUNT in (path, None if route.translation is None else route.translation.path)
        if is_count and route.model.id in self._table.get(("POST", CHAT), _NONE):
            why = ": a program answers each of its requests, in full whatever `max_tokens` says, so that none is just counted"
        return InvalidRequestError(
            f"{route.name} ({config.type}, {config.runtime}) does not serve {path}{why}.{hint}",
            code="endpoint_not_supported",
            param="model",
        )


def endpoint_table(catalog: Catalog) -> Table:
    """(method, public path) → the models that serve it.

    The table also has aliases, so that no request has to resolve them, and token counts of chats, for all models that chat.
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


def _required_translation(cycle: ResponseCycle) -> TargetedTranslation | None:
    """See `Dialect.required_translation`."""
    request = cycle.request
    if not request.dialect.reads_fields:
        return None
    return request.dialect.required_translation(cycle.scope["method"], request.path, cycle.body.fields)
