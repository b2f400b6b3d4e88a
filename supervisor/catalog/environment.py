"""`LLMUX_SERVER__PORT=9000` and its like: settings of `server`, `limits` and `devices` from the environment.

pydantic-settings reads the variables; their values are merged and validated with everything else, so that a mistake in a
variable is reported like a mistake in the file. Importing pydantic-settings takes as long as the rest of a cold start, so
only loader.py imports this module, and only when such a variable is set.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, SettingsError

from supervisor.catalog.document import Items, Layer, Leaf, Node, Place, Problem, Source, Table, Trail, scalar, tree_of
from supervisor.catalog.problems import types_at
from supervisor.catalog.sections import DeviceConfig, LimitsConfig, ServerConfig

PREFIX = "LLMUX_"


class _Environment(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", extra="ignore")

    server: ServerConfig
    limits: LimitsConfig
    devices: Literal["auto"] | list[DeviceConfig]


def read_environment(cwd: Path) -> tuple[Table, list[Problem]]:
    """The settings in `os.environ` as a tree whose places are the variables."""
    everything = Source(Layer.ENVIRONMENT, f"{PREFIX}*", cwd)
    try:
        values = EnvSettingsSource(_Environment)()
    except SettingsError as error:
        return Table({}, Place(everything)), [Problem(Place(everything), (), f"{error}: {error.__cause__}")]
    tree = _named(tree_of(values, Place(everything)), (), cwd)
    assert isinstance(tree, Table)
    return tree, _misspelt(cwd)


def _named(node: Node, trail: Trail, cwd: Path) -> Node:
    """The same tree, each value placed at its variable; where no text is wanted, words are read as YAML would."""
    place = Place(Source(Layer.ENVIRONMENT, _variable(trail), cwd))
    match node:
        case Table():
            return Table({key: _named(value, (*trail, key), cwd) for key, value in node.entries.items()}, place)
        case Items():
            return Items(tuple(_named(item, (*trail, index), cwd) for index, item in enumerate(node.nodes)), place)
        case Leaf(value=str(text)) if not _is_text(trail):
            return Leaf(scalar(text), place)
        case Leaf():
            return Leaf(node.value, place)


def _is_text(trail: Trail) -> bool:
    return any(branch in {str, Path} for branch in types_at(_Environment, trail))


def _variable(trail: Trail) -> str:
    """The variable that was set for this value: its own, or the nearest above it that held JSON."""
    present = {name.upper() for name in os.environ}
    for length in range(len(trail), 0, -1):
        name = PREFIX + "__".join(str(key) for key in trail[:length]).upper()
        if name in present:
            return name
    return PREFIX + "*"


def _misspelt(cwd: Path) -> list[Problem]:
    """A single underscore where two belong would otherwise be ignored silently."""
    problems = []
    for name in sorted(os.environ):
        for section in _Environment.model_fields:
            head = f"{PREFIX}{section.upper()}_"
            rest = name.upper().removeprefix(head)
            if rest != name.upper() and not rest.startswith("_"):
                place = Place(Source(Layer.ENVIRONMENT, name, cwd))
                problems.append(Problem(place, (), f"unknown variable; did you mean {head}_{rest}?"))
    return problems
