"""Tools: the functions among them as a chat has them, and the choice.

A chat completion's model calls functions and nothing else. A custom tool is a function of one text. Tools that OpenAI itself
would run are refused, unless programs offer them whether they are needed or not, as Codex does: these are left out, and
named as ignored.

Functions within a namespace get its name before their own, and lose it again in the answer. What lies in `functions` has none:
OpenAI's models know functions by that name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from pydantic import JsonValue

from supervisor.dialects.responses.checks import (
    Json,
    a_list,
    an_object,
    name,
    one_of,
    others,
    shown,
    unsupported,
    wrong,
)

_LEFT_OUT: Final = ("web_search", "image_generation", "local_shell", "tool_search")
_FUNCTIONS: Final = "functions"
_TEXT: Final = "input"  # the one parameter of a custom tool
_MODES: Final = ("auto", "none", "required")
_PASSED: Final = ("description", "parameters", "strict")


class _Arguments(msgspec.Struct):
    input: str


@dataclass(frozen=True, slots=True)
class Own:
    """What a client calls a tool."""

    namespace: str | None
    name: str
    is_custom: bool = False


Owns = Mapping[str, Own]
"""Tools by their name in the chat: those that the client knows otherwise, or not as functions."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a chat completion gets. `choice` is null where there are no functions."""

    functions: list[JsonValue]
    choice: JsonValue
    owns: Owns
    ignored: list[str]


@dataclass(frozen=True, slots=True)
class _Function:
    name: str  # in the chat
    own: Own
    passed: Json


def flat_name(namespace: JsonValue, own: str) -> str:
    """A function's name in a chat."""
    if not isinstance(namespace, str) or namespace in {"", _FUNCTIONS}:
        return own
    return f"{namespace}{own}" if namespace.endswith("_") else f"{namespace}__{own}"


def arguments_of(text: str) -> str:
    """A custom tool's text as a function's arguments."""
    return msgspec.json.encode({_TEXT: text}).decode()


def text_of(arguments: str) -> str:
    """The other way round. What else a model says is the text itself."""
    try:
        return msgspec.json.decode(arguments, type=_Arguments).input
    except (msgspec.MsgspecError, RecursionError):
        return arguments


def tools_of(given: JsonValue, choice: JsonValue, more: Sequence[JsonValue] = ()) -> Tools:
    """By a request's `tools`, those that its items bring, and `tool_choice`. Raises InvalidRequestError for what no chat can do."""
    functions, ignored = list[_Function](), list[str]()
    for index, tool in enumerate([*([] if given is None else a_list(given, "tools")), *more]):
        where = f"tools[{index}]"
        found = [*_functions(an_object(tool, where), where)]
        functions += [one for one in found if isinstance(one, _Function)]
        ignored += [one for one in found if isinstance(one, str)]
    chosen, mode = _chosen(functions, "auto" if choice is None else choice)
    if not chosen:
        if mode not in {"auto", "none"}:
            left_out = f" ({', '.join(ignored)} can't be called here)" if ignored else ""
            raise unsupported("tool_choice", f"it asks for a call, but there is no function to call{left_out}.")
        mode = None
    owns = {one.name: one.own for one in chosen if one.own.namespace is not None or one.own.is_custom}
    return Tools([one.passed for one in chosen], mode, owns, ignored)


def _functions(tool: Json, where: str, namespace: str | None = None) -> Iterator[_Function | str]:
    """The functions that a tool is, and the places of what is left out of it."""
    kind = tool.get("type")
    if kind == "function":
        own = name(tool.get("name"), f"{where}.name")
        flat = flat_name(namespace, own)
        function: Json = {"name": flat}
        function |= {key: tool[key] for key in _PASSED if tool.get(key) is not None}
        yield from others(tool, where, "type", "name", *_PASSED)
        yield _Function(flat, Own(namespace, own), {"type": "function", "function": function})
    elif kind == "custom":
        own = name(tool.get("name"), f"{where}.name")
        flat = flat_name(namespace, own)
        yield from others(tool, where, "type", "name", "description", "format")
        yield _Function(flat, Own(namespace, own, is_custom=True), _custom(flat, tool, where))
    elif kind == "namespace" and namespace is None:
        named = name(tool.get("name"), f"{where}.name")
        space = None if named == _FUNCTIONS else named
        yield from others(tool, where, "type", "name", "tools")
        for index, inner in enumerate(a_list(tool.get("tools"), f"{where}.tools")):
            place = f"{where}.tools[{index}]"
            yield from _functions(an_object(inner, place), place, space)
    elif isinstance(kind, str) and kind.startswith(_LEFT_OUT):
        yield f"tools[{next(one for one in _LEFT_OUT if kind.startswith(one))}]"
    else:
        message = f"{shown(kind)} is no tool that this model can use. Leave it out; it calls functions, which you run."
        raise unsupported(where, message)


def _custom(flat: str, tool: Json, where: str) -> Json:
    """The function that stands for a custom tool. A grammar of its text is only told: no worker holds an argument to one."""
    shape = {} if tool.get("format") is None else an_object(tool["format"], f"{where}.format")
    told = "The text, as it is."
    if isinstance(rules := shape.get("definition"), str):
        told = f"The text, by this grammar ({shown(shape.get('syntax'))}):\n{rules}"
    parameters: Json = {
        "type": "object",
        "properties": {_TEXT: {"type": "string", "description": told}},
        "required": [_TEXT],
    }
    function: Json = {"name": flat, "parameters": parameters}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _chosen(functions: list[_Function], choice: JsonValue) -> tuple[list[_Function], JsonValue]:
    """The functions that are offered, and the chat's choice."""
    if isinstance(choice, str):
        return functions, one_of(choice, _MODES, "tool_choice")
    match an_object(choice, "tool_choice"):
        case {"type": "function" | "custom", **rest}:
            flat = flat_name(rest.get("namespace"), name(rest.get("name"), "tool_choice.name"))
            found = next((one for one in functions if flat in {one.name, one.own.name}), None)
            if found is None:
                raise wrong("tool_choice.name", "the name of one of the tools")
            return [found], "required"  # llama.cpp's server takes a chat's choice of one function for `auto`
        case {"type": "allowed_tools", **rest}:
            mode = one_of(rest.get("mode", "auto"), ("auto", "required"), "tool_choice.mode")
            allowed = {*_allowed(a_list(rest.get("tools"), "tool_choice.tools"))}
            return [one for one in functions if one.name in allowed or one.own.name in allowed], mode
        case other:
            message = f"{shown(other.get('type'))} can't be chosen: this model calls functions only."
            raise unsupported("tool_choice", message)


def _allowed(tools: list[JsonValue]) -> Iterator[str]:
    """The names in the chat of the functions among them; others can't be called anyway."""
    for index, tool in enumerate(tools):
        where = f"tool_choice.tools[{index}]"
        found = an_object(tool, where)
        if found.get("type") in ("function", "custom"):
            yield flat_name(found.get("namespace"), name(found.get("name"), f"{where}.name"))
