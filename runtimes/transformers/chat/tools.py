"""What a request says about tools: which ones, whether the model may, must, or must not call one, and how it begins to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from runtimes.kit.body import Body
from runtimes.kit.errors import WorkerError, unsupported
from runtimes.transformers.chat.formats.tagged import THINK, THOUGHT
from runtimes.transformers.chat.guide import Guide, Way
from runtimes.transformers.chat.model import Loaded
from runtimes.transformers.chat.prompt import Prompt

NAME: Final = re.compile(r"[\w.-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Tools:
    """`offered` go into the prompt. `must`: names of which one has to be called; empty: as the model likes."""

    offered: tuple[Mapping[str, Any], ...] = ()
    must: tuple[str, ...] = ()
    parallel: bool = True
    schemas: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


def wanted(body: Body, loaded: Loaded) -> Tools:
    """Raises WorkerError for tools that are none, and for choices that can't be kept."""
    given = body.values.get("tools") or []
    if not isinstance(given, list):
        raise body.wrong("tools", "a list of tools")
    named = {_name(tool): tool for tool in given}
    choice = body.values.get("tool_choice") or "auto"
    if choice == "none" or (choice == "auto" and not named):
        return Tools()
    if not named:
        raise WorkerError("tool_choice asks for a call, but there are no tools.", param="tool_choice")
    if not loaded.knows_tools:
        raise unsupported("tools", "this model's chat template knows no tools")
    must: tuple[str, ...] = ()
    if choice == "required":
        must = tuple(named)
    elif isinstance(choice, dict) and isinstance(function := choice.get("function"), dict):
        must = (str(function.get("name")),)
        if must[0] not in named:
            raise WorkerError(f"tool_choice names {must[0]!r}, which is not among the tools.", param="tool_choice")
    elif choice != "auto":
        raise body.wrong("tool_choice", 'auto, none, required, or {"type": "function", "function": {"name": …}}')
    schemas = {name: tool["function"].get("parameters") or {} for name, tool in named.items()}
    offered = tuple(tool for name, tool in named.items() if not isinstance(choice, dict) or name in must)
    return Tools(offered, must, body.flag("parallel_tool_calls", default=True), schemas)


def _name(tool: object) -> str:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise unsupported("tools", 'only {"type": "function", "function": {…}} is known here')
    name = function.get("name")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise WorkerError(f"tools: {name!r} is no name of a function.", param="tools")
    if not isinstance(function.get("parameters") or {}, dict):
        raise WorkerError(f"tools: the parameters of {name} must be a JSON Schema.", param="tools")
    return name


def guide(tools: Tools, loaded: Loaded, prompt: Prompt) -> Guide | None:
    """Holds the model to a call, where one is asked for."""
    if not tools.must:
        return None
    begins: dict[Literal["harmony", "json", "xml"], str] = {
        "harmony": "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
        "json": '<tool_call>\n{{"name": "{}", "arguments":',
        "xml": "<tool_call>\n<function={}>",
    }
    form: Literal["harmony", "json", "xml"] = (
        "harmony" if loaded.format == "harmony" else "xml" if loaded.xml_calls else "json"
    )
    begin = begins[form]

    def ways(lead: str) -> list[Way]:
        return [Way(tuple(loaded.encode(lead + begin.format(name)))) for name in tools.must]

    if form == "harmony":
        end = loaded.one("<|end|>")
        thought = Way(tuple(loaded.encode("<|channel|>analysis<|message|>")), until=end)
        return Guide([*ways(""), thought] if end is not None else ways(""), then=ways("<|start|>assistant"))
    end, begun = loaded.one(THOUGHT), loaded.one(THINK)
    if prompt.thinking and end is not None:
        return Guide([], then=ways("\n\n"), open_thought=end)
    mentions = THINK in str(loaded.tokenizer.chat_template) or begun in prompt.tokens
    thought_first = not _closed(loaded, prompt) and mentions and begun is not None and end is not None
    return Guide(
        [*ways(""), Way((begun,), until=end)] if thought_first and begun is not None else ways(""), then=ways("\n\n")
    )


def _closed(loaded: Loaded, prompt: Prompt) -> bool:
    """Whether the prompt ends with a thought that has ended already (thinking is off)."""
    return loaded.decode(prompt.tokens[-8:]).rstrip().endswith(THOUGHT)
