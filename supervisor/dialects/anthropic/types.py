"""Requests and answers of Anthropic's API: messages, token counts, the list of models. Types have the names of Anthropic's SDKs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from supervisor.gateway.body.typed import Sent, Unused, unparsed
from supervisor.schema.operation import Open, doc

_Name = Annotated[str, Meta(min_length=1)]
_Object = Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
# The worker checks these numbers itself: they pass unparsed.
_Share = Annotated[Raw, Meta(extra_json_schema={"type": "number", "minimum": 0, "maximum": 1})]
_Count = Annotated[Raw, Meta(extra_json_schema={"type": "integer", "minimum": 0})]


class Cacheable(Sent):
    """A part of a request that may say what to cache. That is accepted, and has no effect."""

    cache_control: Unused = None


class TextBlockParam(Cacheable, kw_only=True, tag="text"):
    text: str


class Base64ImageSource(Sent, tag="base64"):
    media_type: Annotated[str, Meta(pattern="^image/")]
    data: Annotated[str, doc("Base64.", extra_json_schema={"pattern": "^[A-Za-z0-9+/]+={0,2}$"})]


class URLImageSource(Sent, tag="url"):
    url: Annotated[str, doc("Where media may be loaded from addresses.")]


class ImageBlockParam(Cacheable, kw_only=True, tag="image"):
    source: Base64ImageSource | URLImageSource


class ThinkingBlockParam(Cacheable, kw_only=True, tag="thinking"):
    thinking: str
    signature: Annotated[Any, doc("Without effect: only Anthropic could check it.", "no effect")] = None


class RedactedThinkingBlockParam(Cacheable, tag="redacted_thinking"):
    """An encrypted thought. Only Anthropic could read it, so it has no effect."""


class ToolUseBlockParam(Cacheable, kw_only=True, tag="tool_use"):
    id: _Name
    name: _Name
    input: _Object = unparsed()


class ToolResultBlockParam(Cacheable, kw_only=True, tag="tool_result"):
    tool_use_id: _Name
    content: str | list[TextBlockParam | ImageBlockParam] | None = None
    is_error: bool | None = None


class UserMessageParam(Sent, tag_field="role", tag="user"):
    content: str | list[TextBlockParam | ImageBlockParam | ToolResultBlockParam]


class AssistantMessageParam(Sent, tag_field="role", tag="assistant"):
    content: str | list[TextBlockParam | ThinkingBlockParam | RedactedThinkingBlockParam | ToolUseBlockParam]


class SystemMessageParam(Sent, tag_field="role", tag="system"):
    content: str | list[TextBlockParam]


class ToolParam(Cacheable, kw_only=True):
    name: str
    description: str | None = None
    input_schema: Annotated[_Object, doc("A tool of Anthropic's needs none.")] = unparsed()
    strict: bool | None = None
    type: (
        Annotated[str, doc("`custom`, or a tool of Anthropic's that its client runs, such as `bash_20250124`.")] | None
    ) = None


class ToolChoiceParam(Sent):
    type: Literal["auto", "any", "none", "tool"]
    name: Annotated[str, doc("The one that must be called, with `tool`.")] | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfigParam(Sent):
    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormatParam(Sent):
    type: Literal["json_schema"]
    schema: dict[str, Raw]


class OutputConfigParam(Sent):
    format: OutputFormatParam | None = None


class MetadataParam(Sent):
    user_id: str | None = None


class ContextEditParam(Sent):
    """Chat templates clear earlier thoughts themselves, and no other edit is made."""

    type: Annotated[str, Meta(pattern="^clear_thinking_")]
    keep: Unused = None


class ContextManagementParam(Sent):
    edits: list[ContextEditParam] | None = None


class MessageFields(Sent):
    """The fields of a message and of its count."""

    messages: Annotated[
        list[UserMessageParam | AssistantMessageParam | SystemMessageParam],
        doc("The conversation: at least one message.", min_length=1),
    ]
    model: str | None = None
    system: str | list[TextBlockParam] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingConfigParam | None = None
    stop_sequences: list[str] | None = None
    temperature: _Share = unparsed()
    top_p: _Share = unparsed()
    top_k: _Count = unparsed()
    output_config: OutputConfigParam | None = None
    output_format: Annotated[OutputFormatParam, doc("An older name of `output_config.format`.")] | None = None
    metadata: MetadataParam | None = None
    context_management: Annotated[ContextManagementParam | None, doc(None, "named")] = None
    container: Annotated[list[Raw], doc("No model here runs code in one.", "refused", max_length=0)] | None = None
    mcp_servers: Annotated[list[Raw], doc("No model here connects to them.", "refused", max_length=0)] | None = None


class MessageRequest(MessageFields, kw_only=True):
    """A conversation, to be answered."""

    max_tokens: Annotated[int, doc("How many tokens the answer may have.", ge=1)]
    stream: bool | None = None


class CountRequest(MessageFields):
    """A conversation, to be counted."""

    max_tokens: _Count = unparsed()


class TextBlock(Struct, tag="text"):
    text: str


class ThinkingBlock(Struct, tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Open, kw_only=True):
    """Tokens. Some workers' servers leave out those of caches."""

    input_tokens: int
    cache_creation_input_tokens: int | UnsetType = UNSET
    cache_read_input_tokens: int | UnsetType = UNSET
    output_tokens: int


class Message(Open, kw_only=True):
    """An answer; at the beginning of a stream, one without content."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageTokensCount(Struct):
    input_tokens: int


class AnthropicErrorDetails(Open):
    type: Annotated[str, doc("Anthropic's types.")]
    message: str


class AnthropicError(Open):
    """The body of an error. llmux's own fields are beside Anthropic's."""

    type: Literal["error"]
    error: AnthropicErrorDetails


class AnthropicModel(Struct):
    """A model that can be asked at `/v1/messages`."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None


class AnthropicModelQuery(Struct):
    """A page of the list of models."""

    limit: Annotated[int, doc("How many at most.", ge=1, le=1000)] = 1000
    after_id: Annotated[str, doc("Those behind this one.")] | None = None
    before_id: Annotated[str, doc("Those before this one.")] | None = None


class AnthropicModelList(Struct):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None
