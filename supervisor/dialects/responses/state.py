"""What a request says about earlier responses, and about keeping its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec
from pydantic import JsonValue

from supervisor.catalog.rewrite import Fields
from supervisor.dialects.responses.checks import flag, name, unsupported, wrong

FIELDS: Final = ("previous_response_id", "conversation", "prompt", "background", "store")

OFF: Final = "responses are not kept here (limits.responses_mib is 0)."
_REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "previous_response_id": f"{OFF} Send the whole conversation as input.",
        "conversation": "conversations are not kept here. Send the whole one as input, or previous_response_id.",
        "prompt": "prompt templates are not kept here. Send their text as instructions and input.",
        "background": f"{OFF} Send the request without it, or with stream.",
    }
)
"""What a translation can't do. It sees the first and the last only where nothing is kept."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One request's."""

    previous: str | None  # the name of the response that it goes on from
    store: bool | None  # None: it doesn't say
    background: bool


def wish_of(fields: Fields) -> Wish:
    """Raises InvalidRequestError for a value that is none."""
    previous, store, background = (_value(fields, field) for field in ("previous_response_id", "store", "background"))
    return Wish(
        None if previous is None else name(previous, "previous_response_id"),
        None if store is None else flag(store, "store"),
        background is not None and flag(background, "background"),
    )


def is_for_background(fields: Fields) -> bool:
    """Is it to be answered while its client doesn't wait?"""
    raw = fields.get("background")
    return raw is not None and bytes(raw) == b"true"


def stateless(values: Mapping[str, JsonValue]) -> list[str]:
    """Looks at those of `FIELDS` that reach a translation. The ones that have no effect.

    Raises InvalidRequestError for the others.
    """
    for field, message in _REFUSED.items():
        if values.get(field) not in (None, False):
            raise unsupported(field, message)
    return ["store"] if values.get("store") not in (None, False) else []


def _value(fields: Fields, field: str) -> JsonValue:
    raw = fields.get(field)
    try:
        value: JsonValue = None if raw is None else msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise wrong(field, "valid JSON") from error
    return value
