"""Settings of an operator for a model's next loads, without a change of the file.

The runtime defines the allowed keys and values (`Adapter.overridable`). The whole configuration is then validated and checked
as if it came from a file, so that an override can't set anything that a file couldn't.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from supervisor.catalog.catalog import CatalogModel
from supervisor.catalog.document.document import Layer, Place, Source, dotted, tree_of
from supervisor.catalog.problems import suggestion, validate
from supervisor.core.types import ModelSpec
from supervisor.errors import InvalidRequestError

_BACKEND: Final = re.compile("^(llama_server|gguf|exllama|vllm)_")  # begins a key of llm-pool's
_RUNTIMES: Final = {"gguf": ("llama_cpp",), "exllama": ("exllamav3",), "vllm": ("vllm", "vllm_serve")}
"""Our runtimes for llm-pool's backends with other names."""
_PLACE = Place(Source(Layer.FLAG, "overrides", Path()))


@dataclass(frozen=True, slots=True)
class Override:
    """A model with an operator's settings, and its specs for the core: `spec` with them, `base` without them."""

    model: CatalogModel
    values: Mapping[str, JsonValue]
    spec: ModelSpec
    base: ModelSpec


def renamed(model: CatalogModel, values: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """`values` with llm-pool's names and words replaced by ours, if they belong to the model's own backend."""
    allowed = model.adapter.overridable(model.as_configured)
    own: dict[str, JsonValue] = {}
    for key, value in values.items():
        backend = _BACKEND.match(key)
        theirs = backend is not None and model.adapter.name in _RUNTIMES.get(backend[1], (backend[1],))
        name = _BACKEND.sub("", key)
        name = name if theirs and name in allowed and key not in allowed else key
        own[name] = "draft-simple" if (name, value) == ("spec_type", "draft") else value
    return own


def overridden(model: CatalogModel, values: Mapping[str, JsonValue], *, runtimes_dir: Path) -> CatalogModel:
    """The model with `values` in its configuration. Blocks on looking at its files.

    Raises InvalidRequestError that names every problem.
    """
    allowed = model.adapter.overridable(model.as_configured)
    problems = [
        f"overrides.{key}: can't be set for a load{suggestion(_BACKEND.sub('', key), allowed, what='what can')}"
        for key in values
        if key not in allowed
    ]
    document = model.as_configured.model_dump(mode="json", exclude_unset=True)
    document |= {key: value for key, value in values.items() if key in allowed}
    config, wrong = validate(type(model.as_configured), tree_of(document, _PLACE), ())
    problems += [f"{dotted(('overrides', *problem.trail))}: {problem.message}" for problem in wrong]
    reported = {problem.trail[0] for problem in wrong if problem.trail}
    problems += [
        f"overrides.{key}: {beyond}"
        for key, value in values.items()
        if key in allowed and key not in reported and (beyond := _range_violation(allowed[key], value)) is not None
    ]
    if config is not None:
        problems += [f"overrides: {found}" for found in model.adapter.check(config, runtimes_dir=runtimes_dir)]
        if not problems:
            return model.configured(config)
    raise InvalidRequestError("; ".join(problems), code="invalid_override", param="overrides", detail=tuple(problems))


def _range_violation(constraint: Mapping[str, JsonValue], value: JsonValue) -> str | None:
    """The violation of the range allowed for a load, which may be narrower than in a file; None: there is none."""
    choices = constraint.get("enum")
    if isinstance(choices, list) and value is not None and value not in choices:
        return f"expected one of {', '.join(map(str, choices))}, got {value}"
    least, most = constraint.get("minimum"), constraint.get("maximum")
    if not isinstance(value, int | float):
        return None
    if isinstance(least, int | float) and value < least:
        return f"expected at least {least}, got {value}"
    if isinstance(most, int | float) and value > most:
        return f"expected at most {most}, got {value}"
    return None
