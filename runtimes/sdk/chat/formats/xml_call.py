"""Parses a call written as tags, `<function=name><parameter=key>value</parameter></function>`, to JSON while it arrives.

A parameter's type comes from the function's schema: strings are streamed, other values are output when complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from runtimes.sdk.chat.formats.pieces import CallArguments, CallStart, Schemas
from runtimes.sdk.chat.formats.reader import Reader, Reading, ignore

FUNCTION = "<function="
_PARAMETER, _CLOSED, _DONE = "<parameter=", "</parameter>", "</function>"
_ENDS = (f"\n{_CLOSED}", _CLOSED, f"\n{_PARAMETER}", f"\n{_DONE}")  # models sometimes omit the closing tag
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
    opening = yield from reader.before(">")
    if opening is None:
        return False
    name = opening.partition(FUNCTION)[2].strip()
    reader.out.append(CallStart(index, name))
    lead = "{"
    while marker := (yield from reader.until((_PARAMETER, _DONE), ignore)):
        if marker == _DONE:
            reader.out.append(CallArguments(index, "{}" if lead == "{" else "}"))
            break
        key = yield from reader.before(">")
        if key is not None:
            types = frozenset(_types_of(schemas.get(name, {}), key.strip()))
            reader.out.append(CallArguments(index, f"{lead}{json.dumps(key.strip(), ensure_ascii=False)}: "))
            yield from _read_value(reader, index, types)
            lead = ", "
    return True


def _read_value(reader: Reader, index: int, types: frozenset[str]) -> Reading[None]:
    is_text = types == {"string"}
    parts: list[str] = []

    def give(text: str) -> None:
        reader.out.append(CallArguments(index, text))

    def say(text: str) -> None:
        parts.append(text if parts else text.removeprefix("\n"))  # the line break after the tag
        if is_text:
            give(json.dumps(parts[-1], ensure_ascii=False)[1:-1])

    if is_text:
        give('"')
    marker = yield from reader.until(_ENDS, say)
    if marker:
        give('"' if is_text else _json("".join(parts), types))
        if not marker.endswith(_CLOSED):
            reader.buffer = marker + reader.buffer


def _json(value: str, types: frozenset[str]) -> str:
    try:
        text = {"True": "true", "False": "false", "None": "null"}.get(value.strip(), value)
        parsed = json.loads(text, parse_constant=_refuse)
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
    fits = not types or any(
        isinstance(parsed, _TYPES.get(name, ())) and not (isinstance(parsed, bool) and name != "boolean")
        for name in types
    )
    return json.dumps(parsed if fits else value, ensure_ascii=False)


def _refuse(word: str) -> None:
    raise ValueError(word)  # NaN and Infinity are not JSON


def _types_of(schema: object, key: str) -> Iterator[str]:
    """JSON types that a function's schema allows for a parameter; none if unknown."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return _types(properties.get(key)) if isinstance(properties, Mapping) else iter(())


def _types(schema: object) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    kind = schema.get("type")
    yield from (item for item in (kind if isinstance(kind, list) else [kind]) if isinstance(item, str))
    for name in ("anyOf", "oneOf"):
        branches = schema.get(name)
        for branch in branches if isinstance(branches, list) else ():
            yield from _types(branch)
