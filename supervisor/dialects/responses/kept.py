"""What is kept of a response, as others read it: its object, and the items that led to it and follow from it.

Items are kept as they came. Their ids and what else OpenAI adds are worked out when they are read, the same each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from pydantic import JsonValue

from supervisor.dialects.responses.checks import Json
from supervisor.errors import InvalidRequestError
from supervisor.io.response_store import Kept, ResponseStore

RUNNING: Final = frozenset({"queued", "in_progress"})
_PREFIXES: Final[Mapping[str, str]] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}
_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode


def response_of(kept: Kept) -> Json:
    """The response object."""
    found: Json = _decode(kept.response)
    return found


def is_running(kept: Kept) -> bool:
    """Is it still to be generated, or being so?"""
    return kept.is_background and response_of(kept).get("status") in RUNNING


def items_of(name: str, kept: Kept) -> list[Json]:
    """All that its model was given, oldest first, in full."""
    given = _decode(kept.items)
    items: list[JsonValue] = [_message(given)] if isinstance(given, str) else given or []
    return [_full(item, name, index) for index, item in enumerate(items) if isinstance(item, dict)]


async def earlier(store: ResponseStore, name: str, owner: str | None, *, is_admin: bool) -> list[JsonValue]:
    """The items of a conversation up to and with this response. Raises InvalidRequestError."""
    kept = await store.find(name, owner, is_admin=is_admin)
    if kept is None:
        raise InvalidRequestError(
            f"Previous response with id '{name[:100]}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if is_running(kept):
        message = f"Previous response with id '{name}' is not completed yet: wait until it is."
        raise InvalidRequestError(message, param="previous_response_id", code="previous_response_not_completed")
    output = response_of(kept).get("output")
    return [*items_of(name, kept), *(output if isinstance(output, list) else [])]


def joined(before: Sequence[JsonValue], given: bytes) -> bytes:
    """A list of items, and after them `input` as it came, as JSON."""
    items = _encode(before)
    if given == b"null":
        return items
    if given[:1] == b'"':
        given = _encode([_message(_decode(given))])
    if given[:1] != b"[":
        raise InvalidRequestError("input must be a text or a list of items.", param="input")
    inner, own = items[1:-1], bytes(given[1:-1]).strip()
    return b"[%b%b%b]" % (inner, b"," if inner and own else b"", own)


def _message(text: str) -> Json:
    return {"type": "message", "role": "user", "content": text}


def _full(item: Json, name: str, index: int) -> Json:
    """An item with what its client may leave out."""
    kind = str(item.get("type") or "message")
    digest = hashlib.sha256(f"{name}/{index}".encode()).hexdigest()[:32]
    found: Json = {"id": f"{_PREFIXES.get(kind, 'item')}_{digest}", "type": kind}
    if kind != "reasoning":
        found["status"] = "completed"
    found |= {key: value for key, value in item.items() if value is not None or key not in found}
    if kind == "message" and isinstance(text := item.get("content"), str):
        is_output = item.get("role") == "assistant"
        part: Json = {"type": "output_text", "annotations": []} if is_output else {"type": "input_text"}
        found["content"] = [part | {"text": text}]
    return found
