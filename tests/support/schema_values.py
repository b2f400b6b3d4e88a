"""Values that fit a JSON schema, for Hypothesis: of the schemas that `supervisor.schema.operation` makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

_TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
_ODD_NAMES = st.sampled_from(("x_trace", "unknown", "n", "ä"))
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), _TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(_TEXTS, inner, max_size=2)),
    max_leaves=4,
)


def values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Of a schema without references. Raises NotImplementedError for what isn't known here."""
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return st.one_of([values(each) for each in schema[word]])
    kinds = schema.get("type")
    if kinds is None:
        return ANYTHING
    return st.one_of([_of(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)])


def _of(kind: str, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    match kind:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            least, most = _bounds(schema)
            return st.integers(int(least), int(most))
        case "number":
            least, most = _bounds(schema)
            return st.floats(least, most, exclude_min="exclusiveMinimum" in schema) | st.integers(
                int(least) + 1, int(most)
            )
        case "string":
            if "pattern" in schema:
                most = schema.get("maxLength", 100)
                return st.from_regex(schema["pattern"].replace("$", r"\Z")).filter(lambda text: len(text) <= most)
            return st.text(st.characters(codec="utf-8"), min_size=schema.get("minLength", 0), max_size=12)
        case "array":
            return st.lists(values(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=3)
        case "object":
            return _objects(schema)
    raise NotImplementedError(kind)


def _bounds(schema: Mapping[str, Any]) -> tuple[float, float]:
    least = schema.get("minimum", schema.get("exclusiveMinimum", -1000))
    return least, schema.get("maximum", max(least, 0) + 1000)


def _objects(schema: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    fields, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    needed = {name: values(field) for name, field in fields.items() if name in schema.get("required", ())}
    optional = {name: values(field) for name, field in fields.items() if name not in needed}
    found = st.fixed_dictionaries(needed, optional=optional)
    if more is False:
        return found
    others = st.dictionaries(_ODD_NAMES, ANYTHING if more is True else values(more), max_size=1)
    return st.builds(lambda own, other: {**other, **own}, found, others)
