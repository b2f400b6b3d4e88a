"""A flush: workers forget the prompts in their caches, of all requests, or of one model, tenant or tag.

The result of each model is `slots_erased` (llama.cpp's slots, if the worker can erase them), `worker_restarted` (if it can't),
`salt_rotated` (vLLM: no request finds the prompts again; the worker drops them when it needs the room), `nothing_to_flush`; or
`not_separable` (the worker can't tell tenants or tags apart), `unknown` (only the program that serves the model knows), `failed`
(`error` has the reason; the other models are flushed nevertheless). `flushed`: whether no request can find a flushed prompt again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import UNSET

from runtimes.prompt_cache import PromptCache
from supervisor.core.events import UnloadRequested
from supervisor.core.types import ModelId, WorkerState
from supervisor.daemon import loading
from supervisor.daemon.daemon import Daemon
from supervisor.dialects.runner.lifecycle import total, unload
from supervisor.dialects.runner.types import Flush, Flushed, FlushedModel, FlushTag, FlushTenant
from supervisor.engine.status import ModelStatus
from supervisor.errors import InvalidRequestError, LlmuxError, UnavailableError
from supervisor.host.upstream.upstream import Upstream

ERASE_S: Final = 10.0
"""How long a busy slot may delay its erasure; after that llmux restarts the worker instead."""
_ANSWER_LIMIT: Final = 4 * 1024 * 1024


class _Slot(msgspec.Struct):
    id: int


class _Erased(msgspec.Struct):
    n_erased: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one model."""

    how: str
    entries: int | None = None  # erased tokens; None: unknown
    freed_mib: int | None = 0
    error: str | None = None  # set iff it failed

    @property
    def is_flushed(self) -> bool:
        """Whether no request can find a flushed prompt again."""
        return self.how not in {"not_separable", "unknown", "failed"}


async def flush(daemon: Daemon, body: Flush, only: ModelId | None) -> Flushed:
    """Flush the model `only`, or all models. Raises UnavailableError if `only` can't be flushed."""
    done: dict[ModelId, Outcome] = {}
    for model in daemon.catalog.models if only is None else (only,):
        try:
            done[model] = await _flush_model(daemon, model, body)
        except UnavailableError as error:
            if model == only:
                raise
            done[model] = Outcome("failed", None, None, error.message)
    await _rotate_salts(daemon, body, done)
    return Flushed(
        all(each.is_flushed for each in done.values()),
        total(each.entries for each in done.values() if each.how != "nothing_to_flush"),
        total(each.freed_mib for each in done.values()),
        [
            FlushedModel(model, each.is_flushed, each.how, each.entries, UNSET if each.error is None else each.error)
            for model, each in done.items()
        ],
    )


async def _rotate_salts(daemon: Daemon, body: Flush, done: dict[ModelId, Outcome]) -> None:
    """Change the cache salts of the tenant, the tag, or the models that use salts."""
    match body:
        case FlushTenant():  # for all models: the salt of a tenant or a tag has no model
            await daemon.cache_salts.rotate("tenant", body.tenant_id.strip())
        case FlushTag():
            await daemon.cache_salts.rotate("tag", body.tag.strip())
        case _:
            for model, each in done.items():
                if each.how == "salt_rotated":
                    await daemon.cache_salts.rotate("model", model)


async def _flush_model(daemon: Daemon, model: ModelId, body: Flush) -> Outcome:
    status, configured = daemon.engine.model(model), daemon.fleet.effective(model)
    cache = configured.adapter.prompt_cache(configured.config)
    if status is None or status.state is WorkerState.STARTING or not (status.has_worker or status.spec.remote):
        return Outcome("nothing_to_flush", 0)
    if cache is None:
        return Outcome("unknown")
    if not cache.is_kept:
        return Outcome("nothing_to_flush", 0)
    if cache.salt_field is not None:
        return Outcome("salt_rotated")
    if isinstance(body, FlushTenant | FlushTag):
        return Outcome("not_separable", 0)
    entries = await _erase_all_slots(daemon, status, cache)
    if entries is not None:
        return Outcome("slots_erased", entries)
    freed = await unload(daemon, model, UnloadRequested(model, reason="restarted to flush its cache"))
    if status.state is not WorkerState.READY:  # it was stopping anyway: don't load it again
        return Outcome("nothing_to_flush", 0)
    loading.ask_load(daemon, model)
    return Outcome("worker_restarted", None, freed)


async def _erase_all_slots(daemon: Daemon, status: ModelStatus, cache: PromptCache) -> int | None:
    """Erase every slot of every worker. Returns the number of erased tokens; None: some slots couldn't be erased."""
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
    slots = msgspec.json.decode(await _request_worker(upstream, "GET", path), type=list[_Slot])
    erased = 0
    for slot in slots:
        answer = await _request_worker(upstream, "POST", f"{path}/{slot.id}?action=erase")
        erased += msgspec.json.decode(answer, type=_Erased).n_erased
    return erased


async def _request_worker(upstream: Upstream, method: str, path: str) -> bytes:
    """The body of a worker's answer. Raises InvalidRequestError for a refusal, and the errors of `Upstream.request`."""
    response = await upstream.request(method, path.encode(), [])
    try:
        body = await response.read(_ANSWER_LIMIT)
    finally:
        response.close()
    if response.status >= 400:
        raise InvalidRequestError(f"The worker refuses {path}.")
    return body
