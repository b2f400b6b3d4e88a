"""The adapter contract: how a configured model becomes a process that llmux can probe and send requests to.

An adapter is pure: it turns a validated model configuration and a `LaunchContext` into a `LaunchSpec`, says which
endpoints the worker serves and how parameters map, and estimates memory by looking at files. It starts nothing itself.
Every adapter passes the contract suite in tests/contract.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import ClassVar, Final, Generic, Literal, TypeVar, get_args

from pydantic import JsonValue

from runtimes import installed
from runtimes.build import Archives, Build
from runtimes.device_kind import DeviceAssignment, visibility
from runtimes.endpoints import OTHER, SMALLEST, Meaning, meaning_of
from runtimes.estimate import Estimate
from runtimes.model_config import PATIENCE, PLACEMENT, Modality, ModelConfig
from runtimes.prompt_cache import NO_CACHE, PromptCache
from runtimes.shared.kernel import Kernel
from runtimes.sizing import Room, Sizing


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """The supervisor's decisions for one start of a worker."""

    model: str
    host: str
    port: int
    key: str  # per-spawn secret; the worker must refuse requests without it where the runtime can
    devices: tuple[DeviceAssignment, ...]  # several only where `Adapter.gpus` says so, and then only GPUs
    runtimes_dir: Path
    parts_mib: tuple[int, ...] = ()  # its share of each device, if the core decided one

    def environment(self, runtime: str) -> Path:
        """The path of the runtime's own environment, whether it exists or not.

        The link is resolved: a worker must still find its files after a newer environment replaced the link.
        """
        return (self.runtimes_dir / runtime).resolve()

    @property
    def device(self) -> DeviceAssignment:
        """The first device, and nearly always the only one."""
        return self.devices[0]

    def device_environment(self) -> dict[str, str]:
        """The variables that limit the worker to its own devices."""
        return visibility(self.devices)


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A health check. Any 2xx response to GET `path` means that the model answers.

    During the start, GET `then` with the worker's key must succeed as well.
    """

    path: str = "/health"
    then: str | None = None
    interval_s: float = 0.5


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Everything needed to start, probe, and talk to one worker."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # added to the allowlisted base environment
    cwd: Path | None = None
    library_path: tuple[str, ...] = ()  # prepended to LD_LIBRARY_PATH
    health: HealthCheck = HealthCheck()
    auth: str | None = None  # value of the Authorization header the proxy sends to this worker
    metrics: str | None = None  # path of the worker's own Prometheus metrics, where it has any
    patience_s: float = 0.0  # allowed silence in addition to `limits`
    progress: str | None = (
        None  # path with the progress of its requests: {"requests": {x-request-id: {"step", "steps"}}}
    )
    stop_argv: tuple[str, ...] | None = None  # run instead of the first SIGTERM
    kill_argv: tuple[str, ...] | None = None  # ends what it runs outside its processes; those then don't own its port
    host: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True, slots=True)
class RemoteSpec:
    """Everything needed to talk to a model that somebody else runs. `key` is a secret; `repr` leaves it out."""

    base_url: str  # http(s)://host[:port]/prefix, no slash at the end; stands for /v1 of the public paths
    key: str | None = field(default=None, repr=False)
    key_env: str | None = None  # the variable the key came from; may be shown
    ca_file: Path | None = None  # certificates to trust instead of the system's
    connect_s: float = 10.0
    first_byte_s: float | None = None  # None: as for workers; so with the next
    stream_idle_s: float | None = None
    max_retries: int = 0  # only before an answer has begun
    retry_wait_s: float = 5.0
    probe_interval_s: float | None = None  # None: it counts as there


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """A public path, or a pattern of paths (see `path_pattern`), that a runtime's workers serve. llmux refuses all others."""

    path: str
    method: Literal["POST", "GET"] = "POST"
    upstream_path: str | None = None  # if it differs from the public path
    loads: bool = field(default=False, compare=False)  # of a GET: it loads its model, and counts as a use
    meaning: Meaning = field(default=OTHER, compare=False)  # known by itself for a well-known path
    unsupported_fields: tuple[tuple[str, bytes], ...] = field(default=(), compare=False)
    """Pairs of a field and a text. The workers ignore or misread the field if its JSON isn't null and contains the text.
    llmux then translates the request, if it can.
    """

    passed_over: frozenset[str] = field(default=frozenset(), compare=False)
    """Fields of the API that the workers ignore without an error."""

    def __post_init__(self) -> None:
        if self.meaning is OTHER:
            object.__setattr__(self, "meaning", meaning_of(self.path))

    @property
    def only_looks(self) -> bool:
        """Does a request only read the worker's state? Then it neither loads the model nor keeps it loaded."""
        return self.method == "GET" and not self.loads


@dataclass(frozen=True, slots=True)
class TextReferences:
    """Prompt texts that workers treat as references: any text between these two marks, as in Markdown."""

    begin: str
    end: str  # one character


@dataclass(frozen=True, slots=True)
class Thinking:
    """Request fields that switch reasoning on or off. llmux merges them into the body, objects key by key."""

    enabled: Mapping[str, JsonValue]
    disabled: Mapping[str, JsonValue]


CHAT_TEMPLATE: Final = Thinking(
    enabled={"chat_template_kwargs": {"enable_thinking": True}},
    disabled={"chat_template_kwargs": {"enable_thinking": False}},
)
"""How most chat templates switch reasoning on and off."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a model, for people and clients that choose a model. None: unknown."""

    modalities: tuple[Modality, ...]
    tools: bool | None = None
    thinking: bool | None = None
    multi_turn: bool | None = None
    context: int | None = None  # tokens of one request, prompt and answer together
    architecture: str | None = None  # as the file of its weights names it
    translates: bool = False  # from one language that a request names into another, and nothing else
    documents: bool = False  # does llmux put the text of documents in their place?


def in_order(inputs: Collection[Modality]) -> tuple[Modality, ...]:
    """These modalities in the order of `Capabilities`."""
    return tuple(modality for modality in get_args(Modality) if modality in inputs)


_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth")


MADE_FOR: Final[Mapping[str, frozenset[str]]] = {
    "cpu": frozenset(),
    "cuda": frozenset({"cuda"}),
    "rocm": frozenset({"rocm"}),
    "vulkan": frozenset({"cuda", "rocm", "vulkan"}),
}
"""The target of an environment → the kinds of GPUs that its programs compute on."""


class RuntimeNotInstalledError(Exception):
    """The runtime's program is not installed; `remedy` is the command that installs it."""

    def __init__(self, runtime: str, message: str, remedy: str) -> None:
        super().__init__(f"{message} Remedy: {remedy}")
        self.runtime = runtime
        self.remedy = remedy


class ModelUnusableError(Exception):
    """The model can't be launched as configured (missing file, unsupported option). The message names the change to make."""


class Contradiction(str):
    """A problem in the configuration itself: no other file and no other machine would solve it."""

    __slots__ = ()


C = TypeVar("C", bound=ModelConfig)


class Adapter(abc.ABC, Generic[C]):
    """One runtime. Stateless; one instance serves all of its models."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for tables
    all_endpoints: ClassVar[frozenset[Endpoint]]  # of all of its models together, unless configured otherwise
    requirements: ClassVar[Path | None] = None  # hash-pinned lock of its own venv, if any: tools/lock_runtimes.py
    prune: ClassVar[tuple[str, ...]] = ()  # patterns below site-packages: files removed once everything is installed
    builds: ClassVar[Mapping[str, Build]] = {}  # device → how its program is compiled; other devices need no compiler
    archives: ClassVar[Archives | None] = None  # its project's own builds for GPUs
    spreads: ClassVar[bool] = False  # can one of its workers use several GPUs?
    divides: ClassVar[bool] = False  # in unequal parts, too: `gpus: auto`
    offload_key: ClassVar[str] = ""  # moves a part of a model from the GPU to the main memory
    remote: ClassVar[bool] = False  # do others run its models? They take no device then
    converts_pictures: ClassVar[frozenset[str]] = frozenset(
        {"heic"}
    )  # forms that its workers don't open: webp, heic, avif
    heeds_max_tokens: ClassVar[bool] = True  # may a chat's answer be cut short?
    overridable_keys: ClassVar[
        tuple[str, ...]
    ] = ()  # beside vram_mib; never a path, address, program or free arguments, unless the file lists the allowed values
    claims: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # device → further name==version that the venv claims to have
    decoding: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "top_k": ("top_k",),
        "min_p": ("min_p",),
        "repetition_penalty": ("repetition_penalty",),
    }  # parameter beyond OpenAI's → its names in the workers' chat completions; without an entry: not supported
    config: type[C]

    def check(self, config: C, *, runtimes_dir: Path) -> tuple[str, ...]:
        """Problems of this configuration that are visible without a start, each a sentence that names the key.

        Reads files' existence and metadata only. An empty tuple means it should start. A configuration with a
        `Contradiction` is refused; every other problem is about this machine, and only this model can't run until it is mended.
        """
        return ()

    @abc.abstractmethod
    def launch(self, config: C, context: LaunchContext) -> LaunchSpec:
        """How to start it. Raises RuntimeNotInstalledError or ModelUnusableError."""

    def endpoints(self, config: C) -> frozenset[Endpoint]:
        """The endpoints of this model's workers. A runtime with several kinds of models distinguishes the kinds here."""
        return self.all_endpoints

    def smallest_request(self, config: C) -> tuple[str, Mapping[str, object]] | None:
        """The path and body of the cheapest possible request; None where the model has no such request."""
        paths = {endpoint.path: endpoint.upstream_path or endpoint.path for endpoint in self.endpoints(config)}
        requests = [*SMALLEST.get(config.type, {}).items()]
        if config.prompt_format is not None:  # its worker may have no chat template
            requests.reverse()
        return next(((paths[path], body) for path, body in requests if path in paths), None)

    def estimate(self, config: C) -> Estimate | None:
        """The model's memory, from metadata or file sizes; None: unknown."""
        return None

    def weights(self, config: C) -> tuple[Path, ...]:
        """The weight files that a load reads; empty: unknown. Blocks while it lists folders."""
        path = getattr(config, "path", None)
        if not isinstance(path, Path) or not path.is_dir():
            return ()
        return tuple(path.glob("*.safetensors")) or tuple(file for end in _WEIGHTS for file in path.glob(end))

    def sized(self, config: C, room: Room | None) -> tuple[C, Sizing | None]:
        """The configuration with its open values for context and slots filled in, and the reasons.

        None as reasons: the runtime has neither context nor slots.

        Deterministic for the same files and room. No room: as for an unknown device. Blocks while it reads metadata.
        """
        return config, None

    def gpus(self, config: C) -> int:
        """The number of GPUs that one worker uses; no meaning on host memory."""
        return config.equal_gpus

    def target_inflight(self, config: C) -> int:
        """Requests one worker serves well at once; 0: no limit."""
        return config.target_inflight or 0

    def shared_context(self, config: C) -> int:
        """The size in tokens of a context that all requests of one worker share; 0: each request has its own context."""
        return 0

    def needs_permission(self, config: C) -> bool:
        """Must each request allow that it leaves this machine?"""
        return False

    def kinds(self, config: C, *, runtimes_dir: Path) -> frozenset[str] | None:
        """The kinds of GPUs that this model's program computes on; empty: the processor only; None: unknown, so any.

        Depends on the target of the environment. Blocks on a small file.
        """
        if self.offload_key and getattr(config, self.offload_key) == 0:
            return frozenset()
        made = installed.program(runtimes_dir / self.name) if self.requirements is not None else None
        return None if made is None or made.device is None else MADE_FOR[made.device]

    def hint(self, line: str, argv: Sequence[str]) -> str:
        """A hint for everybody, to follow the last log line of a worker with this command; empty: no hint."""
        return ""

    def needs_set_uid(self, config: C) -> bool:
        """Does the program start set-UID programs such as `newuidmap`? A sealed service forbids that."""
        return False

    def prompt_cache(self, config: C) -> PromptCache | None:
        """The controls of the workers' prompt cache; None: only the program that serves the model knows them."""
        return NO_CACHE

    def thinking(self, config: C) -> Thinking | None:
        """Fields for `enable_thinking`; None where the runtime has no such switch."""
        return None

    def chat_template(self, config: C) -> str | None:
        """The worker's chat template, in Jinja. Blocks on the model's files.

        Empty: there is none, or only the worker knows it. None: the model's files aren't there yet.
        """
        return ""

    def voices(self, config: C) -> tuple[str, ...]:
        """The names of a speech model's voices, if they are known without a worker; else empty."""
        return ()

    def fields(self, config: C) -> Mapping[str, JsonValue]:
        """Default fields of all requests that render a prompt, unless a virtual model switches thinking itself."""
        return {}

    def kernels(self, config: C, described: Callable[[], Mapping[str, JsonValue]]) -> tuple[Kernel, ...]:
        """The kernels that a worker needs on a GPU. `described` reads the model's config.json, at some cost."""
        return ()

    def upstream_model(self, config: C) -> str | None:
        """The model name that the worker requires in requests; None: any name."""
        return None

    def known_as(self, config: C) -> Collection[str]:
        """Further names that clients use to load the model, beside its names in the configuration."""
        return ()

    def answers_as(self, config: C, model: str) -> str:
        """The model name in its answers, for a model that is configured as `model`."""
        return self.upstream_model(config) or model

    def inputs(self, config: C) -> frozenset[Modality] | None:
        """The model's input modalities; None: only the worker knows. May read the head of a file."""
        return frozenset(config.modalities) if "modalities" in config.model_fields_set else None

    def text_references(self, config: C) -> TextReferences | None:
        """Prompt texts that make a worker load something; None: only keys such as `image_url` do."""
        return None

    def capabilities(self, config: C) -> Capabilities:
        """The model's abilities. Blocks while it reads metadata."""
        return Capabilities(
            modalities=tuple(config.modalities),
            thinking=True if self.thinking(config) is not None else None,
        )

    def overridable(self, config: C) -> Mapping[str, Mapping[str, JsonValue]]:
        """Keys an operator may set for a load without changing the file, each with its constraint as JSON Schema."""
        return self.constraints(*self.overridable_keys)

    def context_settings(self, config: C, tokens: int) -> Mapping[str, JsonValue]:
        """The overrides that give one request a context of this many tokens; empty: no override does."""
        return {}

    def constraints(self, *keys: str) -> dict[str, Mapping[str, JsonValue]]:
        """The JSON Schema of these configuration keys and of those that every model has, `vram_mib`."""
        properties = _properties(self.config)
        return {key: _constraint(properties[key]) for key in (*keys, "vram_mib")}

    def memory_definition(self, config: C) -> str:
        """A stable text of everything that determines the worker's memory. Models with equal texts share learned footprints."""
        return config.model_dump_json(exclude={*PLACEMENT, *PATIENCE})


@cache
def _properties(config: type[ModelConfig]) -> Mapping[str, Mapping[str, JsonValue]]:
    """The JSON Schema of the class's keys. Building it takes milliseconds, and a thousand models may share a few classes."""
    properties: Mapping[str, Mapping[str, JsonValue]] = config.model_json_schema()["properties"]
    return properties


def _constraint(schema: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """The part of a field's schema that limits its values, without `null`, which stands for the default."""
    choices = [choice for choice in _as_list(schema.get("anyOf")) if choice != {"type": "null"}]
    if len(choices) == 1 and isinstance(choices[0], dict):
        schema = {**schema, **choices[0]}
    elif choices:
        return {"anyOf": choices}
    kept = ("type", "enum", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    return {key: schema[key] for key in kept if key in schema}


def _as_list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []
