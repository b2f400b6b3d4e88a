"""Step 2 of a request's way: which model is meant, may it be asked this, and what does its worker get?

A request names its model in the body's `model` (JSON or multipart) or in `?model=`. Where only one configured model serves
the path, it may leave the name out. A task stands for several models: `ladder` says whom to ask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import parse_qs

from runtimes.base import Endpoint
from runtimes.endpoints import OTHER, aliases_of
from supervisor.catalog import Catalog, Route, Task
from supervisor.catalog.clients import ClientConfig
from supervisor.core.types import ModelId, WorkerState
from supervisor.daemon.engine import Engine
from supervisor.daemon.ladder import Ladder
from supervisor.daemon.requests import RequestContext
from supervisor.daemon.runtime_config import RuntimeConfig
from supervisor.errors import InvalidRequestError
from supervisor.io.held_body import BodyBudget, HeldBody
from supervisor.proxy import budget, permission
from supervisor.proxy.body import BUDGET, Body
from supervisor.proxy.disconnect import Scope
from supervisor.proxy.model_name import Renaming, renaming
from supervisor.proxy.translation import AnswerTranslation, StreamTranslation, Translation

Table = Mapping[tuple[str, str], Mapping[ModelId, Endpoint]]


NAME_LIMIT: Final = 512  # of the name of a model
_NONE: Final[Mapping[ModelId, Endpoint]] = {}


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes, and what is sent there."""

    model: ModelId
    path: bytes  # the worker's path and query
    body: HeldBody
    translation: AnswerTranslation | None = None  # of the answer
    names: Renaming | None = None  # in the answer
    completion: StreamTranslation | None = None  # of what it lacks
    is_known: bool = True  # so that the form of a stream is known before the worker answers
    ladder: Ladder | None = None  # set iff a task was asked: who is asked next
    prefix: int | None = None  # of its conversation, where several replicas could answer


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request wants, whoever answers it."""

    body: Body
    name: str
    path: str
    translation: Translation | None  # for models that don't serve the path
    profile: ClientConfig  # its client's
    is_permitted: bool  # by its body, to leave this machine


class Targets:
    """Finds them in one catalog."""

    def __init__(self, engine: Engine, catalog: Catalog, bodies: BodyBudget, runtime: RuntimeConfig) -> None:
        self._engine = engine
        self._catalog = catalog
        self._bodies = bodies
        self._runtime = runtime
        self._inputs = {model.id: model.adapter.inputs(model.config) for model in catalog.models.values()}
        self._names = {model.id: model.adapter.answers_as(model.config, model.id) for model in catalog.models.values()}
        self._guarded = {model.id for model in catalog.models.values() if model.adapter.needs_permission(model.config)}
        self._with_replicas = {model.id for model in catalog.models.values() if model.config.most_replicas > 1}
        self.table = endpoint_table(catalog)

    async def find(
        self, scope: Scope, body: Body, context: RequestContext, held: HeldBody, profile: ClientConfig
    ) -> Target:
        """The model, or a task's first candidate, and what to send it. Raises LlmuxError."""
        translation = context.dialect.translation(scope["method"], context.path)
        name = body.name if body.name is not None else self._unnamed(scope, context.path, translation, profile.model)
        if name is None:
            raise body.nameless(scope)
        if len(name) > NAME_LIMIT or not name.isprintable():  # it will be logged, and shown in terminals
            raise InvalidRequestError("`model` is not the name of a model.", param="model")
        context.name = name
        context.budget_s = budget.budget_s(scope["headers"], body.said(BUDGET))
        route = self._catalog.resolve(name)
        asked = Asked(body, name, context.path, translation, profile, body.take_permission())
        if not isinstance(route, Task):
            return await self._target(scope, asked, context, held, route)
        if route.config.budget_s is not None:
            context.budget_s = min(context.budget_s or math.inf, route.config.budget_s)
        return await Ladder(
            route,
            self._engine,
            partial(self._target, scope, asked, context, held),
            allow_cloud_fallback=self._runtime.allow_cloud_fallback,
        ).target()

    async def _target(
        self,
        scope: Scope,
        asked: Asked,
        context: RequestContext,
        held: HeldBody,
        route: Route,
        ladder: Ladder | None = None,
    ) -> Target:
        """Whether this request is allowed for the model, and what to send it. Raises LlmuxError."""
        body, name, method, model = asked.body, asked.name, scope["method"], route.model.id
        endpoint, translation = self.table.get((method, asked.path), _NONE).get(model), None
        if endpoint is None and asked.translation is not None:
            endpoint = self.table.get((method, asked.translation.path), _NONE).get(model)
            if endpoint is not None:
                body, translation = body.translated(asked.translation)
        if endpoint is None:
            raise self._not_served(asked, method, route)
        context.stream, context.ignored = body.stream, () if translation is None else translation.ignored
        is_permitted = asked.is_permitted or (ladder is not None and ladder.task.config.allow_remote)
        if not (is_permitted or model not in self._guarded or permission.in_headers(scope["headers"])):
            raise permission.refuse(name)
        await body.check(name, self._inputs[model], endpoint)
        path = (endpoint.upstream_path or endpoint.path).encode()
        if query := scope["query_string"]:
            path += b"?" + query
            if b"autoload=" in query:
                self._refuse_load(query, name, model)
        theirs = self._names[model]
        names = renaming(theirs, name) if theirs != name and endpoint.meaning.role == "run" else None
        completion = None if translation is not None else context.dialect.completion(name, stream=body.stream)
        parameters = asked.profile.parameters
        rewrite = route.rewrite.with_defaults(parameters) if parameters else route.rewrite
        data = await body.rewritten(rewrite, endpoint)
        if ladder is None:
            rewritten = held.changed(data)
        else:  # `held` stays as it came: the next candidate's is made of it
            rewritten = HeldBody(self._bodies)
            rewritten.keep(data)
        is_known = translation is not None or endpoint.meaning is not OTHER
        prefix = body.prefix() if model in self._with_replicas else None
        return Target(model, path, rewritten, translation, names, completion, is_known, ladder, prefix)

    def _refuse_load(self, query: bytes, name: str, model: ModelId) -> None:
        """llama.cpp's `?autoload=false`: raises InvalidRequestError unless the model is loaded, or is being loaded."""
        found = self._engine.model(model)
        is_coming = found is not None and (found.answering or found.state is WorkerState.STARTING)
        if not is_coming and parse_qs(query.decode("latin-1")).get("autoload", ["true"])[0] not in {"true", "1"}:
            raise InvalidRequestError(
                f"{name} is not loaded, and the request says autoload=false.", code="model_not_loaded"
            )

    def _unnamed(self, scope: Scope, path: str, translation: Translation | None, default: str | None) -> str | None:
        """The model of a request whose body names none. `default`: the client's, if it serves the path."""
        query: bytes = scope["query_string"]
        named = parse_qs(query.decode("latin-1")).get("model") if query else None
        if named:
            return named[0]
        serving = self._serving(scope["method"], path, translation)
        if default is not None and self._catalog.resolve(default).model.id in serving:
            return default
        if len(serving) != 1:
            return None
        rows = (row for row in self._catalog.listing() if not isinstance(row, Task))
        names = [row.name for row in rows if row.model.id in serving]
        return names[0] if len(names) == 1 else next(iter(serving))  # itself, not one of several virtual models

    def _serving(self, method: str, path: str, translation: Translation | None) -> Mapping[ModelId, Endpoint]:
        """The models that can be asked there."""
        serving = self.table.get((method, path), _NONE)
        return serving if translation is None else {**self.table.get((method, translation.path), _NONE), **serving}

    def _not_served(self, asked: Asked, method: str, route: Route) -> InvalidRequestError:
        serving, config = self._serving(method, asked.path, asked.translation), route.model.config
        others = [listing.name for listing in self._catalog.listing() if listing.model.id in serving]
        hint = f" Models that do: {', '.join(others[:5])}." if others else ""
        return InvalidRequestError(
            f"{asked.name} ({config.type}, {config.runtime}) does not serve {asked.path}.{hint}",
            code="endpoint_not_supported",
            param="model",
        )


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
