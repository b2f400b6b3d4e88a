"""Translates a request's `input` and `instructions` into the messages of a chat.

A model's turn is several items (reasoning, text, calls), but one message of a chat, so consecutive items of the assistant
become one message. The instructions and the first system messages become one message, because many chat templates accept a
system prompt only at the beginning. Images and audio in function results become parts of a user message, because a tool
message of a chat has only text.
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
    """The messages so far, and the parts of the next messages."""

    def __init__(self) -> None:
        self.system: list[_Json] = []  # parts of the first message
        self._messages: list[_Json] = []
        self._thoughts: list[str] = []  # these three: the current turn of the assistant
        self._parts: list[_Json] = []
        self._calls: list[_Json] = []
        self._function_media: list[_Json] = []  # images and audio in function results

    def add(self, item: Item | None) -> None:
        """Add the next item."""
        match item:
            case InputMessage(role="assistant"):
                self._begin_turn()
                self._parts += _chat_parts(item.content)
            case InputMessage():
                self._add_message(item.role, _chat_parts(item.content))
            case ReasoningItem():  # encrypted reasoning adds nothing
                self._begin_turn()
                self._thoughts += [thought.text for thought in item.content or item.summary or ()]
            case FunctionCall():
                self._add_call(item, arguments_text(item.arguments))
            case CustomToolCall():
                self._add_call(item, arguments_of(item.input))
            case FunctionCallOutput():
                self._end_turn()
                parts = _chat_parts(item.output)
                texts = [part for part in parts if part["type"] == "text"]
                self._messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _chat_content(texts)})
                self._function_media += [part for part in parts if part["type"] != "text"]

    def finished(self) -> list[_Json]:
        """All messages; ends the current turn."""
        self._end_turn()
        self._add_function_media()
        system = [{"role": "system", "content": _chat_content(self.system, _GAP)}] if self.system else []
        return [*system, *self._messages]

    def _add_message(self, role: str, parts: list[_Json]) -> None:
        self._end_turn()
        if role == "user":
            parts, self._function_media = self._function_media + parts, []
        self._add_function_media()
        if role == "user":
            self._messages.append({"role": role, "content": _chat_content(parts)})
        elif self._messages:
            self._messages.append({"role": "system", "content": _chat_content(parts, _GAP)})
        else:
            self.system += parts

    def _add_call(self, item: FunctionCall | CustomToolCall, arguments: str) -> None:
        self._add_function_media()
        function = {"name": flat_name(item.namespace, item.name), "arguments": arguments}
        self._calls.append({"id": item.call_id, "type": "function", "function": function})

    def _add_function_media(self) -> None:
        """Add a user message with the images and audio of function results, after these results."""
        if self._function_media:
            self._messages.append({"role": "user", "content": _chat_content(self._function_media)})
            self._function_media = []

    def _begin_turn(self) -> None:
        """End a turn that has text: further reasoning or text begins the next turn. Not after a call: its result comes next."""
        self._add_function_media()
        if self._parts and not self._calls:
            self._end_turn()

    def _end_turn(self) -> None:
        thoughts, parts, calls = self._thoughts, self._parts, self._calls
        self._thoughts, self._parts, self._calls = [], [], []
        if parts or calls:  # no template accepts reasoning without text or calls
            message: _Json = {"role": "assistant", "content": _chat_content(parts) if parts else None}
            message |= {"reasoning_content": _GAP.join(thoughts)} if thoughts else {}
            self._messages.append(message | ({"tool_calls": calls} if calls else {}))


def _chat_parts(content: Content) -> list[_Json]:
    return [_text_part(content)] if isinstance(content, str) else [_chat_part(part) for part in content]


def _chat_part(part: Part) -> _Json:
    """A part of a chat message."""
    match part:
        case InputImage():
            detail = {} if part.detail is None else {"detail": part.detail}
            return {"type": "image_url", "image_url": {"url": part.image_url, **detail}}
        case InputAudio():
            return {"type": "input_audio", "input_audio": part.input_audio}
        case RefusalPart():  # workers know no parts of this type; a text has the same meaning
            return _text_part(part.refusal)
        case _:
            return _text_part(part.text)


def _text_part(text: str) -> _Json:
    return {"type": "text", "text": text}


def _chat_content(parts: list[_Json], gap: str = "") -> object:
    """A text instead of parts if possible: not all workers accept parts, especially from tools. `gap` joins several texts."""
    texts = [str(part["text"]) for part in parts if part["type"] == "text"]
    return parts if len(texts) < len(parts) or (len(texts) > 1 and not gap) else gap.join(texts)
