"""What a request's `input` and `instructions` say, as the messages of a chat.

What a model said in one turn is several items (its reasoning, its text, its calls), but one message of a chat: items of
the assistant that follow each other are joined. The instructions and what the system says before anything else become one
message, because many chat templates take a system prompt only there. Pictures and sounds that functions gave become the user's:
a tool's message of a chat has only text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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

_SYSTEM: Final = ("system", "developer")
_GAP: Final = "\n\n"
_Json = dict[str, object]


def messages_of(items: Iterable[Item | None], instructions: str | None = None) -> list[_Json]:
    """The messages for items, after instructions."""
    chat = _Chat()
    if instructions:
        chat.system.append(_text_part(instructions))
    for item in items:
        chat.add(item)
    return chat.finished()


@dataclass
class _Turn:
    """What the assistant says before anybody else does."""

    thoughts: list[str] = field(default_factory=list)
    parts: list[_Json] = field(default_factory=list)
    calls: list[_Json] = field(default_factory=list)

    def messages(self) -> list[_Json]:
        """None for thoughts that led to nothing: no template takes them."""
        if not self.parts and not self.calls:
            return []
        message: _Json = {"role": "assistant", "content": _content(self.parts) if self.parts else None}
        if self.thoughts:
            message["reasoning_content"] = _GAP.join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return [message]


class _Chat:
    """The messages so far."""

    def __init__(self) -> None:
        self.system: list[_Json] = []  # parts of the message at the beginning
        self._messages: list[_Json] = []
        self._turn = _Turn()
        self._given: list[_Json] = []  # by functions, all but texts

    def add(self, item: Item | None) -> None:
        """The next item."""
        match item:
            case InputMessage(role="assistant"):
                self._begin_turn()
                self._turn.parts += _parts(item.content)
            case InputMessage():
                self._add_message(item.role, _parts(item.content))
            case ReasoningItem():  # nothing of one that is encrypted
                self._begin_turn()
                self._turn.thoughts += [thought.text for thought in item.content or item.summary or ()]
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
        system = [{"role": "system", "content": _system_content(self.system)}] if self.system else []
        return [*system, *self._messages]

    def _add_message(self, role: str, parts: list[_Json]) -> None:
        self._end_turn()
        if role == "user":
            parts, self._given = self._given + parts, []
        self._show()
        if role not in _SYSTEM:
            self._messages.append({"role": role, "content": _content(parts)})
        elif self._messages:
            self._messages.append({"role": "system", "content": _system_content(parts)})
        else:
            self.system += parts

    def _add_call(self, item: FunctionCall | CustomToolCall, arguments: str) -> None:
        self._show()
        function = {"name": flat_name(item.namespace, item.name), "arguments": arguments}
        self._turn.calls.append({"id": item.call_id, "type": "function", "function": function})

    def _show(self) -> None:
        """Let the user say what functions gave: their results have been said."""
        if self._given:
            self._messages.append({"role": "user", "content": _content(self._given)})
            self._given = []

    def _begin_turn(self) -> None:
        """Further thoughts or text belong to the next turn. Not after a call: its result comes next."""
        self._show()
        if self._turn.parts and not self._turn.calls:
            self._end_turn()

    def _end_turn(self) -> None:
        self._messages += self._turn.messages()
        self._turn = _Turn()


def _parts(content: Content) -> list[_Json]:
    return [_text_part(content)] if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Part) -> _Json:
    """A part of a message, as chats have it."""
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


def _texts(parts: list[_Json]) -> list[str] | None:
    """None where not all is text."""
    found = [text for part in parts if isinstance(text := part.get("text"), str)]
    return found if len(found) == len(parts) else None


def _content(parts: list[_Json]) -> object:
    """A text, where that says it: not all workers take parts, above all not from tools."""
    texts = _texts(parts)
    return parts if texts is None or len(texts) > 1 else "".join(texts)


def _system_content(parts: list[_Json]) -> object:
    texts = _texts(parts)
    return parts if texts is None else _GAP.join(texts)
