"""A request to `/v1/messages` as one for chat completions.

Every field is mapped, refused by its name, or told as one without effect. A field that is null is as good as missing.
What concerns caching is accepted wherever it stands.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.dialects.anthropic import client_tools
from supervisor.dialects.anthropic.conversation import messages, system_text, without_effect
from supervisor.dialects.anthropic.fields import NOTHING, decoded, is_set, refuse
from supervisor.errors import InvalidRequestError

_Function = dict[str, object]

_SAME: Final = ("model", "max_tokens", "temperature", "top_p", "top_k")
_REFUSED: Final = {
    "container": "container: no model here runs code in one; leave it out",
    "mcp_servers": "mcp_servers: no model here connects to them; offer their tools in `tools`",
}
NAMES: Final = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "chat_template_kwargs": "thinking",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Canonical fields → what they are called here."""
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_TOOL_FIELDS: Final = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control"})
_FORGETS_THOUGHTS: Final = "clear_thinking_"


class _Tool(msgspec.Struct):
    name: str
    input_schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class _ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Kind(msgspec.Struct):
    type: str


class _Edits(msgspec.Struct):
    edits: list[_Kind] = []


class _Format(msgspec.Struct):
    type: str
    schema: msgspec.Raw = NOTHING


class _User(msgspec.Struct):
    user_id: str | None = None


_fields: Final = msgspec.json.Decoder(Fields)
_tools: Final = msgspec.json.Decoder(list[Fields])
_tool: Final = msgspec.json.Decoder(_Tool)
_choice: Final = msgspec.json.Decoder(_ToolChoice)
_edits: Final = msgspec.json.Decoder(_Edits)
_kind: Final = msgspec.json.Decoder(_Kind)
_type: Final = msgspec.json.Decoder(str)
_format: Final = msgspec.json.Decoder(_Format)
_user: Final = msgspec.json.Decoder(_User)
_flag: Final = msgspec.json.Decoder(bool)
_number: Final = msgspec.json.Decoder(int)
_stops: Final = msgspec.json.Decoder(list[str])


class Canonical:
    """The chat completion that a request asks for.

    `fields` are its top-level ones; `ignored` names those of the request without effect; `stops` are the texts that end
    the answer. Raises InvalidRequestError.
    """

    def __init__(self, fields: Fields) -> None:
        self.fields: Fields = {}
        self.stops: list[str] = []
        self.ignored: list[str] = []
        given = {name: raw for name, raw in fields.items() if is_set(raw)}
        for name in _SAME:
            if name in given:
                self.fields[name] = given.pop(name)
        self._take_conversation(given)
        if (raw := given.pop("stop_sequences", None)) is not None:
            self.stops = decoded(_stops, raw, "stop_sequences")
            if self.stops:
                self._set("stop", self.stops)
        self._take_stream(given)
        self._take_tools(given)
        self._take_thinking(given)
        self._take_format(given)
        self._take_rest(given)

    def _set(self, name: str, value: object) -> None:
        self.fields[name] = msgspec.Raw(msgspec.json.encode(value))

    def _ignore(self, names: Iterable[str], *, of: str) -> None:
        self.ignored += (f"{of}.{name}" for name in names)

    def _take_conversation(self, given: Fields) -> None:
        raw = given.pop("messages", None)
        if raw is None:
            raise InvalidRequestError("messages: the field is missing.", param="messages", code="missing_parameter")
        found = messages(raw)
        system = given.pop("system", NOTHING)
        if is_set(system) and (text := system_text(system)):
            found.insert(0, {"role": "system", "content": text})
        self.ignored += dict.fromkeys(without_effect(raw, system))
        self._set("messages", found)

    def _take_stream(self, given: Fields) -> None:
        raw = given.pop("stream", None)
        if raw is not None and decoded(_flag, raw, "stream"):
            self._set("stream", True)
            self._set("stream_options", {"include_usage": True})

    def _take_tools(self, given: Fields) -> None:
        raw = given.pop("tools", None)
        tools = [self._function(tool) for tool in decoded(_tools, raw, "tools")] if raw is not None else []
        choice = given.pop("tool_choice", None)
        if choice is not None:
            tools = self._chosen(tools, choice)
        if tools:
            self._set("tools", [{"type": "function", "function": function} for function in tools])

    def _chosen(self, tools: list[_Function], raw: msgspec.Raw) -> list[_Function]:
        """The tools that are offered: where one must be called, only that one. Not all workers know such a choice."""
        choice = decoded(_choice, raw, "tool_choice")
        if choice.type == "tool" and choice.name:
            tools = [tool for tool in tools if tool["name"] == choice.name]
            if not tools:
                raise InvalidRequestError(
                    f"tool_choice: there is no {choice.name[:50]!r} among the tools.", param="tool_choice"
                )
            self._set("tool_choice", "required")
        elif choice.type in _CHOICES:
            self._set("tool_choice", _CHOICES[choice.type])
        else:
            raise InvalidRequestError(
                "tool_choice: its `type` is one of auto, any, none, and tool with a `name`.", param="tool_choice"
            )
        self._ignore(
            (n for n in decoded(_fields, raw, "tool_choice") if n not in _ToolChoice.__struct_fields__),
            of="tool_choice",
        )
        if choice.disable_parallel_tool_use is not None:
            self._set("parallel_tool_calls", not choice.disable_parallel_tool_use)
        return tools

    def _function(self, tool: Fields) -> _Function:
        kind = decoded(_type, tool["type"], "tools") if is_set(tool.get("type", NOTHING)) else "custom"
        if (schema := client_tools.schema_of(kind)) is not None:
            tool = {**tool, "input_schema": msgspec.Raw(msgspec.json.encode(schema))}
        elif kind != "custom":
            raise refuse("tools", f"tools: a {kind[:50]!r} runs at Anthropic; offer a tool of your own instead")
        found = decoded(_tool, msgspec.Raw(msgspec.json.encode(tool)), "tools")
        function: _Function = {"name": found.name, "parameters": found.input_schema}
        if found.description is not None:
            function["description"] = found.description
        if found.strict is not None:
            function["strict"] = found.strict
        names = [f"tools.{name}" for name in tool if name not in _TOOL_FIELDS]
        self.ignored += [name for name in names if name not in self.ignored]
        return function

    def _take_thinking(self, given: Fields) -> None:
        if (raw := given.pop("thinking", None)) is None:
            return
        kind = decoded(_kind, raw, "thinking").type
        if kind not in {"enabled", "adaptive", "disabled"}:
            raise InvalidRequestError(
                "thinking: its `type` is one of enabled, adaptive and disabled.", param="thinking"
            )
        self._set("chat_template_kwargs", {"enable_thinking": kind != "disabled"})
        self._ignore((name for name in decoded(_fields, raw, "thinking") if name != "type"), of="thinking")

    def _take_format(self, given: Fields) -> None:
        """`output_format`, and where it stands now: in `output_config`."""
        raw = given.pop("output_format", None)
        if (whole := given.pop("output_config", None)) is not None:
            config = {name: value for name, value in decoded(_fields, whole, "output_config").items() if is_set(value)}
            raw = config.pop("format", raw)
            self._ignore(config, of="output_config")
        if raw is None:
            return
        asked = decoded(_format, raw, "output_config")
        if asked.type != "json_schema" or not is_set(asked.schema):
            raise refuse("output_config", 'output_config: its `format` must be of type "json_schema" with a `schema`')
        schema = {"name": "answer", "schema": asked.schema, "strict": True}
        self._set("response_format", {"type": "json_schema", "json_schema": schema})

    def _take_rest(self, given: Fields) -> None:
        for name, message in _REFUSED.items():
            if name in given and bytes(given.pop(name)).translate(None, b" \t\r\n") != b"[]":
                raise refuse(name, message)
        if (raw := given.pop("context_management", None)) is not None:
            edits = decoded(_edits, raw, "context_management").edits
            if not all(edit.type.startswith(_FORGETS_THOUGHTS) for edit in edits):  # chat templates do that
                raise refuse("context_management", "context_management: shorten the conversation yourself")
            self.ignored.append("context_management")
        if (raw := given.pop("metadata", None)) is not None:
            if (user := decoded(_user, raw, "metadata").user_id) is not None:
                self._set("user", user)
            self._ignore((name for name in decoded(_fields, raw, "metadata") if name != "user_id"), of="metadata")
        self.ignored += given


def require_max_tokens(fields: Fields) -> None:
    """Raises InvalidRequestError unless the limit that Anthropic's API demands is there."""
    raw = fields.get("max_tokens", NOTHING)
    if not is_set(raw):
        raise InvalidRequestError(
            "max_tokens: the field is missing; say how many tokens the answer may have.",
            param="max_tokens",
            code="missing_parameter",
        )
    if decoded(_number, raw, "max_tokens") < 1:
        raise InvalidRequestError("max_tokens: it must be at least 1.", param="max_tokens")
