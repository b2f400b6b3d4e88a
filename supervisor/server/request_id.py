"""The id of a request, in llmux's log, in the response's headers and at the worker."""

from __future__ import annotations

import random
from typing import Final

MAX_LENGTH: Final = 128
STATE_KEY: Final = "request_id"  # in the ASGI scope's state
_random: Final = random.Random()  # noqa: S311  # seeded by the system; ids must differ, not be secret
_HARMLESS: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")


def request_id_of(given: bytes | None) -> bytes:
    """The client's own `x-request-id` if it is short and harmless, else a new one."""
    if given is not None and 0 < len(given) <= MAX_LENGTH and _HARMLESS.issuperset(given):
        return given
    return b"req_%024x" % _random.getrandbits(96)
