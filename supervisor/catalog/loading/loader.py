"""Loads the configuration from its layers: the base file, `tasks.yaml` and `local.yaml` beside it, `LLMUX_*` variables, flags;
and below all of them the variables of other runners (`runner_variables`).

`tasks.yaml` is the section `tasks` in a separate file: the names of tasks are at its top, or below `tasks:`.

Later layers win, key by key. Every value keeps its layer and its place.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from runtimes.registry import REGISTRY, Registry
from supervisor.catalog.assembly import KEYS_NAME, SECTIONS, Assembly, config_error
from supervisor.catalog.catalog import Catalog
from supervisor.catalog.document.document import (
    Items,
    Layer,
    Leaf,
    Node,
    Place,
    Problem,
    Source,
    Table,
    merge,
    parse,
    tree_of,
)
from supervisor.catalog.loading.folders import NoHomeError, config_dir
from supervisor.catalog.loading.ownership import exposure, read_guarded
from supervisor.catalog.loading.runner_variables import fill_missing, read_variables, vllm_defaults
from supervisor.catalog.sections.sections import ServerConfig
from supervisor.errors import ConfigError

FileKind = Literal["configuration", "tasks", "local", "api_keys"]
FILE_NAME = "llmux.yaml"
LOCAL_NAME = "local.yaml"
TASKS_NAME = "tasks.yaml"

_NO_FILE = "the variables"
"""The name in problems of a configuration that comes from variables alone."""
_SETTING = re.compile(r"LLMUX_(SERVER|LIMITS|DEVICES)", re.IGNORECASE)


def find_config(explicit: Path | None = None) -> Path | None:
    """The base file: `explicit`, $LLMUX_CONFIG, or the first existing file of `search_path`; None: there is none.

    Raises ConfigError if a named file doesn't exist.
    """
    named = explicit or _path_variable("LLMUX_CONFIG")
    if named is not None:
        if not named.is_file():
            what = "a folder, and no configuration" if named.is_dir() else "there is no such file"
            raise ConfigError((f"{named}: {what}",))
        return named
    return next((path for path in search_path() if path.is_file()), None)


def require_config(explicit: Path | None = None) -> Path:
    """The base file. Raises ConfigError, with a remedy, if there is none."""
    base = find_config(explicit)
    if base is None:
        looked = ", ".join(str(path) for path in search_path())
        remedy = "Make one: llmux config init, or llmux run ORG/REPO-GGUF for a first model of the hub; or see how it works: llmux demo"
        raise ConfigError((f"no configuration found; looked for {looked}. {remedy}",))
    return base


def search_path() -> tuple[Path, ...]:
    """The files to try if no configuration is named. A user without a home folder has none there."""
    own: tuple[Path, ...] = ()
    with contextlib.suppress(NoHomeError):
        own = (config_dir(),)
    return tuple(folder / FILE_NAME for folder in (*own, Path.cwd(), Path("/etc/llmux")))


@dataclass(frozen=True, slots=True)
class Foreign:
    """A source instead of the base file: another program's files, or variables alone."""

    files: tuple[Path, ...]  # absolute; the first must exist. Empty: there are only variables
    read: Callable[[], Mapping[str, JsonValue]]  # returns their values as ours; blocks, and raises ConfigError
    alone: bool = False  # flags and variables are the whole configuration; only the file of keys is read


def load(
    config: Path | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    registry: Registry = REGISTRY,
    check_files: bool = True,
    foreign: Foreign | None = None,
    text: str | None = None,
) -> Catalog:
    """The validated configuration. With `foreign`, `config` only locates the files beside it.

    `text` is used instead of the base file's text.

    `flags`: dotted keys, such as `{"server.port": 9000}`; None values are skipped. `check_files=False` leaves out
    the checks of adapters on disk.
    Blocks on files. Raises ConfigError with every problem.
    """
    base = (config if foreign is not None and config is not None else require_config(config)).absolute()
    label = _NO_FILE if foreign is not None and not foreign.files else _label(base)
    root, problems = _merge_layers(_read_layers(base, flags or {}, foreign, text=text), base, label)
    return _new_assembly(root, base, registry, check_files=check_files).catalog(problems)


def _new_assembly(root: Table, base: Path, registry: Registry, *, check_files: bool) -> Assembly:
    defaults, problems = vllm_defaults(os.environ, Path.cwd())
    assembly = Assembly(root, base, registry, check_files=check_files, vllm_defaults=defaults)
    assembly.problems += problems
    return assembly


def load_text(text: str, base: Path) -> Catalog:
    """The configuration as `load` would return it if the base file had this text, without the checks of adapters on disk.

    Blocks on the files beside it. Raises ConfigError with every problem.
    """
    base = base.absolute()
    root, problems = _merge_layers(_read_layers(base, {}, text=text), base)
    return _new_assembly(root, base, REGISTRY, check_files=False).catalog(problems)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A base file and the flags that override it; can be read again."""

    base: Path  # absolute; with `foreign` it isn't read, and need not exist
    flags: Mapping[str, object] = field(default_factory=dict)
    foreign: Foreign | None = None

    def read(self, *, check_files: bool = True, text: str | None = None) -> Catalog:
        """The validated configuration as its files are now, by `load`. Blocks on files. Raises ConfigError with every problem."""
        return load(self.base, flags=self.flags, check_files=check_files, foreign=self.foreign, text=text)

    @property
    def label(self) -> str:
        """The name of the base file in problems."""
        return _label(self.base)

    def tree(self) -> Table:
        """The merged values, not validated. Blocks on files. Raises ConfigError if a file can't be read."""
        return _merge_layers(_read_layers(self.base, self.flags, self.foreign), self.base)[0]

    def server(self) -> ServerConfig:
        """The section `server` alone; mistakes in other sections don't matter. Blocks on files. Raises ConfigError."""
        return Assembly(self.tree(), self.base, REGISTRY, check_files=False).server()

    def keys_file(self) -> Path:
        """The file from which a daemon reads its keys; it may be missing. Blocks on files. Raises ConfigError."""
        return self.server().api_keys or self.base.with_name(KEYS_NAME)

    def model_files(self, catalog: Catalog) -> tuple[Path, ...]:
        """The files that determine the models of `models_from`. Blocks on the folders."""
        if not catalog.models_from:
            return ()
        from supervisor.catalog.models import local_models  # noqa: PLC0415  # few configurations need it

        return tuple(file for folder in catalog.models_from for file in (folder, *local_models.candidates(folder)))

    def files(self, catalog: Catalog) -> dict[Path, FileKind]:
        """All files of the configuration and of API keys, the base file first. Some may be missing."""
        local = _path_variable("LLMUX_LOCAL_CONFIG") or self.base.with_name(LOCAL_NAME)
        own = (self.base,) if self.foreign is None else self.foreign.files
        tasks = self.base.with_name(TASKS_NAME)
        keys = catalog.server.api_keys or self.base.with_name(KEYS_NAME)
        return {**dict.fromkeys(own, "configuration"), tasks: "tasks", local: "local", keys: "api_keys"}


def _path_variable(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None


Layers = list[tuple[Node | None, list[Problem]]]


def _read_layers(
    base: Path, flags: Mapping[str, object], foreign: Foreign | None = None, *, text: str | None = None
) -> Layers:
    if foreign is not None and foreign.alone:
        return _variables_and_flags(flags)
    source = Source(Layer.FILE, _label(base), base.parent)
    if foreign is not None:
        layers: Layers = [_read_foreign(foreign)]
    else:
        layers = [read_guarded(base, source) if text is None else parse(text, source)]
    if (tasks := base.with_name(TASKS_NAME)).is_file() and tasks != base:
        layers.append(_read_tasks(tasks))
    named, beside = _path_variable("LLMUX_LOCAL_CONFIG"), base.with_name(LOCAL_NAME)
    if named is not None or (beside.is_file() and beside != base):
        path = (named or beside).absolute()
        layers.append(read_guarded(path, Source(Layer.LOCAL, _label(path), path.parent)))
    if any(node is None and problems for node, problems in layers):
        # Else values of an unreadable file would be reported as missing, too.
        raise config_error([problem for _, problems in layers for problem in problems])
    return [*layers, *_variables_and_flags(flags)]


def _variables_and_flags(flags: Mapping[str, object]) -> Layers:
    """The layers of environment variables and flags."""
    layers: Layers = []
    if any(map(_SETTING.match, os.environ)):
        # Imported late: it takes as long as all other imports together.
        from supervisor.catalog.loading.environment import read_environment  # noqa: PLC0415

        layers.append(read_environment(Path.cwd()))
    return [*layers, *((_flag_tree(key, value), []) for key, value in flags.items() if value is not None)]


def _read_tasks(path: Path) -> tuple[Node | None, list[Problem]]:
    """The section `tasks` of its own file, with or without the line `tasks:`. Problems have their places in that file."""
    node, problems = read_guarded(path, Source(Layer.FILE, _label(path), path.parent))
    inner = node.entries.get("tasks") if isinstance(node, Table) and len(node.entries) == 1 else None
    if isinstance(inner, Table) and not isinstance(inner.entries.get("candidates"), Items):  # else: a task of that name
        return node, problems
    return node if node is None else Table({"tasks": node}, node.place), problems


def _read_foreign(foreign: Foreign) -> tuple[Node | None, list[Problem]]:
    """The values, without line numbers, which would be those of another program's file. Relative paths start at the current folder."""
    place = Place(Source(Layer.FILE, _label(foreign.files[0]) if foreign.files else _NO_FILE, Path.cwd()))
    if exposed := [problem for path in foreign.files if path.exists() and (problem := exposure(path)) is not None]:
        return None, [Problem(place, (), problem) for problem in exposed]
    return tree_of(foreign.read(), place), []


def _flag_tree(dotted_key: str, value: object) -> Node:
    *parents, key = dotted_key.split(".")
    place = Place(Source(Layer.FLAG, f"--{key.replace('_', '-')}", Path.cwd()))
    node: Node = Table({key: tree_of(value, place)}, place)
    for parent in reversed(parents):
        node = Table({parent: node}, place)
    return node


def _merge_layers(layers: Layers, base: Path, label: str | None = None) -> tuple[Table, list[Problem]]:
    root = Table({}, Place(Source(Layer.FILE, label or _label(base), base.parent)))
    found: list[Problem] = []
    for node, problems in layers:
        found += problems
        if isinstance(node, Table):
            merged = merge(root, node)
            assert isinstance(merged, Table)
            root = merged
        elif node is not None and node != Leaf(None, node.place):
            found.append(Problem(node.place, (), f"expected sections: {', '.join(SECTIONS)}"))
    variables, problems = read_variables(os.environ, Path.cwd())
    return fill_missing(root, variables), found + problems


def _label(path: Path) -> str:
    """The name of a file in problems: relative, if it lies below the current folder."""
    cwd = Path.cwd()
    return str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)
