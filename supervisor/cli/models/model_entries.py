"""`llmux add`, `llmux remove`, and the first step of `llmux run`: choose a model, fetch it, enter it in the configuration.

The files come first. The entry is written last; before anything is fetched, the configuration with the entry is validated.
So an interrupted command leaves the configuration unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import JsonValue

from runtimes.base import MADE_FOR, LaunchContext, ModelUnusableError, RuntimeNotInstalledError
from runtimes.device_kind import HOST, DeviceAssignment
from runtimes.installed import program
from runtimes.llama_server.adapter import LlamaServerAdapter
from runtimes.registry import REGISTRY
from supervisor.catalog import Catalog, CatalogModel, Configuration, check_devices, load_text
from supervisor.catalog.assembly import NAME_RULE, is_name
from supervisor.catalog.document.edit import with_entries, with_model, without_entry
from supervisor.catalog.loading.folders import config_dir
from supervisor.catalog.loading.loader import FILE_NAME
from supervisor.catalog.models import local_models
from supervisor.catalog.models.fitting import processor_warning, usable
from supervisor.catalog.models.local_models import LocalModel
from supervisor.cli import configuration, output, starter
from supervisor.cli.environments import environments
from supervisor.cli.models import hub_models, pull
from supervisor.cli.models.hub_models import PLAIN_WEIGHTS, Reference, Variant
from supervisor.core.types import ModelId
from supervisor.errors import ConfigError, InvalidRequestError, LlmuxError, NotFoundError
from supervisor.host.environments.installer import InstallError
from supervisor.host.memory.devices import open_sampler
from supervisor.host.memory.memory import DeviceInfo
from supervisor.host.store import files

Echo = Callable[[str], None]
QUICK = "Q4_K_M"
"""The quantisation for a processor: speed depends on the size of the weights, and a smaller one is noticeably worse."""


class UnusableError(LlmuxError):
    """The model can't run here."""

    code = "model_unusable"


@dataclass(frozen=True, slots=True)
class Target:
    """The configuration file to change, with the text that was read. The file may be missing."""

    path: Path
    text: str
    catalog: Catalog
    foreign: Configuration | None = None  # another program's files are used instead

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments by which `serve` uses this file."""
        return () if self.foreign is not None else ("--config", str(self.path))

    def check_writable(self) -> None:
        """Raises OSError or ConfigError where the file can't be written, so that nothing is fetched in vain."""
        if self.foreign is not None:
            configuration.refuse_foreign(self.foreign)
        if (refusal := files.refusal(self.path.resolve().parent)) is not None:
            raise refusal

    @contextlib.contextmanager
    def changing(self) -> Iterator[Target]:
        """Hold the lock on the file, so that no other process adds or removes a model; yields the file's present state.

        Raises LlmuxError, OSError.
        """
        with files.locked_folder(self.path.resolve().parent):
            yield target(self.path)

    def write(self, text: str) -> None:
        """Replace the file's text. The mode stays; of a link, the target is replaced."""
        real = self.path.resolve()
        if not real.exists():
            starter.write(real, text)
            return
        files.rewrite(real, text)


@dataclass(frozen=True, slots=True)
class Offer:
    """The variants of a repository, the device with room for them, and the variant that is taken."""

    variants: tuple[Variant, ...]
    device: DeviceInfo  # the device with the most room
    taken: Variant
    why: str = ""  # the reason for a choice other than the largest that fits

    def fits(self, variant: Variant) -> bool:
        return variant.need_mib <= self.device.spec.usable_mib

    def rows(self, wanted: Reference) -> list[dict[str, object]]:
        return [
            {
                "quantisation": variant.label,
                "reference": wanted.reference(variant),
                "files": [file.name for file in variant.files],
                "size_bytes": variant.size_bytes,
                "need_mib": variant.need_mib,
                "fits": self.fits(variant),
                "taken": variant is self.taken,
            }
            for variant in self.variants
        ]

    def table(self) -> output.Table:
        lines: list[output.Row] = [("", "QUANTISATION", "SIZE", "TAKES", f"FITS ON {self.device.label}")]
        for variant in self.variants:
            size = output.mib(-(-variant.size_bytes // (1 << 20)))
            fits = "yes" if self.fits(variant) else "no"
            mark = "→" if variant is self.taken else ""
            lines.append((mark, variant.label, size, output.mib(variant.need_mib), fits))
        return output.Table(lines)


def target(config: Path | None) -> Target:
    """The configuration that `serve` would use, else the file to make. Raises ConfigError for mistakes in the file."""
    if config is not None and not config.exists():
        path = config.absolute()
    else:
        found = configuration.found(config)
        if found is not None and found.foreign is not None:
            return Target(found.base, "", found.read(check_files=False), found)
        path = found.base if found is not None else config_dir() / FILE_NAME
    try:
        text = path.read_bytes().decode("utf-8-sig") if path.exists() else f"{starter.HEAD}\n"
    except UnicodeDecodeError as error:
        raise ConfigError((f"{path}: not UTF-8 text",)) from error
    return Target(path, text, load_text(text, path))


def configured(catalog: Catalog, wanted: Reference) -> str | None:
    """The name of the entry for this reference; None: no entry has it yet."""
    for model in catalog.models.values():
        source = model.config.source
        if source is None or (source.repo, source.revision) != (wanted.repo, wanted.revision):
            continue
        first = source.files[0] if source.files else ""
        if wanted.quantisation is None or hub_models.is_named(first, wanted.quantisation):
            return str(model.id)
    return None


def offer(catalog: Catalog, wanted: Reference) -> Offer:
    """List the variants and choose one: the named one, else the best that fits; on a processor Q4_K_M.

    Blocks on the hub and the devices. Raises HubError; NotFoundError where there is no such variant; UnusableError where the wanted one doesn't fit.
    """
    found = tuple(hub_models.variants(wanted))
    device = max(_allowed_devices(catalog, found[0]), key=lambda device: device.spec.usable_mib)
    room = device.spec.usable_mib
    where = f"{device.label} has {output.mib(room)}"
    if wanted.quantisation is not None:
        taken = next((variant for variant in found if variant.is_called(wanted.quantisation)), None)
        if taken is None:
            there = ", ".join(variant.label for variant in found)
            raise NotFoundError(f"{wanted.repo} has no {wanted.quantisation}; there are: {there}.")
        if taken.need_mib > room:
            raise UnusableError(
                f"{wanted.repo}: {taken.label} takes {output.mib(taken.need_mib)} ({taken.detail}), and {where}. Leave out "
                "the quantisation to get the best that fits; or enter it yourself, with n_gpu_layers or a smaller n_ctx."
            )
        return Offer(found, device, taken)
    fitting = [variant for variant in found if variant.need_mib <= room]
    if not fitting:
        least = min(found, key=lambda variant: variant.need_mib)
        raise UnusableError(
            f"{wanted.repo}: nothing of it fits: {least.label}, the smallest, takes {output.mib(least.need_mib)} "
            f"({least.detail}), and {where}. Look for a smaller model."
        )
    quantised = [variant for variant in fitting if variant.label not in PLAIN_WEIGHTS] or fitting
    quick = next((variant for variant in quantised if variant.label == QUICK), quantised[0])
    if device.kind.accelerates or quick is quantised[0]:
        return Offer(found, device, quantised[0])
    why = f"{QUICK} is taken: a processor answers faster with it than with {quantised[0].label}. Another: {wanted.repo}:QUANTISATION"
    return Offer(found, device, quick, why)


def free_name(catalog: Catalog, wanted: Reference, variant: Variant, name: str | None) -> str:
    """The name for the entry: the given one, else a free name like the repository's. Raises InvalidRequestError."""
    if name is not None and not is_name(name):
        raise InvalidRequestError(f"{name!r} is not a name: {NAME_RULE}.", param="--name")
    taken = {*catalog.models, *catalog.virtual}
    own = wanted.name or hub_models.name_of(wanted.repo)
    for word in (name,) if name is not None else (own, f"{own}-{variant.label.lower()}"):
        if word not in taken:
            return word
    raise InvalidRequestError(f"There is a model {name or own} already; give it another name with --name.")


def add(
    place: Target,
    wanted: Reference,
    found: Offer,
    given: str | None,
    echo: Echo,
    show_amount: pull.ShowAmount | None = None,
) -> str:
    """Fetch the model's files, install its runtime, enter it under the given name or a free one; returns the name.

    `show_amount` gets the progress in bytes, as in `pull.fetch`.

    Raises LlmuxError; then the configuration is unchanged.
    """
    variant, name = found.taken, free_name(place.catalog, wanted, found.taken, given)
    catalog = load_text(with_model(place.text, name, variant.entry), place.path)
    model = catalog.models[ModelId(name)]
    downloads = pull.downloads(catalog, (name,))
    pull.make_room(downloads)
    pull.fetch(downloads, echo, show_amount)
    runtimes_dir = catalog.server.runtimes_dir
    _install_program(model, runtimes_dir, _machine_devices(catalog), echo)
    problems = model.adapter.check(model.config, runtimes_dir=runtimes_dir)
    problems += tuple(map(str, check_devices(catalog, (found.device.spec,), (model.spec(),))))
    if problems:
        raise UnusableError(f"{name} can't run here; it isn't entered:", detail=problems)
    with place.changing() as now:
        if (entered := configured(now.catalog, wanted)) is not None:  # another process entered it meanwhile
            return entered
        name = free_name(now.catalog, wanted, variant, given)
        now.write(with_model(now.text, name, variant.entry))
    echo(f"{name}: entered in {place.path}")
    print_device_note(catalog, name, echo)
    return name


def add_files(place: Target, path: Path, given: str | None, echo: Echo) -> list[str]:
    """Enter the models of a file or folder; returns the names of new and known models. `echo` gets messages.

    Raises LlmuxError; then the configuration is unchanged.
    """
    found, problems = local_models.find(path)
    if not found:
        raise UnusableError(f"Nothing in {path} can be used.", detail=tuple(problems))
    for problem in problems:
        echo(problem)
    if given is not None and len(found) > 1:
        raise InvalidRequestError(f"{path} has {len(found)} models; one name is not enough.", param="--name")
    names, _, catalog = with_models_entered(place, found, given)
    install_for([catalog.resolve(name).model for name in names.values()], catalog, echo)
    with place.changing() as now:
        known = _entries_by_path(now.catalog)
        names, text, catalog = with_models_entered(now, found, given)
        if text != now.text:
            now.write(text)
    for model in found:
        name = names[model.path]
        if model.path in known:
            echo(f"{model.path} is configured already, as {name}.")
        else:
            echo(f"{name}: {model.path}" + (f", with {model.projector.name}" if model.projector is not None else ""))
        print_device_note(catalog, name, echo)
    if text != now.text:
        echo(f"entered in {now.path}")
    return list(names.values())


def with_models_entered(
    place: Target, found: Sequence[LocalModel], given: str | None
) -> tuple[dict[Path, str], str, Catalog]:
    """Path → name of these models; and the configuration, as text and as catalog, with an entry for each model without one."""
    names = _entries_by_path(place.catalog)
    taken = {str(one.id) for one in place.catalog.models.values() if not place.catalog.is_local(one)}
    taken |= place.catalog.virtual.keys()
    entries: dict[str, Mapping[str, JsonValue]] = {}
    for model in found:
        if model.path not in names:
            names[model.path] = name = _check_name(taken, given) if given is not None else model.name(taken)
            taken.add(name)
            entries[name] = model.entry
        elif given is not None and names[model.path] != given:
            raise InvalidRequestError(f"{model.path} is configured already, as {names[model.path]}.", param="--name")
    text = with_entries(place.text, entries) if entries else place.text
    return {model.path: names[model.path] for model in found}, text, load_text(text, place.path)


def _entries_by_path(catalog: Catalog) -> dict[Path, str]:
    """Path → name of the models with an entry of their own."""
    own = (one for one in catalog.models.values() if not catalog.is_local(one))
    return {path: str(one.id) for one in own if (path := getattr(one.config, "path", None)) is not None}


def _check_name(taken: set[str], name: str) -> str:
    """The given name. Raises InvalidRequestError for an invalid name, or another model's."""
    if not is_name(name):
        raise InvalidRequestError(f"{name!r} is not a name: {NAME_RULE}.", param="--name")
    if name in taken:
        raise InvalidRequestError(f"There is a model {name} already; give it another name with --name.", param="--name")
    return name


def removable(place: Target, name: str) -> CatalogModel:
    """The model to remove. Raises NotFoundError; InvalidRequestError for a virtual model, and for a model that has no entry."""
    if (virtual := place.catalog.virtual.get(name)) is not None and name not in place.catalog.models:
        raise InvalidRequestError(
            f"{name} is a virtual model, of {virtual.model.id}: take it out of {place.path} yourself."
        )
    found = place.catalog.models.get(ModelId(name))
    if found is None:
        raise NotFoundError(f"There is no model {name!r} in {place.path}.")
    if place.catalog.is_local(found):
        path = getattr(found.config, "path", "")
        raise InvalidRequestError(
            f"{name} has no entry to remove: it is one of the models of a folder (models_from). Move or delete {path}, and it goes."
        )
    return found


def remove(place: Target, name: str) -> None:
    """Remove the model's entry. Raises LlmuxError, and changes nothing, where another entry refers to this model."""
    with place.changing() as now:
        text = without_entry(now.text, name)
        try:
            load_text(text, now.path)
        except ConfigError as error:
            users = [virtual.name for virtual in now.catalog.virtual.values() if virtual.model.id == name]
            if not users:
                raise
            raise InvalidRequestError(
                f"Virtual models refer to {name}: {', '.join(users)}. Take them out of {place.path} first."
            ) from error
        now.write(text)


def install_for(models: Iterable[CatalogModel], catalog: Catalog, echo: Echo) -> None:
    """Install the missing programs of these models. Raises UnusableError, InstallError."""
    runtimes_dir, devices = catalog.server.runtimes_dir, _machine_devices(catalog)
    for model in models:
        _install_program(model, runtimes_dir, devices, echo)


def print_device_note(catalog: Catalog, name: str, echo: Echo) -> None:
    """Print a warning where the model of this name computes on the processor although there is a GPU."""
    model = replace(catalog.resolve(name).model, runtimes_dir=catalog.server.runtimes_dir)
    note = processor_warning(model, [device.spec for device in _machine_devices(catalog)])
    if note is not None:
        echo(f"{name}: {note}")


def _allowed_devices(catalog: Catalog, variant: Variant) -> Sequence[DeviceInfo]:
    """The devices that a model of this kind may run on: GPUs, unless its runtime is installed for the processor alone."""
    devices = _machine_devices(catalog)
    adapter = REGISTRY.get(str(variant.entry.get("runtime", LlamaServerAdapter.name)))
    made = program(catalog.server.runtimes_dir / adapter.name) if adapter.requirements is not None else None
    kinds = None if made is None or made.device is None else MADE_FOR[made.device]
    mine = usable(kinds, [device.spec for device in devices])
    return [device for device in devices if device.id in mine]


def _machine_devices(catalog: Catalog) -> Sequence[DeviceInfo]:
    return asyncio.run(open_sampler(catalog.wanted_devices, named_by=catalog.devices_variable)).devices


def _install_program(model: CatalogModel, runtimes_dir: Path, devices: Sequence[DeviceInfo], echo: Echo) -> None:
    """Install the program of the model's worker if it is missing, for the GPU if there is one.

    Raises UnusableError for a problem that only a person can mend.
    """
    device = DeviceAssignment(HOST.device_id(), HOST)
    context = LaunchContext(str(model.id), "127.0.0.1", 1, "none", (device,), runtimes_dir)
    try:
        model.adapter.launch(model.config, context)
        if processor_warning(replace(model, runtimes_dir=runtimes_dir), [one.spec for one in devices]) is not None:
            echo(f"{model.adapter.name} is installed for the processor alone; looking for a build for the GPU:")
            try:
                environments.install(model.adapter.name, runtimes_dir, echo)
            except InstallError as error:  # the installed program works, on the processor
                echo(str(error))
    except RuntimeNotInstalledError as error:
        echo(f"Installing the runtime {error.runtime}, once:")
        environments.install(error.runtime, runtimes_dir, echo)
    except ModelUnusableError as error:
        raise UnusableError(f"{model.id}: {error}") from error
