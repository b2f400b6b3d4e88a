"""A model: its state, its memory, its workers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from supervisor.schema.operation import doc

_LIFE = "Where the worker is in its [life](architecture.md#a-workers-life), for how long, and why."
_LOAD = "Requests that it is working on; requests that wait for it."


class Footprint(Struct, gc=False):
    """Memory that a load takes on a device, and how that is known."""

    mib: int
    source: str
    detail: str


class Memory(Struct, gc=False):
    """Memory that a model's workers have, took, and will need."""

    lease_mib: int | None
    measured_mib: int | None
    parts: dict[str, int]
    estimate: Footprint
    learned: dict[str, int]
    raised: dict[str, int]
    need: dict[str, Footprint]


class ModelMemory(Memory, kw_only=True):
    """A model's memory on all its devices."""

    name: str
    device: str | None
    devices: list[str]


class Sizing(Struct, gc=False):
    """Context and slots of a model."""

    context: int
    slots: int
    trained: int | None
    text: str


class WorkerFacts(Struct, gc=False):
    """A worker process, or the connection to a remote API."""

    pid: int | None
    shim_pid: int | UnsetType | None = UNSET
    port: int | None = None
    address: str | UnsetType | None = UNSET
    upstream_model: str | UnsetType | None = UNSET
    uptime_s: float = 0.0
    connections: int = 0
    log: str | UnsetType = UNSET


class Replica(Struct, gc=False):
    """One of a model's workers. Without a process it has none of a process's fields."""

    worker: str
    state: str
    answering: bool
    device: str | None
    devices: list[str]
    in_flight: int
    lease_mib: int | None
    measured_mib: int | None
    parts: dict[str, int]
    pid: int | UnsetType | None = UNSET
    shim_pid: int | UnsetType | None = UNSET
    port: int | UnsetType | None = UNSET
    address: str | UnsetType | None = UNSET
    upstream_model: str | UnsetType | None = UNSET
    uptime_s: float | UnsetType = UNSET
    connections: int | UnsetType = UNSET
    log: str | UnsetType = UNSET


class Crash(Struct, gc=False):
    """An unwanted end of a worker."""

    kind: str = field(name="class")
    summary: str
    exit_code: int | None
    log_tail: list[str]


ThinkingMode = Literal["default", "enabled", "disabled"]


class Capabilities(Struct, gc=False):
    """What a model can do, by its files; null if unknown."""

    modalities: Annotated[list[str], doc("What it takes: `text`, `image`, `audio` …")]
    documents: Annotated[
        list[str], doc("What becomes text for it: `text/plain`, and `application/pdf` with the extra `media`.")
    ]
    tools: bool | None
    thinking: bool | None
    thinking_modes: Annotated[list[ThinkingMode], doc("What a request may choose.")]
    multi_turn: bool | None
    context: Annotated[int | None, doc("Tokens of one request.")]
    endpoints: Annotated[list[str], doc("What its worker serves.")]


class ModelView(Struct):
    """A model's whole state."""

    name: Annotated[str, doc("As configured.")]
    virtual_models: Annotated[list[str], doc("As configured.")]
    runtime: Annotated[str, doc("As configured.")]
    type: Annotated[str, doc("As configured.")]
    priority: Annotated[int, doc("As configured.")]
    pin: Annotated[bool, doc("Whether it is protected from eviction: as configured, or as set since with `…/pin`.")]
    state: Annotated[str, doc(_LIFE)]
    answering: Annotated[bool, doc("Whether its health check succeeds, so that it gets requests.")]
    reason: Annotated[str | None, doc(_LIFE)]
    since_s: Annotated[float, doc(_LIFE)]
    retry_s: Annotated[float | None, doc("Seconds until it is tried again by itself after a crash; else null.")]
    eta_s: Annotated[
        float | None,
        doc(
            "While it loads: the expected remaining time, from its last load or else from its size. While it drains: the time "
            "until its running requests are cut. Otherwise null."
        ),
    ]
    idle_s: Annotated[float | None, doc("Seconds since its last request; null while it has any.")]
    keep_alive_s: Annotated[
        float | None, doc("Its keep-alive, or that of its type; null: none, it stays until its memory is needed.")
    ]
    unload_s: Annotated[
        float | None,
        doc(
            "Seconds until it is unloaded if nobody uses it, by the longest "
            "[keep-alive](configuration.md#how-long-a-model-stays) in force; else null."
        ),
    ]
    held_s: Annotated[
        float | None,
        doc("Seconds during which no model of equal or lower priority evicts it (`hold_s`); else null."),
    ]
    in_flight: Annotated[int, doc(_LOAD)]
    queued: Annotated[int, doc(_LOAD)]
    waits_for: Annotated[list[str], doc("Models that must be unloaded first.")]
    drain_s: Annotated[
        float,
        doc("How long its running requests may go on after an unload that isn't forced; the rest is cut then."),
    ]
    device: Annotated[str | None, doc("Where it runs.")]
    devices: Annotated[list[str], doc("The same as a list.")]
    remote: Annotated[
        bool,
        doc("Whether another API runs it: no memory and no process here; see [runtimes](runtimes.md#openai_remote)."),
    ]
    memory: Annotated[
        Memory,
        doc(
            "`lease_mib` is its lease, `parts` its share on each device. `measured_mib` is what it takes; in main memory each "
            "worker counts as if alone, so workers that share pages add up to more than is used. `estimate` is the expectation "
            "without a measurement (`mib`, `source`, `detail`), `learned` the earlier measurement by device, `raised` the least "
            "that it gets on a device since a load ran out of memory there. `need` is what the next load leases on each device, "
            "with its source: the best of these."
        ),
    ]
    sizing: Annotated[
        Sizing | None,
        doc(
            "What the runtime chose, or was told: `context` in tokens, `slots`, `trained` (the longest context that the model "
            "was made for), and all of it with the reason in `text`; null if unknown."
        ),
    ]
    warnings: Annotated[list[str], doc("What can't be right about its memory, in sentences.")]
    worker: Annotated[
        WorkerFacts | None,
        doc(
            "`pid`, `shim_pid`, `port`, `uptime_s`, `connections`, `log`; null without a process. For a remote model `address`, "
            "`upstream_model`, `uptime_s` and `connections`; its `device` is `remote`. Where a "
            "[program](runtimes.md#claude_cli) answers, the fields of its worker and `upstream_model`."
        ),
    ]
    replicas: Annotated[
        list[Replica],
        doc(
            "Its workers, at most `replica_max`, usually one ([several](scheduling.md#several-workers-of-one-model)). Fields "
            "outside of this list are those of the worker that answers first; `memory`, `in_flight` and `devices` of all "
            "together. Each has `worker` (name and generation), `state`, `answering`, `device`, `in_flight`, `lease_mib`, "
            "`measured_mib`, `parts`, and the fields of `worker` above."
        ),
    ]
    replica_max: Annotated[int, doc("As configured.")]
    generation: Annotated[int, doc("How often it was started.")]
    load_s: Annotated[float | None, doc("How long the last load took, also before a restart.")]
    crash: Annotated[
        Crash | None, doc("Why it ended by itself: `class`, `summary`, `exit_code`, `log_tail`; else null.")
    ]
    capabilities: Annotated[
        Capabilities | None,
        doc(
            "What it can do, from its files: `modalities`, `documents` (what becomes text for it: `text/plain`, and "
            "`application/pdf` with the extra `media`), `tools`, `thinking`, `thinking_modes` (what a request may choose: "
            "`default`, `enabled`, `disabled`), `multi_turn`, `context` (tokens of one request), `endpoints`; null if unknown."
        ),
    ]
    load_constraints: Annotated[
        dict[str, Any], doc("The keys that a load may override, each with type and range as JSON Schema.")
    ]
    overrides: Annotated[dict[str, Any], doc("The overrides of its loads.")]
    definition: Annotated[dict[str, Any], doc("Its effective configuration. Values that look like secrets are masked.")]


class ModelList(Struct):
    """All models, in the order of the configuration."""

    object: Literal["list"]
    data: list[ModelView]


class LoadRequest(Struct, forbid_unknown_fields=True):
    """How to load a model."""

    overrides: Annotated[
        dict[str, Any] | None,
        doc("Keys of the configuration, and values that replace the configured ones; `{}` removes all of them."),
    ] = None


class UnloadQuery(Struct):
    """How to unload a model."""

    force: Annotated[bool, doc("Cut the requests.")] = False


class PinRequest(Struct, forbid_unknown_fields=True):
    """Whether a model is protected from eviction."""

    pin: Annotated[bool, doc("Whether it is protected; false also where the configuration pins it.")]


class LogQuery(Struct):
    """Which lines of a log."""

    lines: Annotated[Annotated[int, doc("", ge=0, le=10_000)], doc("How many at most; 200 by default.")] = 200
    follow: Annotated[bool, doc("Go on with each new one.")] = False
