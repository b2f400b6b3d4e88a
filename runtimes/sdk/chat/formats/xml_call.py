"""Parses a call written as tags, `<function=name><parameter=key>value</parameter></function>`, to JSON while it arrives.

A parameter's type comes from the function's schema: strings are streamed, other values are output when complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from runtimes.sdk.chat.formats.pieces import CallArguments, CallStart, Schemas
from runtimes.sdk.chat.formats.reader import Reader, Reading, ignore

FUNCTION = "<function="
_PARAMETER, _PARAMETER_END, _FUNCTION_END = "<parameter=", "</parameter>", "</function>"
_ENDS = (
    f"\n{_PARAMETER_END}",
    _PARAMETER_END,
    f"\n{_PARAMETER}",
    f"\n{_FUNCTION_END}",
)  # models sometimes omit the closing tag
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def read_call(reader: Reader, index: int, schemas: Schemas) -> Reading[bool]:
    """Read one call. False if the text ends before its name does."""
    opening = yield from reader.read_before(">")
    if opening is None:
        return False
    name = opening.partition(FUNCTION)[2].strip()
    reader.out.append(CallStart(index, name))
    lead = "{"
    while marker := (yield from reader.read_until((_PARAMETER, _FUNCTION_END), ignore)):
        if marker == _FUNCTION_END:
            reader.out.append(CallArguments(index, "{}" if lead == "{" else "}"))
            break
        key = yield from reader.read_before(">")
        if key is not None:
            types = frozenset(_types_of(schemas.get(name, {}), key.strip()))
            reader.out.append(CallArguments(index, f"{lead}{json.dumps(key.strip(), ensure_ascii=False)}: "))
            yield from _read_value(reader, index, types)
            lead = ", "
    return True


def _read_value(reader: Reader, index: int, types: frozenset[str]) -> Reading[None]:
    is_text = types == {"string"}
    parts: list[str] = []

    def output(text: str) -> None:
        reader.out.append(CallArguments(index, text))

    def collect(text: str) -> None:
        parts.append(text if parts else text.removeprefix("\n"))  # the line break after the tag
        if is_text:
            output(json.dumps(parts[-1], ensure_ascii=False)[1:-1])

    if is_text:
        output('"')
    marker = yield from reader.read_until(_ENDS, collect)
    if marker:
        output('"' if is_text else _to_json("".join(parts), types))
        if not marker.endswith(_PARAMETER_END):
            reader.buffer = marker + reader.buffer


def _to_json(value: str, types: frozenset[str]) -> str:
    try:
        text = {"True": "true", "False": "false", "None": "null"}.get(value.strip(), value)
        parsed = json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
    fits = not types or any(
        isinstance(parsed, _TYPES.get(name, ())) and not (isinstance(parsed, bool) and name != "boolean")
        for name in types
    )
    return json.dumps(parsed if fits else value, ensure_ascii=False)


def _refuse_constant(word: str) -> None:
    raise ValueError(word)  # NaN and Infinity are not JSON


def _types_of(schema: object, key: str) -> Iterator[str]:
    """JSON types that a function's schema allows for a parameter; none if unknown."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return _schema_types(properties.get(key)) if isinstance(properties, Mapping) else iter(())


def _schema_types(schema: object) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    kind = schema.get("type")
    yield from (item for item in (kind if isinstance(kind, list) else [kind]) if isinstance(item, str))
    for name in ("anyOf", "oneOf"):
        branches = schema.get(name)
        for branch in branches if isinstance(branches, list) else ():
            yield from _schema_types(branch)
