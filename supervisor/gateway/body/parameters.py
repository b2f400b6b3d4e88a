"""Input of llmux's own routes: query parameters and small JSON bodies. Errors say what was expected."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec
from pydantic import JsonValue
from starlette.requests import Request

from supervisor.errors import InvalidRequestError, TooLargeError
from supervisor.gateway.body.body import read_body

BODY_LIMIT: Final = 64 * 1024

S = TypeVar("S", bound=str)


def flag(request: Request, name: str) -> bool:
    """`?name=true`; False without it."""
    value = request.query_params.get(name, "false").lower()
    if value not in {"true", "false", "1", "0"}:
        raise InvalidRequestError(f"{name}: expected true or false, got {value!r}.", param=name)
    return value in {"true", "1"}


def number(request: Request, name: str, default: int, most: int, *, least: int = 1) -> int:
    """`?name=5`, within its range."""
    value = request.query_params.get(name, str(default))
    if not (value.isascii() and value.isdecimal() and len(value) < 20 and least <= int(value) <= most):
        raise InvalidRequestError(f"{name}: expected a whole number from {least} to {most}, got {value!r}.", param=name)
    return int(value)


def choices(request: Request, name: str, known: Iterable[S]) -> tuple[S, ...]:
    """`?name=a,b`; all of `known` without it."""
    by_name = {str(choice): choice for choice in known}
    wanted = request.query_params.get(name)
    if wanted is None:
        return tuple(by_name.values())
    unknown = [word for word in wanted.split(",") if word not in by_name]
    if unknown:
        raise InvalidRequestError(f"{name}: there is no {unknown[0]!r}, only {', '.join(by_name)}.", param=name)
    return tuple(by_name[word] for word in wanted.split(","))


T = TypeVar("T", bound=msgspec.Struct)


async def struct_body(request: Request, kind: type[T], limit: int = BODY_LIMIT) -> T:
    """The body, of at most `limit` bytes, as such a struct. Raises InvalidRequestError, TooLargeError."""
    try:
        body = await read_body(request.scope, request.receive, limit)
    except TooLargeError:  # whose message names a setting of inference
        raise TooLargeError(f"The request body is larger than {limit} bytes.") from None
    try:
        json.loads(body, object_pairs_hook=_once_each)
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"The request body is not what is expected here: {error}.") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from error


async def json_object(request: Request, keys: Iterable[str] | None) -> dict[str, JsonValue]:
    """The body as a JSON object with none but these keys (None: any); empty without a body.

    Raises InvalidRequestError, TooLargeError.
    """
    try:
        body = await read_body(request.scope, request.receive, BODY_LIMIT)
    except TooLargeError:  # whose message names a setting of inference
        raise TooLargeError(f"The request body is larger than {BODY_LIMIT} bytes.") from None
    if not body.strip():
        return {}
    try:
        fields = msgspec.json.decode(body)
        json.loads(body, object_pairs_hook=_once_each)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError("The request body must be a JSON object.")
    known = None if keys is None else tuple(keys)
    for key in fields:
        if known is not None and key not in known:
            raise InvalidRequestError(f"{key[:100]}: unknown; there is {', '.join(known)}.", param=key[:100])
    return fields


def _once_each(pairs: list[tuple[str, JsonValue]]) -> None:
    """Which of two values counts is nothing to guess in what an operator asks for. Raises InvalidRequestError."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            message = f"The request body has {name[:100]!r} twice in one object."
            raise InvalidRequestError(message, code="duplicate_key", param=name[:100])
        seen.add(name)
