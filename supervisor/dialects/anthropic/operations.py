"""What Anthropic's clients ask for."""

from __future__ import annotations

from typing import Final

from supervisor.schema.operation import (
    EVENTS,
    Example,
    Operation,
    Parameter,
    Schema,
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


def _block(kind: str, fields: dict[str, Schema], *optional: str) -> Schema:
    """A content block. What concerns caching may stand in each, and has no effect."""
    needed = [name for name in fields if name not in optional]
    cached = {"cache_control": mapping(anything(), null=True)}
    return request({"type": {"const": kind}, **fields, **cached}, "type", *needed)


_DATA: Final = {
    "type": {"const": "base64"},
    "media_type": choice("image/png", "image/jpeg", "image/gif", "image/webp"),
    "data": text(pattern="^[A-Za-z0-9+/]+={0,2}$"),
}
_ADDRESS: Final = {"type": {"const": "url"}, "url": text("Where media may be loaded from addresses.")}
_TEXT: Final = _block("text", {"text": text()})
_SYSTEM: Final[Schema] = {"anyOf": [text(), array(_TEXT)]}
_IMAGE: Final = _block("image", {"source": {"oneOf": [request(_DATA, *_DATA), request(_ADDRESS, *_ADDRESS)]}})
_THOUGHT: Final = _block("thinking", {"thinking": text(), "signature": text()}, "signature")
_HIDDEN: Final = _block("redacted_thinking", {"data": text()})
_USE: Final = _block("tool_use", {"id": text(), "name": text(), "input": mapping(anything())})
_RESULT: Final = _block(
    "tool_result",
    {
        "tool_use_id": text(),
        "content": {"anyOf": [text(), array({"oneOf": [_TEXT, _IMAGE]})]},
        "is_error": flag(),
    },
    "content",
    "is_error",
)
_MESSAGE: Final = {
    "oneOf": [
        request(
            {
                "role": {"const": "user"},
                "content": {"anyOf": [text(), array({"oneOf": [_TEXT, _IMAGE, _RESULT]}, minItems=1)]},
            },
            "role",
            "content",
        ),
        request(
            {
                "role": {"const": "assistant"},
                "content": {"anyOf": [text(), array({"oneOf": [_TEXT, _THOUGHT, _HIDDEN, _USE]}, minItems=1)]},
            },
            "role",
            "content",
        ),
    ]
}
_FIELDS: Final = {
    "model": text(),
    "messages": array(named(_MESSAGE, "AnthropicMessage"), minItems=1),
    "system": _SYSTEM,
    "tools": array(
        request(
            {"name": text(), "description": text(), "input_schema": mapping(anything())},
            "name",
            "input_schema",
            more=True,
        )
    ),
    "tool_choice": {
        "oneOf": [
            request({"type": choice("auto", "any", "none"), "disable_parallel_tool_use": flag()}, "type"),
            request({"type": {"const": "tool"}, "name": text(), "disable_parallel_tool_use": flag()}, "type", "name"),
        ]
    },
    "thinking": request({"type": choice("enabled", "disabled", "adaptive")}, "type", more=True),
}
_MODEL: Final = named(
    record(
        {
            "type": {"const": "model"},
            "id": text(),
            "display_name": text(),
            "created_at": text(),
            "max_input_tokens": whole(null=True),
        }
    ),
    "AnthropicModel",
)
_ERROR: Final = named(
    record(
        {
            "type": {"const": "error"},
            "error": record(
                {"type": text("Anthropic's types."), "message": text()},
                more=True,
            ),
        },
        more=True,
    ),
    "AnthropicError",
)
_VERSION: Final = Parameter("anthropic-version", "Which Anthropic's clients always send.", place="header")
_HEADERS: Final = {"anthropic-version": "2023-06-01"}
_HELLO: Final = {"model": "Tiny-Instruct", "messages": [{"role": "user", "content": "Hello"}]}

SECTION: Final = Section(
    "Anthropic",
    "Anthropic's messages, for every model that chats.",
    (
        Operation(
            "POST",
            "/v1/messages",
            "Let a model answer a conversation.",
            "Its stream has Anthropic's events, from `message_start` to `message_stop`.",
            parameters=(_VERSION,),
            request=named(
                request(
                    {
                        **_FIELDS,
                        "max_tokens": whole("How many tokens the answer may have.", minimum=1),
                        "stop_sequences": array(),
                        "stream": flag(),
                        "temperature": number(minimum=0, maximum=1),
                        "top_p": number(minimum=0, maximum=1),
                        "top_k": whole(minimum=0),
                        "metadata": request({"user_id": text(null=True)}, more=True),
                    },
                    "messages",
                    "max_tokens",
                    more=True,
                ),
                "MessageRequest",
            ),
            answer=named(
                record(
                    {
                        "id": text(),
                        "type": {"const": "message"},
                        "role": {"const": "assistant"},
                        "model": text(),
                        "content": array(
                            record({"type": choice("text", "thinking", "tool_use")}, more=True),
                        ),
                        "stop_reason": text(null=True),
                        "stop_sequence": text(null=True),
                        "usage": record({"input_tokens": whole(), "output_tokens": whole()}, more=True),
                    },
                    more=True,
                ),
                "Message",
            ),
            stream_type=EVENTS,
            is_run=True,
            example=Example(_HELLO | {"max_tokens": 64}, headers=_HEADERS),
        ),
        Operation(
            "POST",
            "/v1/messages/count_tokens",
            "How many tokens such a request has.",
            parameters=(_VERSION,),
            request=named(request(_FIELDS, "messages", more=True), "CountRequest"),
            answer=record({"input_tokens": whole()}, more=True),
            is_run=True,
            example=Example(_HELLO, headers=_HEADERS),
        ),
        Operation(
            "GET",
            "/v1/models",
            "With `anthropic-version`: the models that serve `/v1/messages` or chat.",
            "`limit`, `after_id` and `before_id` choose a page.",
            parameters=(
                _VERSION,
                Parameter("limit", "How many at most.", whole(minimum=1, maximum=1000)),
                Parameter("after_id", "Those behind this one."),
                Parameter("before_id", "Those before this one."),
            ),
            answer=record(
                {
                    "data": array(_MODEL),
                    "has_more": flag(),
                    "first_id": text(null=True),
                    "last_id": text(null=True),
                }
            ),
            example=Example(headers=_HEADERS),
        ),
        Operation(
            "GET",
            "/v1/models/{name}",
            "With `anthropic-version`: one entry of that list.",
            parameters=(_VERSION,),
            answer=_MODEL,
            errors=(404,),
            example=Example(path="/v1/models/Tiny-Instruct", headers=_HEADERS),
        ),
    ),
    _ERROR,
)
