"""The requests and answers of a model runner's API."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from supervisor.gateway.body.typed import Sent
from supervisor.schema.operation import doc

_EVICTED: Final = (
    "Which is unloaded first. A busy one goes when its requests have ended, at most after its drain; an idle model of no higher "
    "priority may have to go instead of waiting for that."
)
_Count = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


def _camel_case(name: str) -> str:
    """The name of a field in JSON: `gpu_memory_mb` is `gpuMemoryMB`."""
    first, *rest = name.split("_")
    return first + "".join("MB" if word == "mb" else word.capitalize() for word in rest)


def _name_meta(about: str) -> Meta:
    return doc(about, min_length=1, max_length=512)


ModelName = Annotated[str, _name_meta("A model's id or public name, its `source` or its path.")]


class _Command(Sent, kw_only=True, rename=_camel_case):
    verified_op_token: Annotated[
        Any,
        doc("Who agreed to it, where `server.governance` is configured: see [signed operations](#signed-operations)."),
    ] = UNSET


class RunnerLoad(_Command, kw_only=True):
    """Which model to load, and how."""

    model_id: ModelName
    evict_model: Annotated[str, _name_meta(_EVICTED)] | None = None
    quantization: Annotated[str, doc("Such as `awq-4bit`.")] | None = None
    max_context_length: _Count | None = None
    gpu_memory_budget_mb: _Count | None = None


class RunnerUnload(_Command, kw_only=True):
    """Which model to unload."""

    model_id: ModelName


class FlushAll(_Command, tag_field="scope", tag="all"):
    """The prompts of everybody."""


class FlushModel(_Command, kw_only=True, tag_field="scope", tag="model"):
    """The prompts of one model."""

    model_id: ModelName


class FlushTenant(_Command, kw_only=True, tag_field="scope", tag="tenant"):
    """The prompts of one tenant."""

    tenant_id: Annotated[str, doc("As `X-Tenant-ID`, not blank.", pattern=r"\S")]
    model_id: ModelName | UnsetType = UNSET


class FlushTag(_Command, kw_only=True, tag_field="scope", tag="tag"):
    """The prompts of one tag."""

    tag: Annotated[str, doc("As `X-Cache-Tag`, not blank.", pattern=r"\S")]
    model_id: ModelName | UnsetType = UNSET


Flush = FlushAll | FlushModel | FlushTenant | FlushTag


class LoadTask(Struct, rename=_camel_case):
    """How far a load is."""

    task_id: str
    status: Literal["queued", "loading", "completed", "failed"]
    model_id: Annotated[str, doc("Its id, whatever it was called in the request.")]
    progress: Annotated[float, doc("From 0 to 1.")] = 0.0
    eta: Annotated[float, doc("Seconds; null: not known.")] | None = None
    gpu_memory_used_mb: int | UnsetType | None = UNSET
    load_time_ms: int | UnsetType | None = UNSET
    error: str | UnsetType = UNSET
    bytes_done: Annotated[int, doc("Of its files, while they are fetched.")] | UnsetType = UNSET
    bytes_total: Annotated[int, doc("Null: not known yet.")] | UnsetType | None = UNSET


class Unloaded(Struct, rename=_camel_case):
    """What an unload gave back."""

    model_id: str
    gpu_memory_freed_mb: int | None
    kv_cache_flushed: bool


class FlushedModel(Struct, rename=_camel_case):
    """What a flush did with one model."""

    model_id: str
    flushed: bool
    done: Annotated[str, doc("What was done with it: see below.")]
    entries_removed: int | None
    error: Annotated[str, doc("Why it failed.")] | UnsetType = UNSET


class Flushed(Struct, rename=_camel_case):
    """What a flush did."""

    flushed: bool
    entries_removed: Annotated[int, doc("Tokens; null: not known.")] | None
    memory_freed_mb: Annotated[int, doc("By workers that were restarted, as an unload tells it.")] | None
    models: list[FlushedModel]


class RunnerModel(Struct, rename=_camel_case):
    """A loaded model."""

    id: str
    quantization: str | None
    context_length: int | None
    loaded_at: int | None
    gpu_memory_mb: int | None


class RunnerLoading(Struct):
    """A model that is being loaded."""

    id: str
    progress: float
    eta: float | None


class RunnerModels(Struct):
    """Each model once; one that has failed is in no list."""

    loaded: list[RunnerModel]
    loading: list[RunnerLoading]
    available: list[str]


class RunnerResources(Struct, rename=_camel_case):
    """Those of all GPUs together, or of main memory where there is none. Sizes are MiB; null is not known."""

    gpu_ids: list[int]
    gpu_memory_total_mb: int
    gpu_memory_used_mb: int | None
    gpu_memory_free_mb: int | None
    gpu_utilization: Annotated[float, doc("Of all GPUs, the share of time that they computed lately.")] | None
    kv_cache_size_mb: Annotated[int, doc("As computed for the loaded models.")] | None
    kv_cache_utilization: Annotated[float, doc("As their workers say; vLLM does.")] | None


class RunnerQueue(Struct, rename=_camel_case):
    """Requests that wait."""

    depth: int
    max_depth: int
    avg_wait_ms: float | None
    p95_wait_ms: float | None


class RunnerAbilities(Struct, rename=_camel_case):
    """What at least one model can do."""

    streaming: bool | None
    prefix_caching: bool | None
    multi_tenant: bool | None
    vision_input: bool | None
    audio_input: bool | None
    function_calling: bool | None


class RunnerCapabilities(Struct, rename=_camel_case):
    """What a runner can do, and how full it is."""

    runner_type: Annotated[str, doc("`server.runner_type`.")]
    runner_id: Annotated[str, doc("`server.runner_id`.")]
    models: RunnerModels
    resources: RunnerResources
    queue: RunnerQueue
    capabilities: RunnerAbilities
    health: Literal["healthy", "unhealthy"]


class RunnerFault(Struct):
    """What went wrong."""

    code: str
    message: str
    param: str | UnsetType = UNSET


class RunnerError(Struct):
    """An error, with further fields for some codes."""

    error: RunnerFault
