"""What OpenAI's Responses are asked for."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.llm_pool.types import AnswerMetrics
from supervisor.dialects.openai.schemas import X_FIELDS
from supervisor.schema.operation import (
    EVENTS,
    Example,
    Operation,
    Parameter,
    Section,
    anything,
    array,
    choice,
    flag,
    mapping,
    named,
    number,
    record,
    request,
    struct,
    text,
    whole,
)

_PART: Final = named(
    {
        "oneOf": [
            request({"type": choice("input_text", "output_text"), "text": text()}, "type", "text"),
            request(
                {"type": {"const": "input_image"}, "image_url": text("A `data:` URL.", pattern="^data:")},
                "type",
                "image_url",
            ),
        ]
    },
    "ResponsePart",
)
_ITEM: Final = named(
    {
        "anyOf": [
            request(
                {
                    "type": {"const": "message"},
                    "role": choice("system", "developer", "user", "assistant"),
                    "content": {"anyOf": [text(), array(_PART, minItems=1)]},
                },
                "role",
                "content",
            ),
            request(
                {
                    "type": {"const": "function_call"},
                    "call_id": text(minLength=1),
                    "name": text(pattern="^[a-zA-Z0-9_-]{1,64}$"),
                    "arguments": text("JSON."),
                },
                "type",
                "call_id",
                "name",
                "arguments",
            ),
            request(
                {"type": {"const": "function_call_output"}, "call_id": text(minLength=1), "output": text()},
                "type",
                "call_id",
                "output",
            ),
        ]
    },
    "ResponseItem",
)
_REQUEST: Final = named(
    request(
        {
            "model": text(),
            "input": {"anyOf": [text(minLength=1), array(_ITEM, minItems=1)]},
            "instructions": text(null=True),
            "max_output_tokens": whole(null=True, minimum=1),
            "temperature": number(minimum=0, null=True),
            "top_p": number(minimum=0, maximum=1, null=True),
            "stream": flag(null=True),
            "tools": array(mapping(anything()), "Functions, or namespaces of functions."),
            "tool_choice": anything(),
            "parallel_tool_calls": flag(null=True),
            "reasoning": request(
                {"effort": choice("none", "minimal", "low", "medium", "high", "xhigh", null=True)},
                more=True,
            ),
            "text": request(
                {"format": anything("`text`, `json_object`, or a `json_schema`.")},
                more=True,
            ),
            "metadata": mapping(anything()),
            "previous_response_id": text("A response to go on from.", null=True),
            "store": flag("Whether it is kept; by default it is.", null=True),
            "background": flag("Answer at once, and generate it meanwhile.", null=True),
            "include": array(null=True),
            **X_FIELDS,
        },
        "input",
        more=True,
    ),
    "ResponseRequest",
)
_RESPONSE: Final = named(
    record(
        {
            "id": text(),
            "object": {"const": "response"},
            "created_at": number(),
            "status": choice("in_progress", "completed", "incomplete", "failed", "queued", "cancelled"),
            "model": text(),
            "output": array(
                record(
                    {"type": choice("message", "reasoning", "function_call"), "id": text(), "status": text()},
                    more=True,
                    optional=("id", "status"),
                )
            ),
            "usage": record(
                {"input_tokens": whole(), "output_tokens": whole(), "total_tokens": whole()},
                more=True,
                null=True,
            ),
            "error": anything("Null, or why it failed."),
            "incomplete_details": anything("Null, or why the model ended early."),
            "metrics": struct(AnswerMetrics),
        },
        more=True,
        optional=("usage", "error", "incomplete_details", "metrics"),
    ),
    "Response",
)
_ID: Final = "/v1/responses/resp_0123456789abcdef"
_NEEDS: Final = "the id of a response"
_KEPT: Final = {
    "id": "resp_0123456789abcdef",
    "object": "response",
    "created_at": 1790000000,
    "status": "queued",
    "model": "Tiny-Instruct",
    "output": [],
    "background": True,
}
_INCLUDE: Final = Parameter(
    "include[]", "What else to tell of its items, such as `message.input_image.image_url`.", array()
)
_BODY: Final = {"model": "Tiny-Instruct", "input": "Hello"}

SECTION: Final = Section(
    "Responses",
    "OpenAI's Responses, for every model that chats.",
    (
        Operation(
            "POST",
            "/v1/responses",
            "Let a model answer a conversation of items.",
            "Its stream has OpenAI's events, from `response.created` to `response.completed`.",
            request=_REQUEST,
            answer=_RESPONSE,
            stream_type=EVENTS,
            is_run=True,
            example=Example(_BODY),
        ),
        Operation(
            "POST",
            "/v1/responses/input_tokens",
            "How many tokens such a request has.",
            request=_REQUEST,
            answer=record({"object": {"const": "response.input_tokens"}, "input_tokens": whole()}, more=True),
            is_run=True,
            example=Example(_BODY),
        ),
        Operation(
            "GET",
            "/v1/responses/{id}",
            "A response as it stands.",
            "404 `response_not_found` where none of this key is kept by that id.",
            parameters=(
                _INCLUDE,
                Parameter(
                    "stream", "Its events again, of one that was created with `background` and `stream`.", flag()
                ),
                Parameter("starting_after", "Only the events after the one with this number.", whole(minimum=0)),
            ),
            answer=_RESPONSE,
            stream_type=EVENTS,
            errors=(404,),
            aliases=("/responses/{id}",),
            example=Example(path=_ID, needs=_NEEDS, answer=_KEPT),
        ),
        Operation(
            "DELETE",
            "/v1/responses/{id}",
            "Forget it, and cancel it if it runs.",
            "Responses that went on from it keep what it said.",
            answer=record({"id": text(), "object": {"const": "response"}, "deleted": {"const": True}}),
            errors=(404,),
            aliases=("/responses/{id}",),
            example=Example(
                path=_ID, needs=_NEEDS, answer={"id": "resp_0123456789abcdef", "object": "response", "deleted": True}
            ),
        ),
        Operation(
            "POST",
            "/v1/responses/{id}/cancel",
            "End a response in the background.",
            "Any other response, and one that is over, is 400.",
            answer=_RESPONSE,
            errors=(404,),
            aliases=("/responses/{id}/cancel",),
            example=Example(path=_ID + "/cancel", needs=_NEEDS, answer=_KEPT | {"status": "cancelled"}),
        ),
        Operation(
            "GET",
            "/v1/responses/{id}/input_items",
            "All items that the model was given, those of earlier responses included.",
            "Images come without their content, unless `include` has `message.input_image.image_url`.",
            parameters=(
                Parameter("order", "`desc`, the newest first, which is the default, or `asc`.", choice("desc", "asc")),
                Parameter("limit", "How many at most; 20 by default.", whole(minimum=1, maximum=100)),
                Parameter("after", "Only those behind the item with this id."),
                Parameter("before", "Only those in front of the item with this id."),
                _INCLUDE,
            ),
            answer=record(
                {
                    "object": {"const": "list"},
                    "data": array(record({"id": text(), "type": text()}, more=True)),
                    "first_id": text(null=True),
                    "last_id": text(null=True),
                    "has_more": flag(),
                }
            ),
            errors=(404,),
            aliases=("/responses/{id}/input_items",),
            example=Example(
                path=_ID + "/input_items",
                needs=_NEEDS,
                answer={
                    "object": "list",
                    "data": [
                        {
                            "id": "msg_0123456789abcdef",
                            "type": "message",
                            "status": "completed",
                            "role": "user",
                            "content": [{"type": "input_text", "text": "Hello"}],
                        }
                    ],
                    "first_id": "msg_0123456789abcdef",
                    "last_id": "msg_0123456789abcdef",
                    "has_more": False,
                },
            ),
        ),
    ),
)
