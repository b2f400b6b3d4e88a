"""How long a request may take, by its own words: `x_timeout_s` in its body, or `X-Timeout`, both in seconds.

Field and header are llmux's own and are never forwarded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from supervisor.errors import InvalidRequestError

FIELD: Final = "x_timeout_s"
HEADER: Final = b"x-timeout"
MOST_S: Final = 86_400.0

_number: Final = msgspec.json.Decoder(float | None).decode


def budget_s(headers: Iterable[tuple[bytes, bytes]], private: Mapping[str, bytes]) -> float | None:
    """The least that it says, in seconds; None where it says nothing. `private`: JSON values, or a form's texts.

    Raises InvalidRequestError for what is no such time.
    """
    said = [_seconds(value, "X-Timeout") for name, value in headers if name == HEADER]
    if FIELD in private:
        said.append(_seconds(private[FIELD], FIELD))
    return min((value for value in said if value is not None), default=None)


def _seconds(text: bytes, where: str) -> float | None:
    try:
        value = _number(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = 0.0
    if value is not None and not 0 < value <= MOST_S:
        raise InvalidRequestError(f"{where} must be a number of seconds, above 0 and at most {MOST_S:.0f}.", param=FIELD)
    return value
