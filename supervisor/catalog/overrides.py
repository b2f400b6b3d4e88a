"""Settings an operator gives a model for its next loads, without touching the file.

The runtime says which keys may be set and what they may be (`Adapter.overridable`); the whole configuration is then
validated and checked like one from a file, so that an override can't say what the file could not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import JsonValue, ValidationError

from supervisor.catalog.catalog import CatalogModel
from supervisor.catalog.problems import suggestion
from supervisor.core.types import ModelSpec
from supervisor.errors import InvalidRequestError

_KINDS = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}


@dataclass(frozen=True, slots=True)
class Override:
    """A model with an operator's settings, and its specs for the core: with them, and without them."""

    model: CatalogModel
    values: Mapping[str, JsonValue]
    spec: ModelSpec
    base: ModelSpec


def overridden(model: CatalogModel, values: Mapping[str, JsonValue], *, runtimes_dir: Path) -> CatalogModel:
    """The model with `values` in its configuration. Blocks on looking at its files.

    Raises InvalidRequestError that names every problem, each with the choice or range there is.
    """
    allowed = model.adapter.overridable(model.config)
    problems = [
        f"overrides.{key}: can't be set for a load{suggestion(key, allowed, what='what can')}"
        for key in values
        if key not in allowed
    ]
    document = model.config.model_dump(mode="json", exclude_unset=True) | dict(values)
    try:
        config = type(model.config).model_validate_json(json.dumps(document))
    except ValidationError as error:
        wrong = dict.fromkeys(str(found["loc"][0]) for found in error.errors(include_url=False) if found["loc"])
        problems += [
            f"overrides.{key}: expected {expected(allowed[key])}, got {json.dumps(values[key])}"
            for key in wrong
            if key in allowed and key in values
        ]
    else:
        problems += [f"overrides: {found}" for found in model.adapter.check(config, runtimes_dir=runtimes_dir)]
        if not problems:
            return replace(model, config=config)
    raise InvalidRequestError("; ".join(problems), code="invalid_override", param="overrides", detail=tuple(problems))


def expected(constraint: Mapping[str, JsonValue]) -> str:
    """A constraint in words: "a whole number from 1 to 6"."""
    match constraint:
        case {"anyOf": list(choices)}:
            return " or ".join(expected(choice) for choice in choices if isinstance(choice, dict))
        case {"enum": list(choices)}:
            return "one of " + ", ".join(map(str, choices))
        case {"const": value}:
            return json.dumps(value)
    kind = _KINDS.get(str(constraint.get("type")), "another value")
    return " ".join((kind, *_bounds(constraint)))


def _bounds(constraint: Mapping[str, JsonValue]) -> Iterator[str]:
    if "minimum" in constraint and "maximum" in constraint:
        yield f"from {constraint['minimum']} to {constraint['maximum']}"
        return
    for key, words in (
        ("minimum", "of at least"),
        ("exclusiveMinimum", "greater than"),
        ("maximum", "of at most"),
        ("exclusiveMaximum", "less than"),
    ):
        if key in constraint:
            yield f"{words} {constraint[key]}"
