"""Messages and tool calls: Ollama's as canonical ones, and canonical tool calls as Ollama's.

Ollama's tool calls have arguments as objects, and its older clients know no ids: results belong to calls by the tool's name,
else by their order. Pictures are plain base64.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.dialects.chat import ToolCall
from supervisor.dialects.ollama.fields import decoded, encode
from supervisor.errors import InvalidRequestError, UpstreamError

Json = dict[str, Any]

_PICTURES: Final = (("/9j/", "jpeg"), ("iVBORw0KGgo", "png"), ("UklGR", "webp"), ("R0lGOD", "gif"), ("Qk", "bmp"))
"""How the base64 of pictures begins."""
_KNOWN: Final = frozenset({"role", "content", "thinking", "images", "tool_calls", "tool_name", "name", "tool_call_id"})
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Pending:
    """The calls that no result was seen for, and ids for those that have none."""

    def __init__(self) -> None:
        self._open = set[str]()  # of the ids in the queues, those without a result
        self._all = deque[str]()  # oldest first
        self._by_name = defaultdict[str, deque[str]](deque)
        self._made = 0

    def add(self, name: str, known: str | None) -> str:
        """A call, by its own id if it has one; its id."""
        found = known or self._new()
        self._open.add(found)
        self._all.append(found)
        self._by_name[name].append(found)
        return found

    def answer(self, name: str, known: str | None) -> str:
        """The id of the call that a result belongs to: by id, else by name, else by order."""
        if known:  # the worker says that there is no such call, if it minds
            self._open.discard(known)
            return known
        queue = self._by_name[name] if name else self._all
        while queue:
            if (found := queue.popleft()) in self._open:
                self._open.remove(found)
                return found
        return self._new()

    def _new(self) -> str:
        self._made += 1
        return f"call_{self._made}"


def messages(fields: Fields) -> tuple[list[Json], list[str]]:
    """The canonical messages, and the names of what has no effect. Raises InvalidRequestError."""
    found = decoded(fields, "messages")
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise InvalidRequestError('"messages" must be a list of messages.', param="messages")
    pending = Pending()
    unknown = [f"messages[].{key}" for each in found for key in each if key not in _KNOWN]
    return [_message(each, pending) for each in found], list(dict.fromkeys(unknown))


def content(said: str, images: object) -> str | list[Json]:
    """A text with its pictures, which come first, as Ollama puts them. Raises InvalidRequestError."""
    if images in (None, []):
        return said
    if not isinstance(images, list):
        raise InvalidRequestError('"images" must be a list of pictures in base64.', param="images")
    parts: list[Json] = [{"type": "image_url", "image_url": {"url": _url(image)}} for image in images]
    return [*parts, {"type": "text", "text": said}] if said else parts


def tool_calls(calls: Sequence[ToolCall]) -> list[Json]:
    """Whole canonical calls as Ollama's. Raises UpstreamError for arguments that are no object."""
    return [
        {
            **({"id": call.id} if call.id else {}),
            "function": {
                "index": index,
                "name": call.function.name or "",
                "arguments": _arguments(call),
            },
        }
        for index, call in enumerate(calls)
    ]


def _arguments(call: ToolCall) -> dict[str, msgspec.Raw]:
    said = (call.function.arguments or "").strip()
    try:
        return _object(said or "{}")
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UpstreamError(
            f"The model's call of {call.function.name} has arguments that are no JSON object."
        ) from error


def _message(said: Json, pending: Pending) -> Json:
    role = said.get("role")
    if not isinstance(role, str):
        raise InvalidRequestError('Each of "messages" must have a "role".', param="messages")
    message: Json = {"role": role, "content": content(_text(said, "content"), said.get("images"))}
    if thought := _text(said, "thinking"):
        message["reasoning_content"] = thought
    if calls := said.get("tool_calls"):
        message["tool_calls"] = _calls(calls, pending)
    name = _text(said, "tool_name") or _text(said, "name")
    known = _text(said, "tool_call_id") or None
    if role == "tool":
        message["tool_call_id"] = pending.answer(name, known)
    if name:
        message["name"] = name
    return message


def _text(said: Json, key: str) -> str:
    value = said.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    raise InvalidRequestError(f'"{key}" of a message must be a text.', param="messages")


def _calls(calls: object, pending: Pending) -> list[Json]:
    if not isinstance(calls, list):
        raise _bad_call()
    return [_call(call, pending) for call in calls]


def _call(call: object, pending: Pending) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(name, str):
        raise _bad_call()
    known, arguments = call.get("id"), function.get("arguments")
    if not (arguments is None or isinstance(arguments, dict | str)):
        raise _bad_call()
    # Some clients send the canonical form, JSON in a text, back.
    written = arguments if isinstance(arguments, str) else encode(arguments or {}).decode()
    found = pending.add(name, known if isinstance(known, str) else None)
    return {"id": found, "type": "function", "function": {"name": name, "arguments": written}}


def _bad_call() -> InvalidRequestError:
    return InvalidRequestError(
        '"tool_calls" of a message must be a list of {"function": {"name": NAME, "arguments": {…}}}.', param="messages"
    )


def _url(image: object) -> str:
    """A picture as a `data:` URL; what it is stands in its first bytes, which even a large body's outline has."""
    if isinstance(image, str):
        if image.startswith("data:"):
            return image
        for start, kind in _PICTURES:
            if image.startswith(start):
                return f"data:image/{kind};base64,{image}"
    raise InvalidRequestError('Each of "images" must be a JPEG, PNG, WebP, GIF or BMP in base64.', param="images")
