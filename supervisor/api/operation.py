"""An operation of the daemon's API: one function with typed input and output, from which all else about it follows.

    @GROUP.operation("POST", "/v1/admin/models/{name:path}/pin", answer=…)
    async def pin(api: Api, name: str, body: PinRequest) -> ModelView:
        \"\"\"Protect the model from eviction and from keep-alives.\"\"\"

The first argument is the daemon. `body` and `query` are structs: what doesn't fit them is refused, with their own words. `request` is
Starlette's. Every other argument is a part of the path. The docstring's first paragraph is the summary, the rest the description.
"""

from __future__ import annotations

import inspect
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import UnionType
from typing import Any, Final, TypeVar, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.daemon.editing import Editor
from supervisor.daemon.handover import Handover
from supervisor.daemon.reload import Reloader
from supervisor.daemon.sets import Sets
from supervisor.errors import InvalidRequestError, TooLargeError
from supervisor.gateway.body.body import read_body
from supervisor.schema.operation import JSON, Method, Operation, Parameter, Schema, Scope, Section, struct

BODY_LIMIT: Final = 64 * 1024
_CONVERTER: Final = re.compile(r":\w+(?=})")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$(.*)`)?", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(.*?)`(?: - at `\$(.*)`)?", re.DOTALL)
_FIELD: Final = re.compile(r" - at `(?:key in )?\$\.(\w+)", re.DOTALL)
_TYPES: Final[Mapping[object, str]] = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "array": "a list",
    "object": "an object",
    "null": "null",
}

_Run = Callable[..., Awaitable[object]]
_R = TypeVar("_R", bound=_Run)
_T = TypeVar("_T", bound=msgspec.Struct)


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


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a path, and the function that answers it."""

    method: Method
    path: str  # with Starlette's converters: /v1/admin/models/{name:path}
    run: _Run
    answer: type[msgspec.Struct] | UnionType | None  # of JSON; None: it has no struct
    body: type[msgspec.Struct] | None = None
    reads: type[msgspec.Struct] | None = None  # the body, where the function reads it itself
    is_body_optional: bool = False
    query: type[msgspec.Struct] | None = None
    takes_request: bool = False
    body_limit: int = BODY_LIMIT
    etag: bool = False  # the answer's own field of that name is sent as a header, too
    about: Mapping[str, Any] = field(default_factory=dict)  # further fields of its `Operation`

    @property
    def paths(self) -> tuple[str, ...]:
        """Its path, and the others that are the same."""
        return (self.path, *self.about.get("aliases", ()))

    @property
    def scope(self) -> Scope | None:
        """Of a key; None: it is open to all."""
        scope: Scope | None = self.about["scope"]
        return scope

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
            return Response(msgspec.json.encode(found), self.about.get("status", HTTPStatus.OK), headers, JSON)

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
            is_body_optional=self.is_body_optional,
            answer=_answer(self.answer),
            **{**self.about, "parameters": (*parameters, *self.about.get("parameters", ()))},
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
        is_body_optional: bool = False,
        body_limit: int = BODY_LIMIT,
        etag: bool = False,
        **about: Any,
    ) -> Callable[[_R], _R]:
        """Serve a function there. `answer`: of one that makes its response itself; `reads`: of one that reads its body itself.

        `about`: further fields of its `Operation`.
        """
        about["scope"] = scope

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
                    run,
                    made,
                    body=None if body is None else body.annotation,
                    is_body_optional=is_body_optional,
                    query=names["query"].annotation if "query" in names else None,
                    takes_request="request" in names,
                    body_limit=body_limit,
                    etag=etag,
                    reads=reads,
                    about=about,
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
        kinds = [kind for kind in _listed(said.get("type")) if kind != "null"]
        plain = {key: value for key, value in said.items() if key not in ("description", "default")}
        plain["type"] = kinds[0]
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


# ------------------------------------------------------------------------------------------------------------------ input


def query_of(request: Request, kind: type[_T]) -> _T:
    """The query as such a struct; other names in it are ignored. Raises InvalidRequestError."""
    given = request.query_params
    try:
        return msgspec.convert(dict(given), kind, strict=False)
    except msgspec.ValidationError as error:
        refused = invalid(error, kind)
        if refused.param is not None:
            refused.message = f"{refused.message.removesuffix('.')}, got {given[refused.param][:50]!r}."
        raise refused from error


async def body_of(request: Request, kind: type[_T], limit: int = BODY_LIMIT) -> _T:
    """The body, of at most `limit` bytes, as such a struct; an empty one is an empty object. Raises InvalidRequestError, TooLargeError."""
    try:
        body = await read_body(request.scope, request.receive, limit)
    except TooLargeError:  # whose message names a setting of inference
        raise TooLargeError(f"The request body is larger than {limit} bytes.") from None
    try:
        json.loads(body if body.strip() else b"{}", object_pairs_hook=_once_each)
        return msgspec.json.decode(body if body.strip() else b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise invalid(error, kind) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from error


def invalid(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> InvalidRequestError:
    """What is wrong with an input, and what was expected in its place, by the descriptions of the struct's fields."""
    told, fields = str(error), struct(kind, is_answer=False)["properties"]
    if (found := _UNKNOWN.fullmatch(told)) is not None:
        place = f"{found[2]}.{found[1]}".removeprefix(".") if found[2] else found[1]
        there = f"; there is {', '.join(fields)}" if not found[2] else ""
        return InvalidRequestError(f"{place[:100]}: unknown{there}.", param=place[:100])
    if (found := _MISSING.fullmatch(told)) is not None and not found[2]:
        name = found[1]
        return InvalidRequestError(f"{name}: missing; expected {expected(fields[name])}", param=name)
    if (found := _FIELD.search(told)) is not None and found[1] in fields:
        return InvalidRequestError(f"{found[1]}: expected {expected(fields[found[1]])}", param=found[1])
    return InvalidRequestError("The request body must be a JSON object.")


def expected(schema: Schema) -> str:
    """A field in words, such as "a whole number from 1 to 9. How many."."""
    about = schema.get("description", "")
    return f"{_kind(schema)}. {about}" if about else f"{_kind(schema)}."


def _kind(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"] if each != {"type": "null"})
    if "enum" in schema:
        return f"one of {', '.join(str(value) for value in schema['enum'] if value is not None)}"
    words = " or ".join(_TYPES[kind] for kind in _listed(schema.get("type")) if kind != "null")
    if (items := schema.get("items")) is not None and items.get("type") == "string":
        words += " of texts"
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None:
        words += f" from {least:g}" if most is not None else f" of at least {least:g}"
    return f"{words} to {most:.15g}" if most is not None else words or "another value"


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _once_each(pairs: list[tuple[str, object]]) -> None:
    """Which of two values counts is nothing to guess in what an operator asks for. Raises InvalidRequestError."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            message = f"The request body has {name[:100]!r} twice in one object."
            raise InvalidRequestError(message, code="duplicate_key", param=name[:100])
        seen.add(name)
