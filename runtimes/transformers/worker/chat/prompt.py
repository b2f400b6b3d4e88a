"""Messages to tokens: validate them, bring them into the form that chat templates expect, render, and add images."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from jinja2.exceptions import TemplateError  # type: ignore[import-not-found]  # comes with transformers

from runtimes.sdk.errors import WorkerError, unsupported
from runtimes.transformers.worker.chat.formats.tagged import THINK
from runtimes.transformers.worker.chat.model import Loaded
from runtimes.transformers.worker.chat.pictures import MAX_PIXELS, picture, prepared

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
EFFORT: Final = re.compile(r"\A\s*Reasoning: *(low|medium|high) *(?:\n+|\Z)")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """`thinking`: it ends within reasoning. `pictures`: model inputs beside the tokens."""

    tokens: list[int]
    thinking: bool = False
    pictures: Mapping[str, Any] | None = None


def chat(
    loaded: Loaded, messages: object, tools: Sequence[Mapping[str, object]], arguments: Mapping[str, object]
) -> Prompt:
    """The prompt for a conversation. `arguments` go to the chat template. Raises WorkerError."""
    if loaded.tokenizer.chat_template is None:
        raise WorkerError("This model has no chat template; use /v1/completions.", code="unsupported_endpoint")
    if not isinstance(messages, list) or not messages:
        raise WorkerError("messages must be a list of messages, and not empty.", param="messages")
    images: list[Any] = []
    turns = [_turn(loaded, message, images) for message in messages]
    extra = dict(arguments)
    if loaded.format == "harmony":
        _take_effort(turns, extra)
    own = inspect.signature(loaded.tokenizer.apply_chat_template).parameters
    for name in extra:
        if name in own or name not in str(loaded.tokenizer.chat_template):
            raise unsupported("chat_template_kwargs", f"this model's chat template has no argument {name!r}")
    try:
        text = loaded.tokenizer.apply_chat_template(
            turns, tools=list(tools) or None, add_generation_prompt=True, tokenize=False, **extra
        )
        text.encode()
    except UnicodeEncodeError as error:
        raise WorkerError("messages: there is half a character in them, a lone surrogate.", param="messages") from error
    except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise WorkerError(f"The model's chat template refuses these messages: {error}", param="messages") from error
    thinking = loaded.format == "tagged" and text.rstrip().endswith(THINK)
    tokens = loaded.encode(text)
    if not images:
        return Prompt(tokens, thinking)
    features, counts = prepared(loaded.image_processor, images)
    return Prompt(*_with_pictures(loaded, tokens, features, counts, thinking))


def _turn(loaded: Loaded, message: object, images: list[Any]) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise WorkerError(f"messages: each must be an object with a role of {', '.join(ROLES)}.", param="messages")
    turn: Message = {**message, "content": _content(loaded, message.get("content"), images)}
    if turn["role"] == "developer" and loaded.format != "harmony":
        turn["role"] = "system"
    if isinstance(thought := turn.get("reasoning_content") or turn.get("reasoning"), str):
        turn |= {"reasoning_content": thought, "thinking": thought}
    if calls := turn.get("tool_calls"):
        if not isinstance(calls, list):
            raise WorkerError("messages: tool_calls must be a list.", param="messages")
        turn["tool_calls"] = [_call(call) for call in calls]
    else:
        turn.pop("tool_calls", None)
    return turn


def _content(loaded: Loaded, content: object, images: list[Any]) -> str | list[Message]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise WorkerError("messages: content must be a text or a list of parts.", param="messages")
    parts: list[Message] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in {"text", "input_text"} and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "image_url":
            if loaded.image_processor is None:
                raise WorkerError("This model takes no pictures.", code="modality_unsupported", param="messages")
            url = part.get("image_url")
            left = MAX_PIXELS - sum(image.width * image.height for image in images)
            images.append(picture(url.get("url") if isinstance(url, dict) else url, left))
            parts.append({"type": "image"})
        else:
            message = f"messages: this model takes text{' and image_url' if loaded.image_processor else ''} parts, not {kind!r}."
            raise WorkerError(message, code="modality_unsupported", param="messages")
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _call(call: object) -> Message:
    """A call of an earlier turn. Templates expect its arguments as an object, clients send JSON text."""
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


def _take_effort(turns: list[Message], extra: dict[str, object]) -> None:
    """gpt-oss clients write `Reasoning: high` before the system prompt; the chat template has an argument for it."""
    first = turns[0]
    found = EFFORT.match(first["content"]) if first["role"] in {"system", "developer"} else None
    if found is None:
        return
    extra.setdefault("reasoning_effort", found[1])
    first["content"] = first["content"][found.end() :]
    if not first["content"] and len(turns) > 1:
        del turns[0]


def _with_pictures(
    loaded: Loaded, tokens: list[int], features: dict[str, Any], counts: list[int], thinking: bool
) -> tuple[list[int], bool, Mapping[str, Any]]:
    """The tokens with each image's placeholder repeated for each of the image's tokens."""
    place = loaded.model.config.image_token_id
    if tokens.count(place) != len(counts):
        message = "messages: the text has marks of pictures in it, or the chat template leaves pictures out."
        raise WorkerError(message, param="messages")
    left = iter(counts)
    long: list[int] = []
    for token in tokens:
        long += [token] * next(left) if token == place else [token]
    device = loaded.model.device
    given = {
        name: value.to(device, loaded.model.dtype) if value.is_floating_point() else value.to(device)
        for name, value in features.items()
    }
    given["mm_token_type_ids"] = torch.tensor([[int(token == place) for token in long]], device=device)
    return long, thinking, given
