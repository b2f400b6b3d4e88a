"""Reads stored responses: the response object, its input items and its output items.

Items are stored as they came. Ids and other missing fields of OpenAI's API are computed at each read, always the same, from
condensed JSON: a conversation may have megabytes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from supervisor.catalog.models.rewrite import Fields
from supervisor.dialects.responses.types import Json
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.condensed_json import CondensedJson
from supervisor.gateway.body.json_body import JsonBody
from supervisor.host.store.response_store import Part, ResponseStore, StoredResponse

RUNNING: Final = frozenset({"queued", "in_progress"})
NULL: Final = msgspec.Raw(b"null")
_BATCH: Final = 100  # items handled before other tasks get a turn
_PREFIXES: Final[Mapping[str, str]] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode
_fields: Final = msgspec.json.Decoder(Fields).decode
_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


async def response_of(stored: StoredResponse) -> Json:
    """The object of a response without output, so no larger than its request's fields."""
    found: Json = _decode(await stored.response.whole())
    return found


def is_running(stored: StoredResponse) -> bool:
    """Whether a job still has to generate the response."""
    return stored.is_background and stored.status in RUNNING


async def items_of(stored: StoredResponse, condensed: CondensedJson, source: Part | None = None) -> list[Fields]:
    """All items that the model got, oldest first, at their positions; an empty item for anything but an object.

    Adds them to `condensed`; see `CondensedJson.add`. Raises LlmuxError.
    """
    text = msgspec.Raw(await condensed.add(await stored.items.whole(), source))
    return [_user_message(text)] if begin_of(text) == b'"' else await _items_of(text)


async def previous_response(store: ResponseStore, name: str, owner: str | None, *, is_admin: bool) -> StoredResponse:
    """The stored response that a request continues. Raises InvalidRequestError if it is unknown or still running."""
    stored = await store.find(name, owner, is_admin=is_admin)
    if stored is None:
        raise InvalidRequestError(
            f"Previous response with id '{name[:100]}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if is_running(stored):
        message = f"Previous response with id '{name}' is not completed yet: wait until it is."
        raise InvalidRequestError(message, param="previous_response_id", code="previous_response_not_completed")
    return stored


async def prepend_conversation(body: JsonBody, name: str, stored: StoredResponse) -> JsonBody:
    """`body` with this response and its earlier conversation in front of `input`. Raises LlmuxError."""
    before: list[bytes] = []
    items = await items_of(stored, body.condensed)
    for start in range(0, len(items), _BATCH):
        batch = enumerate(items[start : start + _BATCH], start)
        before.append(_items_without_brackets([item_with_defaults(item, name, index) for index, item in batch if item]))
        await asyncio.sleep(0)
    output = _fields(await body.condensed.add(await stored.response.whole())).get("output", NULL)
    before.append(_items_without_brackets([item for item in await _items_of(output) if item]))
    before.append(_input_items(body.raw("input") or b"null"))
    return body.changed({"input": b"[%b]" % b",".join(filter(None, before))})


def _input_items(given: bytes) -> bytes:
    """The items of `input` as they came."""
    if given == b"null":
        return b""
    if given[:1] == b'"':
        return _items_without_brackets([_user_message(msgspec.Raw(given))])
    if given[:1] != b"[":
        raise InvalidRequestError("input must be a text or a list of items.", param="input")
    return given[1:-1].strip()


def _items_without_brackets(items: Sequence[Fields]) -> bytes:
    """The items as JSON, without the brackets of a list."""
    return _encode(items)[1:-1]


def begin_of(value: msgspec.Raw) -> bytes:
    """The first byte of a value: it shows the JSON type."""
    return bytes(memoryview(value)[:1])


async def _items_of(value: msgspec.Raw) -> list[Fields]:
    """The objects of a list at their positions; an empty one for any other item."""
    found: list[Fields] = []
    for item in _items(value) if begin_of(value) == b"[" else ():
        if len(found) % _BATCH == 0:
            await asyncio.sleep(0)
        found.append(_fields(item) if begin_of(item) == b"{" else {})
    return found


def _decode_or_none(raw: msgspec.Raw | None) -> object:
    return None if raw is None else _decode(raw)


def _encode_raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))


def _user_message(text: msgspec.Raw) -> Fields:
    return {"type": _encode_raw("message"), "role": _encode_raw("user"), "content": text}


def id_of(item: Fields, name: str, index: int) -> msgspec.Raw:
    """The item's own id, or one computed from its position in this response."""
    if (own := item.get("id", NULL)) != NULL:
        return own
    digest = hashlib.sha256(f"{name}/{index}".encode()).hexdigest()[:32]
    return _encode_raw(f"{_PREFIXES.get(_type_of(item), 'item')}_{digest}")


def _type_of(item: Fields) -> str:
    return str(_decode_or_none(item.get("type")) or "message")


def item_with_defaults(item: Fields, name: str, index: int) -> Fields:
    """The item with defaults for fields that its client left out."""
    kind = _type_of(item)
    found: Fields = {"id": id_of(item, name, index), "type": _encode_raw(kind)}
    if kind != "reasoning":
        found["status"] = _encode_raw("completed")
    found |= {key: value for key, value in item.items() if key not in found or value != NULL}
    if kind == "message" and begin_of(content := item.get("content", NULL)) == b'"':
        is_output = _decode_or_none(item.get("role")) == "assistant"
        part: Json = {"type": "output_text", "annotations": []} if is_output else {"type": "input_text"}
        found["content"] = _encode_raw([{**part, "text": content}])
    return found
