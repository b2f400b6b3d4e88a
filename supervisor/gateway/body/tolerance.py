"""Rules for requests that are slightly wrong: common deviations of clients from an API, and their intended meaning.

Decoders apply these rules to the requests that they translate. A request that goes to its worker untranslated is mended only if
the worker refuses it (`put_right`): so llmux decodes no request that a worker accepts, and needs no list of each worker's rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from runtimes.endpoints import Meaning
from supervisor.gateway.body.typed import UNREADABLE

Json = dict[str, Any]

_SYSTEM: Final = ("system", "developer")
_SEPARATOR: Final = "\n\n"  # texts may have marks, see `gateway.body.condensed_json`: a line break must follow a mark
_READ_FIELDS: Final = ("messages", "system", "tools", "reasoning_effort", "documents", "input", "truncate")
_SCHEMA: Final = ("items", "contains", "additionalItems", "not", "if", "then", "else", "propertyNames")
_SCHEMAS: Final = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_NAMED_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ABOUT_SCHEMAS: Final = re.compile(r"grammar|parser|schema", re.IGNORECASE)
_ABOUT_SYSTEM: Final = re.compile(r"\bsystem\b", re.IGNORECASE)
_TOKEN_COUNTS: Final = re.compile(r"\((\d+) tokens\)\D+(\d+)")  # sent, and accepted at most: in llama.cpp's message
_SAFETY_FACTOR: Final = 0.98  # of the accepted tokens: texts differ in the length of their tokens
_LEVELS: Final = {"minimal": "low", "xhigh": "high", "max": "high"}
_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode


def put_right(
    fields: Mapping[str, msgspec.Raw], meaning: Meaning, refusal: str
) -> tuple[dict[str, bytes | None], list[str]]:
    """The changes to a request that a worker refused with `refusal`, and the fields that have no effect after the changes.

    No change: there is nothing left to try. A field that can't be read stays: the worker has reported its error.
    """
    changes: dict[str, bytes | None] = {name: None for name, raw in fields.items() if bytes(raw) == b"null"}
    try:
        values = {name: _decode(fields[name]) for name in _READ_FIELDS if name in fields and name not in changes}
    except UNREADABLE:
        return changes, []
    before = {name: _encode(value) for name, value in values.items()}
    tools = [*map(_function_of, _object_list(values.get("tools")))]
    talks = meaning.prompt is not None and bool(_object_list(values.get("messages")))
    ignored: list[str] = []

    def changed() -> dict[str, bytes | None]:
        return {name: data for name, value in values.items() if (data := _encode(value)) != before.get(name)}

    if talks:
        for message in values["messages"]:
            _repair_message(message)
        _reorder_messages(values, apart=meaning.prompt == "system")
    if isinstance(effort := values.get("reasoning_effort"), str):
        values["reasoning_effort"] = level_of(effort)
    if isinstance(documents := values.get("documents"), list):
        values["documents"] = [*map(document_text, documents)]
    if values.get("truncate") is True and (found := _TOKEN_COUNTS.search(refusal)) is not None:
        values["input"] = _truncate_texts(values.get("input"), int(found[2]) / int(found[1]) * _SAFETY_FACTOR)
    for tool in tools:
        for name in _PARAMETERS:
            if name in tool:
                tool[name] = _without_boolean_schemas(tool[name])
    if not changes and not changed():
        if _ABOUT_SCHEMAS.search(refusal):
            loose = (tool for tool in tools if tool.get("strict") is not True)
            ignored += [f"tools[{tool.get('name')}]" for tool in loose if _loosen_parameters(tool)]
        elif talks and _ABOUT_SYSTEM.search(refusal):
            _reorder_messages(values, apart=meaning.prompt == "system", takes_system=False)
    return changes | changed(), ignored


def ordered(fields: Mapping[str, msgspec.Raw], meaning: Meaning) -> dict[str, bytes | None]:
    """The changes for a model that accepts only one system message, at the beginning; empty if the messages are in order."""
    try:
        values = {name: _decode(fields[name]) for name in ("messages", "system") if name in fields}
    except UNREADABLE:
        return {}
    if meaning.prompt is None or not _object_list(values.get("messages")):
        return {}
    before = values["messages"]
    _reorder_messages(values, apart=meaning.prompt == "system")
    return {} if values["messages"] is before else {name: _encode(value) for name, value in values.items()}


def arguments_text(text: str) -> str:
    """The JSON arguments of an earlier tool call: agents send an empty text for a call without arguments."""
    return text if text.strip() else "{}"


def level_of(effort: str) -> str:
    """The reasoning effort for models with three levels."""
    return _LEVELS.get(effort, effort)


def document_text(document: object) -> object:
    """The text of a document to be ranked: Cohere's and Jina's clients send objects.

    An object with further fields stays unchanged, because these fields would be lost.
    """
    text = document.get("text") if isinstance(document, dict) and len(document) == 1 else None
    return text if isinstance(text, str) else document


def _truncate_texts(texts: object, part: float) -> object:
    """A text, or the long texts of a list, truncated to the share `part` of the longest."""
    if isinstance(texts, str):
        return texts[: int(len(texts) * part)]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return texts
    most = int(max(map(len, texts), default=0) * part)
    return [text[:most] for text in texts]


def in_order(
    messages: Sequence[Json], system: object = None, *, takes_system: bool = True
) -> tuple[str | list[Any], list[Json]]:
    """`system` and the system messages at the beginning, joined to one content; and the other messages.

    Many chat templates allow only one system message, at the beginning: the text of later ones is added to the user's next turn.
    Without `takes_system`, the text of all system messages is.
    """
    first: list[object] = []
    waiting: list[object] = []  # for the user's next turn
    others: list[Json] = []
    (first if takes_system else waiting).append(system)
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role in _SYSTEM:
            (first if takes_system and not others else waiting).append(content)
            continue
        if role == "user" and waiting:
            are_results = any(
                part.get("type") == "tool_result" for part in _object_list(content)
            )  # results must come first
            parts = [content, *waiting] if are_results else [*waiting, content]
            others.append({**message, "content": _join_contents(parts)})
            waiting = []
            continue
        if role != "tool" and waiting:  # nothing may come between a call and its result
            _append_user_text(others, waiting)
            waiting = []
        others.append(message)
    _append_user_text(others, waiting)
    return _join_contents(first), others


def _append_user_text(messages: list[Json], waiting: Sequence[object]) -> None:
    """Append the waiting contents as a user message."""
    text = _join_contents(waiting)
    if text and messages and messages[-1].get("role") == "user":
        messages[-1] = {**messages[-1], "content": _join_contents([messages[-1].get("content"), *waiting])}
    elif text:
        messages.append({"role": "user", "content": text})


def _join_contents(contents: Sequence[object]) -> str | list[Any]:
    """Contents joined to one: a text if all contents are text; else a list of parts."""
    parts: list[Any] = []
    for content in contents:
        parts += content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    whole = [text for text in texts if isinstance(text, str)]
    return _SEPARATOR.join(whole) if len(whole) == len(parts) else parts


def _reorder_messages(values: Json, *, apart: bool, takes_system: bool = True) -> None:
    """Order the messages with `in_order`. `apart`: the first content goes into the field `system`."""
    messages = values["messages"]
    roles = [message.get("role") for message in messages]
    begin = next((at for at, role in enumerate(roles) if role not in _SYSTEM), len(roles))
    if takes_system and begin <= (0 if apart else 1) and not any(role in _SYSTEM for role in roles[begin:]):
        return
    first, others = in_order(messages, values.get("system") if apart else None, takes_system=takes_system)
    if apart:
        values |= {"system": first, "messages": others}
    else:
        values["messages"] = [{"role": "system", "content": first}, *others] if first else others


def _repair_message(message: Json) -> None:
    for call in _object_list(message.get("tool_calls")):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), str):
            function["arguments"] = arguments_text(arguments)
    for part in _object_list(message.get("content")):
        if isinstance(part.get("image_url"), str):
            part["image_url"] = {"url": part["image_url"]}


# ------------------------------------------------------------------------------------------------------------- schemas

_PARAMETERS: Final = ("parameters", "input_schema")


def _function_of(tool: Json) -> Json:
    function = tool.get("function")
    return function if isinstance(function, dict) else tool


def _without_boolean_schemas(schema: object) -> object:
    """The schema with objects instead of `true` and `false`: some programs that make grammars of schemas don't know these."""
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in _SCHEMA:
        if key in found and not isinstance(found[key], list):
            found[key] = _without_boolean_schemas(found[key])
    for key in _SCHEMAS:
        if isinstance(found.get(key), list):
            found[key] = [*map(_without_boolean_schemas, found[key])]
    for key in _NAMED_SCHEMAS:
        if isinstance(found.get(key), dict):
            found[key] = {name: _without_boolean_schemas(inner) for name, inner in found[key].items()}
    return found


def _loosen_parameters(tool: Json) -> bool:
    """Allow any values for a tool's parameters, and append the schema to its description. Did the tool change?"""
    name = next((name for name in _PARAMETERS if isinstance(tool.get(name), dict)), None)
    if name is None:
        return False
    schema = tool[name]
    properties = schema.get("properties")
    free: Json = {
        "type": "object",
        "properties": {key: {} for key in properties} if isinstance(properties, dict) else {},
    }
    if schema == free:
        return False
    text = _encode(schema).decode()
    tool[name] = free
    tool["description"] = f"{tool.get('description') or ''}{_SEPARATOR}Parameters: {text}".strip()
    return True


def _object_list(value: object) -> list[Json]:
    """The value if it is a list of objects; else an empty list."""
    return value if isinstance(value, list) and all(isinstance(each, dict) for each in value) else []
