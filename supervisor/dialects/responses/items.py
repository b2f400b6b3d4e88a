"""What a request's `input` and `instructions` say, as the messages of a chat.

What a model said in one turn is several items (its reasoning, its text, its calls), but one message of a chat: items of
the assistant that follow each other are joined. The instructions and what the system says before anything else become one
message, because many chat templates take a system prompt only there. Pictures and sounds that functions gave become the user's:
a tool's message of a chat has only text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pydantic import JsonValue

from supervisor.dialects.responses.checks import Json, a_list, an_object, name, others, shown, text, unsupported, wrong
from supervisor.dialects.responses.tools import arguments_of, flat_name
from supervisor.gateway.body.tolerance import arguments_text

_SYSTEM: Final = ("system", "developer")
_OF_ALL: Final = ("type", "id", "status")
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "message": ("role", "content"),
    "reasoning": ("summary", "content"),
    "function_call": ("call_id", "name", "namespace", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "namespace", "input"),
    "custom_tool_call_output": ("call_id", "name", "output"),
    "additional_tools": ("role", "tools"),
}
_OF_TEXTS: Final = ("text", "annotations", "logprobs")  # the last two are what an answer says of itself
_OF_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "input_text": _OF_TEXTS,
    "output_text": _OF_TEXTS,
    "text": _OF_TEXTS,
    "refusal": ("refusal",),
    "input_image": ("image_url", "detail"),
    "input_audio": ("input_audio",),
}
_GAP: Final = "\n\n"


def messages_of(given: JsonValue, instructions: JsonValue = None) -> tuple[list[Json], list[str], list[JsonValue]]:
    """The messages for `input` (a text, or a list of items) after `instructions`; null stands for none of it.

    Beside them what has no effect: the places of fields, and items that no chat has. And the tools that items bring.
    Raises InvalidRequestError, whose `param` names the item, for what can't be said in a chat.
    """
    chat = _Chat()
    if instructions is not None:
        chat.say_to_all(text(instructions, "instructions"))
    if isinstance(given, str):
        chat.add_message("user", [_text_part(given)])
    elif given is not None:
        if not isinstance(given, list):
            raise wrong("input", "a text or a list of items")
        for index, item in enumerate(given):
            _add(chat, an_object(item, f"input[{index}]"), f"input[{index}]")
    return chat.finished(), chat.ignored, chat.tools


@dataclass
class _Turn:
    """What the assistant says before anybody else does."""

    thoughts: list[str] = field(default_factory=list)
    parts: list[Json] = field(default_factory=list)
    calls: list[JsonValue] = field(default_factory=list)

    @property
    def is_answered(self) -> bool:
        """Further thoughts or text belong to the next turn. Not after a call: its result comes next."""
        return bool(self.parts) and not self.calls

    def message(self) -> Json | None:
        """None for thoughts that led to nothing: no template takes them."""
        if not self.parts and not self.calls:
            return None
        message: Json = {"role": "assistant", "content": _content(self.parts) if self.parts else None}
        if self.thoughts:
            message["reasoning_content"] = _GAP.join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class _Chat:
    """The messages so far."""

    def __init__(self) -> None:
        self.ignored: list[str] = []
        self.tools: list[JsonValue] = []
        self._system: list[Json] = []  # parts of the message at the beginning
        self._messages: list[Json] = []
        self._turn = _Turn()
        self._given: list[Json] = []  # by functions, what is no text

    def say_to_all(self, said: str) -> None:
        """Instructions."""
        if said:
            self._system.append(_text_part(said))

    def add_message(self, role: str, parts: list[Json]) -> None:
        """Of anybody but the assistant."""
        self._end_turn()
        if role == "user":
            parts, self._given = self._given + parts, []
        self._show()
        if role not in _SYSTEM:
            self._messages.append({"role": role, "content": _content(parts)})
        elif self._messages:
            self._messages.append({"role": "system", "content": _system_content(parts)})
        else:
            self._system += parts

    def add_text(self, parts: list[Json]) -> None:
        """Of the assistant."""
        self._begin_turn()
        self._turn.parts += parts

    def add_thoughts(self, thoughts: list[str]) -> None:
        """Of the assistant."""
        self._begin_turn()
        self._turn.thoughts += thoughts

    def add_call(self, call: Json) -> None:
        """Of the assistant."""
        self._show()
        self._turn.calls.append(call)

    def add_result(self, call_id: str, parts: list[Json]) -> None:
        """Of a call."""
        self._end_turn()
        texts = [part for part in parts if part["type"] == "text"]
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(texts)})
        self._given += [part for part in parts if part["type"] != "text"]

    def finished(self) -> list[Json]:
        """All messages."""
        self._end_turn()
        self._show()
        if not self._system:
            return self._messages
        return [{"role": "system", "content": _system_content(self._system)}, *self._messages]

    def _show(self) -> None:
        """Let the user say what functions gave: their results have been said."""
        if self._given:
            self._messages.append({"role": "user", "content": _content(self._given)})
            self._given = []

    def _begin_turn(self) -> None:
        self._show()
        if self._turn.is_answered:
            self._end_turn()

    def _end_turn(self) -> None:
        message, self._turn = self._turn.message(), _Turn()
        if message is not None:
            self._messages.append(message)


def _add(chat: _Chat, item: Json, where: str) -> None:
    kind = "message" if item.get("type") is None and "role" in item else item.get("type")
    if isinstance(kind, str) and kind in _FIELDS:
        chat.ignored += others(item, where, *_OF_ALL, *_FIELDS[kind])
    match kind:
        case "message":
            _add_message(chat, item, where)
        case "reasoning":
            chat.add_thoughts(_thoughts(item, where))
        case "function_call":
            _add_call(chat, item, where, arguments_text(text(item.get("arguments"), f"{where}.arguments")))
        case "custom_tool_call":
            _add_call(chat, item, where, arguments_of(text(item.get("input"), f"{where}.input")))
        case "function_call_output" | "custom_tool_call_output":
            parts = _parts(chat, item.get("output"), f"{where}.output")
            chat.add_result(name(item.get("call_id"), f"{where}.call_id"), parts)
        case "additional_tools":
            chat.tools += a_list(item.get("tools"), f"{where}.tools")
        case "item_reference" | None:
            raise unsupported(where, "items can't be referred to here. Send the item itself, or previous_response_id.")
        case str():  # of tools that others run, and what only their makers can read
            chat.ignored.append(f"input[{kind}]")
        case _:
            raise wrong(f"{where}.type", "the name of a type")


def _add_call(chat: _Chat, item: Json, where: str, arguments: str) -> None:
    called = flat_name(item.get("namespace"), name(item.get("name"), f"{where}.name"))
    call_id = name(item.get("call_id"), f"{where}.call_id")
    chat.add_call({"id": call_id, "type": "function", "function": {"name": called, "arguments": arguments}})


def _add_message(chat: _Chat, item: Json, where: str) -> None:
    role, parts = item.get("role"), _parts(chat, item.get("content"), f"{where}.content")
    if role == "assistant":
        chat.add_text(parts)
    elif role == "user" or role in _SYSTEM:
        chat.add_message(str(role), parts)
    else:
        raise wrong(f"{where}.role", "one of user, assistant, system, developer")


def _parts(chat: _Chat, content: JsonValue, where: str) -> list[Json]:
    if isinstance(content, str):
        return [_text_part(content)]
    if not isinstance(content, list):
        raise wrong(where, "a text or a list of parts")
    return [
        _part(chat, an_object(part, f"{where}[{index}]"), f"{where}[{index}]") for index, part in enumerate(content)
    ]


def _part(chat: _Chat, part: Json, where: str) -> Json:
    """A part of a message, as chats have it."""
    chat.ignored += others(part, where, "type", *_OF_PARTS.get(str(part.get("type")), ()))
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return _text_part(text(part.get("text"), f"{where}.text"))
        case "refusal":  # workers know no parts of this type, and it is what the assistant said
            return _text_part(text(part.get("refusal"), f"{where}.refusal"))
        case "input_image":
            return _image(part, where)
        case "input_audio":
            return {"type": "input_audio", "input_audio": an_object(part.get("input_audio"), f"{where}.input_audio")}
        case "input_file":
            raise unsupported(where, "input_file: no model here opens files. Send its text as input_text.")
        case kind:
            known = "input_text, output_text, refusal, input_image and input_audio"
            raise unsupported(where, f"{shown(kind)} is no part that this model takes; it takes {known}.")


def _image(part: Json, where: str) -> Json:
    if part.get("file_id") is not None:
        message = "no files are kept here. Send the image itself as image_url, as data:image/png;base64,<content>."
        raise unsupported(f"{where}.file_id", message)
    image: Json = {"url": text(part.get("image_url"), f"{where}.image_url")}
    if part.get("detail") is not None:
        image["detail"] = part["detail"]
    return {"type": "image_url", "image_url": image}


def _thoughts(item: Json, where: str) -> list[str]:
    """A reasoning item's text, else its summary; nothing of one that is encrypted."""
    for key in ("content", "summary"):
        places = [
            (part, f"{where}.{key}[{index}]")
            for index, part in enumerate([] if item.get(key) is None else a_list(item[key], f"{where}.{key}"))
        ]
        if found := [text(an_object(part, place).get("text"), f"{place}.text") for part, place in places]:
            return found
    return []


def _text_part(said: str) -> Json:
    return {"type": "text", "text": said}


def _texts(parts: list[Json]) -> list[str] | None:
    """None where not all is text."""
    found = [said for part in parts if isinstance(said := part.get("text"), str)]
    return found if len(found) == len(parts) else None


def _content(parts: list[Json]) -> JsonValue:
    """A text, where that says it: not all workers take parts, above all not from tools."""
    texts = _texts(parts)
    if texts is None or len(texts) > 1:
        return [*parts]
    return "".join(texts)


def _system_content(parts: list[Json]) -> JsonValue:
    texts = _texts(parts)
    return [*parts] if texts is None else _GAP.join(texts)
