"""Input of llmux's own routes: query parameters and small JSON bodies. Errors describe the expected value."""

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

_NOT_AN_OBJECT: Final = "The request body must be a JSON object."
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}

_T = TypeVar("_T", bound=msgspec.Struct)
_D = TypeVar("_D")


def query_of(request: Request, kind: type[_T]) -> _T:
    """The query as a struct of this kind; other names in the query are ignored. Raises InvalidRequestError."""
    given, fields = dict(request.query_params), fields_of(kind)
    values = {name: _convert_text(text, fields[name]) for name, text in given.items() if name in fields}
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(error, kind, given) from error


def _convert_text(text: str, schema: Schema) -> object:
    """The text as a number or a boolean, if the schema expects one and the text is one; else the text."""
    kinds = kinds_of(schema)
    if "integer" in kinds and text.isascii() and text.isdecimal() and len(text) < 20:
        return int(text)
    if "boolean" in kinds and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    return text


async def body_of(request: Request, kind: type[_T], limit: int = BODY_LIMIT) -> _T:
    """The body, of at most `limit` bytes, as such a struct; an empty body is an empty object. Raises InvalidRequestError, TooLargeError."""
    try:
        return await _decode_body(request, kind, limit)
    except msgspec.ValidationError as error:
        raise _invalid_field(error, kind) from error


async def json_object(request: Request, limit: int = BODY_LIMIT) -> dict[str, Any]:
    """The body, of at most `limit` bytes, as a JSON object; empty without a body. Raises InvalidRequestError, TooLargeError."""
    try:
        return await _decode_body(request, dict[str, Any], limit)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(_NOT_AN_OBJECT) from error


async def _decode_body(request: Request, kind: type[_D], limit: int) -> _D:
    """A small body; no object in it has a name twice. Raises InvalidRequestError, TooLargeError, msgspec.ValidationError."""
    try:
        body = await read_body(request.scope, request.receive, limit)
    except TooLargeError:  # its message names a setting that is only for inference
        raise TooLargeError(f"The request body is larger than {limit} bytes.") from None
    if not body.strip():
        body = b"{}"
    try:
        msgspec.json.decode(body)  # the whole body must be JSON, also fields that the type doesn't have
        json.loads(body, object_pairs_hook=_refuse_duplicates, parse_int=str, parse_float=str)
    except (*UNREADABLE, ValueError) as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    return msgspec.json.decode(body, type=kind)


def _refuse_duplicates(pairs: list[tuple[str, JsonValue]]) -> None:
    """Raises InvalidRequestError for a name that an object has twice: the intended value is unknown."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            message = f"The request body has {name[:100]!r} twice in one object."
            raise InvalidRequestError(message, code="duplicate_key", param=name[:100])
        seen.add(name)


def _invalid_field(
    error: msgspec.ValidationError, kind: type[msgspec.Struct], given: Mapping[str, str] | None = None
) -> InvalidRequestError:
    """An error that describes the expected value by the docs of the struct's field. `given`: the values of a query."""
    mistake, fields = mistake_of(error, kind), fields_of(kind)
    name = top(mistake.place)
    if mistake.verdict == "unknown" and not mistake.place:
        return unknown_field(mistake)
    if name not in fields:
        return InvalidRequestError(_NOT_AN_OBJECT)
    schema, about = fields[name], ""
    if given is not None:
        schema = {**schema, "type": kinds_of(schema)}  # a query's text is never null
        about = f", got {given[name][:50]!r}."
    elif schema.get("type") != "boolean":
        about = f"{':' if 'pattern' in schema else '.'} {plain(schema.get('description', ''))}"
    missing = "missing; " if mistake.verdict == "missing" and mistake.place == name else ""
    return InvalidRequestError(f"{name}: {missing}expected {expected(schema)}{about.rstrip() or '.'}", param=name)
