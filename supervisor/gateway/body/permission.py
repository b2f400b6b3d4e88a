"""Permission for a request to leave this machine: `allow_remote: true` in its body, or the header `X-Allow-Remote: true`.

Field and header are llmux's own and are never forwarded: a client may send them in every request, to any model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from supervisor.errors import ForbiddenError, InvalidRequestError
from supervisor.gateway.head import ALLOW_REMOTE as HEADER

FIELD: Final = "allow_remote"

_BOOLEANS: Final = {b"true": True, b"1": True, b"false": False, b"0": False, b"null": False, b"": False}


def in_headers(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Do the headers give permission? Raises InvalidRequestError for a value that is neither true nor false."""
    return any(_parse_boolean(value) for name, value in headers if name == HEADER)


def in_form(value: str | None) -> bool:
    """Does a form's field give permission? Raises InvalidRequestError for a value that is neither true nor false."""
    return value is not None and _parse_boolean(value.encode())


def refuse(name: str) -> ForbiddenError:
    """The error for a request that would leave this machine without permission."""
    return ForbiddenError(
        f"{name} is run by somebody else, and this request would leave this machine for it. To allow that, send "
        '"allow_remote": true in the body, or the header X-Allow-Remote: true.',
        code="remote_not_allowed",
        param=FIELD,
    )


def _parse_boolean(text: bytes) -> bool:
    answer = _BOOLEANS.get(text.strip().lower())
    if answer is None:
        raise InvalidRequestError('"allow_remote" must be true or false.', param=FIELD)
    return answer
