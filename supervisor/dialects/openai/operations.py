"""What OpenAI's clients ask for: lists of models, chats, completions, embeddings and the like."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.openai.models import TYPES
from supervisor.dialects.openai.schemas import (
    CALL,
    CAPABILITIES,
    CHAT_REQUEST,
    RERANK_REQUEST,
    RERANKED,
    RERANKING,
    SAMPLING,
    STATUS,
    USAGE,
    X_FIELDS,
)
from supervisor.schema.operation import (
    EVENTS,
    Example,
    Operation,
    Parameter,
    Section,
    anything,
    array,
    choice,
    listing,
    named,
    number,
    record,
    request,
    text,
    whole,
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
                **SAMPLING,
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
    "Turn texts into vectors, or pictures (models of type `vision`), with scores for labels.",
    request=named(
        request(
            {
                "model": text(),
                "input": {
                    "anyOf": [
                        text(),
                        array(anything(), "Texts, their tokens, or parts such as `image_url`.", minItems=1),
                    ]
                },
                "encoding_format": choice("float", "base64"),
                "dimensions": whole(minimum=1),
                "candidate_labels": array(text(), minItems=1),
                "hypothesis_template": text(),
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
                            "scores": array(record({"label": text(), "score": number()})),
                        },
                        more=True,
                        optional=("scores",),
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
            parameters=(
                Parameter("type", "Only models of this type.", choice(*TYPES)),
                Parameter(
                    "loaded",
                    "`1`: only models that are loaded, and remote ones. Default: `0`, unless `server.responses` is `llm-pool`.",
                    choice("0", "1"),
                ),
            ),
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
