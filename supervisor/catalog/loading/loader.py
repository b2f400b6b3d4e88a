"""Where configuration comes from: the base file, `tasks.yaml` and `local.yaml` beside it, `LLMUX_*` variables, flags; and
beneath all of them the variables of other runners (`runner_variables`).

`tasks.yaml` is the section `tasks` in a file of its own: the names of tasks stand at its top, or below `tasks:`.

Later layers win, key by key, and every value remembers the layer and the place it came from.
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
from supervisor.catalog.loading.runner_variables import read_variables, vllm_defaults, with_variables
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
    """The base file: `explicit`, $LLMUX_CONFIG, then the first there is of the usual places; None: there is none.

    Raises ConfigError when a named one isn't there.
    """
    named = explicit or _path_variable("LLMUX_CONFIG")
    if named is not None:
        if not named.is_file():
            what = "a folder, and no configuration" if named.is_dir() else "there is no such file"
            raise ConfigError((f"{named}: {what}",))
        return named
    return next((path for path in search_path() if path.is_file()), None)


def require_config(explicit: Path | None = None) -> Path:
    """The base file. Raises ConfigError, with what to do, when there is none."""
    base = find_config(explicit)
    if base is None:
        looked = ", ".join(str(path) for path in search_path())
        remedy = "Make one: llmux config init, or llmux run ORG/REPO-GGUF for a first model of the hub; or see how it works: llmux demo"
        raise ConfigError((f"no configuration found; looked for {looked}. {remedy}",))
    return base


def search_path() -> tuple[Path, ...]:
    """The places where a configuration is searched when none is named; a user without a home folder has none there."""
    own: tuple[Path, ...] = ()
    with contextlib.suppress(NoHomeError):
        own = (config_dir(),)
    return tuple(folder / FILE_NAME for folder in (*own, Path.cwd(), Path("/etc/llmux")))


@dataclass(frozen=True, slots=True)
class Foreign:
    """Another program's files, or what variables say alone, in place of the base file."""

    files: tuple[Path, ...]  # absolute; the first has to be there. None: there are only variables
    read: Callable[[], Mapping[str, JsonValue]]  # what they mean here; blocks, and raises ConfigError
    alone: bool = False  # flags and variables say everything, and of files only that of keys counts


def load(
    config: Path | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    registry: Registry = REGISTRY,
    check_files: bool = True,
    foreign: Foreign | None = None,
    text: str | None = None,
) -> Catalog:
    """The validated configuration. With `foreign`, `config` only says where the files beside it are searched.

    `text` is used instead of the base file's text.

    `flags`: dotted keys, such as `{"server.port": 9000}`; None values are skipped. `check_files=False` leaves out
    the checks of adapters on disk.
    Blocks on files. Raises ConfigError with every problem.
    """
    base = (config if foreign is not None and config is not None else require_config(config)).absolute()
    label = _NO_FILE if foreign is not None and not foreign.files else _label(base)
    root, problems = _merged(_layers(base, flags or {}, foreign, text=text), base, label)
    return _assembly(root, base, registry, check_files=check_files).catalog(problems)


def _assembly(root: Table, base: Path, registry: Registry, *, check_files: bool) -> Assembly:
    defaults, problems = vllm_defaults(os.environ, Path.cwd())
    assembly = Assembly(root, base, registry, check_files=check_files, vllm_defaults=defaults)
    assembly.problems += problems
    return assembly


def load_text(text: str, base: Path) -> Catalog:
    """The configuration as `load` would return it if the base file had this text, without the checks of adapters on disk.

    Blocks on the files beside it. Raises ConfigError with every problem.
    """
    base = base.absolute()
    root, problems = _merged(_layers(base, {}, text=text), base)
    return _assembly(root, base, REGISTRY, check_files=False).catalog(problems)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A base file and the flags that override it; can be read again."""

    base: Path  # absolute; with `foreign` it isn't read, and need not be there
    flags: Mapping[str, object] = field(default_factory=dict)
    foreign: Foreign | None = None

    def read(self, *, check_files: bool = True, text: str | None = None) -> Catalog:
        """The validated configuration as its files are now, by `load`. Blocks on files. Raises ConfigError with every problem."""
        return load(self.base, flags=self.flags, check_files=check_files, foreign=self.foreign, text=text)

    @property
    def label(self) -> str:
        """How problems name the base file."""
        return _label(self.base)

    def tree(self) -> Table:
        """The merged values, not validated. Blocks on files. Raises ConfigError where one can't be read."""
        return _merged(_layers(self.base, self.flags, self.foreign), self.base)[0]

    def server(self) -> ServerConfig:
        """The section `server` alone: mistakes in others don't matter. Blocks on files. Raises ConfigError."""
        return Assembly(self.tree(), self.base, REGISTRY, check_files=False).server()

    def keys_file(self) -> Path:
        """The file from which a daemon reads its keys; it may be missing. Blocks on files. Raises ConfigError."""
        return self.server().api_keys or self.base.with_name(KEYS_NAME)

    def model_files(self, catalog: Catalog) -> tuple[Path, ...]:
        """The files that decide which models `models_from` has. Blocks on the folders."""
        if not catalog.models_from:
            return ()
        from supervisor.catalog.models import local_models  # noqa: PLC0415  # few configurations need it

        return tuple(file for folder in catalog.models_from for file in (folder, *local_models.candidates(folder)))

    def files(self, catalog: Catalog) -> dict[Path, FileKind]:
        """The files that decide what `catalog` contains and who may use it, the base file first. Some may be missing."""
        local = _path_variable("LLMUX_LOCAL_CONFIG") or self.base.with_name(LOCAL_NAME)
        own = (self.base,) if self.foreign is None else self.foreign.files
        tasks = self.base.with_name(TASKS_NAME)
        keys = catalog.server.api_keys or self.base.with_name(KEYS_NAME)
        return {**dict.fromkeys(own, "configuration"), tasks: "tasks", local: "local", keys: "api_keys"}


def _path_variable(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None


Layers = list[tuple[Node | None, list[Problem]]]


def _layers(
    base: Path, flags: Mapping[str, object], foreign: Foreign | None = None, *, text: str | None = None
) -> Layers:
    if foreign is not None and foreign.alone:
        return _settings(flags)
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
        # Values that are missing because a file couldn't be read are not reported, too.
        raise config_error([problem for _, problems in layers for problem in problems])
    return [*layers, *_settings(flags)]


def _settings(flags: Mapping[str, object]) -> Layers:
    """The layers of environment variables and flags."""
    layers: Layers = []
    if any(map(_SETTING.match, os.environ)):
        # Imported late: it takes as long as all other imports together.
        from supervisor.catalog.loading.environment import read_environment  # noqa: PLC0415

        layers.append(read_environment(Path.cwd()))
    return [*layers, *((_flag(key, value), []) for key, value in flags.items() if value is not None)]


def _read_tasks(path: Path) -> tuple[Node | None, list[Problem]]:
    """The section that it is, with or without its first line; its problems say where they are in the file."""
    node, problems = read_guarded(path, Source(Layer.FILE, _label(path), path.parent))
    inner = node.entries.get("tasks") if isinstance(node, Table) and len(node.entries) == 1 else None
    if isinstance(inner, Table) and not isinstance(inner.entries.get("candidates"), Items):  # else: a task of that name
        return node, problems
    return node if node is None else Table({"tasks": node}, node.place), problems


def _read_foreign(foreign: Foreign) -> tuple[Node | None, list[Problem]]:
    """The values, without lines: those are of another program's file. Relative paths start from the current folder."""
    place = Place(Source(Layer.FILE, _label(foreign.files[0]) if foreign.files else _NO_FILE, Path.cwd()))
    if exposed := [problem for path in foreign.files if path.exists() and (problem := exposure(path)) is not None]:
        return None, [Problem(place, (), problem) for problem in exposed]
    return tree_of(foreign.read(), place), []


def _flag(dotted_key: str, value: object) -> Node:
    *parents, key = dotted_key.split(".")
    place = Place(Source(Layer.FLAG, f"--{key.replace('_', '-')}", Path.cwd()))
    node: Node = Table({key: tree_of(value, place)}, place)
    for parent in reversed(parents):
        node = Table({parent: node}, place)
    return node


def _merged(layers: Layers, base: Path, label: str | None = None) -> tuple[Table, list[Problem]]:
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
    return with_variables(root, variables), found + problems


def _label(path: Path) -> str:
    """How problems name a file: relative to the current folder, where it lies below it."""
    cwd = Path.cwd()
    return str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)
