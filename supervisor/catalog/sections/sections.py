"""The sections of the configuration file besides `models:`, as strict, frozen pydantic models.

Every key has a purpose, a unit in its name, and a default or an example; config/llmux.example.yaml and the JSON schema are
checked against them. Numbers of the scheduler repeat those of `core.types.Limits`, which a test holds equal.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, field_validator, model_validator
from pydantic_core import PydanticKnownError

from runtimes.device_kind import KINDS, DeviceWanted
from runtimes.model_config import ModelConfig
from supervisor.catalog.loading.folders import models_dir, runtimes_dir, state_dir
from supervisor.catalog.sections.governance import GovernanceConfig
from supervisor.core.demand import LEAST_URGENT, MOST_URGENT
from supervisor.core.types import DeviceId, Eviction, Limits, Policy


class Section(BaseModel):
    """Unknown keys and wrong types are errors; a validated section doesn't change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


Priority = Literal["high", "normal", "low"] | Annotated[int, Field(ge=MOST_URGENT, le=LEAST_URGENT)]
"""How urgent a request is; lower is more urgent. `core.demand.priority_of` converts it to a number."""
TENANT_LIMIT: Final = 64
"""Characters of the name of a tenant."""


class FoldersConfig(Section):
    """Models that no section names, because their files are enough."""

    models_from: tuple[Path, ...] = Field(
        default=(),
        description=(
            "Folders, and files, whose models are served without an entry: GGUF files and Hugging Face folders. Watched: a "
            "new file is a new model, and the model of a removed one goes once it is idle."
        ),
        examples=[["~/models"]],
    )


Word = Annotated[str, Field(min_length=1, max_length=4096)]
Port = Annotated[int, Field(ge=1, le=65535)]
Host = Annotated[
    str,
    Field(
        max_length=300,
        pattern=r"^(\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:]+\])(:[1-9][0-9]{0,4})?$",
    ),
]


class AlertsConfig(Section):
    """Where alerts go. Each is sent once a minute at most, however often it is raised."""

    webhook: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s]+$",
        description="Address that gets each alert by POST, as JSON: `at`, `code`, `message`, `device`, `model`, `host`.",
        examples=["https://ntfy.example.org/llmux"],
    )
    command: list[Word] = Field(
        default_factory=list,
        max_length=100,
        description="Program and arguments that are run for each alert, without a shell: `LLMUX_ALERT` has the same JSON, "
        "`LLMUX_ALERT_CODE`, `…_MESSAGE`, `…_DEVICE` and `…_MODEL` its parts. It has ten seconds.",
        examples=[["/usr/local/bin/notify-me"]],
    )


class MediaConfig(Section):
    """`server.media`. Whatever it allows, it allows every key that may ask a model."""

    hosts: tuple[Host, ...] = Field(
        default=(),
        description="Whose https addresses may stand in prompts; `*.NAME` is every name below it, `*` every one. On port 443, or "
        "the one given. Names lead to public addresses only; an IP address that is listed itself may be a private one.",
        examples=[["images.example.com", "*.example.org"]],
    )
    folder: Path | None = Field(
        default=None,
        description="Files below it may stand in prompts, as file:///PATH. Default: none.",
        examples=["/srv/pictures"],
    )
    size_mib: int = Field(default=20, ge=1, le=1024, description="What one request's media may have together, in MiB.")
    timeout_s: float = Field(default=10.0, gt=0, le=600, description="Time to load all media of one request.")
    per_request: int = Field(default=16, ge=1, le=256, description="References in one request.")
    at_once: int = Field(
        default=16,
        ge=1,
        le=256,
        description="What is loaded at once, for all requests; for each of them a quarter of it, or one.",
    )
    ca_file: Path | None = Field(
        default=None,
        description="Certificates of the authorities to trust. Default: the system's.",
        examples=["/etc/ssl/company.pem"],
    )


def _one_address(value: object) -> object:
    """The address without brackets. Raises ValueError for anything but one network address."""
    if isinstance(value, list) or (isinstance(value, str) and ("," in value or len(value.split()) > 1)):
        raise ValueError(
            "llmux listens on one address; 0.0.0.0 is all of IPv4, and :: all there are, and both need keys"
        )
    if not isinstance(value, str):
        return value
    if "/" in value or value.startswith(("unix:", "@")):
        raise ValueError(
            "llmux listens on an address and a port; a proxy such as nginx or socat can offer it as a Unix socket"
        )
    return value.removeprefix("[").removesuffix("]")


Address = Annotated[str, BeforeValidator(_one_address), Field(min_length=1)]

OLLAMA: Final = "ollama_port"
METRICS: Final = "metrics_port"


class ServerConfig(Section):
    """Where the daemon listens and what it keeps where."""

    ollama_port: Port | None = Field(
        default=None,
        description="Port that answers Ollama's API and all of inference as well, without the admin API and the dashboard.",
        examples=[11434],
    )
    metrics_port: Port | None = Field(
        default=None,
        description="Port that answers `/metrics`, `/health` and `/livez` as well, and nothing else.",
        examples=[9090],
    )
    runner_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="`runnerId` in `GET /v1/capabilities`. Default: the machine's host name.",
        examples=["llm-1"],
    )
    runner_type: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="`runnerType` in `GET /v1/capabilities`. Default: `llmux-VERSION`.",
        examples=["vllm-0.6.0"],
    )
    health: Literal["llmux", "runner"] = Field(
        default="llmux",
        description="What `/health` answers. llmux: 200 while the daemon serves; runner: as a model runner does, also 503 when a "
        "device is out of memory, all models have failed, or the queue is full. Every answer of inference then says what came "
        "from the cache of prompts, too.",
        examples=["runner"],
    )
    multi_tenant: bool = Field(
        default=True,
        description="Requests may name the tenant for whom they come (`X-Tenant-ID`, `x_client_id`). false: those without a key "
        "are one client, those with a key the key's.",
        examples=[False],
    )
    metrics: bool = Field(default=True, description="Serve `/metrics`.", examples=[False])
    model_base_path: Path | None = Field(
        default=None,
        description="The files of all models must lie below this folder, links followed. What lies there and is no model of this "
        "file is one, too, under its path: GGUF files, and folders of safetensors. Where it is set, it is also the default of "
        "`models_dir`.",
        examples=["/models"],
    )
    allow_pull: bool = Field(
        default=False,
        description="A client with the scope `admin` that loads a model whose files are missing has them fetched from its "
        "`source` first.",
        examples=[True],
    )
    host: Address = Field(
        default="127.0.0.1",
        description="Address to listen on. Any other than loopback needs API keys.",
        examples=["0.0.0.0"],
    )
    port: int = Field(default=8081, ge=0, le=65535, description="Port to listen on; 0 takes any that is free.")
    worker_port_first: Port = Field(default=18100, description="First port given to workers.")
    worker_port_last: Port = Field(default=18999, description="Last port given to workers.")
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description=(
            "Names that may stand in the Host header besides loopback, `host`, what containers call this machine, and, with "
            "keys, its own name; guards against DNS rebinding."
        ),
        examples=[["llm.example.org"]],
    )
    allowed_origins: tuple[str, ...] = Field(
        default=(),
        description="Web origins whose pages may call the inference API from a browser.",
        examples=[["https://chat.example.org"]],
    )
    public_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s?#]+(/[^\s?#]*)?$",
        description="Where clients reach llmux, behind a proxy for instance: addresses in answers begin with it. Default: as "
        "the request's Host header says, with http.",
        examples=["https://llm.example.org"],
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe events to log."
    )
    log_format: Literal["auto", "console", "json"] = Field(
        default="auto", description="auto: console on a terminal, else json.", examples=["json"]
    )
    state_dir: Path = Field(
        default_factory=state_dir,
        description="Learned footprints and load times, tasks, worker logs. Default: $XDG_STATE_HOME/llmux.",
        examples=["~/.local/state/llmux"],
    )
    runtimes_dir: Path = Field(
        default_factory=runtimes_dir,
        description="Virtual environments of the runtimes. Default: $XDG_DATA_HOME/llmux/runtimes.",
        examples=["~/.local/share/llmux/runtimes"],
    )
    models_dir: Path = Field(
        default_factory=models_dir,
        description="Files that `llmux pull` gets. Default: $XDG_DATA_HOME/llmux/models.",
        examples=["~/.local/share/llmux/models"],
    )
    api_keys: Path | None = Field(
        default=None,
        description="File of API keys. Default: api_keys.yaml beside this file, where there is one.",
        examples=["~/.config/llmux/api_keys.yaml"],
    )
    leases: str | None = Field(
        default=None,
        pattern=r"^(redis|rediss|unix)://",
        description="Redis in which several daemons, and other programs, lease the memory of the same devices. "
        "Default: this daemon has them alone.",
        examples=["redis://127.0.0.1:6379/0"],
    )
    leases_ttl_s: float = Field(
        default=60.0,
        ge=45,
        le=86_400,
        description="How long a lease there outlives its last renewal. Workers are stopped where theirs can't be renewed in time.",
    )
    traces: bool = Field(
        default=False,
        description="Send spans of requests by OTLP, to where OTEL_EXPORTER_OTLP_ENDPOINT says, by default "
        "http://localhost:4318. Needs llmux-supervisor[otel].",
    )
    media: MediaConfig | None = Field(
        default=None, description="What is loaded for prompts that refer to media. Default: nothing."
    )
    alerts: AlertsConfig | None = Field(
        default=None, description="Who hears of alerts besides the log. Default: nobody."
    )
    governance: GovernanceConfig | None = Field(default=None, description="Who must sign the runner API's operations.")
    responses: Literal["openai", "llm-pool"] = Field(
        default="openai",
        description="Whose requests `/v1/responses` gets, unless their key says otherwise. llm-pool: all are taken for llm-pool's, "
        "not only those with its fields, and `/v1/models` lists only models that are loaded.",
        examples=["llm-pool"],
    )
    load_feedback: bool = Field(
        default=False,
        description="Chat streams tell, as reasoning, that a model loads and how long, unless their key says otherwise.",
        examples=[True],
    )
    edit: Literal["none", "safe", "all"] = Field(
        default="safe",
        description="What the dashboard, and keys with the scope `configure`, may change in this file. safe: models, names, tasks "
        "and limits, but no key that names a program, its arguments or environment, and nothing of `server`; all: everything, "
        "as soon as there are API keys.",
        examples=["none"],
    )
    watch: bool = Field(
        default=False,
        description="Reload by itself when this file, local.yaml or the file of API keys changes.",
        examples=[True],
    )

    @model_validator(mode="after")
    def _ports_in_order(self) -> Self:
        if self.worker_port_first > self.worker_port_last:
            raise ValueError(
                f"worker_port_first {self.worker_port_first} lies above worker_port_last {self.worker_port_last}"
            )
        keys: dict[int, str] = {}
        for key, port in {"port": self.port, **self.extra_ports}.items():
            if self.worker_port_first <= port <= self.worker_port_last:
                raise ValueError(f"{key} {port} lies among the workers' own")
            if keys.setdefault(port, key) != key:
                raise ValueError(f"{key} {port} is {keys[port]} already")
        return self

    @property
    def extra_ports(self) -> dict[str, int]:
        """The extra ports that are set, by their keys."""
        found = {OLLAMA: self.ollama_port, METRICS: self.metrics_port}
        return {key: port for key, port in found.items() if port is not None}

    @property
    def reports_caches(self) -> bool:
        """Whether every inference response has headers about the prompt cache, which clients of a model runner expect."""
        return self.health == "runner"


Seconds = Annotated[float, Field(gt=0, le=86_400)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
LoadedByType = Annotated[int, Field(ge=1, le=1000)]


def drain_seconds(drain_s: float | Literal["never"] | None) -> float | None:
    """The seconds for the scheduler: `never` is an infinite time."""
    return math.inf if drain_s == "never" else drain_s


KEEP_ALIVE_BY_TYPE: Final[Mapping[str, float | Literal["forever"]]] = {"image": 900, "llm": 300, "vision": 60}
"""The keep-alives that `by_type` stands for; models of other types stay until their memory is needed."""


def _spelled_out(written: object) -> object:
    """The keep-alives by type that `keep_alive` stands for."""
    if written == "by_type":
        return dict(KEEP_ALIVE_BY_TYPE)
    if not isinstance(written, dict):
        raise PydanticKnownError("literal_error", {"expected": "'by_type' or a mapping"})
    return written


class _KeptConfig(BaseModel):
    """The keys of `limits` for what is kept on disk for clients that come back for it: pictures and responses."""

    pictures_mib: Annotated[int, Field(ge=0, le=1 << 30)] = Field(
        default=256,
        description="Disk for pictures that requests want by address (`response_format: url`); the oldest go first. 0: such "
        "requests are refused.",
    )
    pictures_keep_s: Annotated[float, Field(gt=0, le=31_536_000)] = Field(
        default=3600.0, description="How long such an address holds; at most until the daemon ends."
    )
    responses_mib: Annotated[int, Field(ge=0, le=1 << 30)] = Field(
        default=256,
        description="Disk for responses that `previous_response_id` and `GET /v1/responses/ID` find again; the oldest go "
        "first. 0: none is kept.",
    )
    responses_most: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        default=10_000, description="So many responses are kept at most; the oldest go first."
    )
    responses_keep_s: Annotated[float, Field(gt=0, le=315_360_000)] = Field(
        default=2_592_000.0, description="How long a response is kept, in seconds; 30 days by default."
    )


class JobsConfig(BaseModel):
    """The keys of `limits` for jobs and batches."""

    jobs_waiting: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=1000, description="Jobs that may wait; 0: no jobs are taken."
    )
    jobs_running: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=8, description="Jobs whose requests are sent at once; the others wait for them."
    )
    jobs_keep_s: Annotated[float, Field(gt=0, le=31_536_000)] = Field(
        default=86_400.0, description="How long a job that has ended is kept, with its result."
    )
    jobs_mib: Annotated[int, Field(ge=1, le=1 << 30)] = Field(
        default=1024,
        description="Disk for requests and results of jobs, and for the files of batches; the oldest results go first.",
    )
    files_mib: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        default=200, description="Largest file of a batch (`POST /v1/files`), in MiB."
    )
    batch_lines: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        default=50_000, description="Requests that a batch may have."
    )


class LimitsConfig(JobsConfig, _KeptConfig, Section):
    """Numbers of scheduling, failure handling and HTTP."""

    aging_s: Annotated[float, Field(ge=0, le=86_400)] | Literal["never"] = Field(
        default=60.0,
        description="A request that has waited this much longer comes before one of the next higher class (30 points of "
        "priority); `never`: higher classes always go first.",
        examples=[60, "never"],
    )
    overtakes: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=64,
        description="While a model waits for the memory of another one, that one answers at most so many later requests "
        "before it makes room.",
    )
    keep_alive: Annotated[
        dict[str, Seconds | Literal["forever"]],
        BeforeValidator(
            _spelled_out, json_schema_input_type=Literal["by_type"] | dict[str, Seconds | Literal["forever"]]
        ),
    ] = Field(
        default_factory=dict,
        description="`keep_alive_s` of models that set none, by type. `by_type`: image 900, llm 300, "
        "vision 60. Default, and of types not named: `forever`.",
        examples=["by_type", {"llm": 300}],
    )
    default_model: str | list[str] = Field(
        default_factory=list,
        description="The model, or models, to come back when nothing else is asked for.",
        examples=["qwen3-8b", ["qwen3-8b", "whisper"]],
    )
    default_after_s: Seconds = Field(
        default=300.0, description="They come back when no other model was used for this long."
    )
    queue_total: Count = Field(default=512, description="Requests that may wait in all.")
    queue_per_model: Count = Field(default=64, description="Requests that may wait for one model.")
    queue_wait_s: Seconds = Field(default=600.0, description="Longest a request waits, in seconds.")
    min_residency_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        default=30.0,
        description="A model in demand stays at least this long before another evicts it, and an idle one before a less "
        "urgent request does.",
    )
    linger_s: float = Field(
        default=0.25,
        ge=0,
        le=60,
        description="A young model counts as in demand after its last request: for 2 % of the time that it takes to load, at "
        "most this long.",
    )
    loads_per_device: int = Field(default=1, ge=1, le=64, description="Models that may load on one device at once.")
    replica_idle_s: float = Field(
        default=60.0,
        gt=0,
        description="A worker beyond the `replicas` of its model goes when it has been idle this long.",
    )
    drain_s: Annotated[float, Field(ge=0, le=86_400)] | Literal["never"] | None = Field(
        default=None,
        description="Time running requests get before their worker is stopped; `never`: none is cut for another model. "
        "Default: 30 for an unload, a reload or the shutdown; for another model until they have ended, or their clients "
        "have stopped reading for 30.",
        examples=[60, "never"],
    )
    backoff_first_s: Seconds = Field(default=1.0, description="Pause after the first crash; doubles.")
    backoff_max_s: Seconds = Field(default=60.0, description="Longest pause between starts.")
    backoff_jitter: float = Field(default=0.25, ge=0, le=1, description="Share by which a pause varies at random.")
    backoff_reset_s: Seconds = Field(default=600.0, description="Ready for this long, a model's crashes are forgotten.")
    crash_limit: int = Field(
        default=5, ge=1, le=1000, description="Crashes within `crash_window_s` after which a model is given up."
    )
    crash_window_s: Seconds = Field(default=600.0, description="Window of `crash_limit`.")
    failed_retry_s: Seconds = Field(
        default=600.0,
        description="Pause before a model that was given up is tried again, if its cause may mend itself.",
    )
    memory_warn_s: Seconds = Field(
        default=5.0, description="Warn when memory isn't back this long after its worker ended."
    )
    memory_quarantine_s: Seconds = Field(
        default=30.0, description="Stop loading on the device when it isn't back after this long."
    )
    eviction: Literal["last_resort", "strict"] = Field(
        default="last_resort",
        description="May a model go for one of lower priority? last_resort: if nothing lower would do; strict: never.",
        examples=["strict"],
    )
    admission: Literal["fair", "first_come"] = Field(
        default="fair",
        description="Who is served next, and who goes first. fair: by class with age, then fair shares of the tenants; cheap reloads "
        "and long idle models go first. first_come: by arrival alone; the least recently used model goes first. A model of higher "
        "`priority` comes first in both.",
        examples=["first_come"],
    )
    max_loaded: dict[str, LoadedByType] = Field(
        default_factory=dict, description="Models of a type that may be loaded at once.", examples=[{"llm": 1}]
    )
    body_mib: int = Field(
        default=32,
        ge=1,
        le=4096,
        description="Largest request body, and largest answer that is kept until it is complete, such as a job's, in MiB.",
    )
    bodies_mib: int | None = Field(
        default=None,
        ge=1,
        le=1_048_576,
        description="Memory for the bodies of all requests and the answers of running jobs, in MiB. Default: an eighth of main "
        "memory, at most 1024.",
        examples=[1024],
    )
    spill_mib: int = Field(
        default=4096,
        ge=0,
        le=1_048_576,
        description="Disk for large bodies of requests that wait, in MiB, in the state directory; 0: none.",
    )
    header_kib: int = Field(default=64, ge=1, le=1024, description="Largest request head, in KiB.")
    header_s: Seconds = Field(default=10.0, description="Time a client has to send its head.")
    body_s: Seconds = Field(default=600.0, description="Time a client has to send its body.")
    least_bytes_per_s: float = Field(
        default=1024.0,
        ge=0,
        le=1e9,
        description="Least rate at which a client sends its body, and reads what waits for it; 0: any rate.",
    )
    connections_per_client: int = Field(
        default=1024,
        ge=0,
        le=1_000_000,
        description="Open connections of one address, such as a reverse proxy with all its users; 0: any number.",
    )
    connect_s: Seconds = Field(default=2.0, description="Time to connect to a worker.")
    first_byte_s: Seconds = Field(
        default=300.0, description="Time a worker has to begin its answer; with pictures, for each step."
    )
    stream_idle_s: Seconds = Field(default=120.0, description="Longest silence within an answer.")
    keepalive_s: Seconds = Field(
        default=10.0, description="Interval of comments to a streaming client that waits for its model."
    )
    readiness_interval_s: Seconds = Field(
        default=2.0,
        description="Interval of health checks; after three failures a worker gets no new requests until one succeeds.",
    )
    liveness_interval_s: Seconds = Field(
        default=10.0,
        description="Interval of patient health checks; after six failures without a byte a worker is replaced.",
    )

    def limits(self) -> Limits:
        """The limits for the scheduler."""
        numbers = {field.name: getattr(self, field.name) for field in fields(Limits)}
        aging_s = math.inf if self.aging_s == "never" else self.aging_s
        return Limits(**numbers | {"aging_s": aging_s, "drain_s": drain_seconds(self.drain_s)})

    def bodies_bytes(self, memory_mib: int) -> int:
        """The bytes for all bodies together on a machine with this memory: at least the largest body."""
        share_mib = min(memory_mib // 8, 1024) if self.bodies_mib is None else self.bodies_mib
        return max(share_mib, self.body_mib) << 20

    def keep_alive_of(self, config: ModelConfig) -> float | None:
        """The keep-alive of a model that sets none, in seconds; None: it stays until its memory is needed."""
        seconds = self.keep_alive.get(config.type)
        return None if seconds == "forever" else seconds

    @property
    def default_models(self) -> tuple[str, ...]:
        """The names in `default_model`."""
        return (self.default_model,) if isinstance(self.default_model, str) else tuple(self.default_model)

    def policy(self) -> Policy:
        """The policy by which models compete for memory."""
        return Policy(Eviction(self.eviction), dict(self.max_loaded), admission=self.admission)


def _known_kind(name: object) -> object:
    if name not in KINDS:
        *others, last = (f"'{known}'" for known in KINDS)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})
    return name


class DeviceConfig(Section):
    """One device to use, where `devices:` is a list instead of `auto`."""

    kind: Annotated[str, BeforeValidator(_known_kind)] = Field(
        description="host: main memory; cuda: a GPU of NVIDIA's; rocm: one of AMD's; vulkan: one of Intel's, or of AMD's without ROCm's driver.",
        examples=["cuda"],
        json_schema_extra=lambda schema: schema.update(enum=[*KINDS]),
    )
    index: Annotated[int, Field(ge=0, le=1023)] | None = Field(
        default=None,
        description="Which GPU, by its number in nvidia-smi, among those of AMD's in rocminfo, or of Vulkan's by address on the PCI bus, from 0.",
        examples=[0],
    )
    uuid: str | None = Field(
        default=None,
        pattern=r"^(GPU-[0-9a-fA-F-]+|[0-9a-fA-F]{4,8}:[0-9a-fA-F:.]*)$",
        description="Which GPU, by its UUID, or Vulkan's by its address on the PCI bus, or a unique beginning of it; survives a change of order.",
        examples=["GPU-6f1e2d3c"],
    )
    budget_mib: Annotated[int, Field(gt=0)] | None = Field(
        default=None,
        description="Host only: memory llmux may use, in MiB. Default: 80 % of what there is.",
        examples=[16000],
    )
    margin_mib: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Memory always left free, in MiB. Default: 512 or 3 %, whichever is more; with `budget_mib` 0.",
        examples=[512],
    )

    @model_validator(mode="after")
    def _one_address(self) -> Self:
        kind = KINDS[self.kind]
        given = [name for name in ("index", "uuid") if getattr(self, name) is not None]
        if given and not kind.accelerates:
            raise ValueError(f'the {kind.name} has no "{given[0]}"')
        if kind.accelerates and len(given) != 1:
            raise ValueError(f'a {kind.name} device is given by either "index" or "uuid"')
        if kind.accelerates and self.budget_mib is not None:
            raise ValueError(f'"budget_mib" is for the host; use "margin_mib" to leave more of a {kind.noun} free')
        return self

    @property
    def id(self) -> DeviceId | None:
        """The device's name in models and the API; None for a UUID, whose number only the driver knows."""
        return None if self.uuid is not None else DeviceId(KINDS[self.kind].device_id(self.index))

    @property
    def wanted(self) -> DeviceWanted:
        """The device to open, as drivers look for it."""
        return DeviceWanted(KINDS[self.kind], self.index, self.uuid, self.budget_mib, self.margin_mib)


V = TypeVar("V", bound=Container[str])


def refuse_routing(fields: Container[str]) -> None:
    """Raises ValueError for fields of a request that a configuration can't set."""
    for field in ("model", "stream"):
        if field in fields:
            raise ValueError(f'"{field}" can\'t be changed: it decides who answers, and how')


class ParametersConfig(Section):
    """What is done to a model's requests."""

    enable_thinking: bool | None = Field(
        default=None,
        description="Turn reasoning on or off, whatever the client says. Default: as the client or the model likes.",
        examples=[False],
    )
    system_prompt_prefix: str | None = Field(
        default=None,
        min_length=1,
        description="Put before the client's system prompt, or instead of a missing one.",
        examples=["Reasoning: low"],
    )
    defaults: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Request fields for clients that don't send them.",
        examples=[{"temperature": 0.7}],
    )
    force: dict[str, JsonValue] = Field(
        default_factory=dict, description="Request fields set whatever the client sends.", examples=[{"top_k": 20}]
    )
    strip: tuple[str, ...] = Field(
        default=(), description="Request fields taken away, before `defaults` fill in.", examples=[["logit_bias"]]
    )

    @field_validator("defaults", "force", "strip")
    @classmethod
    def _llmux_owns_routing(cls, value: V) -> V:
        refuse_routing(value)
        return value


class VirtualModelConfig(ParametersConfig):
    """A public name: a model and what is done to its requests."""

    model: str = Field(
        min_length=1, description="The model that answers. Also accepted: `physical`.", examples=["qwen"]
    )
    description: str | None = Field(
        default=None, description="Shown in the list of models.", examples=["Quick answers, no thinking"]
    )


CONFIGURED: Final = "configured"
"""Means "no set", so no set may have this name."""


class SetConfig(Section):
    """What holds while the set is active, instead of `limits.default_model` and the models' own `pin`."""

    description: str | None = Field(default=None, description="Shown beside its switch.", examples=["In the evening"])
    default_model: str | list[str] = Field(
        default_factory=list,
        description="The model, or models, to come back when nothing else is asked for.",
        examples=["qwen-coder"],
    )
    pin: list[str] = Field(
        default_factory=list,
        description="The models that are never evicted; all others may be.",
        examples=[["qwen-coder", "embedder"]],
    )

    @property
    def default_models(self) -> tuple[str, ...]:
        """The names in `default_model`."""
        return (self.default_model,) if isinstance(self.default_model, str) else tuple(self.default_model)
