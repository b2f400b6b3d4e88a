"""Translates tools and the choice among them into the functions of a chat.

A chat completion's model calls functions and nothing else. A custom tool becomes a function with one text. Tools that OpenAI
itself would run are refused, unless programs offer them whether they need them or not, as Codex does: `decode` drops these.

Functions within a namespace get its name before their own, and lose it again in the answer. Those in `functions` get none:
OpenAI's models know functions by that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from supervisor.dialects.responses.types import (
    AllowedTools,
    ChosenFunction,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    Tool,
    ToolChoice,
)
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.typed import UNREADABLE, is_given

_FUNCTIONS: Final = "functions"
_TEXT: Final = "input"  # the one parameter of a custom tool
_PASSED: Final = ("description", "parameters", "strict")
_SHOWN: Final = 50  # characters of a client's own word


class _Arguments(msgspec.Struct):
    input: str


@dataclass(frozen=True, slots=True)
class Own:
    """The client's name for a tool."""

    namespace: str | None
    name: str
    is_custom: bool = False


Owns = Mapping[str, Own]
"""Tools by their name in the chat: those that the client knows by another name, or not as functions."""


@dataclass(frozen=True, slots=True)
class _Function:
    name: str  # in the chat
    own: Own
    fields: Mapping[str, object]  # besides the name

    @property
    def function(self) -> dict[str, object]:
        """The function in a chat's form."""
        return {"type": "function", "function": {"name": self.name, **self.fields}}


def flat_name(namespace: object, own: str) -> str:
    """The name of a function in a chat."""
    if not isinstance(namespace, str) or namespace in {"", _FUNCTIONS}:
        return own
    return f"{namespace}{own}" if namespace.endswith("_") else f"{namespace}__{own}"


def arguments_of(text: str) -> str:
    """A custom tool's text as a function's arguments."""
    return msgspec.json.encode({_TEXT: text}).decode()


def text_of(arguments: str) -> str:
    """The text in a function's arguments: the reverse of `arguments_of`. Arguments of another form are the text themselves."""
    try:
        return msgspec.json.decode(arguments, type=_Arguments).input
    except UNREADABLE:
        return arguments


def tools_of(
    tools: Iterable[Tool | None], choice: ToolChoice | None, left_out: Sequence[str]
) -> tuple[dict[str, object], Owns]:
    """A chat completion's `tools` and `tool_choice`, if there is a function, and the client's names of its functions.

    `left_out`: the names of tools that can't be called. Raises InvalidRequestError for a choice that no chat can make.
    """
    chosen, mode = _chosen([*_functions(tools)], choice or "auto")
    if chosen:
        owns = {tool.name: tool.own for tool in chosen if tool.own.namespace is not None or tool.own.is_custom}
        return {"tools": [tool.function for tool in chosen], "tool_choice": mode}, owns
    if mode in {"auto", "none"}:
        return {}, {}
    more = f" ({', '.join(left_out)} can't be called here)" if left_out else ""
    message = f"tool_choice: it asks for a call, but there is no function to call{more}."
    raise InvalidRequestError(message, code="unsupported_parameter", param="tool_choice")


def _functions(tools: Iterable[Tool | None], namespace: str | None = None) -> Iterator[_Function]:
    for tool in tools:
        match tool:
            case FunctionTool():
                given = {name: getattr(tool, name) for name in _PASSED}
                fields = {name: value for name, value in given.items() if is_given(value)}
                yield _Function(flat_name(namespace, tool.name), Own(namespace, tool.name), fields)
            case CustomTool():
                own = Own(namespace, tool.name, is_custom=True)
                yield _Function(flat_name(namespace, tool.name), own, _custom(tool))
            case NamespaceTool():
                yield from _functions(tool.tools, None if tool.name == _FUNCTIONS else tool.name)


def _custom(tool: CustomTool) -> Mapping[str, object]:
    """The function for a custom tool. The description mentions a grammar of its text: no worker holds an argument to one."""
    about, shape = "The text, as it is.", tool.format or {}
    if isinstance(rules := shape.get("definition"), str):
        about = f"The text, by this grammar ({ascii(shape.get('syntax'))[:_SHOWN]}):\n{rules}"
    properties = {_TEXT: {"type": "string", "description": about}}
    fields = {"parameters": {"type": "object", "properties": properties, "required": [_TEXT]}}
    return {**fields, "description": tool.description} if is_given(tool.description) else fields


def _chosen(functions: list[_Function], choice: ToolChoice) -> tuple[list[_Function], str]:
    """The functions to offer, and the chat's choice."""
    match choice:
        case ChosenFunction():
            flat = flat_name(choice.namespace, choice.name)
            tool = next((tool for tool in functions if flat in {tool.name, tool.own.name}), None)
            if tool is None:
                message = "tool_choice.name: expected the name of one of the tools."
                raise InvalidRequestError(message, param="tool_choice.name")
            return [tool], "required"  # llama.cpp's server takes a chat's choice of one function for `auto`
        case AllowedTools():
            allowed = {*_allowed(choice)}
            return [tool for tool in functions if tool.name in allowed or tool.own.name in allowed], choice.mode
        case mode:
            return functions, mode


def _allowed(choice: AllowedTools) -> Iterator[str]:
    """The chat's names of the functions among the allowed tools; other tools can't be called anyway."""
    for index, tool in enumerate(choice.tools):
        if tool.get("type") in ("function", "custom"):
            if not isinstance(name := tool.get("name"), str) or not name:
                place = f"tool_choice.tools[{index}].name"
                raise InvalidRequestError(f"{place}: expected a name.", param=place)
            yield flat_name(tool.get("namespace"), name)
