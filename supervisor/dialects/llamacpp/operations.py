"""The operations of llama.cpp's server beyond OpenAI's API: its router's model management, and its own inference paths."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Final

import msgspec
from starlette.responses import Response

from supervisor.daemon import loading
from supervisor.daemon.daemon import Daemon
from supervisor.dialects.listed import listed
from supervisor.dialects.llamacpp import types
from supervisor.dialects.model_status import Status, status, status_view
from supervisor.dialects.openai.operations import RERANKED
from supervisor.dialects.openai.types import ChatRequest, Reranking, RerankRequest
from supervisor.engine.events import CLIENTS, Subscription
from supervisor.errors import InvalidRequestError
from supervisor.gateway.filters.event_stream import KEEPALIVE_S, EventStream
from supervisor.gateway.operation import Group
from supervisor.host.distribution import version
from supervisor.schema.operation import EVENTS, Example

_HELLO: Final = [{"role": "user", "content": "Hello"}]
GROUP: Final = Group("llama.cpp", "The paths of llama.cpp's server, and of its router.", scope="inference")


@GROUP.operation("GET", "/models", answer=types.RoutedModels)
async def list_router_models(daemon: Daemon) -> Response:
    """The same names as `GET /v1/models`, each with its `status.value`.

    It is `unloaded`, `loading`, `loaded` or `failed`. `failed` comes with `exit_code` and `reason`.
    """
    created = int(daemon.wall_time(daemon.started))
    models = (
        types.RoutedModel(row.name, row.name, "model", "llmux", created, status_view(daemon, row.model.id))
        for row in daemon.catalog.listing()
    )
    return await listed(models, object="list")


@GROUP.operation("POST", "/models/load", scope="admin", errors=(404, 503), example=Example({"model": "Tiny-Instruct"}))
async def load_router_model(daemon: Daemon, body: types.ModelName) -> types.Accepted:
    """Load a model.

    The answer comes at once; the list and the stream show when the model is loaded.
    """
    loading.ask_load(daemon, daemon.catalog.resolve(body.model).model.id)
    return types.Accepted()


@GROUP.operation("POST", "/models/unload", scope="admin", errors=(404, 503), example=Example({"model": "Tiny-Other"}))
async def unload_router_model(daemon: Daemon, body: types.ModelName) -> types.Accepted:
    """Unload a model after its running requests.

    The answer comes at once.
    """
    loading.ask_unload(daemon, daemon.catalog.resolve(body.model).model.id)
    return types.Accepted()


@GROUP.operation(
    "GET",
    "/models/sse",
    answer_type=EVENTS,
    errors=(503,),
    example=Example(
        needs="patience: it goes on until Ctrl-C",
        answer='data: {"model":"Tiny-Instruct","event":"model_status","data":{"status":"unloaded"}}\n\n'
        'data: {"model":"Tiny-Instruct","event":"status_change","data":{"status":"loading"}}\n',
    ),
)
async def follow_router_models(daemon: Daemon) -> Response:
    """Server-sent events: the status of every model, then each change."""
    subscription = daemon.feed.subscribe(("model",), most=CLIENTS)
    return EventStream(_status_events(daemon, subscription), subscription)


async def _status_events(daemon: Daemon, subscription: Subscription) -> AsyncGenerator[bytes, None]:
    """Events with every model's status, then with each change. Virtual models of one model share its state."""
    shown: dict[str, Status] = {}

    def events(kind: str) -> bytes:
        lines = []
        for row in daemon.catalog.listing():
            now = status(daemon.engine.figures_of(row.model.id))
            if shown.get(row.name) != now:
                shown[row.name] = now
                event = {"model": row.name, "event": kind, "data": {"status": now}}
                lines.append(b"data: " + msgspec.json.encode(event) + b"\n\n")
        return b"".join(lines)

    yield events("model_status")
    while (changes := await subscription.next(KEEPALIVE_S)) is not None:
        found = events("status_change")
        if found or not changes:
            yield found


@GROUP.operation("GET", "/props", answer=types.RouterProps | types.WorkerAnswer, errors=(404, 429, 502, 503, 504))
async def read_props(daemon: Daemon, query: types.ModelQuery) -> types.RouterProps:
    """That this is a router.

    With `?model=NAME` the answer is that of the model's worker.
    """
    if query.model is not None:  # no worker of this model serves /props
        daemon.catalog.resolve(query.model)
        raise InvalidRequestError(f"{query.model} has no /props.", code="endpoint_not_supported", param="model")
    most = daemon.catalog.limits.max_loaded.get("llm", 0)
    settings = {"params": {}, "n_ctx": 0}
    return types.RouterProps(max_instances=most, default_generation_settings=settings, build_info=f"llmux {version()}")


def _tgi_example(answer: Any, **body: Any) -> Example:
    return Example({"model": "served-by-tgi", **body}, needs="a model on Text Generation Inference", answer=answer)


def _tabby_example(answer: Any, **body: Any) -> Example:
    return Example({"model": "served-by-tabbyapi", **body}, needs="a model on TabbyAPI", answer=answer)


GROUP.model_endpoint(
    "/completion",
    "Continue a text, in llama.cpp's own format.",
    reads=types.LlamaCppPrompt,
    answer=types.LlamaCppCompletion,
    stream_type=EVENTS,
    example=Example({"model": "Tiny-Instruct", "prompt": "Hello", "n_predict": 8}),
)
GROUP.model_endpoint(
    "/infill",
    "Fill in the middle.",
    reads=types.LlamaCppInfill,
    answer=types.LlamaCppCompletion,
    stream_type=EVENTS,
    example=Example(
        {"model": "coder", "input_prefix": "def one():\n    return ", "input_suffix": "\n"},
        needs="a model that can fill in",
        answer={"content": "1", "stop": True},
    ),
)
GROUP.model_endpoint(
    "/embedding",
    "Turn texts into vectors, in llama.cpp's own format.",
    reads=types.LlamaCppTexts,
    answer=list[types.LlamaCppEmbedding],
    example=Example(
        {"model": "embedder", "content": "Hello"},
        needs="a short vector",
        answer=[{"index": 0, "embedding": [[0.6, 0.8]]}],
    ),
)
GROUP.model_endpoint(
    "/tokenize",
    "Turn a text into tokens. vLLM calls it `prompt`.",
    reads=types.TextToTokenize,
    answer=types.Tokens,
    example=Example({"model": "Tiny-Instruct", "content": "Hello"}),
)
GROUP.model_endpoint(
    "/detokenize",
    "Turn tokens into a text.",
    reads=types.TokensToText,
    answer=types.TextOfTokens,
    example=Example({"model": "Tiny-Instruct", "tokens": [39, 68]}),
)
GROUP.model_endpoint(
    "/generate",
    "Continue a prompt, as SGLang (`text`, `sampling_params`) and Text Generation Inference (`inputs`, `parameters`) say it.",
    reads=types.GenerateRequest,
    answer=types.Generated,
    example=_tgi_example({"generated_text": " from a"}, inputs="Hello", parameters={"max_new_tokens": 2}),
)
GROUP.model_endpoint(
    "/generate_stream",
    "The same as a stream, as Text Generation Inference says it.",
    reads=types.GenerateStreamRequest,
    answer=types.Generated,
    example=_tgi_example({"generated_text": " from a"}, inputs="Hello"),
)
GROUP.model_endpoint(
    "/chat_tokenize",
    "The tokens of a conversation, as Text Generation Inference counts them.",
    reads=ChatRequest,
    answer=types.ChatTokens,
    example=_tgi_example({"tokenize_response": [{"id": 39, "text": "Hello"}]}, messages=_HELLO),
)
GROUP.model_endpoint(
    "/v1/token/encode",
    "Turn a text into tokens, as TabbyAPI does.",
    reads=types.TabbyText,
    answer=types.TabbyTokens,
    example=_tabby_example({"tokens": [39, 68], "length": 2}, text="Hello"),
)
GROUP.model_endpoint(
    "/v1/token/decode",
    "Turn tokens into a text, as TabbyAPI does.",
    reads=types.TokensToText,
    answer=types.TabbyDecoded,
    example=_tabby_example({"text": "Hello"}, tokens=[39, 68]),
)
GROUP.model_endpoint(
    "/apply-template",
    "What a model's template makes of a conversation.",
    reads=ChatRequest,
    answer=types.ChatPrompt,
    example=Example({"model": "Tiny-Instruct", "messages": _HELLO}),
)
GROUP.model_endpoint(
    "/v1/chat/completions/control",
    "Say something to a chat while it is answered, such as that it has thought enough.",
    reads=types.ForWorker,
    answer=types.WorkerAnswer,
    example=Example(
        {"model": "Tiny-Thinking", "id": "chatcmpl-1", "action": "reasoning_end"},
        needs="a chat under way",
        answer={"success": True},
    ),
)
GROUP.model_endpoint(
    "/v1/reranking", "The same as `POST /v1/rerank`.", reads=RerankRequest, answer=Reranking, example=RERANKED
)
GROUP.model_endpoint(
    "/slots",
    "What a worker's slots do.",
    method="GET",
    query=types.ModelQuery,
    answer=list[types.WorkerAnswer],
    example=Example(path="/slots?model=Tiny-Instruct", answer=[{"id": 0, "n_ctx": 4096, "is_processing": False}]),
)
GROUP.model_endpoint(
    "/lora-adapters",
    "A worker's adapters.",
    method="GET",
    query=types.ModelQuery,
    answer=list[types.LoraAdapter],
    example=Example(path="/lora-adapters?model=Tiny-Instruct"),
)
