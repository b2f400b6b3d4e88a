"""Prints, as JSON, the fields of requests as the SDKs of OpenAI, Anthropic and Ollama type them: by path, name → kinds of JSON."""

from __future__ import annotations

import json
import types
import typing
from typing import Any, get_args, get_origin, get_type_hints

from anthropic.types import message_count_tokens_params, message_create_params
from ollama import _types as ollama
from openai.types import completion_create_params as completions
from openai.types import embedding_create_params
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params

TYPED = {
    "/v1/chat/completions": chat.CompletionCreateParamsBase,
    "/v1/completions": completions.CompletionCreateParamsBase,
    "/v1/embeddings": embedding_create_params.EmbeddingCreateParams,
    "/v1/responses": response_create_params.ResponseCreateParamsBase,
    "/v1/messages": message_create_params.MessageCreateParamsBase,
    "/v1/messages/count_tokens": message_count_tokens_params.MessageCountTokensParams,
    "/api/chat": ollama.ChatRequest,
    "/api/generate": ollama.GenerateRequest,
    "/api/embed": ollama.EmbedRequest,
}


def kinds(hint: Any) -> set[str]:
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return {kind for each in get_args(hint) for kind in kinds(each)}
    if origin in (typing.Required, typing.NotRequired, typing.Annotated):
        return kinds(get_args(hint)[0])
    if origin is typing.Literal:
        return {f"={value}" for value in get_args(hint)}
    for name, of in (("bool", bool), ("int", int), ("float", float), ("str", str)):
        if hint is of:
            return {name}
    if hint is type(None):
        return {"null"}
    is_list = (
        isinstance(origin, type) and issubclass(origin, typing.Iterable) and not issubclass(origin, typing.Mapping)
    )
    return {"list"} if is_list else {"object"}


found = {
    path: {
        name: sorted(kinds(hint)) for name, hint in get_type_hints(typed, include_extras=True).items() if name[0] != "_"
    }
    for path, typed in TYPED.items()
}
print(json.dumps(found))
