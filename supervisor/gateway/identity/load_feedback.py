"""Who is told in the stream that a model loads: clients that ask for it in a header, or for whom their key or the server does.

The header is llmux's own and is never forwarded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from supervisor.errors import InvalidRequestError
from supervisor.gateway.head import LOAD_FEEDBACK as HEADER

_WORDS: Final = dict.fromkeys((b"true", b"1", b"yes", b"on"), True) | dict.fromkeys(
    (b"false", b"0", b"no", b"off"), False
)


def wish_of(headers: Iterable[tuple[bytes, bytes]]) -> bool | None:
    """Does the client want it? None: it doesn't say. Raises InvalidRequestError for what is neither yes nor no."""
    for name, value in headers:
        if name == HEADER:
            said = _WORDS.get(value.strip().lower())
            if said is None:
                raise InvalidRequestError("X-Llmux-Load-Feedback must be true or false.", param="X-Llmux-Load-Feedback")
            return said
    return None
