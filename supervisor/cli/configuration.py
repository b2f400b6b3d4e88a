"""Choose a command's configuration; for `llmux config check` and `show`: every mistake, every value and its origin."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, JsonValue

from supervisor.catalog import TASK, Catalog, Configuration, Foreign, find_config
from supervisor.catalog.document.document import Layer, Place, Trail, dotted
from supervisor.catalog.document.masking import masked
from supervisor.catalog.document.yaml_writer import Comments, to_yaml
from supervisor.catalog.keys import keyring_of, refuse_exposed
from supervisor.catalog.loading.folders import config_dir
from supervisor.catalog.loading.loader import FILE_NAME, require_config, search_path
from supervisor.catalog.loading.runner_variables import is_runner
from supervisor.catalog.sections.clients import DEFAULT as DEFAULT_CLIENT
from supervisor.cli.client import DEFAULT_URL, url_of
from supervisor.errors import ConfigError, LlmuxError

DEFAULT = "default"
SETTINGS_VARIABLE: Final = "LLM_POOL_SETTINGS_PATH"
LOCAL_VARIABLE: Final = "LLM_POOL_LOCAL_SETTINGS_PATH"
"""llm-pool's variables: SETTINGS_VARIABLE names its settings, LOCAL_VARIABLE the file that overrides them on this machine."""


@dataclass(frozen=True, slots=True)
class Effective:
    """One value. `place`: the line or variable that set it; None: the value is a default."""

    trail: Trail
    value: JsonValue
    place: Place | None

    @property
    def origin(self) -> str:
        """The origin for people: `llmux.yaml:4`, `local.yaml:2 (local)`, `LLMUX_SERVER__PORT (env)`, `default`."""
        if self.place is None:
            return DEFAULT
        label, layer = self.place.source.label, self.place.source.layer
        where = f"{label}:{self.place.line}" if self.place.line else label
        return where if layer is Layer.FILE else f"{where} ({layer.value})"


def found(path: Path | None, flags: Mapping[str, object] | None = None) -> Configuration | None:
    """The configuration that `serve` uses: `path`, a file in the usual places, llm-pool's settings that its variables name, or a
    runner's variables; None: there is none.

    Raises ConfigError for a named file that isn't there.
    """
    base = find_config(path)
    if base is not None:
        return Configuration(base.absolute(), flags or {})
    if not pool_variables():
        alone = Foreign((), lambda: {"server": {"health": "runner"}})
        return Configuration(search_path()[0], flags or {}, alone) if is_runner(os.environ) else None
    from supervisor.cli import importers  # noqa: PLC0415  # it imports several runtimes

    files = importers.llm_pool_files()

    def read() -> Mapping[str, JsonValue]:
        there = [file for file in files if file.is_file()]
        return importers.read(there, "llm-pool", Path.cwd()).document()

    return Configuration(search_path()[0], flags or {}, Foreign(tuple(files), read))


def required(path: Path | None, flags: Mapping[str, object] | None = None) -> Configuration:
    """As `found`, for commands that need a configuration. Raises ConfigError, with the remedy, where there is none."""
    return found(path, flags) or Configuration(require_config(path).absolute())


def settings(path: Path | None = None) -> Configuration:
    """As `found`, for commands that need no configuration: where there is none, the settings of variables alone.

    Raises ConfigError for a named file that isn't there, NoHomeError where the default file has no home folder.
    """
    return found(path) or variables()


def variables() -> Configuration:
    """The settings of variables alone, without any file. Raises NoHomeError, as `settings` does."""
    base = config_dir() / FILE_NAME
    return Configuration(base, foreign=Foreign((base,), dict))


def has_models(path: Path) -> bool:
    """Whether the path is a folder or file of models, and no configuration."""
    return path.is_dir() or path.suffix.lower() == ".gguf"


def of_folder(path: Path, flags: Mapping[str, object]) -> Configuration:
    """The models of a folder, or of a file, with flags and variables. Configuration files beside them are not read: anybody
    may have put them there.
    """
    alone = Foreign((path.absolute(),), dict, alone=True)
    return Configuration(search_path()[0], {**flags, "models_from": [str(path.absolute())]}, alone)


def refuse_foreign(configuration: Configuration) -> None:
    """Raises ConfigError where other programs' files, or variables alone, replace the file that a command would change or name."""
    if configuration.foreign is not None and not configuration.foreign.files:
        remedy = f"Write {configuration.base} first: llmux config show says what they mean there"
        raise ConfigError((f"llmux is configured by variables alone here, and this needs a file. {remedy}",))
    if configuration.foreign is not None:
        used = ", ".join(str(file) for file in configuration.foreign.files if file.is_file())
        remedy = f"Make a configuration of them first: llmux config import -o {configuration.base}"
        raise ConfigError((f"llmux reads llm-pool's settings here ({used}), but can't do this with them. {remedy}",))


def daemon_url(path: Path | None = None) -> str:
    """The URL of a daemon with this configuration on this machine; the default URL where the file can't be read."""
    try:
        server = settings(path).server()
    except (LlmuxError, OSError):  # the current folder may be deleted
        return DEFAULT_URL
    return url_of(server.host, server.port)


def pool_variables() -> list[str]:
    """The variables of llm-pool that are set."""
    return [name for name in (SETTINGS_VARIABLE, LOCAL_VARIABLE) if os.environ.get(name)]


def checked(path: Path | None) -> Catalog:
    """The configuration with its keys, checked as `serve` checks it before it opens any device. Blocks on files.

    Raises ConfigError with every problem.
    """
    catalog = required(path).read()
    if nothing := catalog.nothing_to_serve():
        raise ConfigError((nothing,))
    if problem := refuse_exposed(catalog.server.host, keyring_of(catalog.server.api_keys)):
        raise ConfigError((problem,))
    return catalog


def effective(catalog: Catalog) -> Iterator[Effective]:
    """All values in the order of the file's sections; mappings down to their last key. Secrets are masked."""
    for model in catalog.models.values():
        yield from _section_values(catalog, ("models", model.id), model.config)
    for virtual in catalog.virtual.values():
        yield from _section_values(catalog, ("virtual_models", virtual.name), virtual.config)
    for task in catalog.tasks.values():
        about = {"candidates": [one.model_dump(mode="json", exclude_unset=True) for one in task.config.candidates]}
        yield from _section_values(catalog, ("tasks", task.name.removeprefix(TASK)), task.config, about)
    for name, config in catalog.sets.items():
        yield from _section_values(catalog, ("sets", name), config)
    for name, client in catalog.clients.items():
        yield from _section_values(catalog, ("clients", name), client)
    folders: list[JsonValue] = [str(path) for path in catalog.models_from if path != catalog.server.model_base_path]
    if folders:
        yield Effective(("models_from",), folders, catalog.origin("models_from"))
    devices: JsonValue = "auto"
    if catalog.devices != "auto":
        devices = [device.model_dump(mode="json", exclude_none=True) for device in catalog.devices]
    yield Effective(("devices",), devices, catalog.origin("devices"))
    yield from _section_values(catalog, ("limits",), catalog.limits)
    yield from _section_values(catalog, ("server",), catalog.server)


def shown(values: Iterator[Effective]) -> str:
    """The values as YAML that could be used as a configuration, with their origins beside them; unset keys are left out."""
    document: dict[str, JsonValue] = {}
    beside = {}
    for value in values:
        if value.place is None and value.value in (None, [], {}):
            continue
        at = document
        for key in value.trail[:-1]:
            below = at.setdefault(str(key), {})
            assert isinstance(below, dict)
            at = below
        at[str(value.trail[-1])] = value.value
        beside[value.trail] = value.origin
    return to_yaml(document, Comments(beside=beside))


def as_json(values: Iterator[Effective]) -> list[dict[str, JsonValue]]:
    """The values and origins for machines, with all unset keys."""
    return [
        {
            "key": dotted(value.trail),
            "value": value.value,
            "layer": value.place.source.layer.value if value.place is not None else DEFAULT,
            "place": str(value.place) if value.place is not None else None,
        }
        for value in values
    ]


def _section_values(
    catalog: Catalog, trail: Trail, section: BaseModel, instead: Mapping[str, Any] | None = None
) -> Iterator[Effective]:
    for key, value in {**section.model_dump(mode="json"), **(instead or {})}.items():
        yield from _leaf_values(catalog, (*trail, key), masked(value, key))


def _leaf_values(catalog: Catalog, trail: Trail, value: JsonValue) -> Iterator[Effective]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaf_values(catalog, (*trail, key), item)
    else:
        yield Effective(trail, value, _place_of(catalog, trail))


def _place_of(catalog: Catalog, trail: Trail) -> Place | None:
    """The place of a value, also where the file has `physical` for `model`, or a virtual model's parameters under `params`."""
    found = catalog.origin(*trail)
    if found is None and trail[0] == "clients":
        return catalog.origin("clients", DEFAULT_CLIENT, *trail[2:])
    if found is None and trail[0] == "virtual_models":
        section, name, key, *rest = trail
        found = catalog.origin(section, name, "params", key, *rest)
        if key == "model":
            found = found or catalog.origin(section, name, "physical")
    return found
