"""The operations of Ollama's API: models answer chats, prompts and embeddings; the daemon answers all others.

The daemon refuses to create, push, copy and remove models: models come from the configuration.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from supervisor.daemon import loading
from supervisor.daemon.daemon import Daemon
from supervisor.dialects.listed import listed
from supervisor.dialects.model_status import status
from supervisor.dialects.ollama import decode, models, types
from supervisor.errors import InvalidRequestError, LlmuxError, UnavailableError
from supervisor.gateway.operation import Group
from supervisor.jobs.job import Pull
from supervisor.jobs.pulls import trouble_of
from supervisor.schema.operation import LINES, Example, Method

VERSION: Final = "0.12.11"
"""The version of Ollama's API that llmux serves; some clients refuse older versions."""
LOOK_S: Final = 0.5
_REFUSED: Final[tuple[tuple[Method, str], ...]] = (
    ("POST", "/api/push"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
    ("HEAD", "/api/blobs/{digest}"),
    ("POST", "/api/blobs/{digest}"),
)
_NOT_OFFERED: Final = (
    "{} is not offered: the models come from llmux's configuration. Its operator adds one with `llmux add` and removes one "
    "with `llmux remove`."
)
_HELLO: Final = [{"role": "user", "content": "Hello"}]
GROUP: Final = Group(
    "Ollama", "Ollama's API, for clients that know no other.", scope="inference", error=types.OllamaError
)


class NotOfferedError(LlmuxError):
    """Models come from the configuration, so no request here creates, fetches or removes one.

    501 instead of 404: for a 404 Ollama's clients believe that the model is missing, and some try to fetch it.
    """

    status = HTTPStatus.NOT_IMPLEMENTED
    type = "invalid_request_error"
    code = "not_offered"
    lasts = True


GROUP.model_endpoint(
    decode.CHAT,
    "Let a model answer a conversation.\n\nWithout messages it loads its model, or, with `keep_alive: 0`, unloads it.",
    reads=types.OllamaChatRequest,
    answer=types.OllamaChat,
    stream_type=LINES,
    example=Example({"model": "Tiny-Instruct:latest", "messages": _HELLO, "stream": False, "keep_alive": "10m"}),
)
GROUP.model_endpoint(
    decode.GENERATE,
    "Let a model answer a prompt.\n\nWithout a prompt it loads its model, or, with `keep_alive: 0`, unloads it.",
    reads=types.OllamaGenerateRequest,
    answer=types.OllamaGeneration,
    stream_type=LINES,
    example=Example({"model": "Tiny-Instruct", "prompt": "Hello", "stream": False}),
)
GROUP.model_endpoint(
    decode.EMBED,
    "Turn texts into vectors.\n\nWithout a text it loads its model.",
    reads=types.OllamaEmbedRequest,
    answer=types.OllamaVectors,
    example=Example({"model": "tiny-embed", "input": []}),
)
GROUP.model_endpoint(
    decode.EMBEDDINGS,
    "The older way to turn a text into a vector.\n\nWithout a text it loads its model.",
    reads=types.OllamaEmbeddingsRequest,
    answer=types.OllamaVector,
    example=Example({"model": "tiny-embed", "prompt": ""}),
)


@GROUP.operation("GET", "/api/tags", answer=types.OllamaModels)
async def list_models(daemon: Daemon) -> Response:
    """The public names of models that chat or embed, loaded or not; those without a tag have `:latest`.

    `digest` is a hash of the name, `size` that of its weights in bytes (0: unknown).
    """
    await daemon.know_capabilities()
    rows = models.usable(daemon.catalog.listing())
    effective = {row.model.id: daemon.fleet.effective(row.model.id) for row in rows}
    sizes = await asyncio.to_thread(lambda: {id_: models.size_of(model) for id_, model in effective.items()})
    keyed = ((row.name, row.model.id) for row in rows)  # a reload may remove a model meanwhile
    return await listed((models.list_entry(daemon, name, effective[id_], sizes[id_]) for name, id_ in keyed), "models")


@GROUP.operation("GET", "/api/ps")
async def list_loaded_models(daemon: Daemon) -> types.OllamaLoadedModels:
    """Those that are loaded, with what their worker takes.

    It is `size`, and of that `size_vram` on GPUs. `expires_at` is a century away for a model that stays until its memory is
    needed.
    """
    await daemon.know_capabilities()
    active = {model.id: model for model in daemon.engine.active() if status(model) == "loaded"}
    rows = models.usable(row for row in daemon.catalog.listing() if row.model.id in active)
    return types.OllamaLoadedModels([models.loaded_entry(daemon, row, active[row.model.id]) for row in rows])


@GROUP.operation("POST", "/api/show", errors=(404,), example=Example({"model": "Tiny-Instruct"}))
async def show_model(daemon: Daemon, body: types.OllamaShowRequest) -> types.OllamaShown:
    """What a model can do.

    `capabilities` has `completion`, `embedding`, `vision`, `tools` and `thinking`, as far as they are known; `model_info` the
    architecture and its `context_length`. Templates, parameters and licences are not shown.
    """
    row = models.resolve(daemon, _requested_name(body))
    await daemon.know_capabilities()
    return models.shown_model(daemon, row)


@GROUP.operation("GET", "/api/version")
async def get_version(_daemon: Daemon) -> types.OllamaVersion:
    """The version of Ollama's API that these paths are made for, not llmux's own."""
    return types.OllamaVersion(VERSION)


@GROUP.operation(
    "POST",
    "/api/pull",
    scope="admin",
    answer=types.OllamaPulled,
    stream_type=LINES,
    errors=(404, 501),
    example=Example({"model": "Tiny-Instruct", "stream": False}),
)
async def pull_model(daemon: Daemon, body: types.OllamaPullRequest) -> Response | types.OllamaPulled:
    """Fetch the missing files of a configured model; `success` for one that is there.

    Files are fetched from the model's `source`, where `server.allow_pull` is on; a pull whose client leaves goes on. Any other
    model is refused: operators add models, with `llmux add`.
    """
    name, is_stream = _requested_name(body), body.stream is not False
    row = models.find(daemon, name)
    if row is not None and await loading.may_pull(daemon, row.model.id):
        pull = daemon.pulls.begin(row.model.id, _no_action)
        if is_stream:
            return StreamingResponse(_progress_lines(pull), media_type=LINES)
        async for _ in _progress_lines(pull):
            pass
        if trouble := trouble_of(pull):
            raise UnavailableError(trouble)
    elif row is None or (
        row.model.config.source is not None and not await asyncio.to_thread(models.size_of, row.model)
    ):
        raise NotOfferedError(
            f"llmux fetches no model for clients that isn't in its configuration, and only where server.allow_pull is on, "
            f"so not {name[:200]!r}: its operator adds one with `llmux add`, and gets its files with `llmux pull`.",
            param="model",
        )
    elif is_stream:
        return Response(_json_line(types.OllamaPulled()), media_type=LINES)
    return types.OllamaPulled()


async def _no_action() -> None:
    """Nothing to do after a pull: the next request for the model loads it."""


async def _progress_lines(pull: Pull) -> AsyncIterator[bytes]:
    """JSON lines with a pull's progress, until it is over. A client that disconnects ends only these lines, not the pull."""
    yield _json_line({"status": "pulling manifest"})
    while not pull.is_over:
        if pull.total_bytes:  # `ollama pull` shows one bar for each digest
            amount = {"total": pull.total_bytes, "completed": pull.done_bytes}
            yield _json_line({"status": f"pulling {pull.model}", "digest": pull.model, **amount})
        else:
            yield _json_line({"status": "pulling manifest"})
        await asyncio.sleep(LOOK_S)
    trouble = trouble_of(pull)
    yield _json_line({"error": trouble} if trouble else types.OllamaPulled())


def _json_line(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"


async def _refuse(_daemon: Daemon, request: Request, **_path: str) -> Response:
    """Refused: models come from the configuration."""
    raise NotOfferedError(_NOT_OFFERED.format(request.url.path[:100]))


for _method, _path in _REFUSED:
    _example = _path.format(digest="sha256:0")
    GROUP.operation(
        _method,
        _path,
        scope="admin",
        status=HTTPStatus.NOT_IMPLEMENTED,
        answer=None if _method == "HEAD" else types.OllamaError,
        example=Example(
            needs="Ollama: it is refused here",
            path=_example,
            answer=None if _method == "HEAD" else {"error": _NOT_OFFERED.format(_example)},
        ),
    )(_refuse)


def _requested_name(body: types.OllamaShowRequest) -> str:
    """The model's name in the request. Raises InvalidRequestError."""
    name = body.model or body.name
    if not isinstance(name, str):
        raise InvalidRequestError('The body must be {"model": "NAME"}; GET /api/tags lists the choice.', param="model")
    return name
