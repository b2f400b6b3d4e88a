"""Describes the API: an `Operation` for each method of a path, with JSON schemas, made from structs or written directly.

A dialect lists its operations in a module `operations`; those of the daemon follow from its functions (`supervisor.api`).
`/openapi.json` (`supervisor.api.openapi`) and docs/reference/api.md (`tools.api_page`) are made from all operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec

Schema = Mapping[str, Any]
"""A JSON schema, in OpenAPI 3.1's dialect: 2020-12."""
Method = Literal["GET", "POST", "PUT", "DELETE", "HEAD"]
Scope = Literal["inference", "admin", "metrics", "configure"]
"""The scope of a key."""
Fate = Literal["no effect", "named", "refused"]
"""The treatment of a known field without effect. `named`: a value that requests something is listed as ignored."""

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"
PLAIN: Final = "text/plain"
FORM: Final = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the query, or a header. The path itself has its parameters."""

    name: str
    description: str
    schema: Schema = field(default_factory=lambda: {"type": "string"})
    place: Literal["query", "header"] = "query"
    required: bool = False


@dataclass(frozen=True, slots=True)
class Example:
    """One request to the demo, and its answer.

    `path`, with the query, if it differs from the operation's path. `answer` None: the last recorded answer
    (`python -m tools.api_examples`). `needs`: the requirement that the demo lacks; then `answer` is given here.
    """

    body: Any = None  # as JSON; the form's fields, if the operation takes a form
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    answer: Any = None
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path. Several operations with the same path and method describe its different forms of requests."""

    method: Method
    path: str  # /v1/models/{name}
    summary: str  # a short sentence
    description: str = ""  # Markdown; links are docs/reference/api.md's
    scope: Scope | None = "inference"  # None: open to all
    parameters: tuple[Parameter, ...] = ()
    request: Schema | None = None
    request_type: str = JSON
    is_body_optional: bool = False
    answer: Schema | None = None  # of JSON
    answer_type: str = JSON
    stream_type: str | None = None  # of the answer, if the request wants a stream
    other_types: tuple[str, ...] = ()  # of the answer, if the request wants another type
    status: int = 200
    other_statuses: tuple[int, ...] = ()  # with an answer of the same kind
    errors: tuple[int, ...] = ()  # in addition to those of every request
    aliases: tuple[str, ...] = ()  # other paths of the same operation
    is_run: bool = False  # does a model answer it, so that `supervisor.api.openapi.RUN_ERRORS` are possible?
    example: Example = Example()

    @property
    def name(self) -> str:
        """The operation's name in links: its method and path."""
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True)
class Section:
    """The operations of one dialect, or of one part of the daemon's own API. `about`: a sentence or two."""

    name: str
    about: str
    operations: tuple[Operation, ...]
    error: Schema  # the body of an error


# ---------------------------------------------------------------------------------------------------------------- schemas


def doc(about: str | None, fate: Fate | None = None, **limits: Any) -> msgspec.Meta:
    """Describes a field of a struct, in `Annotated`; `limits` are those of `msgspec.Meta`. `fate`: for a field without effect."""
    return msgspec.Meta(description=about, extra=None if fate is None else {"fate": fate}, **limits)


def plain(markdown: str) -> str:
    """The text without its Markdown links, which lead to pages in docs/."""
    text, *links = markdown.split("](")
    for link in links:
        before, _, label = text.rpartition("[")
        text = before + label + link.partition(")")[2]
    return text


class Open(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object that may have further fields: of a client's request, or of an answer that a worker's server defines."""


def schema_of(kind: Any, *, is_answer: bool = True) -> Schema:
    """The schema of a type that msgspec knows; a struct's name is its title. An answer has all fields that aren't UNSET."""
    (root,), parts = msgspec.json.schema_components([kind])
    opened = {each.__name__ for each in _with_subclasses(Open)}
    for part in parts.values():
        if part["title"] in opened:
            part["additionalProperties"] = True
    found = _inline_references(root, parts, is_answer=is_answer)
    assert isinstance(found, dict)
    return found


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def _inline_references(schema: Any, parts: Mapping[str, Any], *, is_answer: bool) -> Any:
    """The schema with each reference replaced by its part, simplified."""
    if isinstance(schema, list):
        return [_inline_references(item, parts, is_answer=is_answer) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: _inline_references(value, parts, is_answer=is_answer)
        for key, value in schema.items()
        if key != "discriminator"
    }
    if "$ref" in found:
        part = _inline_references(parts[found.pop("$ref").rpartition("/")[2]], parts, is_answer=is_answer)
        found = {**part, **found}
        if "description" in schema:  # a field's description replaces the title of its type
            del found["title"]
    if isinstance(values := found.get("enum"), list):
        found |= {"const": found.pop("enum")[0]} if len(values) == 1 else {"type": "string"}
    match found.get("anyOf"):
        case [{"type": str(name), **one}, {"type": "null"}] if "title" not in one or "description" in found:
            del found["anyOf"]
            if isinstance(values := one.get("enum"), list):
                one["enum"] = [*values, None]
            found = {**one, **found, "type": [name, "null"]}
            if "title" not in schema:  # the title is the struct's, which is not null
                found.pop("title", None)
    properties = schema.get("properties")
    if not found.get("required", True):
        del found["required"]
    if is_answer and isinstance(properties, dict):
        there = schema.get("required", ())
        if required := [name for name, field in properties.items() if name in there or "default" in field]:
            found["required"] = required
        if found.get("additionalProperties") is False:
            del found["additionalProperties"]  # later versions may add fields
        for field in found["properties"].values():
            field.pop("default", None)
    return found


class ErrorBody(Open):
    """What went wrong."""

    message: Annotated[str, doc("What is wrong, and what to do.")]
    type: str
    param: Annotated[str | None, doc("The field that it is about.")] | msgspec.UnsetType = msgspec.UNSET
    code: Annotated[str | int | None, doc("What went wrong, in a word that stays.")] | msgspec.UnsetType = msgspec.UNSET
    detail: (
        Annotated[list[str], doc("A worker's last lines, or all mistakes of a configuration.")] | msgspec.UnsetType
    ) = msgspec.UNSET


class Error(msgspec.Struct):
    """The body of most errors, in OpenAI's shape."""

    error: ErrorBody
