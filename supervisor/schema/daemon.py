"""The daemon itself: its health, its configuration, its upgrade; usage and sets."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from supervisor.schema.operation import doc

_NAMES = "Models and virtual models, by name."


class Alive(Struct):
    """The process answers."""

    status: Literal["ok"]


class Health(Struct):
    """Whether the daemon serves."""

    status: Literal["ok", "stopping"]
    models_loaded: list[str]
    queued: int


Trouble = Literal["starting", "stopping", "gpu_oom", "all_models_failed", "queue_full"]


class RunnerHealth(Struct):
    """With `health: runner`."""

    status: Literal["healthy", "unhealthy"]
    reason: Trouble | UnsetType = UNSET
    uptime: Annotated[int, doc("Seconds.")] = 0
    models_loaded: int = field(name="modelsLoaded", default=0)
    queue_depth: int = field(name="queueDepth", default=0)


class Document(Struct):
    """An OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    servers: list[Any]
    tags: list[Any]
    paths: dict[str, Any]
    components: dict[str, Any]


class ConfigurationFile(Struct):
    """A file that a reload reads."""

    path: str
    kind: Literal["configuration", "tasks", "local", "api_keys"]
    exists: bool


class Info(Struct):
    """Which daemon this is."""

    version: str
    python: str
    pid: int
    uptime_s: float
    host: str
    port: int
    state_dir: str
    watch: bool
    configuration: list[ConfigurationFile]


class Stop(Struct, frozen=True):
    """A worker that ends by a reload: after its running requests, but at most `drain_s` later."""

    model: str
    state: str
    in_flight: int
    queued: int  # these wait for its next worker, or are refused if the model was removed
    pinned: bool
    drain_s: float


class Difference(Struct, frozen=True):
    """The effect of a reload. Settings as `limits.drain_s`."""

    added: Annotated[tuple[str, ...], doc(_NAMES)]
    removed: Annotated[tuple[str, ...], doc(_NAMES)]
    changed: Annotated[tuple[str, ...], doc(_NAMES)]
    restarted: Annotated[tuple[str, ...], doc("Those of `changed` whose worker is replaced after its requests.")]
    stops: Annotated[
        tuple[Stop, ...],
        doc(
            "The workers that end, those of restarted and of removed models: `model`, `state`, `in_flight` and `queued` "
            "requests, `pinned`, and `drain_s`, after which running requests are cut."
        ),
    ]
    unchanged: Annotated[int, doc("How many names did not change.")]
    settings: Annotated[tuple[str, ...], doc("Changed settings that took effect, such as `limits.drain_s`.")]
    needs_restart: Annotated[
        tuple[str, ...], doc("Changed settings that take effect only after a restart of the daemon.")
    ]
    warnings: Annotated[tuple[str, ...], doc("What can't be right about models' memory, each with the model's name.")]


class ReloadRequest(Struct, forbid_unknown_fields=True):
    """How to reload."""

    dry_run: bool = False
    force: bool = False


class ReloadQuery(Struct):
    """The same in the query."""

    dry_run: Annotated[bool, doc("Only tell what would change.")] = False
    force: Annotated[bool, doc("Also where no models or no keys are left.")] = False


class Upgrade(Struct):
    """A daemon that has taken over."""

    pid: int
    running: int


class RuntimeSettings(Struct):
    """What operators change while the daemon runs."""

    allow_cloud_fallback: Annotated[bool, doc("May tasks [fall back to remote models](tasks.md#remote-models)?")] = (
        field(name="allowCloudFallback")
    )


class ChangedSettings(RuntimeSettings, forbid_unknown_fields=True):
    """The same, to change it."""


class AlertDelivery(Struct):
    """What became of a test: a line for each of the ways that are configured, null where it went well."""

    webhook: str | None
    command: str | None


class SetView(Struct):
    """A set as it is configured, and whether it is active."""

    name: str
    description: str | None
    default_models: list[str]
    pin: list[str]
    active: bool


class SetList(Struct):
    """All sets, in the order of the file. None of them active: it is all as configured."""

    data: list[SetView]


class Switch(Struct, forbid_unknown_fields=True):
    """Another set."""

    active: Annotated[str | None, doc("The set to switch to; null: all as configured.")]


class UsageRow(Struct):
    """The sum for a day and key, and for a model where that was asked for. `key_id`: of a key that is called so now or was."""

    day: str
    key: str
    key_id: str
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    gpu_s: float
    model: str | None = None


class UsageList(Struct):
    """The oldest day first."""

    data: list[UsageRow]


class UsageQuery(Struct):
    """Whose usage, and when."""

    first: Annotated[str | None, doc("The first day, such as 2026-11-01.")] = field(name="from", default=None)
    last: Annotated[str | None, doc("The last day.")] = field(name="to", default=None)
    key: Annotated[str | None, doc("Only this key, by its name or id.")] = None
    model: Annotated[str | None, doc("Only this model.")] = None
    by_model: Annotated[bool, doc("A row for each model.")] = False
    format: Annotated[Literal["json", "csv"] | None, doc("`json` or `csv`; without it `Accept: text/csv` counts.")] = (
        None
    )
