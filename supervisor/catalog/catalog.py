"""The validated configuration: what there is to serve, under which names, with which numbers.

A `Catalog` is frozen; a reload builds another. A *model* is physical and has one worker; a *virtual model* is a public
name for it together with a rewrite of its requests. Any number of virtual models share one worker.

Which names are listed: every virtual model; and a model under its own name where no virtual model refers to it, or
where it says `public: true` (`public: false` never lists it). A model's own name is accepted in requests in any case.
A virtual model may bear the name of the model it refers to and then stands for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Literal

from pydantic import JsonValue

from runtimes.base import PATIENCE, Capabilities, ModelConfig, RemoteAdapter
from runtimes.registry import AnyAdapter
from supervisor.catalog.document import Place, Problem, Trail, dotted
from supervisor.catalog.problems import nearest
from supervisor.catalog.rewrite import Rewrite
from supervisor.catalog.sections import DeviceConfig, LimitsConfig, ServerConfig, VirtualModelConfig
from supervisor.core.footprint import choose
from supervisor.core.types import (
    DEFAULT_PRIORITY,
    DeviceId,
    DeviceSpec,
    Footprint,
    FootprintSource,
    ModelId,
    ModelSpec,
)

Learned = Mapping[tuple[str, DeviceId], int]
"""(footprint key, device) → MiB measured there."""

_ELSEWHERE = Footprint(0, FootprintSource.EXPLICIT, "others run it")
_GUESSES = frozenset({FootprintSource.NAME, FootprintSource.DEFAULT})


@dataclass(frozen=True)
class CatalogModel:
    """A configured model with the adapter that runs it."""

    id: ModelId
    config: ModelConfig
    adapter: AnyAdapter
    rewrite: Rewrite  # for requests that name the model itself

    @cached_property
    def definition(self) -> str:
        """Fingerprint of all that decides how its worker is run."""
        patience = self.config.model_dump_json(include=set(PATIENCE))
        return sha256(f"{self.footprint_key}\n{patience}".encode()).hexdigest()

    @cached_property
    def footprint_key(self) -> str:
        """Fingerprint of all that decides what memory its worker takes; learned footprints are kept under it."""
        text = f"{self.adapter.name}\n{self.adapter.memory_definition(self.config)}"
        return sha256(text.encode()).hexdigest()

    @cached_property
    def capabilities(self) -> Capabilities:
        """What it can do. Blocks on its files when first asked: call it in a thread."""
        return self.adapter.capabilities(self.config)

    @property
    def known_capabilities(self) -> Capabilities | None:
        """`capabilities`, if they were asked for before."""
        return self.__dict__.get("capabilities")

    @cached_property
    def load_constraints(self) -> Mapping[str, Mapping[str, JsonValue]]:
        """What may be set for a load, by key, with its type and range as JSON Schema."""
        return self.adapter.overridable(self.config)

    @property
    def priority(self) -> int:
        """Its own, else that of its type."""
        return DEFAULT_PRIORITY[self.config.type] if self.config.priority is None else self.config.priority

    def spec(self, learned: Learned) -> ModelSpec:
        """What the core knows of it. Blocks: the adapter may read the model's files to estimate its memory."""
        config = self.config
        measured = {
            device: Footprint(mib, FootprintSource.LEARNED, f"measured on {device}")
            for (key, device), mib in learned.items()
            if key == self.footprint_key
        }
        remote = isinstance(self.adapter, RemoteAdapter)
        estimate = self.adapter.estimate(config) if config.vram_mib is None else None
        computed = Footprint(estimate.mib, FootprintSource(estimate.source), estimate.detail) if estimate else None
        return ModelSpec(
            id=self.id,
            type=config.type,
            priority=self.priority,
            footprint=_ELSEWHERE if remote else choose(name=self.id, explicit_mib=config.vram_mib, computed=computed),
            learned=measured,
            devices=tuple(DeviceId(name) for name in config.devices),
            pin=config.pin,
            preload=config.preload,
            keep_alive_s=config.keep_alive_s,
            target_inflight=self.adapter.target_inflight(config),
            remote=remote,
            definition=self.definition,
            footprint_key=self.footprint_key,
        )


@dataclass(frozen=True, slots=True)
class VirtualModel:
    """A public name: its model and what is done to its requests."""

    name: str
    model: CatalogModel
    rewrite: Rewrite
    config: VirtualModelConfig


@dataclass(frozen=True, slots=True)
class Listing:
    """One entry of GET /v1/models."""

    name: str
    model: CatalogModel
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """What a name in a request stands for."""

    model: CatalogModel
    rewrite: Rewrite


@dataclass(frozen=True)
class Catalog:
    """A whole configuration without a known mistake. Disabled models, and virtual models of them, are not in it."""

    models: Mapping[ModelId, CatalogModel]
    virtual: Mapping[str, VirtualModel]
    server: ServerConfig
    limits: LimitsConfig
    devices: tuple[DeviceConfig, ...] | Literal["auto"]
    origins: Mapping[Trail, Place] = field(default_factory=dict, repr=False)

    def model_specs(self, learned: Learned | None = None) -> tuple[ModelSpec, ...]:
        """Every model for the core, in the order of the file. Blocks on reading model files: call it in a thread."""
        return tuple(model.spec(learned or {}) for model in self.models.values())

    @cached_property
    def _routes(self) -> dict[str, Route]:
        own = {str(model.id): Route(model, model.rewrite) for model in self.models.values()}
        return own | {name: Route(virtual.model, virtual.rewrite) for name, virtual in self.virtual.items()}

    def route(self, name: str) -> Route | None:
        """The model and rewrite that a request's `model` stands for. Looked up, never parsed."""
        return self._routes.get(name)

    def nearest(self, name: str) -> str | None:
        """The name a client probably meant. For error messages: takes time."""
        return nearest(name[:200], self._routes)

    def listing(self) -> tuple[Listing, ...]:
        """GET /v1/models: virtual models, then models under their own names, each in the order of the file."""
        return self._listing

    @cached_property
    def _listing(self) -> tuple[Listing, ...]:
        listed = [Listing(name, virtual.model, virtual.config.description) for name, virtual in self.virtual.items()]
        behind_virtual = {virtual.model.id for virtual in self.virtual.values()}
        for model in self.models.values():
            public = model.id not in behind_virtual if model.config.public is None else model.config.public
            if public and model.id not in self.virtual:
                listed.append(Listing(model.id, model))
        return tuple(listed)

    def origin(self, *trail: str | int) -> Place | None:
        """Where an effective value was set; None: it is a default."""
        return self.origins.get(trail)

    def origin_table(self) -> dict[str, str]:
        """Every value that was set, as `models.qwen.n_ctx`, with its place, for people."""
        return {dotted(trail): str(place) for trail, place in self.origins.items() if trail}


def check_devices(
    catalog: Catalog, devices: Sequence[DeviceSpec], specs: Sequence[ModelSpec] | None = None
) -> tuple[str, ...]:
    """What only shows once the devices are known: names that aren't there, models larger than every device.

    A footprint that is only guessed refuses nothing: the first load measures it. `specs`: from `model_specs()`, which
    is called (and blocks) where they are not given.
    """
    problems: list[Problem] = []
    known = {device.id: device for device in devices}
    for spec in catalog.model_specs() if specs is None else specs:
        trail: Trail = ("models", spec.id)
        missing = [name for name in spec.devices if name not in known]
        if missing:
            at: Trail = (*trail, "devices")
            have = ", ".join(known) or "none"
            problems.append(Problem(catalog.origins[at], at, f"no device {missing[0]} here; there is: {have}"))
            continue
        choice = [known[name] for name in spec.devices] or list(devices)
        needs = [(device, spec.need_on(device.id)) for device in choice]
        if not needs or any(need.mib <= device.total_mib - device.margin_mib for device, need in needs):
            continue
        if all(need.source in _GUESSES for _, need in needs):
            continue
        roomiest, need = min(needs, key=lambda pair: (pair[1].mib - pair[0].total_mib + pair[0].margin_mib, pair[0].id))
        explicit = (*trail, "vram_mib")
        at = explicit if explicit in catalog.origins else trail
        problems.append(
            Problem(
                catalog.origins[at],
                at,
                f"takes {need.mib} MiB ({need.source}: {need.detail}), more than any device it may run on; "
                f"{roomiest.id} has {max(0, roomiest.total_mib - roomiest.margin_mib)} MiB after its margin",
            )
        )
    return tuple(str(problem) for problem in problems)
