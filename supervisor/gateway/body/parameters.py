"""Input of llmux's own routes: query parameters and small JSON bodies. Errors say what was expected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from pydantic import JsonValue
from starlette.requests import Request

from supervisor.errors import InvalidRequestError, TooLargeError
from supervisor.gateway.body.body import read_body
from supervisor.gateway.body.typed import UNREADABLE, expected, fields_of, kinds_of, mistake_of, top, unknown_field
from supervisor.schema.operation import Schema, plain

BODY_LIMIT: Final = 64 * 1024

_NO_OBJECT: Final = "The request body must be a JSON object."
_FLAGS: Final = {"true": True, "1": True, "false": False, "0": False}

_T = TypeVar("_T", bound=msgspec.Struct)
_D = TypeVar("_D")


def query_of(request: Request, kind: type[_T]) -> _T:
    """The query as such a struct; other names in it are ignored. Raises InvalidRequestError."""
    given, fields = dict(request.query_params), fields_of(kind)
    values = {name: _value(text, fields[name]) for name, text in given.items() if name in fields}
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _invalid(error, kind, given) from error


def _value(text: str, schema: Schema) -> object:
    """A number or a flag where one is expected and the text is one."""
    kinds = kinds_of(schema)
    if "integer" in kinds and text.isascii() and text.isdecimal() and len(text) < 20:
        return int(text)
    if "boolean" in kinds and text.lower() in _FLAGS:
        return _FLAGS[text.lower()]
    return text


async def body_of(request: Request, kind: type[_T], limit: int = BODY_LIMIT) -> _T:
    """The body, of at most `limit` bytes, as such a struct; an empty one is an empty object. Raises InvalidRequestError, TooLargeError."""
    try:
        return await _small_body(request, kind, limit)
    except msgspec.ValidationError as error:
        raise _invalid(error, kind) from error


async def json_object(request: Request, limit: int = BODY_LIMIT) -> dict[str, Any]:
    """The body, of at most `limit` bytes, as a JSON object; empty without a body. Raises InvalidRequestError, TooLargeError."""
    try:
        return await _small_body(request, dict[str, Any], limit)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(_NO_OBJECT) from error


async def _small_body(request: Request, kind: type[_D], limit: int) -> _D:
    """A small body, in which no object has a name twice. Raises InvalidRequestError, TooLargeError, msgspec.ValidationError."""
    try:
        body = await read_body(request.scope, request.receive, limit)
    except TooLargeError:  # whose message names a setting of inference
        raise TooLargeError(f"The request body is larger than {limit} bytes.") from None
    if not body.strip():
        body = b"{}"
    try:
        msgspec.json.decode(body)  # all of it is JSON, also what the type doesn't have
        json.loads(body, object_pairs_hook=_once_each, parse_int=str, parse_float=str)
    except (*UNREADABLE, ValueError) as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    return msgspec.json.decode(body, type=kind)


def _once_each(pairs: list[tuple[str, JsonValue]]) -> None:
    """Which of two values counts is nothing to guess in what an operator asks for. Raises InvalidRequestError."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            message = f"The request body has {name[:100]!r} twice in one object."
            raise InvalidRequestError(message, code="duplicate_key", param=name[:100])
        seen.add(name)


def _invalid(
    error: msgspec.ValidationError, kind: type[msgspec.Struct], given: Mapping[str, str] | None = None
) -> InvalidRequestError:
    """An error that says what was expected, by the descriptions of the struct's fields. `given`: the values of a query."""
    mistake, fields = mistake_of(error, kind), fields_of(kind)
    name = top(mistake.place)
    if mistake.verdict == "unknown" and not mistake.place:
        return unknown_field(mistake)
    if name not in fields:
        return InvalidRequestError(_NO_OBJECT)
    schema, about = fields[name], ""
    if given is not None:
        schema = {**schema, "type": kinds_of(schema)}  # a text is never null
        about = f", got {given[name][:50]!r}."
    elif schema.get("type") != "boolean":
        about = f"{':' if 'pattern' in schema else '.'} {plain(schema.get('description', ''))}"
    missing = "missing; " if mistake.verdict == "missing" and mistake.place == name else ""
    return InvalidRequestError(f"{name}: {missing}expected {expected(schema)}{about.rstrip() or '.'}", param=name)
