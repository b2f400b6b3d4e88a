"""What OpenAI's Responses are asked for."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.openai.schemas import X_FIELDS
from supervisor.dialects.operation import (
    EVENTS,
    Example,
    Operation,
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
        },
        more=True,
        optional=("usage", "error", "incomplete_details"),
    ),
    "Response",
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
    ),
)
