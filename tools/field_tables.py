"""The tables of docs/reference/request-fields.md: llmux's treatment of each field of a request, from the dialects' types, and the
results of SDKs' fields in a test with real workers.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import inspect

from supervisor.dialects import OPERATIONS
from supervisor.dialects.openai.types import ForLlmux
from supervisor.gateway.body.typed import Sent, fields_of
from supervisor.gateway.operation import Endpoint, Group
from tools.locks import ROOT
from tools.markdown import table

GOLDEN: Final = ROOT / "tests" / "golden" / "request_fields.json"
FATES: Final = ("read", "passed on", "no effect", "named", "refused")

Results = Mapping[str, Mapping[str, Any]]
"""For one path: field → the tried `value`, and the result for each runtime."""


@cache
def recorded() -> Mapping[str, Results]:
    """Path → the results that `make golden` recorded for each field of an SDK."""
    found: Mapping[str, Results] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def requests() -> Iterator[tuple[Group, Endpoint, type[msgspec.Struct]]]:
    """The inference endpoints with a JSON request and its type: typed requests, and those with recorded fields."""
    for name in OPERATIONS:
        group: Group = importlib.import_module(name).GROUP
        for endpoint in group.endpoints:
            kind = endpoint.reads
            if endpoint.run is not None or not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
                continue
            if issubclass(kind, Sent) or endpoint.path in recorded():
                yield group, endpoint, kind


def tables() -> str:
    """The whole page without its introduction."""
    parts = ["## On every path", _llmux_fields_table()]
    shown: set[str] = set()  # the first of two dialects with the same path shows the results
    objects: set[type] = set()
    for group, endpoint, kind in requests():
        results = {} if endpoint.path in shown else recorded().get(endpoint.path, {})
        parts.append(f"## `{endpoint.path}`" + (f", {group.name}" if endpoint.path in shown else ""))
        parts.append(_request_table(kind, results))
        if issubclass(kind, Sent) and (rows := [*_object_rows(kind, objects)]):
            parts += ["Within it:", table(("Object", "Fields"), rows)]
        shown.add(endpoint.path)
    return "\n\n".join(parts)


def fates(kind: type[msgspec.Struct], others: Results | None = None) -> dict[str, str]:
    """Field → llmux's treatment of it, in a request or an object within; `others` are fields that the type lacks."""
    described = {name: field for name, field in _fields_by_name(kind).items() if name not in ForLlmux.__struct_fields__}
    is_passed = issubclass(kind, ForLlmux) and not issubclass(kind, Sent)  # the worker reads the request unchanged
    found = {name: "passed on" if is_passed else _fate_of(field.type) for name, field in described.items()}
    return found | {name: "passed on" if is_passed else "named" for name in others or () if name not in found}


def _fate_of(field: inspect.Type) -> str:
    members = [*_member_types(field)]
    marks = [one.extra["fate"] for one in members if isinstance(one, inspect.Metadata) and one.extra]
    is_raw = any(isinstance(one, inspect.RawType) for one in members)
    return str(marks[0]) if marks else "passed on" if is_raw else "read"


def _llmux_fields_table() -> str:
    return table(("Field", "Meaning"), [(f"`{name}`", one["description"]) for name, one in fields_of(ForLlmux).items()])


def _request_table(kind: type[msgspec.Struct], results: Results) -> str:
    runtimes = [*dict.fromkeys(name for path in recorded().values() for row in path.values() for name in row)]
    columns = runtimes if results else []
    head = ("Field", "llmux", *("Tried with" if name == "value" else f"`{name}`" for name in columns))
    rows = [
        (f"`{name}`", fate, *(_result_text(results.get(name, {}), column) for column in columns))
        for name, fate in fates(kind, results).items()
    ]
    return table(head, rows)


def _result_text(row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        return "–"
    return f"`{json.dumps(row[column])}`" if column == "value" else str(row[column])


def _object_rows(kind: type[msgspec.Struct], known: set[type]) -> Iterator[tuple[str, str]]:
    """Each object within a request that is not in `known`, with its fields grouped by fate."""
    places: dict[type[msgspec.Struct], dict[str, None]] = {}
    for place, inner in _nested_objects(kind, ""):
        places.setdefault(inner, {})[f"`{place}`"] = None
    for inner, found in places.items():
        if inner in known:
            continue
        known.add(inner)
        config = inner.__struct_config__
        tag = "" if config.tag is None else f" with `{config.tag_field}` `{config.tag}`"
        by_fate = {fate: [f"`{name}`" for name, its in fates(inner).items() if its == fate] for fate in FATES}
        words = [f"{fate}: {', '.join(names)}" for fate, names in by_fate.items() if names]
        if not issubclass(inner, Sent):
            words.append("refused: all others")
        yield ", ".join(found) + tag, "; ".join(words) or "–"


def _nested_objects(kind: type[msgspec.Struct], place: str) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    for name, field in _fields_by_name(kind).items():
        yield from _objects_in_type(field.type, f"{place}.{name}".removeprefix("."))


def _objects_in_type(kind: inspect.Type, place: str) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    for one in _member_types(kind):
        if isinstance(one, inspect.ListType):
            yield from _objects_in_type(one.item_type, f"{place}[]")
        elif isinstance(one, inspect.StructType):
            yield place, one.cls
            yield from _nested_objects(one.cls, place)


def _fields_by_name(kind: type[msgspec.Struct]) -> Mapping[str, inspect.Field]:
    """JSON name → field."""
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return {field.encode_name: field for field in described.fields}


def _member_types(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The type and its parts: the members of a union, and an annotated type."""
    yield kind
    match kind:
        case inspect.Metadata(type=inner):
            yield from _member_types(inner)
        case inspect.UnionType(types=types):
            for one in types:
                yield from _member_types(one)
