"""What schedulers ask a model runner for."""

from __future__ import annotations

from typing import Final

from supervisor.schema.operation import (
    Example,
    Operation,
    Schema,
    Section,
    array,
    choice,
    flag,
    named,
    number,
    record,
    request,
    text,
    whole,
)

_ERROR: Final = named(
    record({"error": record({"code": text(), "message": text(), "param": text()}, optional=("param",), more=True)}),
    "RunnerError",
)
_TOKEN: Final = {
    "description": "Who agreed to it, where `server.governance` is configured: see [signed operations](#signed-operations).",
}
_MODEL_ID: Final = text("A model's id or public name, its `source` or its path.")
_TASK: Final = named(
    record(
        {
            "taskId": text(),
            "status": choice("queued", "loading", "completed", "failed"),
            "modelId": text("Its id, whatever it was called in the request."),
            "progress": number("From 0 to 1."),
            "eta": number("Seconds; null: not known.", null=True),
            "gpuMemoryUsedMB": whole(null=True),
            "loadTimeMs": whole(null=True),
            "error": text(),
            "bytesDone": whole("Of its files, while they are fetched."),
            "bytesTotal": whole("Null: not known yet.", null=True),
        },
        optional=("gpuMemoryUsedMB", "loadTimeMs", "error", "bytesDone", "bytesTotal"),
    ),
    "LoadTask",
)
_OF_ALL: Final = "of all GPUs together, or of main memory where there is none"
_CAPABILITIES: Final = named(
    record(
        {
            "runnerType": text("`server.runner_type`."),
            "runnerId": text("`server.runner_id`."),
            "models": record(
                {
                    "loaded": array(
                        record(
                            {
                                "id": text(),
                                "quantization": text(null=True),
                                "contextLength": whole(null=True),
                                "loadedAt": whole(null=True),
                                "gpuMemoryMB": whole(null=True),
                            }
                        )
                    ),
                    "loading": array(
                        record({"id": text(), "progress": number(), "eta": number(null=True)}),
                    ),
                    "available": array(),
                },
                "Each model once; one that has failed is in no list.",
            ),
            "resources": record(
                {
                    "gpuIds": array(whole()),
                    "gpuMemoryTotalMB": whole(),
                    "gpuMemoryUsedMB": whole(null=True),
                    "gpuMemoryFreeMB": whole(null=True),
                    "gpuUtilization": number("Of all GPUs, the share of time that they computed lately.", null=True),
                    "kvCacheSizeMB": whole("As computed for the loaded models.", null=True),
                    "kvCacheUtilization": number("As their workers say; vLLM does.", null=True),
                },
                f"Those {_OF_ALL}. Sizes are MiB; null is not known.",
            ),
            "queue": record(
                {
                    "depth": whole(),
                    "maxDepth": whole(),
                    "avgWaitMs": number(null=True),
                    "p95WaitMs": number(null=True),
                }
            ),
            "capabilities": record(
                {
                    name: flag(null=True)
                    for name in (
                        "streaming",
                        "prefixCaching",
                        "multiTenant",
                        "visionInput",
                        "audioInput",
                        "functionCalling",
                    )
                },
                "What at least one model can do.",
            ),
            "health": choice("healthy", "unhealthy"),
        }
    ),
    "RunnerCapabilities",
)


def _flush(scope: str, **fields: Schema) -> Schema:
    """A request to flush; what is named by a tenant or a tag may name a model as well."""
    others = {"modelId": _MODEL_ID} if scope in {"tenant", "tag"} else {}
    return request({"scope": {"const": scope}, **fields, **others, "verifiedOpToken": _TOKEN}, "scope", *fields)


SECTION: Final = Section(
    "Model runner",
    "For schedulers that route requests to several model runners and tell each what to load.",
    (
        Operation(
            "GET",
            "/v1/capabilities",
            "What this runner can do, and how full it is.",
            "Made anew after five seconds. 503 while the daemon starts or stops.",
            answer=_CAPABILITIES,
            errors=(503,),
        ),
        Operation(
            "POST",
            "/v1/models/load",
            "Load a model: a task.",
            "202, or 200 and `completed` for a loaded model. `maxContextLength` becomes an [override](#post-v1adminmodelsnameload) "
            "of the context (`n_ctx`, `max_model_len`), which lasts until an unload; a running worker with another context is "
            "replaced. `quantization` and `gpuMemoryBudgetMB` must be what the configuration says (a budget: no less than the "
            "model takes), else the request is refused with `not_configured_so`, as is a context that the runtime can't set. "
            "Other fields have no effect, and stand in `x-llmux-ignored`.\n\n"
            "With `server.allow_pull`, a model's missing files are fetched from its `source` first. An unload ends that; what has "
            "come is kept.",
            scope="admin",
            request=request(
                {
                    "modelId": _MODEL_ID,
                    "evictModel": text(
                        "Which is unloaded first. A busy one goes when its requests have ended, at most after its drain; an idle "
                        "model of no higher priority may have to go instead of waiting for that.",
                        null=True,
                    ),
                    "quantization": text(null=True),
                    "maxContextLength": whole(null=True, minimum=1),
                    "gpuMemoryBudgetMB": whole(null=True, minimum=1),
                    "verifiedOpToken": _TOKEN,
                },
                "modelId",
                more=True,
            ),
            answer=_TASK,
            status=202,
            other_statuses=(200,),
            errors=(404, 503),
            example=Example({"modelId": "tiny-embed"}),
        ),
        Operation(
            "GET",
            "/v1/models/load/load-{number}",
            "How far a load is.",
            "`status` is `queued`, `loading`, `completed` or `failed`, which a cancelled load is, too. A completed one has "
            "`gpuMemoryUsedMB` and `loadTimeMs`, a failed one `error`. They are the [loads](#get-v1adminloads) of the admin API.",
            scope="admin",
            answer=_TASK,
            errors=(404, 503),
            example=Example(
                path="/v1/models/load/load-1",
                needs="a load",
                answer={
                    "taskId": "load-1",
                    "status": "completed",
                    "modelId": "qwen3-8b",
                    "progress": 1.0,
                    "eta": 0,
                    "gpuMemoryUsedMB": 5120,
                    "loadTimeMs": 4200,
                },
            ),
        ),
        Operation(
            "GET",
            "/v1/models/load/pull-{number}",
            "How far a load is whose files are fetched first.",
            "It has `bytesDone` and `bytesTotal` meanwhile, and goes on as the load.",
            scope="admin",
            answer=_TASK,
            errors=(404, 503),
            example=Example(
                path="/v1/models/load/pull-1",
                needs="`server.allow_pull`",
                answer={
                    "taskId": "pull-1",
                    "status": "loading",
                    "modelId": "qwen3-8b",
                    "progress": 0.25,
                    "eta": 90,
                    "bytesDone": 1258291200,
                    "bytesTotal": 5033164800,
                },
            ),
        ),
        Operation(
            "GET",
            "/v1/models/load/model-{name}",
            "The task of a load that needed none, since the model was there, or came by another's load.",
            scope="admin",
            answer=_TASK,
            errors=(404, 503),
            example=Example(path="/v1/models/load/model-tiny-embed-model"),
        ),
        Operation(
            "POST",
            "/v1/models/unload",
            "Unload a model; the answer comes when its worker has ended.",
            "The memory is what its workers were measured to take just before; where they can't be measured, what its devices have "
            "more after than before; null where neither can be told.",
            scope="admin",
            request=request({"modelId": _MODEL_ID, "verifiedOpToken": _TOKEN}, "modelId", more=True),
            answer=record({"modelId": text(), "gpuMemoryFreedMB": whole(null=True), "kvCacheFlushed": flag()}),
            errors=(404, 503),
            example=Example({"modelId": "tiny-embed"}),
        ),
        Operation(
            "POST",
            "/v1/cache/flush",
            "Forget the prompts that workers keep.",
            "Of everybody, of one model, of one tenant, or of one tag; the last two may name a `modelId` to look at. `flushed` says "
            "whether nothing of it can be found again.",
            scope="admin",
            request={
                "oneOf": [
                    _flush("all"),
                    _flush("model", modelId=_MODEL_ID),
                    _flush("tenant", tenantId=text("As `X-Tenant-ID`.", minLength=1)),
                    _flush("tag", tag=text("As `X-Cache-Tag`.", pattern="^[!-~]{1,64}$")),
                ]
            },
            answer=record(
                {
                    "flushed": flag(),
                    "entriesRemoved": whole("Tokens; null: not known.", null=True),
                    "memoryFreedMB": whole("By workers that were restarted, as an unload tells it.", null=True),
                    "models": array(
                        record(
                            {
                                "modelId": text(),
                                "flushed": flag(),
                                "done": text("What was done with it: see below."),
                                "entriesRemoved": whole(null=True),
                                "error": text("Why it failed."),
                            },
                            optional=("error",),
                        )
                    ),
                }
            ),
            errors=(404, 503),
            example=Example({"scope": "model", "modelId": "tiny-embed"}),
        ),
    ),
    _ERROR,
)
