"""The operations of OpenAI's API: the list of models, chats, completions, embeddings, moderations, rerankings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from msgspec import UNSET
from msgspec.structs import asdict
from starlette.responses import Response

from runtimes.model_config import ModelType
from supervisor import catalog
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.observability.views import capabilities
from supervisor.dialects.listed import listed
from supervisor.dialects.model_status import status, status_view
from supervisor.dialects.openai import types
from supervisor.errors import NotFoundError
from supervisor.gateway.operation import Group
from supervisor.schema.operation import EVENTS, Example

GROUP: Final = Group(
    "OpenAI",
    "OpenAI's API: what most clients speak. A worker's server defines requests and answers.",
    scope="inference",
)
RERANKED: Final = Example(
    {"model": "reranker", "query": "Which is a fruit?", "documents": ["apple", "hammer"]},
    needs="a reranker",
    answer={"model": "reranker", "results": [{"index": 0, "relevance_score": 0.98}]},
)
_HELLO: Final = {"model": "Tiny-Instruct", "messages": [{"role": "user", "content": "Hello"}]}
_TASK: Final = "load/"
"""For a runner's client, a name with this prefix is a load task, unless a model has the name."""
_OUTPUT: Final[Mapping[ModelType, str]] = {
    "llm": "text",
    "asr": "text",
    "tts": "audio",
    "image": "image",
    "embedding": "embeddings",
    "vision": "embeddings",
}


@GROUP.operation("GET", "/v1/models", answer=types.Models)
async def list_models(daemon: Daemon, query: types.ModelsQuery) -> Response:
    """The public names of all models, loaded or not.

    `status` is the same as in [`GET /models`](#get-models). What a model can do stands in `capabilities` (as in the
    [admin API](#get-v1adminmodels), and with `output_modalities`), and where clients of OpenRouter and vLLM look for it:
    `context_length`, `max_model_len`, `architecture` and `supported_parameters`. What can't be told is null.
    """
    await daemon.know_capabilities()
    only_loaded = daemon.catalog.server.responses == "llm-pool" if query.loaded is None else query.loaded
    rows = [row for row in daemon.catalog.listing() if query.type in {None, row.model.config.type}]
    # Each entry is encoded later than the one before, with the state at that moment; the set of entries is fixed here.
    found = [(row, daemon.fleet.effective(row.model.id)) for row in rows]
    data = (_model_view(daemon, row, model) for row, model in found if not only_loaded or _is_loaded(daemon, row))
    return await listed(data, object="list")


@GROUP.operation("GET", "/v1/models/{name:path}", errors=(404,), example=Example(path="/v1/models/Tiny-Instruct"))
async def read_model(daemon: Daemon, name: str) -> types.Model:
    """One entry of that list."""
    if name.startswith(_TASK) and daemon.catalog.route(name) is None:
        raise NotFoundError(f"There is no load task {name.removeprefix(_TASK)[:100]!r}.", code="task_not_found")
    await daemon.know_capabilities()
    entry = daemon.catalog.resolve(name)
    return _model_view(daemon, entry, daemon.fleet.effective(entry.model.id))


def _model_view(daemon: Daemon, entry: catalog.Route, model: catalog.CatalogModel) -> types.Model:
    found = types.Model(
        id=entry.name,
        created=int(daemon.wall_time(daemon.started)),
        name=entry.name,
        type=entry.model.config.type,
        runtime=entry.model.config.runtime,
        status=status_view(daemon, entry.model.id),
        description=UNSET if entry.description is None else entry.description,
    )
    known, can = model.known_capabilities, capabilities(model, entry)
    if known is not None and can is not None:
        output = [_OUTPUT[model.config.type]]
        found.context_length = found.max_model_len = known.context
        found.architecture = types.Architecture(list(known.modalities), output)
        found.supported_parameters = ["tools", "tool_choice"] if known.tools else []
        found.capabilities = types.ListedCapabilities(**asdict(can), output_modalities=output)
    return found


def _is_loaded(daemon: Daemon, row: catalog.Route) -> bool:
    """Whether the model can answer without a load. A task can if any of its candidates can."""
    candidates = row.candidates if isinstance(row, catalog.Task) else (row,)
    return any(status(daemon.engine.figures_of(one.model.id)) == "loaded" for one in candidates)


GROUP.model_endpoint(
    "/v1/chat/completions",
    """Let a model answer a conversation.

    Its stream has chunks of type `chat.completion.chunk`, and ends with `[DONE]`.""",
    reads=types.ChatRequest,
    answer=types.ChatCompletion,
    stream_type=EVENTS,
    example=Example(_HELLO),
)
GROUP.model_endpoint(
    "/v1/chat/completions/input_tokens",
    "How many tokens a conversation has.",
    reads=types.ChatRequest,
    answer=types.TokenCount,
    example=Example(_HELLO),
)
GROUP.model_endpoint(
    "/v1/completions",
    "Let a model continue a text, without a template.",
    reads=types.CompletionRequest,
    answer=types.Completion,
    stream_type=EVENTS,
    example=Example({"model": "Tiny-Instruct", "prompt": "Hello", "max_tokens": 8}),
)
GROUP.model_endpoint(
    "/v1/embeddings",
    "Turn texts into vectors, or pictures (models of type `vision`), with scores for labels.",
    reads=types.EmbeddingRequest,
    answer=types.Embeddings,
    example=Example({"model": "tiny-embed", "input": "Hello", "encoding_format": "base64"}),
)
GROUP.model_endpoint(
    "/v1/moderations",
    "Judge texts.",
    reads=types.ModerationRequest,
    answer=types.Moderation,
    example=Example(
        {"model": "moderator", "input": "Hello"}, needs="a model that judges texts", answer={"results": []}
    ),
)
GROUP.model_endpoint(
    "/v1/rerank",
    "Put texts in the order of how well they answer a query.",
    reads=types.RerankRequest,
    answer=types.Reranking,
    example=replace(
        RERANKED,
        answer={
            "model": "reranker",
            "results": [{"index": 0, "relevance_score": 0.98}, {"index": 1, "relevance_score": 0.01}],
        },
    ),
)
