"""How the API is described: an `Operation` for each method of a path, with JSON schemas, from structs or in few words.

A dialect lists its own in a module called `operations`; those of the daemon follow from its functions (`supervisor.api`). Of all
of them `/openapi.json` is made (`supervisor.api.openapi`), and docs/reference/api.md (`tools.api_page`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec

Schema = Mapping[str, Any]
"""A JSON schema, of the dialect that OpenAPI 3.1 has: 2020-12."""
Method = Literal["GET", "POST", "PUT", "DELETE", "HEAD"]
Scope = Literal["inference", "admin", "metrics", "configure"]
"""Of a key."""
Fate = Literal["no effect", "named", "refused"]
"""What becomes of a field that llmux knows and does nothing with. `named`: a value that asks for something is named as ignored."""

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"
PLAIN: Final = "text/plain"
FORM: Final = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A part of the query, or a header. Those of the path are known by the path."""

    name: str
    description: str
    schema: Schema = field(default_factory=lambda: {"type": "string"})
    place: Literal["query", "header"] = "query"
    required: bool = False


@dataclass(frozen=True, slots=True)
class Example:
    """One request, against the demo, and its answer.

    `path` with the query, where it is not the operation's own. An `answer` of None is the one that was recorded last
    (`python -m tools.api_examples`). `needs`: what the demo doesn't have for it; then the answer stands here.
    """

    body: Any = None  # as JSON; a form's fields, where the operation takes a form
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    answer: Any = None
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path. Several with the same path and method are one that is asked in several ways."""

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
    stream_type: str | None = None  # of the answer, where the request wants a stream
    other_types: tuple[str, ...] = ()  # of the answer, where the request wants another
    status: int = 200
    other_statuses: tuple[int, ...] = ()  # with an answer of the same kind
    errors: tuple[int, ...] = ()  # besides those that every request may get
    aliases: tuple[str, ...] = ()  # paths that are the same
    is_run: bool = False  # a model answers it, so it may fail as `supervisor.api.openapi.RUN_ERRORS` say
    example: Example = Example()

    @property
    def name(self) -> str:
        """How others call it."""
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True)
class Section:
    """What one dialect, or one part of the daemon's own API, serves. `about`: in a sentence or two."""

    name: str
    about: str
    operations: tuple[Operation, ...]
    error: Schema  # the body of an error


# ---------------------------------------------------------------------------------------------------------------- schemas


def doc(about: str | None, fate: Fate | None = None, **limits: Any) -> msgspec.Meta:
    """Describes a field of a struct, in `Annotated`; `limits` are those of `msgspec.Meta`. `fate`: of one without use."""
    return msgspec.Meta(description=about, extra=None if fate is None else {"fate": fate}, **limits)


def plain(markdown: str) -> str:
    """Without links, which are those of a page in docs/."""
    text, *links = markdown.split("](")
    for link in links:
        before, _, label = text.rpartition("[")
        text = before + label + link.partition(")")[2]
    return text


class Open(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object that may have further fields: of a client's request, or of an answer that a worker's server defines."""


def schema_of(kind: Any, *, is_answer: bool = True) -> Schema:
    """Of a type that msgspec knows; a struct's has its name. An answer has all fields that aren't UNSET."""
    (root,), parts = msgspec.json.schema_components([kind])
    opened = {each.__name__ for each in _with_subclasses(Open)}
    for part in parts.values():
        if part["title"] in opened:
            part["additionalProperties"] = True
    found = _inlined(root, parts, is_answer=is_answer)
    assert isinstance(found, dict)
    return found


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def _inlined(schema: Any, parts: Mapping[str, Any], *, is_answer: bool) -> Any:
    """The schema with each part in place of the reference to it, as short as it can be said."""
    if isinstance(schema, list):
        return [_inlined(item, parts, is_answer=is_answer) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: _inlined(value, parts, is_answer=is_answer) for key, value in schema.items() if key != "discriminator"
    }
    if "$ref" in found:
        part = _inlined(parts[found.pop("$ref").rpartition("/")[2]], parts, is_answer=is_answer)
        found = {**part, **found}
        if "description" in schema:  # of a field, which says more than the name of its type
            del found["title"]
    if isinstance(values := found.get("enum"), list):
        found |= {"const": found.pop("enum")[0]} if len(values) == 1 else {"type": "string"}
    match found.get("anyOf"):
        case [{"type": str(name), **one}, {"type": "null"}] if "title" not in one or "description" in found:
            del found["anyOf"]
            if isinstance(values := one.get("enum"), list):
                one["enum"] = [*values, None]
            found = {**one, **found, "type": [name, "null"]}
            if "title" not in schema:  # that of the struct, which is not null
                found.pop("title", None)
    properties = schema.get("properties")
    if not found.get("required", True):
        del found["required"]
    if is_answer and isinstance(properties, dict):
        there = schema.get("required", ())
        if required := [name for name, field in properties.items() if name in there or "default" in field]:
            found["required"] = required
        if found.get("additionalProperties") is False:
            del found["additionalProperties"]  # more may come
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
