"""Decodes JSON requests into structs, describes their mistakes, and lists their fields without effect.

A struct's type defines each field and its meaning once (`supervisor.schema.operation.doc`); error messages and the OpenAPI document
follow from that type. A `Reader` reads one kind of request; a `Remedy` replaces the default message for a mistake by a more helpful
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Final, Generic, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import inspect

from supervisor.catalog.models.rewrite import Fields
from supervisor.errors import InvalidRequestError, UpstreamError
from supervisor.schema.operation import Open, Schema, doc, plain, schema_of

UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""The errors that msgspec raises for bytes that it can't decode."""
_KIND_TEXTS: Final[Mapping[str, str]] = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "array": "a list",
    "object": "an object",
}
_LIMIT_TEXTS: Final[Mapping[str, str]] = {
    "minimum": " from {:.15g}",
    "maximum": " to {:.15g}",
    "minLength": " of at least {} characters",
    "maxLength": " of at most {} characters",
    "minItems": " of at least {} items",
    "maxItems": " of at most {} items",
}
_PLACE: Final = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")  # at the end: a value may look like a place
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_WRONG_WORD: Final = re.compile(r"Invalid (?:enum )?value '(.*)'", re.DOTALL)
_STEP: Final = re.compile(r"(\w+)|\[(\d+)\]")
_INDEX: Final = re.compile(r"\[\d+\]")
_MAX_QUOTED: Final = 100  # characters of a client's value in a message

T = TypeVar("T")
S = TypeVar("S", bound="Sent")
_encode: Final = msgspec.json.Encoder().encode
_fields: Final = msgspec.json.Decoder(Fields).decode
_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Sent(Open):
    """An object that a client sends. A `Reader` leaves out fields that the struct doesn't have, and lists them.

    Structs inside may forbid unknown fields: a request with such a field is refused.
    """


WITHOUT_EFFECT: Final = doc("Accepted, without effect.", "no effect")
Unused = Annotated[Any, WITHOUT_EFFECT]
"""The type of a field that clients send and llmux doesn't read."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """The message for a mistake, instead of the default. In `message`, {place} and {got} are replaced by the request's.

    A message with {got} applies only to an unexpected word, to no other mistake.
    """

    place: str  # a regular expression; indices are left out: messages[].content[].type
    message: str
    code: str | None = None
    verdict: Literal["missing", "wrong"] | None = None  # None: both


@dataclass(frozen=True, slots=True)
class Mistake:
    """A value of a request that doesn't fit its struct."""

    verdict: Literal["unknown", "missing", "wrong"]
    place: str  # messages[0].content; empty: the whole request
    schemas: Sequence[Schema] = ()  # the schemas that are allowed there
    got: str | None = None  # an unexpected word, or the name of an unknown field

    @property
    def about(self) -> str:
        """The field's description, from its type."""
        return plain(self.schemas[0].get("description", "")) if self.schemas else ""


def mistake_of(error: msgspec.ValidationError, kind: type[msgspec.Struct], request: object = None) -> Mistake:
    """The mistake that msgspec reports. `request`: the decoded request, whose tags select the members of unions."""
    message = str(error)
    found = _PLACE.search(message)
    place, message = ("", message) if found is None else (found[1], message[: found.start()])
    if (unknown := _UNKNOWN.fullmatch(message)) is not None:
        return Mistake("unknown", place, _schemas_of_place(_request_schema(kind), place, request), unknown[1])
    if (missing := _MISSING.fullmatch(message)) is not None:
        place = f"{place}.{missing[1]}".removeprefix(".")
    got = _WRONG_WORD.fullmatch(message)
    return Mistake(
        "wrong" if missing is None else "missing",
        place,
        _schemas_of_place(_request_schema(kind), place, request),
        None if got is None else got[1][:_MAX_QUOTED],
    )


@cache
def _request_schema(kind: type[msgspec.Struct]) -> Schema:
    return schema_of(kind, is_answer=False)


def fields_of(kind: type[msgspec.Struct]) -> Mapping[str, Schema]:
    """The schemas of a struct's fields, by their names."""
    fields: Mapping[str, Schema] = _request_schema(kind)["properties"]
    return fields


def _schemas_of_place(schema: Schema, place: str, value: object) -> tuple[Schema, ...]:
    """The schemas that are allowed at a place, without alternatives that the value's tags exclude."""
    found = [schema]
    for step in _STEP.finditer(place):
        found = _inner_schemas(found, step[1], value)
        value = _value_at(value, step[1] or int(step[2]))
    return tuple(each for at, each in enumerate(found) if each not in found[:at])


def _value_at(value: object, step: str | int) -> object:
    if isinstance(value, dict):
        return value.get(step)
    return value[step] if isinstance(value, list) and isinstance(step, int) and step < len(value) else None


def _inner_schemas(schemas: Sequence[Schema], name: str | None, value: object) -> list[Schema]:
    """The schemas of an object's field, or of a list's items: in the objects that the value's tags select, or in all objects."""
    members = [member for schema in schemas for member in _members_of(schema)]
    if name is None:
        return [member["items"] for member in members if isinstance(member.get("items"), Mapping)]
    objects = [member["properties"] for member in members if name in member.get("properties", ())]
    named = [
        fields
        for fields in objects
        if name in _tag_values(fields)
        or all(_value_at(value, tag) in (None, word) for tag, word in _tag_values(fields).items())
    ]
    return [fields[name] for fields in named or objects]


def _members_of(schema: Schema) -> Iterator[Schema]:
    """The members of a union, also of nested unions; or the schema itself."""
    if "anyOf" not in schema:
        yield schema
    for member in schema.get("anyOf", ()):
        yield from _members_of(member)


def _tag_values(fields: Mapping[str, Schema]) -> Mapping[str, object]:
    """The tag fields, which select a member of a union, with their values."""
    return {name: field["const"] for name, field in fields.items() if "const" in field}


def kinds_of(schema: Schema) -> list[str]:
    """The types that a schema allows, without null."""
    kinds = schema.get("type")
    return [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind not in (None, "null")]


def expected(*schemas: Schema) -> str:
    """The kinds of values that any of the schemas allows, in words, such as "a whole number from 1 to 9"."""
    if schemas and all("const" in schema for schema in schemas):
        return f"one of {', '.join(dict.fromkeys(str(schema['const']) for schema in schemas))}"
    words = (word for schema in schemas for word in _descriptions(schema))
    return " or ".join(dict.fromkeys(words)) or "another value"


def _descriptions(schema: Schema) -> list[str]:
    """The kinds of values that a schema allows, each in words."""
    if "anyOf" in schema:
        return [word for each in schema["anyOf"] for word in _descriptions(each)]
    if "const" in schema:
        return [f"{schema['const']!r}"]
    kinds = [_KIND_TEXTS[kind] for kind in kinds_of(schema)]
    if "enum" in schema:
        kinds = [f"one of {', '.join(value for value in schema['enum'] if value is not None)}"]
    elif "pattern" in schema:
        kinds = ["a text of this form" if "description" in schema else "another text"]
    elif schema.get("items") == {"type": "string"}:
        kinds = ["a list of texts"]
    words = " or ".join(kinds) + "".join(_describe_limit(name, schema[name]) for name in _LIMIT_TEXTS if name in schema)
    return [*filter(None, (words, "null" if "null" in schema.get("type", ()) else ""))]


def _describe_limit(name: str, value: float) -> str:
    return " that isn't empty" if value == 1 and name in ("minLength", "minItems") else _LIMIT_TEXTS[name].format(value)


class Reader(Generic[S]):
    """Reads one kind of request. A top-level field that is null counts as missing."""

    def __init__(
        self,
        kind: type[S],
        *remedies: Remedy,
        index: str = "[{}]",
        param: Callable[[str], str] = str,
    ) -> None:
        """`index` formats a list's index in the names of fields without effect; `param` makes an error's `param` from a place."""
        self._kind: Any = kind
        self._type = inspect.type_info(kind)
        self._decode: Final = msgspec.json.Decoder(kind).decode
        self._remedies = [(re.compile(remedy.place), remedy) for remedy in remedies]
        self._index = index
        self._param = param

    def __call__(self, fields: Fields) -> tuple[S, list[str]]:
        """The request, and the places of fields that its type doesn't have, each once. Raises InvalidRequestError."""
        given = {name: raw for name, raw in fields.items() if not is_null(raw)}
        unknown: dict[str, None] = {}
        try:
            try:
                return self._decode(_encode(given)), []
            except msgspec.ValidationError as error:
                if "unknown field" not in str(error):
                    raise
            known = self._without_unknown_fields(self._type, msgspec.Raw(_encode(given)), "", unknown)
            return self._decode(known), [*unknown]
        except msgspec.ValidationError as error:
            raise self._error_for(mistake_of(error, self._kind, _plain_values(given))) from error
        except UNREADABLE as error:
            raise _unreadable_field_error(
                {name: given[name] for name in given if name in _field_decoders(self._kind)}, error
            ) from error

    def _without_unknown_fields(
        self, kind: inspect.Type, raw: msgspec.Raw, place: str, unknown: dict[str, None]
    ) -> msgspec.Raw:
        """The value without the fields that its type doesn't have; a value of another type stays unchanged."""
        begin = bytes(memoryview(raw)[:1])
        for member in _types_with_fields(kind):
            if isinstance(member, inspect.ListType) and begin == b"[":
                item = member.item_type
                decode = _decoder_of_any(
                    tuple(each.cls for each in _types_with_fields(item) if isinstance(each, inspect.StructType))
                )
                return _encode_raw(
                    [
                        each
                        if _can_decode(decode, each)
                        else self._without_unknown_fields(item, each, place + self._index.format(at), unknown)
                        for at, each in enumerate(_items(raw))
                    ]
                )
            if isinstance(member, inspect.StructType) and begin == b"{":
                fields = _fields(raw)
                if member.tag_field in fields and _plain_values(fields[member.tag_field]) != member.tag:
                    continue
                return _encode_raw(dict(self._known_fields(member, fields, place, unknown)))
        return raw

    def _known_fields(
        self, kind: inspect.StructType, fields: Fields, place: str, unknown: dict[str, None]
    ) -> Iterator[tuple[str, msgspec.Raw]]:
        members = _field_decoders(kind.cls)
        for name, value in fields.items():
            inner = f"{place}.{name}" if place else name
            if name == kind.tag_field:
                yield name, value
            elif name in members:
                # Most values decode, and have no unknown fields. A decoder finds that faster than this walk.
                member, decode = members[name]
                yield (
                    name,
                    value
                    if _can_decode(decode, value)
                    else self._without_unknown_fields(member, value, inner, unknown),
                )
            elif not is_null(value):
                if issubclass(kind.cls, Open):
                    unknown[inner] = None
                else:  # the struct refuses it
                    yield name, value

    def _error_for(self, mistake: Mistake) -> InvalidRequestError:
        if mistake.verdict == "unknown":
            return unknown_field(mistake)
        place = _INDEX.sub("[]", mistake.place)
        param = self._param(mistake.place) or None
        for pattern, remedy in self._remedies:
            fits = remedy.verdict in (None, mistake.verdict) and (
                mistake.got is not None or "{got" not in remedy.message
            )
            if fits and pattern.fullmatch(place) is not None:
                message = remedy.message.format(place=mistake.place, got=mistake.got)
                return InvalidRequestError(message, code=remedy.code, param=param)
        return InvalidRequestError(_describe_mistake(mistake), param=param)


def unknown_field(mistake: Mistake) -> InvalidRequestError:
    """The error for an unknown field, with the known ones."""
    place = f"{mistake.place}.{mistake.got}".removeprefix(".")[:_MAX_QUOTED]
    known = [
        name for schema in mistake.schemas for member in _members_of(schema) for name in member.get("properties", ())
    ]
    return InvalidRequestError(f"{place}: unknown; there is {', '.join(dict.fromkeys(known))}.", param=place)


@cache
def _field_decoders(kind: type) -> Mapping[str, tuple[inspect.Type, Callable[[msgspec.Raw], object]]]:
    """The types of a struct's fields, and their decoders, by their names."""
    hints = get_type_hints(kind, include_extras=True)
    fields = inspect.type_info(kind).fields  # type: ignore[attr-defined]
    return {field.encode_name: (field.type, msgspec.json.Decoder(hints[field.name]).decode) for field in fields}


@cache
def _decoder_of_any(structs: tuple[type[msgspec.Struct], ...]) -> Callable[[msgspec.Raw], object]:
    """The decoder for null or an object of one of these structs."""
    return msgspec.json.Decoder(reduce(or_, structs, None)).decode


def _can_decode(decode: Callable[[msgspec.Raw], object], raw: msgspec.Raw) -> bool:
    try:
        decode(raw)
    except UNREADABLE:
        return False
    return True


def top(place: str) -> str:
    """The top-level field of a place."""
    return place.partition(".")[0].partition("[")[0]


def _describe_mistake(mistake: Mistake) -> str:
    missing = "missing; " if mistake.verdict == "missing" else ""
    end = ":" if any("pattern" in schema for schema in mistake.schemas) and mistake.about else "."
    words = f"{missing}expected {expected(*mistake.schemas)}{end} {mistake.about}"
    return f"{mistake.place or 'The request'}: {words}".rstrip()


def _types_with_fields(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The members of a union, or the type itself, as far as they may have fields."""
    match kind:
        case inspect.Metadata(type=inner):
            yield from _types_with_fields(inner)
        case inspect.UnionType(types=types):
            for member in types:
                yield from _types_with_fields(member)
        case inspect.ListType() | inspect.StructType():
            yield kind


def _unreadable_field_error(given: Fields, error: Exception) -> InvalidRequestError:
    """The error for the field that can't be read: its text is not UTF-8, or its values are nested too deeply."""
    for name, raw in given.items():
        try:
            msgspec.json.decode(raw)
        except UNREADABLE as cause:
            return InvalidRequestError(f"{name} can't be read: {cause}.", code="invalid_json", param=name)
    return InvalidRequestError(f"The request can't be read: {error}.", code="invalid_json")


def _plain_values(value: Fields | msgspec.Raw) -> object:
    """The value decoded; None if it can't be decoded."""
    try:
        return msgspec.json.decode(_encode(value))
    except UNREADABLE:
        return None


def is_null(raw: msgspec.Raw) -> bool:
    """Is it JSON's null?"""
    return bytes(memoryview(raw)[:1]) == b"n"


def unparsed() -> Any:
    """The default of a field that is forwarded unparsed. Its type must be Raw alone: in a union with Raw, msgspec accepts only null."""
    return msgspec.field(default_factory=msgspec.Raw)


def is_given(raw: msgspec.Raw) -> bool:
    """Was an unparsed field given, and not null?"""
    return bytes(memoryview(raw)[:1]) not in {b"", b"n"}


def encoded(fields: Mapping[str, object]) -> Fields:
    """Fields with encoded values, as in a canonical request."""
    return {name: value if isinstance(value, msgspec.Raw) else _encode_raw(value) for name, value in fields.items()}


def _encode_raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))


def decoded_answer(decode: Callable[[bytes], T], body: bytes, noun: str) -> T:
    """A worker's answer, decoded. Raises UpstreamError for an answer that isn't a `noun`."""
    try:
        return decode(body)
    except UNREADABLE as error:
        raise UpstreamError(f"The worker's answer is no {noun}.") from error
