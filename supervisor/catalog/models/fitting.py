"""Checks that the configured models fit the devices of this machine, once these are known."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from runtimes.device_kind import HOST
from supervisor.catalog.catalog import NOTHING_LEARNED, Catalog, CatalogModel, Learned
from supervisor.catalog.document.document import Problem, Trail
from supervisor.core.memory.device_sets import (
    MAX_DEVICE_SETS,
    allowed,
    count_device_sets,
    device_sets,
    fits,
    need_mib,
    spread,
)
from supervisor.core.messages import devices_listed, listed
from supervisor.core.types import DeviceId, DeviceSpec, ModelId, ModelSpec

TOO_LARGE = "vram_mib"
"""The key that `placement_problem` names for a model that is larger than its devices."""
MOST_PLACEMENTS = 10_000
Room = Mapping[DeviceId, int]
"""MiB on each device."""


def specs_for_devices(
    catalog: Catalog, devices: Sequence[DeviceSpec], learned: Learned = NOTHING_LEARNED
) -> tuple[ModelSpec, ...]:
    """The specifications for the core, with the trouble of each model that has no place on these devices. Blocks on model files."""
    specs = catalog.model_specs(learned)
    troubles = {problem.trail[1]: problem for problem in check_devices(catalog, devices, specs)}
    found = (replace(spec, remedy=_remedy(catalog.models[spec.id], spec, devices)) for spec in specs)
    return tuple(_with_trouble(spec, troubles[spec.id]) if spec.id in troubles else spec for spec in found)


def _remedy(model: CatalogModel, spec: ModelSpec, devices: Sequence[DeviceSpec]) -> str:
    """The remedies that the model's runtime has for a model that is larger than its devices."""
    adapter, config = model.adapter, model.config
    gpus = [one for one in allowed(spec.devices, spec.kinds, devices) if not one.takes_whole]
    found: list[str] = []
    if len(gpus) > 1 and config.gpus != "auto":
        equal = (
            count
            for count in range(spec.gpus + 1, len(gpus) + 1)
            if placement_problem(replace(spec, gpus=count), gpus) is None
        )
        if adapter.divides:
            found.append("gpus: auto lets it go over several GPUs")
        elif adapter.spreads and (count := next(equal, None)) is not None:
            found.append(f"gpus: {count} gives each GPU a part that fits")
        elif not adapter.spreads:
            found.append(f"a worker of {adapter.name} uses one GPU")
    if adapter.offload_key and gpus:
        found.append(f"{adapter.offload_key} leaves a part of it in the main memory")
    return "; ".join((*found, spec.remedy))


def _with_trouble(spec: ModelSpec, problem: Problem) -> ModelSpec:
    reason = ": ".join((*map(str, problem.trail[2:]), problem.message))
    return replace(
        spec, gpus=1, trouble="; ".join(filter(None, (spec.trouble, reason)))
    )  # the present number may have too many device sets


def check_devices(catalog: Catalog, devices: Sequence[DeviceSpec], specs: Sequence[ModelSpec]) -> tuple[Problem, ...]:
    """Problems of models that name unknown devices, or need more devices than there are. `specs`: from `model_specs()`.

    A too large model is no problem here: it may never be used. See `memory_warnings`.
    """
    problems: list[Problem] = []
    for spec in specs:
        found = placement_problem(spec, devices)
        if found is not None and found[0] != TOO_LARGE:
            key, message = found
            at: Trail = ("models", spec.id, key)
            at = at if at in catalog.origins else at[:2]
            problems.append(Problem(catalog.origins[at], at, message))
    return tuple(problems)


def usable(kinds: frozenset[str] | None, devices: Sequence[DeviceSpec]) -> frozenset[DeviceId]:
    """The devices for a model that names none, and whose program computes on these kinds of GPUs."""
    return frozenset(device.id for device in allowed((), kinds, devices))


def processor_warning(model: CatalogModel, devices: Sequence[DeviceSpec]) -> str | None:
    """A warning for a model that computes on the processor although there is a GPU; None: it doesn't, or is so configured.

    Blocks on a small file, once.
    """
    gpus = [device for device in devices if not device.takes_whole]
    adapter, config = model.adapter, model.config
    if model.kinds is None or not gpus or any(gpu.kind in model.kinds for gpu in gpus):
        return None
    if HOST.name in config.devices or (adapter.offload_key and getattr(config, adapter.offload_key) == 0):
        return None
    choice = "" if adapter.archives is not None else f" --accelerator {gpus[0].kind}"
    return (
        f"computes on the processor, not on {devices_listed(gpus)}: its {adapter.name} is built for the processor "
        f"alone. To use the GPU: llmux runtimes install {adapter.name}{choice}, then llmux reload"
    )


def memory_warnings(model: CatalogModel, spec: ModelSpec, devices: Sequence[DeviceSpec]) -> tuple[str, ...]:
    """Warnings about a model's memory: it is larger than its devices, or than its `vram_mib`.

    `spec`: the model's present specification for the core, with measured figures. Blocks on the model's files, once.
    """
    found: list[str] = []
    if (warning := processor_warning(model, devices)) is not None:
        found.append(warning)
    problem = placement_problem(spec, devices)
    if problem is not None and problem[0] == TOO_LARGE:
        found.append(f"{problem[1]}; {spec.remedy}")
    given = model.config.vram_mib
    if given is not None and (raised := [(device, mib) for device, mib in spec.raised.items() if mib > given]):
        device, mib = max(raised, key=lambda one: one[1])
        where = next((one.label for one in devices if one.id == device), device)
        found.append(
            f"vram_mib is {given}, but a load with less than {mib} MiB ran out of memory on {where}; raise or remove it"
        )
    elif given is not None and not spec.remote:
        parts = {device.id: 1 if device.takes_whole else spec.gpus for device in devices}
        taken = [parts[device] * footprint.mib for device, footprint in spec.learned.items() if device in parts]
        measured = max(taken, default=None)
        if measured is not None and given < measured:
            found.append(f"vram_mib is {given}, but {measured} MiB were measured; raise or remove it")
        elif measured is None and (computed := model.estimate) is not None and given < computed.mib:
            found.append(
                f"vram_mib is {given}, but its files need {computed.mib} MiB ({computed.detail}); raise or remove it, or "
                "choose a smaller context"
            )
    return tuple(found)


def pins_warning(specs: Sequence[ModelSpec], devices: Sequence[DeviceSpec]) -> tuple[ModelId, str] | None:
    """A warning about pinned models that don't all fit, with the last pinned model; None: they fit."""
    if not (pinned := crowded_pins(specs, devices)):
        return None
    *others, last = pinned
    return last.id, (
        f"is pinned, and so {'is' if len(others) == 1 else 'are'} {listed([one.id for one in others])}: together they don't "
        "fit, and a pinned model never makes room. Take pin off one, or choose smaller ones"
    )


def crowded_pins(specs: Sequence[ModelSpec], devices: Sequence[DeviceSpec]) -> tuple[ModelSpec, ...]:
    """The pinned models, if each fits alone but no placement holds all of them; else none.

    A model on several devices counts with its whole memory: in any division, its devices together must have that much left.
    Returns none if there are too many placements to try.
    """
    pinned = [spec for spec in specs if spec.pin and not spec.remote and not spec.trouble]
    pinned = [spec for spec in pinned if placement_problem(spec, devices) is None and device_sets(spec, devices)]
    whole: list[list[Room]] = []
    divided_mib, shared = 0, set[DeviceId]()
    for spec in pinned:
        ways = [way for way in device_sets(spec, devices) if fits(spec, way)]
        together = spread(spec, devices)
        if together is None:
            whole.append([dict.fromkeys((device.id for device in way), need_mib(spec, way)) for way in ways])
        else:
            divided_mib += min((together.whole_mib, *(need_mib(spec, way) for way in ways)))
            shared.update(together.devices, (device.id for way in ways for device in way))
    whole.sort(key=lambda ways: -max(ways[0].values()))  # the largest first: it has the fewest placements
    room = {device.id: max(0, device.usable_mib) for device in devices}
    is_unclear = math.prod(map(len, whole)) > MOST_PLACEMENTS
    return () if is_unclear or _have_room(whole, room, divided_mib, shared) else tuple(pinned)


def _have_room(whole: Sequence[Sequence[Room]], room: Room, divided_mib: int, shared: Collection[DeviceId]) -> bool:
    """Whether all models of `whole` can be placed so that `divided_mib` of the `shared` devices are left."""
    if any(mib < 0 for mib in room.values()) or sum(room[device] for device in shared) < divided_mib:
        return False
    if not whole:
        return True
    first, *others = whole
    rooms = ({device: mib - way.get(device, 0) for device, mib in room.items()} for way in first)
    return any(_have_room(others, left, divided_mib, shared) for left in rooms)


def placement_problem(spec: ModelSpec, devices: Sequence[DeviceSpec]) -> tuple[str, str] | None:
    """The key because of which the model fits on none of these devices, and the reason; None: it fits."""
    known = {device.id: device for device in devices}
    for name in spec.devices:
        if name not in known:
            return "devices", f"no device {name} here; there is: {', '.join(known) or 'none'}"
    if count_device_sets(spec, devices) > MAX_DEVICE_SETS:
        return (
            "devices",
            f"{count_device_sets(spec, devices)} ways to choose {spec.gpus} GPUs; name those that it may run on",
        )
    ways = device_sets(spec, devices)
    if not ways and spec.gpus > 1:
        there = sum(not device.takes_whole for device in allowed(spec.devices, spec.kinds, devices))
        return "gpus", f"{spec.gpus} GPUs share the model, and it may run on {there}"
    together = spread(spec, devices)
    if not ways or any(fits(spec, way) for way in ways):
        return None
    if together is not None and together.fits(known[device].usable_mib for device in together.devices):
        return None
    mine = sorted({device.id: device for way in ways for device in way}.values(), key=lambda device: device.id)
    roomiest = min(mine, key=lambda device: device.need(spec).mib - device.usable_mib)
    need = roomiest.need(spec)
    if enough := [device for device in mine if fits(spec, (device,))]:
        part = f"{need.mib} MiB ({need.source}: {need.detail})"
        return TOO_LARGE, f"{spec.gpus} GPUs share the model; its part, {part}, fits on {devices_listed(enough)} only"
    if together is not None:
        most = sum(max(0, known[device].usable_mib - together.margin_mib) for device in together.devices)
        return TOO_LARGE, (
            f"takes {together.whole_mib} MiB ({need.source}: {need.detail}), more than {devices_listed(map(known.__getitem__, together.devices))} together, "
            f"which have {most} MiB after their margins, less {together.margin_mib} MiB each"
        )
    return TOO_LARGE, (
        f"takes {need.mib} MiB ({need.source}: {need.detail}), more than any device it may run on; "
        f"{roomiest.label} has {max(0, roomiest.usable_mib)} MiB after its margin"
    )
