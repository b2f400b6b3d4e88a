"""The requests and answers of OpenAI's Responses.

A null in `input` and `tools` has no meaning. `decode` replaces items and tools that chats don't support by nulls, so that all
others keep their positions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from supervisor.dialects.llm_pool.types import AnswerMetrics
from supervisor.dialects.openai.types import ForLlmux
from supervisor.gateway.body.typed import Sent, Unused, unparsed
from supervisor.schema.operation import Open, doc

Json = dict[str, object]
Name = Annotated[str, Meta(min_length=1)]

# ---------------------------------------------------------------------------------------------------------------- parts


class InputText(Sent, tag_field="type", tag="input_text"):
    text: str
    annotations: Unused = None  # these two are in answers
    logprobs: Unused = None


class OutputText(InputText, tag="output_text"):
    pass


class PlainText(InputText, tag="text"):
    pass


class RefusalPart(Sent, tag_field="type", tag="refusal"):
    refusal: str


class InputImage(Sent, tag_field="type", tag="input_image"):
    image_url: Annotated[str, doc("A `data:` URL.", extra_json_schema={"pattern": "^data:"})]
    detail: Unused = None
    file_id: Annotated[None, doc("No files are kept here.", "refused")] = None


class InputAudio(Sent, tag_field="type", tag="input_audio"):
    input_audio: dict[str, Raw]


Part = InputText | OutputText | PlainText | RefusalPart | InputImage | InputAudio
Content = str | list[Part]

# ---------------------------------------------------------------------------------------------------------------- tools


class FunctionTool(Sent, tag_field="type", tag="function"):
    name: Name
    description: Raw = unparsed()
    parameters: Raw = unparsed()
    strict: Raw = unparsed()


class CustomTool(Sent, tag_field="type", tag="custom"):
    """A function of one text."""

    name: Name
    description: Raw = unparsed()
    format: dict[str, Any] | None = None


class NamespaceTool(Sent, tag_field="type", tag="namespace"):
    """Functions whose names follow a common one."""

    name: Name
    tools: list[FunctionTool | CustomTool | None]


Tool = FunctionTool | CustomTool | NamespaceTool


class ChosenFunction(Sent, tag_field="type", tag="function"):
    name: Name
    namespace: Any = None


class ChosenCustomTool(ChosenFunction, tag="custom"):
    pass


class AllowedTools(Sent, tag_field="type", tag="allowed_tools"):
    tools: list[dict[str, Any]]
    mode: Literal["auto", "required"] = "auto"


ToolChoice = Literal["auto", "none", "required"] | ChosenFunction | ChosenCustomTool | AllowedTools

# ---------------------------------------------------------------------------------------------------------------- items


class _Item(Sent, kw_only=True, tag_field="type"):
    id: Unused = None
    status: Unused = None


class InputMessage(_Item, tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class Thought(Sent):
    text: str
    type: Unused = None


class ReasoningItem(_Item, tag="reasoning"):
    summary: list[Thought] | None = None
    content: list[Thought] | None = None


class FunctionCall(_Item, tag="function_call"):
    call_id: Name
    name: Name
    arguments: Annotated[str, doc("JSON.")]
    namespace: Any = None


class FunctionCallOutput(_Item, tag="function_call_output"):
    call_id: Name
    output: Content


class CustomToolCall(_Item, tag="custom_tool_call"):
    call_id: Name
    name: Name
    input: str
    namespace: Any = None


class CustomToolCallOutput(FunctionCallOutput, tag="custom_tool_call_output"):
    name: Unused = None


class AdditionalTools(_Item, tag="additional_tools"):
    tools: list[Tool | None]
    role: Unused = None


Item = (
    InputMessage
    | ReasoningItem
    | FunctionCall
    | FunctionCallOutput
    | CustomToolCall
    | CustomToolCallOutput
    | AdditionalTools
)

# -------------------------------------------------------------------------------------------------------------- requests


class TextFormat(Sent, tag_field="type", tag="text"):
    pass


class JsonFormat(Sent, tag_field="type", tag="json_object"):
    pass


class SchemaFormat(Sent, tag_field="type", tag="json_schema"):
    name: Name
    schema: dict[str, Raw]
    description: Raw = unparsed()
    strict: Raw = unparsed()


class TextOptions(Sent):
    format: (
        Annotated[TextFormat | JsonFormat | SchemaFormat, doc("`text`, `json_object`, or a `json_schema`.")] | None
    ) = None
    verbosity: Annotated[Any, doc("All but `medium` have no effect.", "named")] = None


class ReasoningOptions(Sent):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class EventOptions(Sent):
    include_obfuscation: Annotated[Any, doc("No stream has any here.", "named")] = None


class StorageFields(ForLlmux, Sent, kw_only=True):
    """The fields about earlier responses, and about storing the request's own."""

    previous_response_id: Annotated[Name, doc("A response to go on from.")] | None = None
    store: Annotated[bool | None, doc("Whether it is kept; by default it is.")] = None
    background: Annotated[bool | None, doc("Answer at once, and generate it meanwhile.")] = None


class ResponseTokensRequest(StorageFields, kw_only=True):
    """A request whose tokens are counted."""

    model: str | None = None
    input: Annotated[str, Meta(extra_json_schema={"minLength": 1})] | list[Item | None] | None = None
    instructions: str | None = None
    tools: Annotated[list[Tool | None], doc("Functions, or namespaces of functions.")] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, doc(None, "named")] = None
    conversation: Annotated[Any, doc("Not supported: none are kept here.", "refused")] = None
    prompt: Annotated[Any, doc("Not supported: none are kept here.", "refused")] = None


class ResponseRequest(ResponseTokensRequest, kw_only=True):
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[Raw, Meta(extra_json_schema={"type": ["number", "null"], "minimum": 0})] = unparsed()
    top_p: Annotated[Raw, Meta(extra_json_schema={"type": ["number", "null"], "minimum": 0, "maximum": 1})] = unparsed()
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    metadata: dict[str, Raw] | None = None
    include: list[str] | None = None
    service_tier: Annotated[Any, doc("All but `auto` and `default` have no effect.", "named")] = None
    user: Raw = unparsed()


# --------------------------------------------------------------------------------------------------------------- answers


class ResponseOutput(Open):
    type: Literal["message", "reasoning", "function_call"]
    id: str | UnsetType = UNSET
    status: str | UnsetType = UNSET


class ResponseUsage(Open):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class Response(Open):
    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["in_progress", "completed", "incomplete", "failed", "queued", "cancelled"]
    model: str
    output: list[ResponseOutput]
    usage: ResponseUsage | UnsetType | None = UNSET
    error: Annotated[Any, doc("Null, or why it failed.")] = UNSET
    incomplete_details: Annotated[Any, doc("Null, or why the model ended early.")] = UNSET
    metrics: AnswerMetrics | UnsetType = UNSET


class ResponseTokens(Open):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(Struct):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItem(Open):
    id: str
    type: str


class InputItems(Open):
    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseQuery(Struct):
    stream: Annotated[bool, doc("Its events again, of one that was created with `background` and `stream`.")] = False
    starting_after: Annotated[int, doc("Only the events after the one with this number.", ge=0)] | None = None


class InputItemsQuery(Struct):
    order: Annotated[Literal["desc", "asc"], doc("`desc`, the newest first, which is the default, or `asc`.")] = "desc"
    limit: Annotated[int, doc("How many at most; 20 by default.", ge=1, le=100)] = 20
    after: Annotated[str | None, doc("Only those behind the item with this id.")] = None
    before: Annotated[str | None, doc("Only those in front of the item with this id.")] = None
