"""What OpenAI's clients ask for: lists of models, chats, completions, embeddings and the like."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.openai.models import TYPES
from supervisor.dialects.operation import (
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
    listing,
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
_MODEL: Final = named(
    record(
        {
            "id": text("The public name, which requests use."),
            "object": {"const": "model"},
            "created": whole(),
            "owned_by": {"const": "llmux"},
            "name": text(),
            "type": choice(*TYPES),
            "runtime": text(),
            "status": STATUS,
            "description": text(),
            "context_length": whole(null=True),
            "max_model_len": whole(null=True),
            "architecture": record({"input_modalities": array(), "output_modalities": array()}),
            "supported_parameters": array(),
            "capabilities": CAPABILITIES,
        },
        optional=(
            "description",
            "context_length",
            "max_model_len",
            "architecture",
            "supported_parameters",
            "capabilities",
        ),
    ),
    "Model",
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
                    "input_audio": request({"data": text("Base64."), "format": text()}, "data", "format"),
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
_SAMPLING: Final = {
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
            **_SAMPLING,
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
_COMPLETION: Final = {"id": text(), "created": whole(), "model": text("The name that the client asked for.")}
_CHAT: Final = named(
    record(
        {
            **_COMPLETION,
            "object": {"const": "chat.completion"},
            "choices": array(
                record(
                    {
                        "index": whole(),
                        "message": record(
                            {
                                "role": {"const": "assistant"},
                                "content": text(null=True),
                                "reasoning_content": text("What the model thought.", null=True),
                                "tool_calls": array(CALL, null=True),
                            },
                            optional=("content", "reasoning_content", "tool_calls"),
                            more=True,
                        ),
                        "finish_reason": text(null=True),
                    },
                    more=True,
                )
            ),
            "usage": USAGE,
        },
        optional=("usage",),
        more=True,
    ),
    "ChatCompletion",
)
_HELLO: Final = {"messages": [{"role": "user", "content": "Hello"}]}

_CHATS: Final = Operation(
    "POST",
    "/v1/chat/completions",
    "Let a model answer a conversation.",
    "Its stream has chunks of type `chat.completion.chunk`, and ends with `[DONE]`.",
    request=CHAT_REQUEST,
    answer=_CHAT,
    stream_type=EVENTS,
    is_run=True,
    example=Example({"model": "Tiny-Instruct", **_HELLO}),
)
_COMPLETIONS: Final = Operation(
    "POST",
    "/v1/completions",
    "Let a model continue a text, without a template.",
    request=named(
        request(
            {
                "model": text(),
                "prompt": {"anyOf": [text(), array()]},
                **_SAMPLING,
                **X_FIELDS,
            },
            "prompt",
            more=True,
        ),
        "CompletionRequest",
    ),
    answer=named(
        record(
            {
                **_COMPLETION,
                "object": {"const": "text_completion"},
                "choices": array(record({"text": text(), "finish_reason": text(null=True)}, more=True)),
                "usage": USAGE,
            },
            more=True,
            optional=("id", "usage"),
        ),
        "Completion",
    ),
    stream_type=EVENTS,
    is_run=True,
    example=Example({"model": "Tiny-Instruct", "prompt": "Hello", "max_tokens": 8}),
)
_EMBEDDINGS: Final = Operation(
    "POST",
    "/v1/embeddings",
    "Turn texts into vectors.",
    request=named(
        request(
            {
                "model": text(),
                "input": {"anyOf": [text(), array(minItems=1), array(whole(), minItems=1)]},
                "encoding_format": choice("float", "base64"),
                "dimensions": whole(minimum=1),
                **X_FIELDS,
            },
            "input",
            more=True,
        ),
        "EmbeddingRequest",
    ),
    answer=named(
        record(
            {
                "object": {"const": "list"},
                "data": array(
                    record(
                        {
                            "object": {"const": "embedding"},
                            "index": whole(),
                            "embedding": {"anyOf": [array(number()), text("Base64.")]},
                        },
                        more=True,
                    )
                ),
                "model": text(),
                "usage": USAGE,
            },
            more=True,
        ),
        "Embeddings",
    ),
    is_run=True,
    example=Example({"model": "tiny-embed", "input": "Hello", "encoding_format": "base64"}),
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
RERANKED: Final = {
    "body": {"model": "reranker", "query": "Which is a fruit?", "documents": ["apple", "hammer"]},
    "needs": "a reranker",
}
SECTION: Final = Section(
    "OpenAI",
    "OpenAI's API: what most clients speak. A worker's server defines requests and answers.",
    (
        Operation(
            "GET",
            "/v1/models",
            "The public names of all models, loaded or not.",
            "`status` is the same as in [`GET /models`](#get-models). What a model can do stands in `capabilities` (as in the "
            "[admin API](#get-v1adminmodels), and with `output_modalities`), and where clients of OpenRouter and vLLM look "
            "for it: `context_length`, `max_model_len`, `architecture` and `supported_parameters`. What can't be told is "
            "null.",
            parameters=(Parameter("type", "Only models of this type.", choice(*TYPES)),),
            answer=listing(_MODEL),
        ),
        Operation(
            "GET",
            "/v1/models/{name}",
            "One entry of that list.",
            answer=_MODEL,
            errors=(404,),
            example=Example(path="/v1/models/Tiny-Instruct"),
        ),
        _CHATS,
        Operation(
            "POST",
            "/v1/chat/completions/input_tokens",
            "How many tokens a conversation has.",
            request=CHAT_REQUEST,
            answer=record({"input_tokens": whole()}, more=True),
            is_run=True,
            example=Example({"model": "Tiny-Instruct", **_HELLO}),
        ),
        _COMPLETIONS,
        _EMBEDDINGS,
        Operation(
            "POST",
            "/v1/moderations",
            "Judge texts.",
            request=request({"model": text(), "input": anything(), **X_FIELDS}, "input", more=True),
            answer=record({"results": array(anything())}, more=True),
            is_run=True,
            example=Example(
                {"model": "moderator", "input": "Hello"}, needs="a model that judges texts", answer={"results": []}
            ),
        ),
        Operation(
            "POST",
            "/v1/rerank",
            "Put texts in the order of how well they answer a query.",
            request=RERANK_REQUEST,
            answer=RERANKING,
            is_run=True,
            example=Example(
                **RERANKED,
                answer={
                    "model": "reranker",
                    "results": [
                        {"index": 0, "relevance_score": 0.98},
                        {"index": 1, "relevance_score": 0.01},
                    ],
                },
            ),
        ),
    ),
)
