"""The fields of a request: how one is read, and how one is refused."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from supervisor.errors import InvalidRequestError

T = TypeVar("T")

NOTHING: Final = msgspec.Raw()
"""The default of unparsed fields. Their type is no union: msgspec would take nothing but null for one with `Raw` in it."""


def is_set(raw: msgspec.Raw) -> bool:
    """Was an unparsed field there, and not null?"""
    return bytes(raw) not in {b"", b"null"}


def decoded(decoder: msgspec.json.Decoder[T], raw: msgspec.Raw, name: str) -> T:
    """A field's value. Raises InvalidRequestError, which names the field, for one of another type."""
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{name}: {error}.", param=name.partition(".")[0]) from error


def refuse(name: str, message: str) -> InvalidRequestError:
    """The error for what can't be mapped. `message` without its full stop; it says what to do."""
    return InvalidRequestError(f"{message}.", param=name, code="unsupported_parameter")
