"""The validated configuration: the models to serve, their names, and their limits.

A `Catalog` is frozen; a reload builds another. A *model* is physical and has one worker; a *virtual model* is a public
name for it together with a rewrite of its requests. Any number of virtual models share one worker.

Listed are all virtual models, and a model under its own name if no virtual model refers to it, or with `public: true`
(`public: false` never lists it). A model's own name is always accepted in requests, and so is its name on the hub, unless
several models or anything else here has that name. A virtual model may have the name of its own model; it then replaces it. A *task* is a ladder of such names,
and is listed as `task:NAME`; nothing else may be called so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from runtimes.adapters.remote_adapter import RemoteAdapter
from runtimes.base import Capabilities, Endpoint, Thinking
from runtimes.device_kind import DeviceWanted
from runtimes.estimate import Estimate
from runtimes.model_config import PATIENCE, Modality, ModelConfig
from runtimes.registry import AnyAdapter
from runtimes.sizing import Room, Sizing
from supervisor.catalog.document.document import Layer, Place, Problem, Trail, dotted
from supervisor.catalog.document.masking import masked
from supervisor.catalog.models import sources
from supervisor.catalog.models.prompt_format import PromptFormat, written_here
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.catalog.problems import nearest
from supervisor.catalog.sections.clients import DEFAULT, DEFAULT_CLIENT, ClientConfig
from supervisor.catalog.sections.sections import (
    DeviceConfig,
    LimitsConfig,
    ServerConfig,
    SetConfig,
    VirtualModelConfig,
    drain_seconds,
)
from supervisor.catalog.sections.tasks import TaskConfig
from supervisor.core.memory.device_sets import MARGIN_MIB, MOST_PARTS, allowed
from supervisor.core.memory.footprint import choose
from supervisor.core.messages import devices_listed
from supervisor.core.types import (
    DEFAULT_PRIORITY,
    DeviceId,
    DeviceSpec,
    Footprint,
    FootprintSource,
    ModelId,
    ModelSpec,
    Policy,
)
from supervisor.errors import NotFoundError

_ELSEWHERE = Footprint(0, FootprintSource.EXPLICIT, "others run it")
TASK = "task:"
"""The prefix of the public names of tasks, and of no other name."""


@dataclass(frozen=True)
class Learned:
    """The figures measured of models, by footprint key."""

    mib: Mapping[tuple[str, DeviceId], int] = field(default_factory=dict)  # MiB that a model took on a device
    load_s: Mapping[str, float] = field(default_factory=dict)  # duration of the last load
    raised: Mapping[tuple[str, DeviceId], int] = field(default_factory=dict)  # MiB; a load with less ran out of memory


NOTHING_LEARNED = Learned()


@dataclass(frozen=True)
class CatalogModel:
    """A configured model with the adapter that runs it."""

    id: ModelId
    config: ModelConfig
    adapter: AnyAdapter
    rewrite: Rewrite  # for requests that name the model itself
    type_keep_alive_s: float | None = None  # of models of this type that set none
    troubles: tuple[Problem, ...] = ()  # why it can't run on this machine now
    find_troubles: Callable[[], tuple[Problem, ...]] = field(default=tuple, compare=False, repr=False)  # now
    runtimes_dir: Path | None = field(default=None, compare=False)  # None: this machine isn't checked
    sizing: Sizing | None = None  # the choice of `sized`
    _as_configured: ModelConfig | None = None  # before `sized`
    _devices: tuple[DeviceSpec, ...] = ()

    def sized(self, devices: Sequence[DeviceSpec]) -> CatalogModel:
        """The model with context and slots for these devices, if the file leaves them open. Blocks on its files."""
        written = self._as_configured or self.config
        room = _largest_room(written, self.adapter.gpus(written), self.allowed(devices))
        config, sizing = self.adapter.sized(written, room)
        together = _room_together(written, self.allowed(devices))
        if sizing is not None and room is not None and together is not None:
            estimate = self.adapter.estimate(config)
            if estimate is not None and estimate.mib > room.mib:  # too large for one device: use several
                config, sizing = self.adapter.sized(written, together)
        return replace(self, config=config, sizing=sizing, _as_configured=written, _devices=tuple(devices))

    def refreshed(self) -> CatalogModel:
        """The model with its present troubles on this machine, and its files read again. Blocks on its files."""
        return replace(self, troubles=self.find_troubles(), _as_configured=self.as_configured).sized(self._devices)

    def with_troubles_of(self, now: CatalogModel) -> CatalogModel:
        """The model with the troubles of `now`; all else stays as it was read when its files were there."""
        same = copy(self)
        same.__dict__.update(
            troubles=now.troubles, find_troubles=now.find_troubles, type_keep_alive_s=now.type_keep_alive_s
        )
        return same

    def pinned(self, *, pin: bool) -> CatalogModel:
        """The model pinned, or not pinned. Facts already read from its files are kept."""
        same = copy(self)
        same.__dict__.pop("shown", None)
        same.__dict__.update(
            config=self.config.model_copy(update={"pin": pin}),
            _as_configured=self.as_configured.model_copy(update={"pin": pin}),
        )
        return same

    def configured(self, config: ModelConfig) -> CatalogModel:
        """The model with another configuration, for the same devices. Blocks on its files."""
        return replace(self, _as_configured=config).sized(self._devices)

    @property
    def trouble(self) -> str:
        """The troubles as text without places in files; empty: there are none."""
        return troubles_text(self.troubles)

    @cached_property
    def kinds(self) -> frozenset[str] | None:
        """The kinds of GPUs that its program computes on, as in `ModelSpec`. The first call blocks on a small file."""
        if self.runtimes_dir is None or self.adapter.remote:
            return None
        return self.adapter.kinds(self.as_configured, runtimes_dir=self.runtimes_dir)

    def allowed(self, devices: Sequence[DeviceSpec]) -> Sequence[DeviceSpec]:
        """The devices that the model may run on, out of these."""
        return allowed(self.config.devices, self.kinds, devices)

    @property
    def as_configured(self) -> ModelConfig:
        """The model's configuration as the file has it: keys that the file leaves open are open."""
        return self._as_configured or self.config

    @cached_property
    def estimate(self) -> Estimate | None:
        """The memory that the runtime computes for the model: whole MiB, at least one. The first call blocks on its files.

        None also for an impossible value of the adapter.
        """
        found = self.adapter.estimate(self.config)
        if found is None or not 0 <= found.mib < math.inf:
            return None
        return replace(found, mib=max(1, math.ceil(found.mib)), each_mib=max(0, math.ceil(found.each_mib)))

    @cached_property
    def definition(self) -> str:
        """Fingerprint of all settings that affect how the model's worker is run."""
        patience = self.config.model_dump_json(include=set(PATIENCE))
        return sha256(f"{self.footprint_key}\n{patience}".encode()).hexdigest()

    @cached_property
    def shown(self) -> dict[str, JsonValue]:
        """The effective configuration for display, with likely secrets masked. Don't change it."""
        return {key: masked(value, key) for key, value in self.config.model_dump(mode="json").items()}

    @cached_property
    def footprint_key(self) -> str:
        """Fingerprint of all settings that affect the memory of the model's worker: the key of learned footprints."""
        text = f"{self.adapter.name}\n{self.adapter.memory_definition(self.config)}"
        return sha256(text.encode()).hexdigest()

    @cached_property
    def capabilities(self) -> Capabilities:
        """The model's capabilities. The first call blocks on its files: call it in a thread."""
        found = self.adapter.capabilities(self.config)
        found = found if self.prompts is None else self.prompts.limited(found)
        return replace(found, documents=self.config.type == "llm" and self.inputs is not None)

    @cached_property
    def prompts(self) -> PromptFormat | None:
        """The format in which llmux writes its prompts; None: its worker does. The first call may block on its files."""
        wanted = self.config.prompt_format
        return None if wanted is None else written_here(wanted, self.adapter.chat_template(self.config))

    @cached_property
    def thinking(self) -> Thinking | None:
        """How a request switches reasoning; None: it can't. The first call may block on its files."""
        return self.adapter.thinking(self.config) if self.prompts is None else self.prompts.thinking

    @property
    def inputs(self) -> frozenset[Modality] | None:
        """The kinds of input that the model takes; None where only the worker knows. May read the head of a file."""
        return self.adapter.inputs(self.config) if self.prompts is None else frozenset({"text"})

    @property
    def endpoints(self) -> frozenset[Endpoint]:
        """The endpoints that the model serves."""
        endpoints = self.adapter.endpoints(self.config)
        return endpoints if self.prompts is None else self.prompts.endpoints(endpoints)

    @property
    def known_capabilities(self) -> Capabilities | None:
        """`capabilities`, if they are known already."""
        return self.__dict__.get("capabilities")

    @property
    def known_estimate(self) -> Estimate | None:
        """`estimate`, if it is known already."""
        return self.__dict__.get("estimate")

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The endpoints that the model serves, each as "METHOD /path"."""
        return tuple(sorted(f"{endpoint.method} {endpoint.path}" for endpoint in self.endpoints))

    @cached_property
    def load_constraints(self) -> Mapping[str, Mapping[str, JsonValue]]:
        """The keys that may be set for a load, each with its type and range as JSON Schema."""
        return self.adapter.overridable(self.config)

    @property
    def priority(self) -> int:
        """The model's own priority, else that of its type."""
        return DEFAULT_PRIORITY[self.config.type] if self.config.priority is None else self.config.priority

    @property
    def keep_alive_s(self) -> float | None:
        """The model's own keep-alive, else that of its type; None: it stays until its memory is needed."""
        own = self.config.keep_alive_s
        return self.type_keep_alive_s if own is None else None if own == "forever" else own

    def spec(self, learned: Learned = NOTHING_LEARNED) -> ModelSpec:
        """The model's specification for the core. Blocks: the adapter may read the model's files to estimate its memory."""
        config = self.config
        measured = {
            device: Footprint(mib, FootprintSource.LEARNED, f"measured on {device}")
            for (key, device), mib in learned.mib.items()
            if key == self.footprint_key
        }
        remote = self.adapter.remote
        by_worker = remote and not isinstance(self.adapter, RemoteAdapter)
        estimate = self.estimate
        computed = None
        if estimate is not None:
            each_mib = estimate.each_mib if config.gpus == "auto" else 0
            computed = Footprint(estimate.mib, FootprintSource(estimate.source), estimate.detail, each_mib)
        return ModelSpec(
            id=self.id,
            type=config.type,
            priority=self.priority,
            footprint=_ELSEWHERE if remote else choose(name=self.id, explicit_mib=config.vram_mib, computed=computed),
            learned=measured,
            raised={device: mib for (key, device), mib in learned.raised.items() if key == self.footprint_key},
            devices=tuple(DeviceId(name) for name in config.devices),
            kinds=self.kinds,
            gpus=self.adapter.gpus(config),
            spreads=config.gpus == "auto",
            pin=config.pin,
            preload=config.preload or by_worker,  # it takes no memory, so it need not wait for a request
            keep_alive_s=self.keep_alive_s,
            own_keep_alive_s=config.keep_alive_s if isinstance(config.keep_alive_s, int | float) else 0.0,
            hold_s=config.hold_s,
            target_inflight=self.adapter.target_inflight(config),
            shared_context=self.adapter.shared_context(config),
            replicas=config.replicas,
            replica_max=config.most_replicas,
            max_queue=config.max_queue,
            drain_s=drain_seconds(config.drain_s),
            remote=remote,
            by_worker=by_worker,
            definition=self.definition,
            footprint_key=self.footprint_key,
            load_s=learned.load_s.get(self.footprint_key),
            trouble=self.trouble,
        )


def troubles_text(troubles: Sequence[Problem]) -> str:
    """Troubles of one model, without their places in the configuration."""
    return "; ".join(f"{dotted(at)}: {one.message}" if (at := one.trail[2:]) else one.message for one in troubles)


def _largest_room(config: ModelConfig, gpus: int, devices: Sequence[DeviceSpec]) -> Room | None:
    """The largest room for the model: GPUs before host memory, and at most `vram_mib`. None: no device is known."""
    shared = sorted((device for device in devices if not device.takes_whole), key=lambda one: -one.usable_mib)
    if len(shared) >= gpus:
        room = Room(gpus * shared[gpus - 1].usable_mib, devices_listed(shared[:gpus]))
    elif whole := [device for device in devices if device.takes_whole]:
        room = Room(whole[0].usable_mib, whole[0].label, accelerates=False)
    else:
        return None
    if config.vram_mib is not None and config.vram_mib <= room.mib:
        return replace(room, mib=config.vram_mib, name="vram_mib", is_own=True)
    return room


def _room_together(config: ModelConfig, devices: Sequence[DeviceSpec]) -> Room | None:
    """The memory of all GPUs that the model may run on, taken together, where it may use several."""
    gpus = [one for one in devices if not one.takes_whole]
    if config.gpus != "auto" or config.vram_mib is not None or len(gpus) < 2:
        return None
    room_mib = sum(sorted((max(0, one.usable_mib - MARGIN_MIB) for one in gpus), reverse=True)[:MOST_PARTS])
    return Room(room_mib, "its GPUs together")


@dataclass(frozen=True, slots=True)
class Route:
    """The model that a name in a request stands for, and the changes to the request."""

    name: str
    model: CatalogModel
    rewrite: Rewrite
    description: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualModel(Route):
    """A public name with a section of its own."""

    config: VirtualModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Route):
    """A list of candidates under one name, which begins with TASK. As a `Route` it is its first candidate."""

    config: TaskConfig
    candidates: tuple[Route, ...]  # under their names in the configuration; never empty

    def sized(self, models: Mapping[ModelId, CatalogModel]) -> Task:
        """The task with these models instead of its own."""
        candidates = tuple(replace(one, model=models[one.model.id]) for one in self.candidates)
        return replace(self, model=candidates[0].model, candidates=candidates)


@dataclass(frozen=True)
class Catalog:
    """A whole configuration without known mistakes, without disabled models and their virtual models."""

    models: Mapping[ModelId, CatalogModel]
    virtual: Mapping[str, VirtualModel]
    server: ServerConfig
    limits: LimitsConfig
    devices: tuple[DeviceConfig, ...] | Literal["auto"]
    tasks: Mapping[str, Task] = field(default_factory=dict)  # by public name
    origins: Mapping[Trail, Place] = field(default_factory=dict, repr=False)
    clients: Mapping[str, ClientConfig] = field(default_factory=dict)  # by tenant
    sets: Mapping[str, SetConfig] = field(default_factory=dict)
    active_set: str | None = None  # its pins and default models apply; None: those of the models and limits
    models_from: tuple[Path, ...] = ()  # folders whose models are all served
    unread: tuple[str, ...] = ()  # a line for each unusable file in them

    def is_local(self, model: CatalogModel) -> bool:
        """Whether the model comes from `models_from`, and has no entry."""
        place = self.origin("models", model.id)
        return place is not None and place.source.label == str(getattr(model.config, "path", None))

    def sized(self, devices: Sequence[DeviceSpec]) -> Catalog:
        """The catalog with every model's context and slots chosen for these devices. Blocks on reading model files."""
        return self.of({name: model.sized(devices) for name, model in self.models.items()})

    def of(self, models: Mapping[ModelId, CatalogModel]) -> Catalog:
        """The catalog with these models under the same names."""
        virtual = {name: replace(one, model=models[one.model.id]) for name, one in self.virtual.items()}
        tasks = {name: task.sized(models) for name, task in self.tasks.items()}
        return replace(self, models=models, virtual=virtual, tasks=tasks)

    def with_set(self, name: str | None) -> Catalog:
        """The catalog with this set active; the catalog itself if there is no such set."""
        config = self.sets.get(name or "")
        if config is None:
            return self
        pinned = {self.resolve(one).model.id for one in config.pin}
        models = {model.id: model.pinned(pin=model.id in pinned) for model in self.models.values()}
        limits = self.limits.model_copy(update={"default_model": list(config.default_models)})
        return replace(self.of(models), limits=limits, active_set=name)

    def model_specs(self, learned: Learned = NOTHING_LEARNED) -> tuple[ModelSpec, ...]:
        """Every model for the core, in the order of the file. Blocks on reading model files: call it in a thread."""
        return tuple(model.spec(learned) for model in self.models.values())

    @property
    def wanted_devices(self) -> Literal["auto"] | list[DeviceWanted]:
        """The devices that the daemon has to open."""
        return "auto" if self.devices == "auto" else [device.wanted for device in self.devices]

    @property
    def devices_variable(self) -> str:
        """The environment variable that names these devices; empty: none does."""
        place = self.origin("devices")
        return place.source.label if place is not None and place.source.layer is Layer.ENVIRONMENT else ""

    @property
    def policy(self) -> Policy:
        """The policy by which models compete for memory."""
        models = (self.resolve(name).model.id for name in self.limits.default_models)
        return replace(self.limits.policy(), default_models=tuple(dict.fromkeys(models)))

    @cached_property
    def _routes(self) -> dict[str, Route]:
        own = {str(model.id): Route(model.id, model, model.rewrite) for model in self.models.values()}
        bare = {name.removeprefix(TASK): task for name, task in self.tasks.items()}  # only if no model has that name
        hub = {
            name: Route(name, only, only.rewrite)
            for name, (only, *others) in self._models_by_hub_name.items()
            if not others
        }
        return {**hub, **bare, **own, **self.virtual, **self.tasks}

    @cached_property
    def _models_by_hub_name(self) -> dict[str, list[CatalogModel]]:
        """The models by their names on the hub."""
        found: dict[str, list[CatalogModel]] = {}
        for model in self.models.values():
            if (name := sources.hub_id(model.config, self.server.models_dir)) is not None:
                found.setdefault(name, []).append(model)
        return found

    def nothing_to_serve(self) -> str | None:
        """The problem of a configuration without models, with its place; None: it has models, or they may come."""
        if self.models or self.models_from:
            return None
        at: Trail = ("models",) if ("models",) in self.origins else ()
        disabled = sum(trail[0] == "models" for trail in self.origins if len(trail) == 2)
        what = 'every model has "enabled: false", so there is nothing to serve: enable one'
        if not disabled:
            what = (
                "there are no models to serve: add one with llmux add ORG/REPO-GGUF, or as llmux config example shows"
            )
            if self.server.health == "runner":
                what += "; those of a folder are served if MODEL_BASE_PATH names it"
        return str(Problem(self.origins[at], at, what))

    def route(self, name: str) -> Route | None:
        """The model and rewrite for a request's `model`: a lookup, no parsing."""
        return self._routes.get(name)

    def resolve(self, name: str) -> Route:
        """As `route`, but raises NotFoundError, which suggests a similar name, for an unknown name."""
        route = self._routes.get(name)
        if route is None:
            meant = self.nearest(name)
            hint = f" Did you mean {meant!r}?" if meant is not None else " GET /v1/models lists the choice."
            if name in self._models_by_hub_name:
                hint = f" Several come from there: {', '.join(one.id for one in self._models_by_hub_name[name])}. Name one of them."
            raise NotFoundError(f"There is no model {name[:200]!r}.{hint}", code="model_not_found", param="model")
        return route

    def client(self, tenant: str) -> ClientConfig:
        """The profile of this client; the default profile for other clients."""
        return self.clients.get(tenant) or self.clients.get(DEFAULT, DEFAULT_CLIENT)

    def nearest(self, name: str) -> str | None:
        """The most similar known name. For error messages only: takes time."""
        return nearest(name[:200], self._routes)

    def listing(self) -> tuple[Route, ...]:
        """GET /v1/models: virtual models, then models under their own names, then tasks, each in the order of the file."""
        return self._listing

    @cached_property
    def _listing(self) -> tuple[Route, ...]:
        listed: list[Route] = list(self.virtual.values())
        with_virtual = {virtual.model.id for virtual in self.virtual.values()}
        for model in self.models.values():
            public = model.id not in with_virtual if model.config.public is None else model.config.public
            if public and model.id not in self.virtual:
                listed.append(self._routes[model.id])
        return (*listed, *self.tasks.values())

    def names_of(self, model: ModelId) -> tuple[str, ...]:
        """The virtual models of this one, in the order of the file."""
        return self._virtual_names.get(model, ())

    @cached_property
    def _virtual_names(self) -> dict[ModelId, tuple[str, ...]]:
        found: dict[ModelId, tuple[str, ...]] = {}
        for name, virtual in self.virtual.items():
            found[virtual.model.id] = (*found.get(virtual.model.id, ()), name)
        return found

    def origin(self, *trail: str | int) -> Place | None:
        """The place where an effective value was set; None: it is a default."""
        return self.origins.get(trail)
