"""An operation of the daemon's API: one function with typed input and output, from which all else about it follows.

    @GROUP.operation("POST", "/v1/admin/models/{name:path}/pin", answer=…)
    async def pin(api: Api, name: str, body: PinRequest) -> ModelView:
        \"\"\"Protect the model from eviction and from keep-alives.\"\"\"

The first argument is the daemon. `body` and `query` are structs: what doesn't fit them is refused, with their own words. `request` is
Starlette's. Every other argument is a part of the path. The docstring's first paragraph is the summary, the rest the description.
"""

from __future__ import annotations

import inspect
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from types import UnionType
from typing import Final, TypedDict, TypeVar, Unpack, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.daemon.editing import Editor
from supervisor.daemon.handover import Handover
from supervisor.daemon.reload import Reloader
from supervisor.daemon.sets import Sets
from supervisor.gateway.body.parameters import BODY_LIMIT, body_of, kinds_of, query_of
from supervisor.schema.operation import JSON, Example, Method, Operation, Parameter, Schema, Scope, Section, struct

_CONVERTER: Final = re.compile(r":\w+(?=})")
_Run = Callable[..., Awaitable[object]]
_R = TypeVar("_R", bound=_Run)


@dataclass(frozen=True, slots=True)
class Api:
    """What the operations work on."""

    daemon: Daemon
    reloader: Reloader
    editor: Editor
    sets: Sets
    handover: Handover | None = None  # None: this daemon can't be replaced
    run: str = field(default_factory=lambda: secrets.token_hex(4))
    """This daemon among those before and after it: in the ids of a log's lines."""


class Details(TypedDict, total=False):
    """Fields of an `Operation` that its function doesn't say."""

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
    """A method of a path, and the function that answers it."""

    method: Method
    path: str  # with Starlette's converters: /v1/admin/models/{name:path}
    scope: Scope | None  # of a key; None: it is open to all
    run: _Run
    answer: type[msgspec.Struct] | UnionType | None  # of JSON; None: it has no struct
    body: type[msgspec.Struct] | None = None
    reads: type[msgspec.Struct] | None = None  # the body, where the function reads it itself
    query: type[msgspec.Struct] | None = None
    takes_request: bool = False
    body_limit: int = BODY_LIMIT
    etag: bool = False  # the answer's own field of that name is sent as a header, too
    details: Details = field(default_factory=Details)  # further fields of its `Operation`

    @property
    def paths(self) -> tuple[str, ...]:
        """Its path, and the others that are the same."""
        return (self.path, *self.details.get("aliases", ()))

    def routes(self, api: Api) -> list[Route]:
        """Those that answer it."""

        async def answer(request: Request) -> Response:
            values: dict[str, object] = dict(request.path_params)
            if self.query is not None:
                values["query"] = query_of(request, self.query)
            if self.body is not None:
                values["body"] = await body_of(request, self.body, self.body_limit)
            if self.takes_request:
                values["request"] = request
            found = await self.run(api, **values)
            if isinstance(found, Response):
                return found
            headers = {"etag": getattr(found, "etag", "")} if self.etag else {}
            return Response(msgspec.json.encode(found), self.details.get("status", HTTPStatus.OK), headers, JSON)

        return [Route(path, answer, methods=[self.method], name=self.run.__name__) for path in self.paths]

    def described(self) -> Operation:
        """For the documentation."""
        summary, _, description = inspect.cleandoc(self.run.__doc__ or "").partition("\n\n")
        body = self.body or self.reads
        parameters = () if self.query is None else _parameters(struct(self.query, is_answer=False))
        return Operation(
            self.method,
            _CONVERTER.sub("", self.path),
            " ".join(summary.split()),
            description,
            request=None if body is None else struct(body, is_answer=False),
            answer=_answer(self.answer),
            scope=self.scope,
            **Details(**{**self.details, "parameters": (*parameters, *self.details.get("parameters", ()))}),
        )


class Group:
    """A part of the API: a section of its documentation."""

    def __init__(self, name: str, about: str) -> None:
        self.name = name
        self.about = about
        self.endpoints: list[Endpoint] = []
        self.others: list[Operation] = []
        """What is answered elsewhere, and described here."""

    def operation(
        self,
        method: Method,
        path: str,
        *,
        scope: Scope | None = "admin",
        answer: type[msgspec.Struct] | UnionType | None = None,
        reads: type[msgspec.Struct] | None = None,
        body_limit: int = BODY_LIMIT,
        etag: bool = False,
        **details: Unpack[Details],
    ) -> Callable[[_R], _R]:
        """Serve a function there. `answer`: of one that makes its response itself; `reads`: of one that reads its body itself.

        `etag`: the answer's field of that name is sent as a header, too. `details`: further fields of its `Operation`.
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
                    scope,
                    run,
                    made,
                    body=None if body is None else body.annotation,
                    query=names["query"].annotation if "query" in names else None,
                    takes_request="request" in names,
                    body_limit=body_limit,
                    etag=etag,
                    reads=reads,
                    details=details,
                )
            )
            return run

        return declared

    def section(self) -> Section:
        """For the documentation."""
        described = (*(endpoint.described() for endpoint in self.endpoints), *self.others)
        return Section(self.name, self.about, described)


def _parameters(schema: Schema) -> tuple[Parameter, ...]:
    """Of the fields of a query."""
    found = []
    for name, said in schema["properties"].items():
        plain = {key: value for key, value in said.items() if key not in ("description", "default")}
        (plain["type"],) = kinds_of(said)
        if "enum" in plain:
            plain["enum"] = [value for value in plain["enum"] if value is not None]
        found.append(Parameter(name, said.get("description", ""), plain))
    return tuple(found)


def _answer(kind: type[msgspec.Struct] | UnionType | None) -> Schema | None:
    """The schema of what a function returns; of several structs any of them."""
    if kind is None:
        return None
    structs = [each for each in get_args(kind) or (kind,) if issubclass(each, msgspec.Struct)]
    return struct(structs[0]) if len(structs) == 1 else {"anyOf": [struct(each) for each in structs]}
