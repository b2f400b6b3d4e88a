"""An operation: one function with typed input and output, from which its route, its checks and its description follow.

    @GROUP.operation("POST", "/v1/admin/models/{name:path}/pin", answer=…)
    async def pin(api: Api, name: str, body: PinRequest) -> ModelView:
        \"\"\"Protect the model from eviction and from keep-alives.\"\"\"

The first argument is the object that the group's functions work on: the daemon, or its API. `body` and `query` are structs; a
request that doesn't fit them is refused with the structs' own descriptions. A body that is `Sent` may have further fields. The
answer lists these in `x-llmux-ignored`: the argument `ignored` is that list, to which a function may add, and `fields` is the
whole body. `request` is Starlette's. Every other argument is a part of the path. The docstring's first paragraph is the summary,
the rest the description. An operation that a model answers has no function: `GROUP.model_endpoint` describes it by its types.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from types import UnionType
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack, get_args, get_origin

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, compile_path

from supervisor.gateway.body.parameters import BODY_LIMIT, body_of, json_object, query_of
from supervisor.gateway.body.typed import Reader, Sent, encoded, kinds_of
from supervisor.gateway.filters.translation import ignored_header
from supervisor.schema.operation import (
    JSON,
    Error,
    Example,
    Method,
    Operation,
    Parameter,
    Schema,
    Scope,
    Section,
    schema_of,
)

_CONVERTER: Final = re.compile(r":\w+(?=})")
_Run = Callable[..., Awaitable[object]]
_R = TypeVar("_R", bound=_Run)
_Types = type[msgspec.Struct] | type[list[Any]] | UnionType
"""A struct, a list of one, or a union of several."""
_EXTRAS: Final = frozenset({"request", "fields", "ignored"})
"""Arguments of a function that are neither body, query nor part of the path."""


class Details(TypedDict, total=False):
    """Further fields of an `Operation`."""

    parameters: tuple[Parameter, ...]  # headers; those of the query follow from its struct
    request_type: str
    is_body_optional: bool
    answer_type: str
    stream_type: str
    other_types: tuple[str, ...]
    status: int
    other_statuses: tuple[int, ...]
    errors: tuple[int, ...]
    aliases: tuple[str, ...]
    example: Example


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a path, with the function that answers it, or without a function where a model answers."""

    method: Method
    path: str  # with Starlette's converters: /v1/admin/models/{name:path}
    scope: Scope | None  # of a key; None: it is open to all
    about: str  # in Markdown: the summary, then the description
    run: _Run | None  # None: a model answers it
    answer: _Types | None  # of JSON; None: it has no struct
    body: _Types | None = None
    reads: _Types | None = None  # the body's type, where the function or the model reads the body itself
    query: type[msgspec.Struct] | None = None
    extras: frozenset[str] = frozenset()  # the function's arguments that are in `_EXTRAS`
    body_limit: int = BODY_LIMIT
    etag: bool = False  # the answer's own field of that name is sent as a header, too
    route: type[Route] = Route
    details: Details = field(default_factory=Details)  # further fields of its `Operation`

    @property
    def paths(self) -> tuple[str, ...]:
        """The endpoint's path and its aliases."""
        return (self.path, *self.details.get("aliases", ()))

    def routes(self, context: object) -> list[Route]:
        """Routes for the endpoint's paths. `context`: the object that its function works on."""
        if (run := self.run) is None:
            return []
        kind: Any = self.body
        read = Reader(kind) if kind is not None and issubclass(_member_types(kind)[0], Sent) else None

        async def answer(request: Request) -> Response:
            values: dict[str, object] = dict(request.path_params)
            fields: dict[str, Any] = {}
            ignored: list[str] = []
            if self.query is not None:
                values["query"] = query_of(request, self.query)
            if read is not None:
                fields = await json_object(request, self.body_limit)
                values["body"], ignored = read(encoded(fields))
            elif kind is not None:
                values["body"] = await body_of(request, kind, self.body_limit)
            extras = {"request": request, "fields": fields, "ignored": ignored}
            found = await run(context, **values, **{name: extras[name] for name in self.extras})
            headers = {"x-llmux-ignored": ignored_header(ignored)} if ignored else {}
            if isinstance(found, Response):
                found.headers.update(headers)
                return found
            if self.etag:
                headers["etag"] = getattr(found, "etag", "")
            return Response(msgspec.json.encode(found), self.details.get("status", HTTPStatus.OK), headers, JSON)

        return [self.route(path, answer, methods=[self.method], name=run.__name__) for path in self.paths]

    def described(self) -> Operation:
        """The endpoint's description for the documentation."""
        summary, _, description = inspect.cleandoc(self.about).partition("\n\n")
        parameters = () if self.query is None else _query_parameters(schema_of(self.query, is_answer=False))
        return Operation(
            self.method,
            _CONVERTER.sub("", self.path),
            " ".join(summary.split()),
            description,
            request=_schema_of_types(self.body or self.reads, is_answer=False),
            answer=_schema_of_types(self.answer, is_answer=True),
            scope=self.scope,
            is_run=self.run is None,
            **Details(**{**self.details, "parameters": (*parameters, *self.details.get("parameters", ()))}),
        )


class Group:
    """A part of the API: a section of its documentation."""

    def __init__(self, name: str, about: str, *, scope: Scope = "admin", error: type[msgspec.Struct] = Error) -> None:
        """`scope`: the key scope of operations without one of their own. `error`: the body of their errors."""
        self.name = name
        self.about = about
        self.scope = scope
        self.error = error
        self.endpoints: list[Endpoint] = []
        self.others: list[Operation] = []
        """Operations that other code answers, and this group describes."""

    def operation(
        self,
        method: Method,
        path: str,
        *,
        scope: Scope | Literal["group"] | None = "group",
        answer: _Types | None = None,
        reads: _Types | None = None,
        body_limit: int = BODY_LIMIT,
        etag: bool = False,
        route: type[Route] = Route,
        **details: Unpack[Details],
    ) -> Callable[[_R], _R]:
        """Serve the decorated function at this path.

        `answer`: the type of the answer, where the function returns a Response. `reads`: the type of the body, where the function reads
        it itself. `etag`: the answer's field of that name is sent as a header, too. `details`: further fields of its `Operation`.
        """

        def declared(run: _R) -> _R:
            signature = inspect.signature(run, eval_str=True)
            names = signature.parameters
            body = names.get("body")
            returned = signature.return_annotation
            made = answer or (None if returned is Response else returned)
            self.endpoints.append(
                Endpoint(
                    method,
                    path,
                    self.scope if scope == "group" else scope,
                    run.__doc__ or "",
                    run,
                    made,
                    body=None if body is None else body.annotation,
                    query=names["query"].annotation if "query" in names else None,
                    extras=_EXTRAS & names.keys(),
                    body_limit=body_limit,
                    etag=etag,
                    reads=reads,
                    route=route,
                    details=details,
                )
            )
            return run

        return declared

    def model_endpoint(
        self,
        path: str,
        about: str,
        *,
        method: Method = "POST",
        reads: _Types | None = None,
        query: type[msgspec.Struct] | None = None,
        answer: _Types | None = None,
        **details: Unpack[Details],
    ) -> None:
        """Describe a path that a model answers. `about`: the summary, a blank line, the description."""
        self.endpoints.append(
            Endpoint(method, path, self.scope, about, None, answer, reads=reads, query=query, details=details)
        )

    def at(self, path: str) -> Endpoint | None:
        """The group's operation at this path; None if there is none."""
        for endpoint in self.endpoints:
            if any(pattern(each).fullmatch(path) for each in endpoint.paths):
                return endpoint
        return None

    def routes(self, context: object) -> list[Route]:
        """The routes of the group's functions. `context`: the object that the functions work on."""
        return [route for endpoint in self.endpoints for route in endpoint.routes(context)]

    def section(self) -> Section:
        """The group as a section of the documentation."""
        described = (*(endpoint.described() for endpoint in self.endpoints), *self.others)
        return Section(self.name, self.about, described, schema_of(self.error))


@cache
def pattern(path: str) -> re.Pattern[str]:
    """A path with Starlette's converters as a pattern. Starlette's own pattern would end at a newline, which a name may contain."""
    return re.compile(compile_path(path)[0].pattern, re.DOTALL)


def _query_parameters(schema: Schema) -> tuple[Parameter, ...]:
    """The fields of a query as parameters."""
    found = []
    for name, described in schema["properties"].items():
        plain = {key: value for key, value in described.items() if key not in ("description", "default")}
        (plain["type"],) = kinds_of(described)
        if "enum" in plain:
            plain["enum"] = [value for value in plain["enum"] if value is not None]
        found.append(Parameter(name, described.get("description", ""), plain))
    return tuple(found)


def _schema_of_types(kind: _Types | None, *, is_answer: bool) -> Schema | None:
    """The schema of a struct, or of a list of one; of a union, the schemas of its members."""
    if kind is None:
        return None
    structs = [each for each in _member_types(kind) if issubclass(each, msgspec.Struct)]
    schemas = [schema_of(each, is_answer=is_answer) for each in structs]
    if get_origin(kind) is list:
        return {"type": "array", "items": schemas[0]}
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _member_types(kind: _Types) -> tuple[Any, ...]:
    """The members of a union, or the items' type of a list; else the struct itself."""
    return get_args(kind) or (kind,)
