"""Translates the variables that configure containers of model runners into values of our configuration.

They are below all files: a value in a file, even null, wins. Without any file they are the whole configuration, with the models
in `MODEL_BASE_PATH`. Names of tenants are used as they are in the variable. `VLLM_…` variables are defaults of every
vllm_serve model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from supervisor.catalog.document.document import (
    Layer,
    Leaf,
    Node,
    Place,
    Problem,
    Source,
    Table,
    Trail,
    merge,
    scalar,
    tree_of,
    whole_number,
)

TENANT: Final = "TENANT_RATE_LIMIT_"
LLM_POOL: Final = "LLM_POOL_"  # the prefix in an installation of llm-pool
_NO_GPU: Final = frozenset({"", "-1", "none", "void", "nodevfiles"})
_GPU: Final = re.compile(r"(?P<index>\d{1,4})|(?P<uuid>GPU-[0-9a-fA-F-]+)")
_WORDS: Final = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}

_LEVELS: Final = {"trace": "debug", "warn": "warning", "critical": "error", "fatal": "error"}
"""Other programs' names of levels, since these use the variable, too."""

Read = Callable[[str], JsonValue]


def _boolean(text: str) -> bool:
    try:
        return _WORDS[text.lower()]
    except KeyError:
        raise ValueError(f"expected true or false, got {text[:50]!r}") from None


def _seconds(text: str) -> float:
    if (number := whole_number(text)) is None:
        raise ValueError(f"expected a whole number of milliseconds, got {text[:50]!r}")
    return number / 1000


def _level(text: str) -> str:
    return _LEVELS.get(text.lower(), text.lower())


def _format(text: str) -> str:
    return {"text": "console"}.get(text.lower(), text.lower())


def _devices(text: str) -> list[JsonValue]:
    """The devices as CUDA reads the variable: words after a -1 are ignored. Without any GPU the device is main memory."""
    devices: list[JsonValue] = []
    for word in (word.strip() for word in text.split(",")):
        if word.lower() in _NO_GPU:
            break
        if (found := _GPU.fullmatch(word)) is None:
            raise ValueError(
                f"expected GPUs by number or UUID, such as 0,1 or GPU-6f1e2d3c, got {word[:50]!r}; parts of a GPU (MIG) "
                "can't be used"
            )
        which = {"uuid": word} if found["index"] is None else {"index": int(word)}
        devices.append({"kind": "cuda", **which})
    return devices or [{"kind": "host"}]


VARIABLES: Final[Mapping[str, tuple[Trail, Read]]] = {
    "CUDA_VISIBLE_DEVICES": (("devices",), _devices),
    "MODEL_BASE_PATH": (("server", "model_base_path"), str),
    "ENABLE_MULTI_TENANT": (("server", "multi_tenant"), _boolean),
    "DEFAULT_RATE_LIMIT": (("clients", "default", "request_rate"), str),
    "VERIFIED_OP_TOKEN_KEY_PATH": (("server", "governance", "key_file"), str),
    "LOG_LEVEL": (("server", "log_level"), _level),
    "LOG_FORMAT": (("server", "log_format"), _format),
    "ENABLE_METRICS": (("server", "metrics"), _boolean),
    "METRICS_PORT": (("server", "metrics_port"), scalar),
    "MAX_QUEUE_DEPTH": (("limits", "queue_total"), scalar),
    "QUEUE_TIMEOUT_MS": (("limits", "queue_wait_s"), _seconds),
}
"""The key of the configuration that each variable sets, and the function that reads its value."""

_COMMON: Final = frozenset({"CUDA_VISIBLE_DEVICES", "LOG_LEVEL", "LOG_FORMAT"})
"""Also set on many machines without a runner."""

VLLM_RUNTIME: Final = "vllm_serve"
VLLM: Final[Mapping[str, tuple[str, Read]]] = {
    "VLLM_ENABLE_PREFIX_CACHING": ("enable_prefix_caching", _boolean),
    "VLLM_MAX_MODEL_LEN": ("max_model_len", scalar),
    "VLLM_GPU_MEMORY_UTILIZATION": ("gpu_memory_utilization", scalar),
}
"""For each variable the key of a model whose default it sets, and the function that reads its value."""

_SIZED_BY: Final = ("kv_cache_memory_bytes", "vram_mib")
"""Without one of these, `gpu_memory_utilization` is refused, since a share of the device alone sizes nothing."""


def read_variables(environment: Mapping[str, str], cwd: Path) -> tuple[Table, list[Problem]]:
    """The values of these variables, as a tree whose places are the variables. An empty variable is unset, except CUDA's."""
    root = Table({}, Place(Source(Layer.ENVIRONMENT, "the environment", cwd)))
    problems: list[Problem] = []
    for name, trail, read in _set_variables(environment):
        place = Place(Source(Layer.ENVIRONMENT, name, cwd))
        text = environment[name].strip()
        if not text and trail != ("devices",):
            continue
        try:
            node = tree_of(read(text), place)
        except ValueError as error:
            problems.append(Problem(place, (), str(error)))
            continue
        for key in reversed(trail):
            node = Table({str(key): node}, place)
        merged = merge(root, node)
        assert isinstance(merged, Table)
        root = merged
    return root, problems


def _set_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, Trail, Read]]:
    """The variables that are set, with the keys that they set; of two for one key the later wins."""
    for name, (trail, read) in VARIABLES.items():
        if name in environment:
            yield name, trail, read
    for name in sorted(environment):
        if name.startswith(TENANT) and name != TENANT:
            yield name, ("clients", name.removeprefix(TENANT), "request_rate"), str
        elif name.startswith(LLM_POOL):
            yield name, ("server", "responses"), lambda _: "llm-pool"


def is_runner(environment: Mapping[str, str]) -> bool:
    """Whether variables are set that only a runner's container has."""
    own = (VARIABLES.keys() | VLLM.keys()) - _COMMON
    return any(text.strip() and (name in own or name.startswith(TENANT)) for name, text in environment.items())


def vllm_defaults(environment: Mapping[str, str], cwd: Path) -> tuple[Table, list[Problem]]:
    """The keys of a vllm_serve model that variables set."""
    place = Place(Source(Layer.ENVIRONMENT, "the environment", cwd))
    entries: dict[str, Node] = {}
    problems: list[Problem] = []
    for name, (key, read) in VLLM.items():
        if text := environment.get(name, "").strip():
            place = Place(Source(Layer.ENVIRONMENT, name, cwd))
            try:
                entries[key] = tree_of(read(text), place)
            except ValueError as error:
                problems.append(Problem(place, (), str(error)))
    return Table(entries, place), problems


def with_defaults(model: Table, defaults: Table) -> Table:
    """A vllm_serve model with the defaults of keys that it leaves open, if they apply to it."""
    fitting = {
        key: node
        for key, node in defaults.entries.items()
        if key != "gpu_memory_utilization" or any(sized in model.entries for sized in _SIZED_BY)
    }
    return replace(model, entries={**fitting, **model.entries})


def fill_missing(root: Table, variables: Table) -> Table:
    """`root` with the variables' values for its missing keys. A section without keys counts as missing."""
    entries = {key: node for key, node in root.entries.items() if node != Leaf(None, node.place)}
    filled = _fill_missing(replace(root, entries=entries), variables)
    assert isinstance(filled, Table)
    return replace(root, entries={**root.entries, **filled.entries})


def _fill_missing(node: Node, under: Node) -> Node:
    if not (isinstance(node, Table) and isinstance(under, Table)):
        return node
    both = {key: _fill_missing(node.entries[key], value) for key, value in under.entries.items() if key in node.entries}
    return replace(node, entries={**under.entries, **node.entries, **both})
