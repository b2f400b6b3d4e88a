"""A request's tools, and whether the model may, must, or must not call one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from runtimes.sdk.body import Body
from runtimes.sdk.chat.language import Language
from runtimes.sdk.errors import WorkerError, unsupported

NAME: Final = re.compile(r"[\w.-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Tools:
    """`offered`: tools in the prompt. `must`: the model must call one of these tools; empty: the model decides.

    `schemas`: tool → the schema of its arguments. `strict`: schemas enforced whenever a call is required.
    """

    offered: tuple[Mapping[str, Any], ...] = ()
    must: tuple[str, ...] = ()
    parallel: bool = True
    schemas: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()


def requested_tools(body: Body, language: Language) -> Tools:
    """The tools of a request. Raises WorkerError for invalid tools and unsupported choices."""
    given = body.values.get("tools") or []
    if not isinstance(given, list):
        raise body.wrong_value("tools", "a list of tools")
    named = {_function_name(tool): tool for tool in given}
    choice = body.values.get("tool_choice") or "auto"
    if choice == "none" or (choice == "auto" and not named):
        return Tools()
    if not named:
        raise WorkerError("tool_choice asks for a call, but there are no tools.", param="tool_choice")
    if not language.knows_tools:
        raise unsupported("tools", "this model's chat template knows no tools")
    must: tuple[str, ...] = ()
    if choice == "required":
        must = tuple(named)
    elif isinstance(choice, dict) and isinstance(function := choice.get("function"), dict):
        must = (str(function.get("name")),)
        if must[0] not in named:
            raise WorkerError(f"tool_choice names {must[0]!r}, which is not among the tools.", param="tool_choice")
    elif choice != "auto":
        raise body.wrong_value("tool_choice", 'auto, none, required, or {"type": "function", "function": {"name": …}}')
    schemas = {name: tool["function"].get("parameters") or {} for name, tool in named.items()}
    offered = tuple(tool for name, tool in named.items() if not isinstance(choice, dict) or name in must)
    strict = frozenset(name for name, tool in named.items() if tool["function"].get("strict") is True)
    return Tools(offered, must, body.flag("parallel_tool_calls", default=True), schemas, strict)


def _function_name(tool: object) -> str:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise unsupported("tools", 'only {"type": "function", "function": {…}} is known here')
    name = function.get("name")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise WorkerError(f"tools: {name!r} is no name of a function.", param="tools")
    if not isinstance(function.get("parameters") or {}, dict):
        raise WorkerError(f"tools: the parameters of {name} must be a JSON Schema.", param="tools")
    return name
