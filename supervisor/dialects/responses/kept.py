"""What is kept of a response, as others read it: its object, and the items that led to it and follow from it.

Items are kept as they came. Their ids and what else OpenAI adds are worked out when they are read, the same each time. Texts
are not decoded for it, and what takes long is done in a thread: a conversation may have megabytes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.dialects.responses.checks import Json
from supervisor.errors import InvalidRequestError
from supervisor.io.response_store import Kept, ResponseStore

RUNNING: Final = frozenset({"queued", "in_progress"})
NULL: Final = msgspec.Raw(b"null")
_PREFIXES: Final[Mapping[str, str]] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}
_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode
_fields: Final = msgspec.json.Decoder(Fields).decode
_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


def response_of(kept: Kept) -> Json:
    """The response object."""
    found: Json = _decode(kept.response)
    return found


def is_running(kept: Kept) -> bool:
    """Is it still to be generated, or being so?"""
    return kept.is_background and _value(_fields(kept.response).get("status")) in RUNNING


def items_of(name: str, kept: Kept) -> list[Fields]:
    """All that its model was given, oldest first, in full. Call it in a thread."""
    items = [_message(kept.items)] if begin_of(kept.items) == b'"' else _items_of(kept.items)
    return [_full(item, name, index) for index, item in enumerate(items) if item]


async def earlier(store: ResponseStore, name: str, owner: str | None, *, is_admin: bool) -> list[Fields]:
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

    def said() -> list[Fields]:
        output = _fields(kept.response).get("output", NULL)
        return [*items_of(name, kept), *filter(None, _items_of(output))]

    return await asyncio.to_thread(said)


def joined(before: Sequence[Fields], given: bytes) -> bytes:
    """A list of items, and after them `input` as it came, as JSON."""
    items = _encode(before)
    if given == b"null":
        return items
    if given[:1] == b'"':
        given = _encode([_message(msgspec.Raw(given))])
    if given[:1] != b"[":
        raise InvalidRequestError("input must be a text or a list of items.", param="input")
    inner, own = items[1:-1], bytes(given[1:-1]).strip()
    return b"[%b%b%b]" % (inner, b"," if inner and own else b"", own)


def begin_of(value: msgspec.Raw) -> bytes:
    """Its first byte, which tells of which kind it is."""
    return bytes(memoryview(value)[:1])


def _items_of(value: msgspec.Raw) -> list[Fields]:
    """The objects of a list in their places; an empty one for all else."""
    return (
        [_fields(item) if begin_of(item) == b"{" else {} for item in _items(value)] if begin_of(value) == b"[" else []
    )


def _value(raw: msgspec.Raw | None) -> object:
    return None if raw is None else _decode(raw)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))


def _message(text: msgspec.Raw) -> Fields:
    return {"type": _raw("message"), "role": _raw("user"), "content": text}


def _full(item: Fields, name: str, index: int) -> Fields:
    """An item with what its client may leave out."""
    kind = str(_value(item.get("type")) or "message")
    digest = hashlib.sha256(f"{name}/{index}".encode()).hexdigest()[:32]
    found: Fields = {"id": _raw(f"{_PREFIXES.get(kind, 'item')}_{digest}"), "type": _raw(kind)}
    if kind != "reasoning":
        found["status"] = _raw("completed")
    found |= {key: value for key, value in item.items() if key not in found or value != NULL}
    if kind == "message" and begin_of(content := item.get("content", NULL)) == b'"':
        is_output = _value(item.get("role")) == "assistant"
        part: Json = {"type": "output_text", "annotations": []} if is_output else {"type": "input_text"}
        found["content"] = _raw([{**part, "text": content}])
    return found
