"""Validates a request's messages, and converts them to the form that chat templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

from runtimes.sdk.chat.language import Language
from runtimes.sdk.errors import WorkerError

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
EFFORT: Final = re.compile(r"\A\s*Reasoning: *(low|medium|high) *(?:\n+|\Z)")

Message = dict[str, Any]
TakePicture = Callable[[object], None]
"""A function that is called with the URL of each picture. Raises WorkerError."""


def read_messages(language: Language, messages: object, take: TakePicture | None = None) -> list[Message]:
    """The turns of a conversation. `take` is called for each picture, if the model takes pictures. Raises WorkerError."""
    if not isinstance(messages, list) or not messages:
        raise WorkerError("messages must be a list of messages, and not empty.", param="messages")
    return [_read_message(language, message, take) for message in messages]


def single_turn_text(turns: list[Message]) -> str:
    """The text of the only turn, for a runtime with single turns; a system message may precede it. Raises WorkerError."""
    others = [turn for turn in turns if turn["role"] != "system"]
    if len(others) != 1 or others[0]["role"] != "user":
        message = (
            f"messages: this runtime takes single turns only, one message of the user, and there are {len(others)} turns."
            " Send the last one alone, or use another runtime."
        )
        raise WorkerError(message, code="multi_turn_unsupported", param="messages")
    return str(others[0]["content"])


def take_effort(turns: list[Message], extra: dict[str, object]) -> None:
    """Moves `Reasoning: high`, which gpt-oss clients write before the system prompt, into the chat template's argument."""
    first = turns[0]
    found = EFFORT.match(first["content"]) if first["role"] in {"system", "developer"} else None
    if found is None:
        return
    extra.setdefault("reasoning_effort", found[1])
    first["content"] = first["content"][found.end() :]
    if not first["content"] and len(turns) > 1:
        del turns[0]


def _read_message(language: Language, message: object, take: TakePicture | None) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise WorkerError(f"messages: each must be an object with a role of {', '.join(ROLES)}.", param="messages")
    turn: Message = {**message, "content": _read_content(language, message.get("content"), take)}
    if turn["role"] == "developer" and language.format != "harmony":
        turn["role"] = "system"
    if isinstance(thought := turn.get("reasoning_content") or turn.get("reasoning"), str):
        turn |= {"reasoning_content": thought, "thinking": thought}
    if calls := turn.get("tool_calls"):
        if not isinstance(calls, list):
            raise WorkerError("messages: tool_calls must be a list.", param="messages")
        turn["tool_calls"] = [_read_call(call) for call in calls]
    else:
        turn.pop("tool_calls", None)
    return turn


def _read_content(language: Language, content: object, take: TakePicture | None) -> str | list[Message]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise WorkerError("messages: content must be a text or a list of parts.", param="messages")
    parts: list[Message] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "input_text") and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "image_url":
            if take is None or not language.takes_images:
                raise WorkerError("This model takes no pictures.", code="modality_unsupported", param="messages")
            url = part.get("image_url")
            take(url.get("url") if isinstance(url, dict) else url)
            parts.append({"type": "image"})
        else:
            message = f"messages: this model takes text{' and image_url' if language.takes_images else ''} parts, not {kind!r}."
            raise WorkerError(message, code="modality_unsupported", param="messages")
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _read_call(call: object) -> Message:
    """A call of an earlier turn, with its arguments as an object for the template. Clients send them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise WorkerError("messages: a tool call needs a function with a name.", param="messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    if not isinstance(arguments, dict):
        arguments = {"arguments": arguments}
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
