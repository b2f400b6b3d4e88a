"""`POST /v1/cache/flush`: forget the prompts that workers keep, of all requests, of one model's, one tenant's or one tag's.

By model, what can be done: `slots_erased` (llama.cpp's slots, where the program lets them be erased), `worker_restarted`
(where it does not), `salt_rotated` (vLLM: what is kept is never found again, and goes when its room is needed),
`nothing_to_flush`; or why not: `not_separable` (the worker can't tell tenants or tags apart), `unknown` (only the program
that serves the model knows), `failed` (`error` says why; the other models are flushed nevertheless). `flushed` says whether nothing of what was asked for can be found again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import msgspec
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtimes.prompt_cache import PromptCache
from supervisor.core.events import UnloadAsked
from supervisor.core.types import ModelId, WorkerState
from supervisor.daemon import loading
from supervisor.daemon.daemon import Daemon
from supervisor.dialects.runner.lifecycle import agree, answer, unloaded
from supervisor.dialects.runner.models import model_of
from supervisor.engine.status import ModelStatus
from supervisor.errors import InvalidRequestError, LlmuxError, UnavailableError
from supervisor.gateway.body.parameters import json_object
from supervisor.gateway.route.caching import check_tag
from supervisor.io.upstream import Upstream

ERASE_S: Final = 10.0
"""How long a slot may work on before the worker is restarted instead."""
_ANSWER_LIMIT: Final = 4 * 1024 * 1024
_NAMED_BY: Final = {"all": None, "model": "modelId", "tenant": "tenantId", "tag": "tag"}

Json = dict[str, JsonValue]


class _Slot(msgspec.Struct):
    id: int


class _Erased(msgspec.Struct):
    n_erased: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """What was done with one model."""

    how: str
    entries: int | None = None  # tokens that a slot had kept; None: not known
    freed_mib: int | None = 0
    error: str | None = None  # set iff it failed

    @property
    def is_done(self) -> bool:
        """Is nothing of it left to be found?"""
        return self.how not in {"not_separable", "unknown", "failed"}


def routes(daemon: Daemon) -> list[Route]:
    """`POST /v1/cache/flush`."""

    async def flush(request: Request) -> Response:
        fields = await json_object(request)
        asked = dict(fields)
        scope, name = _asked(fields)
        given = fields.pop("modelId", None)
        only = None if given is None else model_of(daemon, given, "modelId")
        if scope == "model":
            assert only is not None
            name = only
        await agree(daemon, request, "cache-flush", asked, fields)
        models = [only] if only is not None else [*daemon.catalog.models]
        done: dict[ModelId, Flushed] = {}
        for model in models:
            try:
                done[model] = await _flush(daemon, model, scope)
            except UnavailableError as error:
                if model == only:
                    raise
                done[model] = Flushed("failed", None, None, error.message)
        await _rotate(daemon, scope, name, done)
        entries = [each.entries for each in done.values() if each.how != "nothing_to_flush"]
        freed = [each.freed_mib for each in done.values()]
        told: Json = {
            "flushed": all(each.is_done for each in done.values()),
            "entriesRemoved": None if None in entries else sum(count or 0 for count in entries),
            "memoryFreedMB": None if None in freed else sum(mib or 0 for mib in freed),
            "models": [_told(model, each) for model, each in done.items()],
        }
        return answer(told, fields)

    return [Route("/v1/cache/flush", flush, methods=["POST"])]


def _told(model: ModelId, done: Flushed) -> Json:
    told: Json = {"modelId": model, "flushed": done.is_done, "done": done.how, "entriesRemoved": done.entries}
    return told if done.error is None else told | {"error": done.error}


def _asked(fields: Json) -> tuple[str, str]:
    """The scope, and the tenant or tag that it names. Raises InvalidRequestError."""
    scope = fields.pop("scope", None)
    if not isinstance(scope, str) or scope not in _NAMED_BY:
        raise InvalidRequestError(f'"scope" must be one of {", ".join(_NAMED_BY)}.', param="scope")
    for needed in filter(None, _NAMED_BY.values()):
        value = fields.get(needed)
        if needed == _NAMED_BY[scope]:
            if not isinstance(value, str) or not value.strip():
                raise InvalidRequestError(f'The scope {scope} needs "{needed}".', param=needed)
        elif value is not None and not (needed == "modelId" and scope in ("tenant", "tag")):
            raise InvalidRequestError(f'The scope {scope} takes no "{needed}": leave it out.', param=needed)
    tenant, tag = fields.pop("tenantId", None), fields.pop("tag", None)
    name = tenant if scope == "tenant" else tag if scope == "tag" else ""
    assert isinstance(name, str)
    if scope == "tag":
        check_tag(name.strip(), "tag")
    return scope, name.strip()


async def _rotate(daemon: Daemon, scope: str, name: str, done: dict[ModelId, Flushed]) -> None:
    """New salts, for the models that take them."""
    match scope:
        case "tenant":
            await daemon.salts.rotate("tenant", name)  # wherever it asks: one model alone would be no less work
        case "tag":
            await daemon.salts.rotate("tag", name)
        case _:
            for model, each in done.items():
                if each.how == "salt_rotated":
                    await daemon.salts.rotate("model", model)


async def _flush(daemon: Daemon, model: ModelId, scope: str) -> Flushed:
    status, configured = daemon.engine.model(model), daemon.fleet.effective(model)
    cache = configured.adapter.prompt_cache(configured.config)
    if status is None or status.state is WorkerState.STARTING or not (status.has_worker or status.spec.remote):
        return Flushed("nothing_to_flush", 0)
    if cache is None:
        return Flushed("unknown")
    if not cache.is_kept:
        return Flushed("nothing_to_flush", 0)
    if cache.salt_field is not None:
        return Flushed("salt_rotated")
    if scope in ("tenant", "tag"):
        return Flushed("not_separable", 0)
    entries = await _erase(daemon, status, cache)
    if entries is not None:
        return Flushed("slots_erased", entries)
    freed = await unloaded(daemon, model, UnloadAsked(model, reason="restarted to flush its cache"))
    if status.state is not WorkerState.READY:  # it was about to go, and stays away
        return Flushed("nothing_to_flush", 0)
    loading.ask_load(daemon, model)
    return Flushed("worker_restarted", None, freed)


async def _erase(daemon: Daemon, status: ModelStatus, cache: PromptCache) -> int | None:
    """Erase every slot of every worker: so many tokens. None: that can't be done, or not all of it."""
    if cache.slots_path is None or not status.replicas:
        return None
    found = 0
    for replica in status.replicas:
        if not replica.answering:
            return None
        try:
            async with asyncio.timeout(ERASE_S):
                found += await _erase_slots(daemon.fleet.upstream(replica.id, replica.generation), cache.slots_path)
        except (TimeoutError, LlmuxError, KeyError, msgspec.MsgspecError):
            return None
    return found


async def _erase_slots(upstream: Upstream, path: str) -> int:
    slots = msgspec.json.decode(await _ask(upstream, "GET", path), type=list[_Slot])
    erased = 0
    for slot in slots:
        told = await _ask(upstream, "POST", f"{path}/{slot.id}?action=erase")
        erased += msgspec.json.decode(told, type=_Erased).n_erased
    return erased


async def _ask(upstream: Upstream, method: str, path: str) -> bytes:
    """Raises InvalidRequestError for what the worker refuses, and as `Upstream.request`."""
    response = await upstream.request(method, path.encode(), [])
    try:
        body = await response.read(_ANSWER_LIMIT)
    finally:
        response.close()
    if response.status >= 400:
        raise InvalidRequestError(f"The worker refuses {path}.")
    return body
