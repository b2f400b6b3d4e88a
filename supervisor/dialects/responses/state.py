"""What would need earlier responses, or keep this one. Nothing is kept here, so it is refused, or ignored."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pydantic import JsonValue

from supervisor.dialects.responses.checks import unsupported

FIELDS: Final = ("previous_response_id", "conversation", "prompt", "background", "store")

_REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "previous_response_id": "responses are not kept here. Send the whole conversation as input.",
        "conversation": "conversations are not kept here. Send the whole conversation as input.",
        "prompt": "prompt templates are not kept here. Send their text as instructions and input.",
        "background": "nothing is generated in the background here. Send the request without it, or with stream.",
    }
)


def stateless(values: Mapping[str, JsonValue]) -> list[str]:
    """Looks at those of `FIELDS` that a request has. The ones that have no effect.

    Raises InvalidRequestError for the others.
    """
    for field, message in _REFUSED.items():
        if values.get(field) not in (None, False):
            raise unsupported(field, message)
    return ["store"] if values.get("store") not in (None, False) else []
