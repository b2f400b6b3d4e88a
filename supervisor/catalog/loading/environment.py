"""`LLMUX_SERVER__PORT=9000` and its like: settings of `server`, `limits` and `devices` from the environment.

pydantic-settings reads the variables; their values are merged and validated with everything else, so that a mistake in a
variable is reported like a mistake in the file. Importing pydantic-settings takes as long as the rest of a cold start, so
only loader.py imports this module, and only when such a variable is set.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from supervisor.catalog.document.document import (
    Items,
    Layer,
    Leaf,
    Node,
    Place,
    Problem,
    Source,
    Table,
    Trail,
    parse,
    plain,
    scalar,
    tree_of,
)
from supervisor.catalog.problems import types_at
from supervisor.catalog.sections.sections import DeviceConfig, LimitsConfig, ServerConfig

PREFIX = "LLMUX_"


class _Environment(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", extra="ignore")

    server: ServerConfig
    limits: LimitsConfig
    devices: Literal["auto"] | list[DeviceConfig]


class _YamlValues(EnvSettingsSource):
    """Reads lists and mappings as YAML. Invalid YAML stays text, so that its problem is reported with its variable."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        node, problems = parse(value, Source(Layer.ENVIRONMENT, PREFIX, Path()))
        return value if problems or not isinstance(node, Table | Items) else plain(node)


def read_environment(cwd: Path) -> tuple[Table, list[Problem]]:
    """The settings in `os.environ` as a tree whose places are the variables."""
    everything = Place(Source(Layer.ENVIRONMENT, f"{PREFIX}*", cwd))
    problems: list[Problem] = []
    tree = _with_variable_places(tree_of(_YamlValues(_Environment)(), everything), (), cwd, problems)
    assert isinstance(tree, Table)
    return tree, problems + _misspelt_variables(cwd)


def _with_variable_places(node: Node, trail: Trail, cwd: Path, problems: list[Problem]) -> Node | None:
    """The same tree with each value's variable as its place. Text is parsed as YAML, except for keys of type text.

    An invalid YAML value becomes a problem and is left out.
    """
    place = Place(Source(Layer.ENVIRONMENT, _variable_of(trail), cwd))
    match node:
        case Table():
            named = {
                key: _with_variable_places(value, (*trail, key), cwd, problems) for key, value in node.entries.items()
            }
            return Table({key: value for key, value in named.items() if value is not None}, place)
        case Items():
            nodes = (
                _with_variable_places(item, (*trail, index), cwd, problems) for index, item in enumerate(node.nodes)
            )
            return Items(tuple(item for item in nodes if item is not None), place)
        case Leaf(value=str(text)) if not _is_text(trail):
            wrong = parse(text, place.source)[1] if text.lstrip().startswith(("{", "[")) else []
            problems += wrong
            return None if wrong else Leaf(scalar(text), place)
        case Leaf():
            return Leaf(node.value, place)


def _is_text(trail: Trail) -> bool:
    return any(branch in {str, Path} for branch in types_at(_Environment, trail))


def _variable_of(trail: Trail) -> str:
    """The variable that set this value: its own, or the nearest one that set a parent as a whole."""
    present = {name.upper() for name in os.environ}
    for length in range(len(trail), 0, -1):
        name = PREFIX + "__".join(str(key) for key in trail[:length]).upper()
        if name in present:
            return name
    return PREFIX + "*"


def _misspelt_variables(cwd: Path) -> list[Problem]:
    """Problems for variables with one underscore instead of two, which would be ignored silently."""
    problems = []
    for name in sorted(os.environ):
        for section in _Environment.model_fields:
            head = f"{PREFIX}{section.upper()}_"
            rest = name.upper().removeprefix(head)
            if rest != name.upper() and not rest.startswith("_"):
                place = Place(Source(Layer.ENVIRONMENT, name, cwd))
                problems.append(Problem(place, (), f"unknown variable; did you mean {head}_{rest}?"))
    return problems
