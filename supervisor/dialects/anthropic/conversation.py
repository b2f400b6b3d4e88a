"""Anthropic's messages as those of chat completions.

Content there is a list of blocks. Turns of one role that follow each other are one turn, as in Anthropic's API: many chat
templates take only turns that alternate. Results of tools become messages of their own, before the rest of the user's
turn, and their pictures become part of that rest. Which thoughts of earlier turns a model sees, its chat template says.

Texts may hold marks (see `gateway.filters.translation`), so they are joined by line breaks only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import groupby
from typing import Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.dialects.anthropic.fields import NOTHING, decoded, is_set, refuse
from supervisor.errors import InvalidRequestError

Json = dict[str, object]

_DATA: Final = "data:"
PREFILL: Final = "prefill"  # a last turn of the assistant's own, which Anthropic's older models went on from


class Source(msgspec.Struct):
    """Where a picture is."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(msgspec.Struct):
    """A content block of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    source: msgspec.Raw = NOTHING  # a `Source`, of what can be used
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = NOTHING
    tool_use_id: str | None = None
    content: msgspec.Raw = NOTHING  # of a tool's result
    is_error: bool | None = None


Content = str | list[Block]


class Message(msgspec.Struct):
    """One turn."""

    role: str
    content: Content


_TURN: Final = frozenset(Message.__struct_fields__)
_SOURCE: Final = frozenset(Source.__struct_fields__)
_USED: Final[Mapping[str, AbstractSet[str]]] = {
    "text": {"text"},
    "thinking": {"thinking", "signature"},  # which only Anthropic could check
    "redacted_thinking": set(),  # encrypted, so that nobody here can read it
    "image": {"source"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id", "content", "is_error"},
}
_ANYWHERE: Final = frozenset({"type", "cache_control"})
_messages: Final = msgspec.json.Decoder(list[Message])
_turns: Final = msgspec.json.Decoder(list[Fields])
_fields: Final = msgspec.json.Decoder(Fields)
_kind: Final = msgspec.json.Decoder(str)
_content: Final = msgspec.json.Decoder(Content | None)
_source: Final = msgspec.json.Decoder(Source)


def messages(raw: msgspec.Raw) -> list[Json]:
    """The messages for chat completions. Raises InvalidRequestError."""
    turns = decoded(_messages, raw, "messages")
    if not turns:
        raise InvalidRequestError("messages: send at least one.", param="messages")
    found: list[Json] = []
    for role, group in groupby(turns, lambda turn: turn.role):
        contents = [turn.content for turn in group]
        blocks = [block for content in contents for block in _blocks(content)]
        if role == "user":
            found += _user(blocks)
        elif role == "assistant":
            found.append(_assistant(blocks))
        elif role == "system":
            found.append({"role": role, "content": _said(blocks, "messages")})
        else:
            raise InvalidRequestError(
                f'messages: the role {role[:50]!r} is not supported; use "user" or "assistant", or "system".',
                param="messages",
            )
    return found


def system_text(raw: msgspec.Raw) -> str:
    """The system prompt; empty without one. Raises InvalidRequestError."""
    return _said(_blocks(decoded(_content, raw, "system") or ""), "system")


def _said(blocks: list[Block], param: str) -> str:
    return "\n\n".join(_text(block, param, "what the system says") for block in blocks)


def without_effect(messages: msgspec.Raw, system: msgspec.Raw) -> Iterator[str]:
    """The fields of turns and of content blocks that nothing is made of. Both have been read."""
    yield from _unused(system, "system")
    turns = _turns.decode(messages)
    if turns and _kind.decode(turns[-1]["role"]) == "assistant":
        yield PREFILL
    for turn in turns:
        yield from _others(turn, _TURN, "messages")
        yield from _unused(turn["content"], "messages.content")


def _unused(content: msgspec.Raw, place: str) -> Iterator[str]:
    if bytes(memoryview(content)[:1]) != b"[":
        return
    for block in _turns.decode(content):
        kind = _kind.decode(block["type"])
        yield from _others(block, _ANYWHERE | _USED[kind], place)
        if kind == "tool_result":
            yield from _unused(block.get("content", NOTHING), f"{place}.content")
        elif kind == "image":
            yield from _others(_fields.decode(block["source"]), _SOURCE, f"{place}.source")


def _others(fields: Fields, known: AbstractSet[str], place: str) -> Iterator[str]:
    return (f"{place}.{name}" for name, value in fields.items() if name not in known and is_set(value))


def _blocks(content: Content) -> list[Block]:
    return [Block("text", content)] if isinstance(content, str) else content


def _user(blocks: list[Block]) -> list[Json]:
    results: list[Json] = []
    seen: list[Json] = []  # by tools
    parts: list[Json] = []
    for block in blocks:
        if block.type == "tool_result":
            text, pictures = _result(block)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            seen += pictures
        elif block.type == "image":
            parts.append(_picture(block))
        else:
            parts.append({"type": "text", "text": _text(block, "messages", "a message of the user")})
    parts = seen + parts
    if parts or not results:
        results.append({"role": "user", "content": _shortest(parts)})
    return results


def _assistant(blocks: list[Block]) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block in blocks:
        if block.type == "tool_use":
            calls.append(_call(block))
        elif block.type == "thinking":
            thoughts.append(_thought(block))
        elif block.type != "redacted_thinking":
            texts.append(_text(block, "messages", "a message of the assistant"))
    text = "\n".join(texts)
    message: Json = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
    return message


def _thought(block: Block) -> str:
    if block.thinking is None:
        raise InvalidRequestError("messages: a thinking block needs its `thinking`.", param="messages")
    return block.thinking


def _call(block: Block) -> Json:
    """An earlier call of a tool."""
    if not block.id or not block.name:
        raise InvalidRequestError("messages: a tool_use block needs an `id` and a `name`.", param="messages")
    arguments = bytes(block.input) if is_set(block.input) else b"{}"
    if not arguments.startswith(b"{"):
        raise InvalidRequestError("messages: the `input` of a tool_use block must be an object.", param="messages")
    try:
        text = arguments.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            "messages: the `input` of a tool_use block is not UTF-8.", param="messages"
        ) from error
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": text}}


def _result(block: Block) -> tuple[str, list[Json]]:
    """What a tool gave: its text, and its pictures."""
    if not block.tool_use_id:
        raise InvalidRequestError("messages: a tool_result block needs a `tool_use_id`.", param="messages")
    content = decoded(_content, block.content, "messages") if is_set(block.content) else None
    texts: list[str] = []
    pictures: list[Json] = []
    for part in _blocks(content or ""):
        if part.type == "image":
            pictures.append(_picture(part))
        else:
            texts.append(_text(part, "messages", "the result of a tool"))
    text = "\n".join(texts)
    return f"Error: {text}" if block.is_error else text, pictures


def _text(block: Block, param: str, where: str) -> str:
    if block.type != "text":
        raise refuse(param, f"{param}: this model takes no {block.type[:50]!r} block in {where}; leave it out")
    if block.text is None:
        raise InvalidRequestError(f"{param}: a text block needs a `text`.", param=param)
    return block.text


def _picture(block: Block) -> Json:
    """By reference as well: what refuses references in any request refuses those."""
    if not is_set(block.source):
        raise InvalidRequestError("messages: an image block needs a `source`.", param="messages")
    source = decoded(_source, block.source, "messages")
    if source.type == "base64" and source.data is not None:
        kind = source.media_type or ""
        if not kind.startswith("image/"):
            raise InvalidRequestError(
                "messages: the `source` of an image needs a `media_type` such as image/png.", param="messages"
            )
        url = f"{_DATA}{kind};base64,{source.data}"
    elif source.type == "url" and source.url is not None:
        url = source.url
    else:
        raise refuse(
            "messages",
            f"messages: an image's `source` of type {source.type[:50]!r} can't be used; send base64 and its `data`",
        )
    return {"type": "image_url", "image_url": {"url": url}}


def _shortest(parts: list[Json]) -> object:
    """Content as a text where it is one: some chat templates take nothing else."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
