"""Translates a request's `input` and `instructions` into the messages of a chat.

A model's turn is several items (its reasoning, its text, its calls), but one message of a chat: consecutive items of
the assistant are joined. The instructions and the system's words before anything else become one message, because many chat
templates take a system prompt only there. Pictures and sounds in functions' results become part of a user's message:
a tool's message of a chat has only text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from supervisor.dialects.responses.tools import arguments_of, flat_name
from supervisor.dialects.responses.types import (
    Content,
    CustomToolCall,
    FunctionCall,
    FunctionCallOutput,
    InputAudio,
    InputImage,
    InputMessage,
    Item,
    Part,
    ReasoningItem,
    RefusalPart,
)
from supervisor.gateway.body.tolerance import arguments_text

_GAP: Final = "\n\n"
_Json = dict[str, object]


def messages_of(items: Iterable[Item | None], instructions: str | None = None) -> list[_Json]:
    """The messages for the instructions and the items."""
    chat = _Chat()
    if instructions:
        chat.system.append(_text_part(instructions))
    for item in items:
        chat.add(item)
    return chat.finished()


class _Chat:
    """The messages so far, and the parts that belong to the next ones."""

    def __init__(self) -> None:
        self.system: list[_Json] = []  # parts of the message at the beginning
        self._messages: list[_Json] = []
        self._thoughts: list[str] = []  # these three: of the assistant, before anybody else says something
        self._parts: list[_Json] = []
        self._calls: list[_Json] = []
        self._given: list[_Json] = []  # by functions, all but texts

    def add(self, item: Item | None) -> None:
        """Add the next item."""
        match item:
            case InputMessage(role="assistant"):
                self._begin_turn()
                self._parts += _parts(item.content)
            case InputMessage():
                self._add_message(item.role, _parts(item.content))
            case ReasoningItem():  # nothing of one that is encrypted
                self._begin_turn()
                self._thoughts += [thought.text for thought in item.content or item.summary or ()]
            case FunctionCall():
                self._add_call(item, arguments_text(item.arguments))
            case CustomToolCall():
                self._add_call(item, arguments_of(item.input))
            case FunctionCallOutput():
                self._end_turn()
                parts = _parts(item.output)
                texts = [part for part in parts if part["type"] == "text"]
                self._messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(texts)})
                self._given += [part for part in parts if part["type"] != "text"]

    def finished(self) -> list[_Json]:
        """All messages."""
        self._end_turn()
        self._show()
        system = [{"role": "system", "content": _content(self.system, _GAP)}] if self.system else []
        return [*system, *self._messages]

    def _add_message(self, role: str, parts: list[_Json]) -> None:
        self._end_turn()
        if role == "user":
            parts, self._given = self._given + parts, []
        self._show()
        if role == "user":
            self._messages.append({"role": role, "content": _content(parts)})
        elif self._messages:
            self._messages.append({"role": "system", "content": _content(parts, _GAP)})
        else:
            self.system += parts

    def _add_call(self, item: FunctionCall | CustomToolCall, arguments: str) -> None:
        self._show()
        function = {"name": flat_name(item.namespace, item.name), "arguments": arguments}
        self._calls.append({"id": item.call_id, "type": "function", "function": function})

    def _show(self) -> None:
        """Let a user's message show the pictures and sounds of functions, after the functions' results."""
        if self._given:
            self._messages.append({"role": "user", "content": _content(self._given)})
            self._given = []

    def _begin_turn(self) -> None:
        """Further thoughts or text belong to the next turn. Not after a call: its result comes next."""
        self._show()
        if self._parts and not self._calls:
            self._end_turn()

    def _end_turn(self) -> None:
        thoughts, parts, calls = self._thoughts, self._parts, self._calls
        self._thoughts, self._parts, self._calls = [], [], []
        if parts or calls:  # no template takes thoughts that led to nothing
            message: _Json = {"role": "assistant", "content": _content(parts) if parts else None}
            message |= {"reasoning_content": _GAP.join(thoughts)} if thoughts else {}
            self._messages.append(message | ({"tool_calls": calls} if calls else {}))


def _parts(content: Content) -> list[_Json]:
    return [_text_part(content)] if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Part) -> _Json:
    """A part of a message in a chat's form."""
    match part:
        case InputImage():
            detail = {} if part.detail is None else {"detail": part.detail}
            return {"type": "image_url", "image_url": {"url": part.image_url, **detail}}
        case InputAudio():
            return {"type": "input_audio", "input_audio": part.input_audio}
        case RefusalPart():  # workers know no parts of this type, and it is what the assistant said
            return _text_part(part.refusal)
        case _:
            return _text_part(part.text)


def _text_part(text: str) -> _Json:
    return {"type": "text", "text": text}


def _content(parts: list[_Json], gap: str = "") -> object:
    """A text instead of parts where possible: not all workers take parts, above all not from tools. `gap` joins several texts."""
    texts = [str(part["text"]) for part in parts if part["type"] == "text"]
    return parts if len(texts) < len(parts) or (len(texts) > 1 and not gap) else gap.join(texts)
