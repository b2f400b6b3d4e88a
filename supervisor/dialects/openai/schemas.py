"""JSON schemas of what OpenAI's clients send and get, which other dialects' operations have as well."""

from __future__ import annotations

from typing import Any, Final

from supervisor.schema.operation import (
    Schema,
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

X_FIELDS: Final[dict[str, Schema]] = {
    "allow_remote": flag("May the request leave this machine? A [remote](runtimes.md#openai_remote) model needs it."),
    "x_priority": {
        "anyOf": [choice("high", "normal", "low"), whole(minimum=0, maximum=100)],
        "description": "How urgent it is; lower goes first.",
    },
    "x_client_id": text("Who asks: the tenant.", maxLength=64, pattern="^[ -~]*$"),
    "x_timeout_s": number("Within how many seconds the answer must come.", exclusiveMinimum=0, maximum=86400),
    "x_keep_alive_s": number("For how long the model stays loaded after it, at least.", minimum=0, maximum=86400),
}
"""Fields of every JSON request to a model that are for llmux. No worker gets them."""

STATUS: Final = named(
    record(
        {
            "value": choice("unloaded", "loading", "loaded", "failed"),
            "failed": {"const": True},
            "exit_code": whole(null=True),
            "reason": text(),
        },
        optional=("failed", "exit_code", "reason"),
    ),
    "ModelStatus",
)
CAPABILITIES: Final = named(
    record(
        {
            "modalities": array(None, "What it takes: `text`, `image`, `audio` …"),
            "documents": array(
                None, "What becomes text for it: `text/plain`, and `application/pdf` with the extra `media`."
            ),
            "tools": flag(null=True),
            "thinking": flag(null=True),
            "thinking_modes": array(choice("default", "enabled", "disabled"), "What a request may choose."),
            "multi_turn": flag(null=True),
            "context": whole("Tokens of one request.", null=True),
            "endpoints": array(None, "What its worker serves."),
            "output_modalities": array(),
        },
        "What it can do, from its files; null if unknown.",
        optional=("output_modalities",),
        null=True,
    ),
    "Capabilities",
)
_DATA_URL: Final = text("A `data:` URL.", pattern="^data:")
_PART: Final = named(
    {
        "oneOf": [
            request({"type": {"const": "text"}, "text": text()}, "type", "text"),
            request(
                {
                    "type": {"const": "image_url"},
                    "image_url": request({"url": _DATA_URL, "detail": text()}, "url"),
                },
                "type",
                "image_url",
            ),
            request(
                {
                    "type": {"const": "input_audio"},
                    "input_audio": request(
                        {"data": text("Base64.", pattern="^[A-Za-z0-9+/]*={0,2}$"), "format": text()}, "data", "format"
                    ),
                },
                "type",
                "input_audio",
            ),
        ]
    },
    "ChatPart",
)
CALL: Final = named(
    record(
        {
            "id": text(),
            "type": {"const": "function"},
            "function": record({"name": text(), "arguments": text("JSON.")}, more=True),
        },
        more=True,
        optional=("id",),
    ),
    "ToolCall",
)
_MESSAGE: Final = named(
    request(
        {
            "role": choice("system", "developer", "user", "assistant", "tool"),
            "content": {"anyOf": [text(null=True), array(_PART)]},
            "tool_calls": array(CALL),
            "tool_call_id": text(),
            "reasoning_content": text(null=True),
        },
        "role",
        more=True,
    ),
    "ChatMessage",
)
TOOL: Final = named(
    request(
        {
            "type": {"const": "function"},
            "function": request(
                {"name": text(), "description": text(), "parameters": mapping(anything(), "A JSON schema.")},
                "name",
                more=True,
            ),
        },
        "type",
        "function",
        more=True,
    ),
    "Tool",
)
SAMPLING: Final = {
    "stream": flag("Send the answer piece by piece, as server-sent events."),
    "stream_options": request({"include_usage": flag()}, more=True),
    "max_tokens": whole(minimum=1),
    "temperature": number(minimum=0),
    "top_p": number(minimum=0, maximum=1),
    "seed": whole(),
    "stop": {"anyOf": [text(), array(maxItems=16)]},
}
CHAT_REQUEST: Final = named(
    request(
        {
            "model": text("A public name; needless where only one model serves the path."),
            "messages": array(_MESSAGE, minItems=1),
            **SAMPLING,
            "max_completion_tokens": whole(minimum=1),
            "tools": array(TOOL),
            "tool_choice": anything("`none`, `auto`, `required`, or a function."),
            "response_format": anything("`text`, `json_object`, or a `json_schema`."),
            "chat_template_kwargs": mapping(anything(), "For the template, such as `enable_thinking`."),
            **X_FIELDS,
        },
        "messages",
        more=True,
    ),
    "ChatRequest",
)
USAGE: Final = named(
    record(
        {"prompt_tokens": whole(), "completion_tokens": whole(), "total_tokens": whole()},
        more=True,
        optional=("prompt_tokens", "completion_tokens", "total_tokens"),
    ),
    "Usage",
)
RERANK_REQUEST: Final = named(
    request(
        {
            "model": text(),
            "query": text(),
            "documents": array(minItems=1),
            "top_n": whole(minimum=1),
            "return_documents": flag(),
            **X_FIELDS,
        },
        "query",
        "documents",
        more=True,
    ),
    "RerankRequest",
)
RERANKING: Final = named(
    record(
        {"results": array(record({"index": whole(), "relevance_score": number()}, more=True))},
        more=True,
    ),
    "Reranking",
)
RERANKED: Final[dict[str, Any]] = {
    "body": {"model": "reranker", "query": "Which is a fruit?", "documents": ["apple", "hammer"]},
    "needs": "a reranker",
}
