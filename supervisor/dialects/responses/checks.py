"""What a field must be: each function gives the value as what it must be, or raises InvalidRequestError with its place."""

from __future__ import annotations

from typing import Final

from pydantic import JsonValue

from supervisor.errors import InvalidRequestError

Json = dict[str, JsonValue]

UNSUPPORTED: Final = "unsupported_parameter"
_SHOWN: Final = 50


def wrong(where: str, what: str) -> InvalidRequestError:
    """The error where something else than `what` stands."""
    return InvalidRequestError(f"{where} must be {what}.", param=where)


def unsupported(where: str, message: str) -> InvalidRequestError:
    """The error for what OpenAI's API knows and this one doesn't. `message` says what to do."""
    return InvalidRequestError(f"{where}: {message}", param=where, code=UNSUPPORTED)


def shown(value: JsonValue) -> str:
    """A value that a message names: short, and on one line."""
    return ascii(value[:_SHOWN] if isinstance(value, str) else value)[: 2 * _SHOWN]


def others(value: Json, where: str, *known: str) -> list[str]:
    """The places of an object's further fields: they have no effect. One that is null is absent."""
    return [f"{where}.{key}" for key, inner in value.items() if inner is not None and key not in known]


def text(value: JsonValue, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise wrong(where, "a text")
    return value


def name(value: JsonValue, where: str) -> str:
    """A string that isn't empty."""
    if not isinstance(value, str) or not value:
        raise wrong(where, "a name")
    return value


def an_object(value: JsonValue, where: str) -> Json:
    """An object."""
    if not isinstance(value, dict):
        raise wrong(where, "an object")
    return value


def a_list(value: JsonValue, where: str) -> list[JsonValue]:
    """A list."""
    if not isinstance(value, list):
        raise wrong(where, "a list")
    return value


def one_of(value: JsonValue, choices: tuple[str, ...], where: str) -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in choices:
        raise wrong(where, f"one of {', '.join(choices)}")
    return value


def count(value: JsonValue, where: str, least: int = 0) -> int:
    """A whole number, not less than `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise wrong(where, f"a whole number, at least {least}")
    return value


def flag(value: JsonValue, where: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise wrong(where, "true or false")
    return value
