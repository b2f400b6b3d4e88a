"""JSON Schemas for structured output. An unsupported keyword is refused by name; none is silently ignored."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from runtimes.sdk.body import Body
from runtimes.sdk.errors import WorkerError, unsupported

Schema = Mapping[str, Any]

_CONSTRAINTS: Final = """
$anchor $defs $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $ref $schema $vocabulary additionalItems
additionalProperties allOf anyOf const contains definitions dependencies dependentRequired dependentSchemas else enum
exclusiveMaximum exclusiveMinimum format id if items maxContains maxItems maxLength maxProperties maximum minContains
minItems minLength minProperties minimum multipleOf not oneOf pattern patternProperties prefixItems properties
propertyNames required then type unevaluatedItems unevaluatedProperties uniqueItems
"""
_ANNOTATIONS: Final = """
$comment contentEncoding contentMediaType contentSchema default deprecated description discriminator example examples
externalDocs readOnly title writeOnly
"""
_CONSTRAINT_KEYWORDS: Final = frozenset(
    _CONSTRAINTS.split()
)  # constraints: llguidance enforces them, or refuses them by name
_KNOWN: Final = _CONSTRAINT_KEYWORDS | frozenset(_ANNOTATIONS.split())
_SUBSCHEMA_NAMES: Final = """
additionalItems additionalProperties allOf anyOf contains else if items not oneOf prefixItems propertyNames then
unevaluatedItems unevaluatedProperties
"""
_SUBSCHEMAS: Final = frozenset(_SUBSCHEMA_NAMES.split())  # a schema, or a list of them
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OPTIONS: Final = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}  # limited, or a weak model generates blanks for ever
OBJECT: Final[Schema] = {"type": "object"}


def requested_schema(body: Body) -> Schema | None:
    """The schema in `response_format`; None: any text. Raises WorkerError for an unsupported one."""
    given = body.values.get("response_format")
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(kind, str):
        raise body.wrong_value("response_format", 'an object with a type, such as {"type": "json_object"}')
    match kind:
        case "text":
            return None
        case "json_object":
            return OBJECT
        case "json_schema":
            named = given.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            if not isinstance(schema, dict):
                raise body.wrong_value(
                    "response_format", '{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
                )
            check(schema, "response_format")
            return schema
        case _:
            raise unsupported("response_format", f"there are text, json_object and json_schema here, and no {kind}")


def check(schema: Schema, param: str) -> None:
    """Raises WorkerError for an unknown keyword. The keywords' values are checked when the schema becomes a grammar."""
    for keyword in _keywords(schema):
        if keyword not in _KNOWN and not keyword.startswith("x-"):
            near = difflib.get_close_matches(keyword, _CONSTRAINT_KEYWORDS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise unsupported(param, f"JSON Schema has no keyword {keyword!r}{hint}")


def to_guidance_json(schema: Schema, *, lenient: bool = False) -> str:
    """The schema as JSON with llguidance's options. `lenient`: ignore unsupported keywords. Raises WorkerError."""
    try:
        return json.dumps({**schema, "x-guidance": {**_OPTIONS, "lenient": lenient}})
    except RecursionError:
        raise WorkerError("The schema is nested too deeply.", code="schema_unusable") from None


def _keywords(schema: Schema) -> Iterator[str]:
    """The keywords of the schema and its subschemas."""
    pending: list[object] = [schema]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += item
        elif isinstance(item, dict):
            yield from item
            for keyword, value in item.items():
                if keyword in _NAMED:
                    pending += value.values() if isinstance(value, dict) else ()
                elif keyword in _SUBSCHEMAS:
                    pending.append(value)
