"""Translates tools and the tool choice into the functions of a chat.

In a chat completion a model calls only functions. A custom tool becomes a function with one text. Tools that OpenAI itself
runs are refused, except tools that programs such as Codex always offer, needed or not: `decode` drops these.

A function in a namespace gets the namespace as a prefix, and loses it again in the answer. Functions in `functions` get no
prefix: OpenAI's models use that name for all functions.
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
_SHOWN: Final = 50  # characters of a client's text


class _Arguments(msgspec.Struct):
    input: str


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as the client knows it."""

    namespace: str | None
    name: str
    is_custom: bool = False


ClientTools = Mapping[str, ClientTool]
"""Function names in the chat → tools that the client knows by another name, or not as functions."""


@dataclass(frozen=True, slots=True)
class _Function:
    name: str  # in the chat
    client_tool: ClientTool
    fields: Mapping[str, object]  # except the name

    @property
    def function(self) -> dict[str, object]:
        """The function as a tool of a chat completion."""
        return {"type": "function", "function": {"name": self.name, **self.fields}}


def flat_name(namespace: object, name: str) -> str:
    """The name of a function in a chat."""
    if not isinstance(namespace, str) or namespace in {"", _FUNCTIONS}:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def arguments_of(text: str) -> str:
    """A custom tool's text as a function's arguments."""
    return msgspec.json.encode({_TEXT: text}).decode()


def text_of(arguments: str) -> str:
    """The text in a function's arguments: the reverse of `arguments_of`. Arguments in another format become the text."""
    try:
        return msgspec.json.decode(arguments, type=_Arguments).input
    except UNREADABLE:
        return arguments


def tools_of(
    tools: Iterable[Tool | None], choice: ToolChoice | None, left_out: Sequence[str]
) -> tuple[dict[str, object], ClientTools]:
    """A chat completion's `tools` and `tool_choice`, if there is a function, and the client's names of its functions.

    `left_out`: the names of dropped tools. Raises InvalidRequestError for a choice that no chat can make.
    """
    chosen, mode = _choose_functions([*_chat_functions(tools)], choice or "auto")
    if chosen:
        client_tools = {
            tool.name: tool.client_tool
            for tool in chosen
            if tool.client_tool.namespace is not None or tool.client_tool.is_custom
        }
        return {"tools": [tool.function for tool in chosen], "tool_choice": mode}, client_tools
    if mode in {"auto", "none"}:
        return {}, {}
    more = f" ({', '.join(left_out)} can't be called here)" if left_out else ""
    message = f"tool_choice: it asks for a call, but there is no function to call{more}."
    raise InvalidRequestError(message, code="unsupported_parameter", param="tool_choice")


def _chat_functions(tools: Iterable[Tool | None], namespace: str | None = None) -> Iterator[_Function]:
    for tool in tools:
        match tool:
            case FunctionTool():
                given = {name: getattr(tool, name) for name in _PASSED}
                fields = {name: value for name, value in given.items() if is_given(value)}
                yield _Function(flat_name(namespace, tool.name), ClientTool(namespace, tool.name), fields)
            case CustomTool():
                client_tool = ClientTool(namespace, tool.name, is_custom=True)
                yield _Function(flat_name(namespace, tool.name), client_tool, _custom_function(tool))
            case NamespaceTool():
                yield from _chat_functions(tool.tools, None if tool.name == _FUNCTIONS else tool.name)


def _custom_function(tool: CustomTool) -> Mapping[str, object]:
    """The function for a custom tool. The description contains the text's grammar, because no worker enforces it."""
    about, shape = "The text, as it is.", tool.format or {}
    if isinstance(rules := shape.get("definition"), str):
        about = f"The text, by this grammar ({ascii(shape.get('syntax'))[:_SHOWN]}):\n{rules}"
    properties = {_TEXT: {"type": "string", "description": about}}
    fields = {"parameters": {"type": "object", "properties": properties, "required": [_TEXT]}}
    return {**fields, "description": tool.description} if is_given(tool.description) else fields


def _choose_functions(functions: list[_Function], choice: ToolChoice) -> tuple[list[_Function], str]:
    """The functions to offer, and the chat's choice."""
    match choice:
        case ChosenFunction():
            flat = flat_name(choice.namespace, choice.name)
            tool = next((tool for tool in functions if flat in {tool.name, tool.client_tool.name}), None)
            if tool is None:
                message = "tool_choice.name: expected the name of one of the tools."
                raise InvalidRequestError(message, param="tool_choice.name")
            return [tool], "required"  # llama.cpp's server treats the choice of one function as `auto`
        case AllowedTools():
            allowed = {*_allowed_names(choice)}
            return [tool for tool in functions if tool.name in allowed or tool.client_tool.name in allowed], choice.mode
        case mode:
            return functions, mode


def _allowed_names(choice: AllowedTools) -> Iterator[str]:
    """The chat's names of the allowed functions; a chat can't call other tools anyway."""
    for index, tool in enumerate(choice.tools):
        if tool.get("type") in ("function", "custom"):
            if not isinstance(name := tool.get("name"), str) or not name:
                place = f"tool_choice.tools[{index}].name"
                raise InvalidRequestError(f"{place}: expected a name.", param=place)
            yield flat_name(tool.get("namespace"), name)
