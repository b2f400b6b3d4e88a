"""The messages of a chat completion as texts with roles, for prompt formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from supervisor.catalog.models.rewrite import Fields
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.typed import UNREADABLE

Role = Literal["system", "user", "assistant"]

_ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_KNOWN_FIELDS: Final = frozenset({"role", "content", "tool_calls", "reasoning_content", "reasoning", "refusal"})
_LANGUAGES: Final = ("source_lang_code", "target_lang_code")


@dataclass(slots=True)
class Turn:
    """One message. `languages`: the language codes of a text to translate."""

    role: Role
    text: str
    languages: dict[str, str] = field(default_factory=dict)


def system_of(turns: Sequence[Turn]) -> str:
    """The texts of all system messages, joined, for formats with one place for them."""
    return "\n\n".join(turn.text for turn in turns if turn.role == "system")


class Conversation:
    """The `turns` of the messages `raw`. Raises InvalidRequestError for messages other than text, which `model` can't read."""

    def __init__(self, raw: msgspec.Raw | None, model: str) -> None:
        self.turns: list[Turn] = []
        self.ignored: list[str] = []
        self._model = model
        messages = None if raw is None else _decode_as(raw, list[Fields], "messages", "a list of messages")
        if not messages:
            raise InvalidRequestError("`messages` is empty: send at least one message.", param="messages")
        for index, message in enumerate(messages):
            self._add_turn(message, f"messages[{index}]")

    def _add_turn(self, message: Fields, at: str) -> None:
        role = _decode_as(message.get("role", _NULL), str, f"{at}.role", "a text")
        calls = message.get("tool_calls", _NULL)
        if role not in _ROLES or msgspec.json.decode(calls):
            error = f"The prompts of {self._model} have no place for tools: leave `{at}` out, or use another model."
            if role not in (*_ROLES, "tool", "function"):
                error = f"`{at}.role` must be one of {', '.join(_ROLES)}."
            raise InvalidRequestError(error, param=f"{at}.role" if role not in _ROLES else f"{at}.tool_calls")
        turn = Turn(_ROLES[role], "")
        content = message.get("content", _NULL)
        match bytes(memoryview(content)[:1]):
            case b"n" if role == "assistant":
                pass
            case b'"':
                turn.text = _decode_as(content, str, f"{at}.content", "a text")
            case _:
                parts = _decode_as(content, list[Fields], f"{at}.content", "a text or a list of parts")
                texts = [self._part_text(part, f"{at}.content[{number}]", turn) for number, part in enumerate(parts)]
                turn.text = "\n".join(texts)
        self.turns.append(turn)
        self._note_ignored(message, _KNOWN_FIELDS, at)

    def _part_text(self, part: Fields, at: str, turn: Turn) -> str:
        kind = _decode_as(part.get("type", _NULL), str, f"{at}.type", "a text")
        if kind not in ("text", "input_text", "output_text"):
            raise InvalidRequestError(
                f"{self._model} takes text, and `{at}` is of type {kind[:50]}.", code="modality_unsupported", param=at
            )
        for name in _LANGUAGES:
            if (code := part.get(name, _NULL)) != _NULL:
                turn.languages[name] = _decode_as(code, str, f"{at}.{name}", "a text")
        self._note_ignored(part, {"type", "text", *_LANGUAGES}, at)
        text: str = _decode_as(part.get("text", _NULL), str, f"{at}.text", "a text")
        return text

    def _note_ignored(self, fields: Fields, known: frozenset[str] | set[str], at: str) -> None:
        self.ignored += (f"{at}.{name}" for name, value in fields.items() if name not in known and value != _NULL)


_NULL: Final = msgspec.Raw(b"null")


def _decode_as(raw: msgspec.Raw, kind: Any, name: str, expected: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except UNREADABLE as error:
        raise InvalidRequestError(f"`{name}` must be {expected}.", param=name) from error
