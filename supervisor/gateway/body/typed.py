"""JSON as structs: what a client sent, what is wrong with it in words, and which fields of it have no effect.

A type says once what a field must be and means (`supervisor.schema.operation.doc`); the words of an error and the OpenAPI document
follow from it. A `Reader` reads one kind of request; a `Remedy` replaces its words where more is to say than what was expected.
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
"""What msgspec raises for bytes that are not what they should be."""
_KINDS: Final[Mapping[str, str]] = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "array": "a list",
    "object": "an object",
}
_LIMITS: Final[Mapping[str, str]] = {
    "minimum": " from {:.15g}",
    "maximum": " to {:.15g}",
    "minLength": " of at least {} characters",
    "maxLength": " of at most {} characters",
    "minItems": " of at least {} items",
    "maxItems": " of at most {} items",
}
_PLACE: Final = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")  # the last one: a value may look like one
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_GOT: Final = re.compile(r"Invalid (?:enum )?value '(.*)'", re.DOTALL)
_STEP: Final = re.compile(r"(\w+)|\[(\d+)\]")
_INDEX: Final = re.compile(r"\[\d+\]")
_SHOWN: Final = 100  # characters of a client's own words in a message

T = TypeVar("T")
S = TypeVar("S", bound="Sent")
_encode: Final = msgspec.json.Encoder().encode
_fields: Final = msgspec.json.Decoder(Fields).decode
_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Sent(Open):
    """An object that a client sends. A `Reader` leaves out the fields that it doesn't have, and names them.

    Within it may be other structs that forbid unknown fields: a request with one is refused.
    """


WITHOUT_EFFECT: Final = doc("Accepted, without effect.", "no effect")
Unused = Annotated[Any, WITHOUT_EFFECT]
"""Of a field that clients send and nothing here reads."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to say of a mistake, instead of what was expected. In `message`, {place} and {got} stand for the client's own.

    One with {got} is for a word that is none of those expected, and no other mistake.
    """

    place: str  # a regular expression; indices are left out: messages[].content[].type
    message: str
    code: str | None = None
    verdict: Literal["missing", "wrong"] | None = None  # None: of both


@dataclass(frozen=True, slots=True)
class Mistake:
    """What doesn't fit a struct."""

    verdict: Literal["unknown", "missing", "wrong"]
    place: str  # messages[0].content; empty: all of it
    schemas: Sequence[Schema] = ()  # what may stand there
    got: str | None = None  # a word that is none of those expected, or the name of an unknown field

    @property
    def about(self) -> str:
        """What the field means, as its type says it."""
        return plain(self.schemas[0].get("description", "")) if self.schemas else ""


def mistake_of(error: msgspec.ValidationError, kind: type[msgspec.Struct], request: object = None) -> Mistake:
    """What msgspec found in a request of this kind. `request`: decoded, so that of a union that member counts which it names."""
    message = str(error)
    found = _PLACE.search(message)
    place, message = ("", message) if found is None else (found[1], message[: found.start()])
    if (unknown := _UNKNOWN.fullmatch(message)) is not None:
        return Mistake("unknown", place, _schemas_at(_schema(kind), place, request), unknown[1])
    if (missing := _MISSING.fullmatch(message)) is not None:
        place = f"{place}.{missing[1]}".removeprefix(".")
    got = _GOT.fullmatch(message)
    return Mistake(
        "wrong" if missing is None else "missing",
        place,
        _schemas_at(_schema(kind), place, request),
        None if got is None else got[1][:_SHOWN],
    )


@cache
def _schema(kind: type[msgspec.Struct]) -> Schema:
    return schema_of(kind, is_answer=False)


def fields_of(kind: type[msgspec.Struct]) -> Mapping[str, Schema]:
    """The schemas of a struct's fields, by their names."""
    fields: Mapping[str, Schema] = _schema(kind)["properties"]
    return fields


def _schemas_at(schema: Schema, place: str, value: object) -> tuple[Schema, ...]:
    """What may stand at a place, of all the alternatives that the value leaves open."""
    found = [schema]
    for step in _STEP.finditer(place):
        found = _inside(found, step[1], value)
        value = _part(value, step[1] or int(step[2]))
    return tuple(one for at, one in enumerate(found) if one not in found[:at])


def _part(value: object, step: str | int) -> object:
    if isinstance(value, dict):
        return value.get(step)
    return value[step] if isinstance(value, list) and isinstance(step, int) and step < len(value) else None


def _inside(schemas: Sequence[Schema], name: str | None, value: object) -> list[Schema]:
    """The schemas of an object's field, or of a list's items: of the objects that the value's tags name, or of all if they name none."""
    members = [member for schema in schemas for member in _members_of(schema)]
    if name is None:
        return [member["items"] for member in members if isinstance(member.get("items"), Mapping)]
    objects = [member["properties"] for member in members if name in member.get("properties", ())]
    named = [
        fields
        for fields in objects
        if name in _tags(fields) or all(_part(value, tag) in (None, word) for tag, word in _tags(fields).items())
    ]
    return [fields[name] for fields in named or objects]


def _members_of(schema: Schema) -> Iterator[Schema]:
    """The members of a union, also of unions within it; or the schema itself."""
    if "anyOf" not in schema:
        yield schema
    for member in schema.get("anyOf", ()):
        yield from _members_of(member)


def _tags(fields: Mapping[str, Schema]) -> Mapping[str, object]:
    """The fields that say which member of a union an object is, with their words."""
    return {name: field["const"] for name, field in fields.items() if "const" in field}


def kinds_of(schema: Schema) -> list[str]:
    """The types that a schema allows, without null."""
    kinds = schema.get("type")
    return [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind not in (None, "null")]


def expected(*schemas: Schema) -> str:
    """The kinds of values that any of them allows, in words, such as "a whole number from 1 to 9"."""
    if schemas and all("const" in schema for schema in schemas):
        return f"one of {', '.join(dict.fromkeys(str(schema['const']) for schema in schemas))}"
    words = (word for schema in schemas for word in _words(schema))
    return " or ".join(dict.fromkeys(words)) or "another value"


def _words(schema: Schema) -> list[str]:
    """What a schema allows, each kind in words."""
    if "anyOf" in schema:
        return [word for each in schema["anyOf"] for word in _words(each)]
    if "const" in schema:
        return [f"{schema['const']!r}"]
    kinds = [_KINDS[kind] for kind in kinds_of(schema)]
    if "enum" in schema:
        kinds = [f"one of {', '.join(value for value in schema['enum'] if value is not None)}"]
    elif "pattern" in schema:
        kinds = ["a text of this form" if "description" in schema else "another text"]
    elif schema.get("items") == {"type": "string"}:
        kinds = ["a list of texts"]
    words = " or ".join(kinds) + "".join(_limit(name, schema[name]) for name in _LIMITS if name in schema)
    return [*filter(None, (words, "null" if "null" in schema.get("type", ()) else ""))]


def _limit(name: str, value: float) -> str:
    return " that isn't empty" if value == 1 and name in ("minLength", "minItems") else _LIMITS[name].format(value)


class Reader(Generic[S]):
    """Reads one kind of request, of which a top-level field that is null is as good as missing."""

    def __init__(
        self,
        kind: type[S],
        *remedies: Remedy,
        index: str = "[{}]",
        param: Callable[[str], str] = str,
    ) -> None:
        """`index` is what a place in a list is called in the names of fields without effect, `param` what an error's field is
        called by its place.
        """
        self._kind: Any = kind
        self._type = inspect.type_info(kind)
        self._decode: Final = msgspec.json.Decoder(kind).decode
        self._remedies = [(re.compile(remedy.place), remedy) for remedy in remedies]
        self._index = index
        self._param = param

    def __call__(self, fields: Fields) -> tuple[S, list[str]]:
        """The request, and the places of what it doesn't have, each once. Raises InvalidRequestError."""
        given = {name: raw for name, raw in fields.items() if not is_null(raw)}
        unknown: dict[str, None] = {}
        try:
            try:
                return self._decode(_encode(given)), []
            except msgspec.ValidationError as error:
                if "unknown field" not in str(error):
                    raise
            known = self._known(self._type, msgspec.Raw(_encode(given)), "", unknown)
            return self._decode(known), [*unknown]
        except msgspec.ValidationError as error:
            raise self._refused(mistake_of(error, self._kind, _plain_values(given))) from error
        except UNREADABLE as error:
            raise _unreadable({name: given[name] for name in given if name in _members(self._kind)}, error) from error

    def _known(self, kind: inspect.Type, raw: msgspec.Raw, place: str, unknown: dict[str, None]) -> msgspec.Raw:
        """The value without the fields that its type doesn't have; what is of another type stays as it is."""
        begin = bytes(memoryview(raw)[:1])
        for one in _structured(kind):
            if isinstance(one, inspect.ListType) and begin == b"[":
                item = one.item_type
                decode = _any_of(tuple(each.cls for each in _structured(item) if isinstance(each, inspect.StructType)))
                return _raw(
                    [
                        each
                        if _fits(decode, each)
                        else self._known(item, each, place + self._index.format(at), unknown)
                        for at, each in enumerate(_items(raw))
                    ]
                )
            if isinstance(one, inspect.StructType) and begin == b"{":
                fields = _fields(raw)
                if one.tag_field in fields and _plain_values(fields[one.tag_field]) != one.tag:
                    continue
                return _raw(dict(self._of(one, fields, place, unknown)))
        return raw

    def _of(
        self, kind: inspect.StructType, fields: Fields, place: str, unknown: dict[str, None]
    ) -> Iterator[tuple[str, msgspec.Raw]]:
        members = _members(kind.cls)
        for name, value in fields.items():
            inner = f"{place}.{name}" if place else name
            if name == kind.tag_field:
                yield name, value
            elif name in members:
                # Most values decode, and have nothing unknown. A decoder finds that sooner than this walk.
                member, decode = members[name]
                yield name, value if _fits(decode, value) else self._known(member, value, inner, unknown)
            elif not is_null(value):
                if issubclass(kind.cls, Open):
                    unknown[inner] = None
                else:  # which refuses it
                    yield name, value

    def _refused(self, mistake: Mistake) -> InvalidRequestError:
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
        return InvalidRequestError(_refusal(mistake), param=param)


def unknown_field(mistake: Mistake) -> InvalidRequestError:
    """The refusal of a field, with those that there are."""
    place = f"{mistake.place}.{mistake.got}".removeprefix(".")[:_SHOWN]
    known = [
        name for schema in mistake.schemas for member in _members_of(schema) for name in member.get("properties", ())
    ]
    return InvalidRequestError(f"{place}: unknown; there is {', '.join(dict.fromkeys(known))}.", param=place)


@cache
def _members(kind: type) -> Mapping[str, tuple[inspect.Type, Callable[[msgspec.Raw], object]]]:
    """The types of a struct's fields, and their decoders, by their names."""
    hints = get_type_hints(kind, include_extras=True)
    fields = inspect.type_info(kind).fields  # type: ignore[attr-defined]
    return {field.encode_name: (field.type, msgspec.json.Decoder(hints[field.name]).decode) for field in fields}


@cache
def _any_of(structs: tuple[type[msgspec.Struct], ...]) -> Callable[[msgspec.Raw], object]:
    """The decoder of null, or an object that is one of these."""
    return msgspec.json.Decoder(reduce(or_, structs, None)).decode


def _fits(decode: Callable[[msgspec.Raw], object], raw: msgspec.Raw) -> bool:
    try:
        decode(raw)
    except UNREADABLE:
        return False
    return True


def top(place: str) -> str:
    """The top-level field of a place."""
    return place.partition(".")[0].partition("[")[0]


def _refusal(mistake: Mistake) -> str:
    missing = "missing; " if mistake.verdict == "missing" else ""
    end = ":" if any("pattern" in schema for schema in mistake.schemas) and mistake.about else "."
    words = f"{missing}expected {expected(*mistake.schemas)}{end} {mistake.about}"
    return f"{mistake.place or 'The request'}: {words}".rstrip()


def _structured(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The members of a union, or the type itself, that may hold fields."""
    match kind:
        case inspect.Metadata(type=inner):
            yield from _structured(inner)
        case inspect.UnionType(types=types):
            for one in types:
                yield from _structured(one)
        case inspect.ListType() | inspect.StructType():
            yield kind


def _unreadable(given: Fields, error: Exception) -> InvalidRequestError:
    """Which field can't be read: text that is not UTF-8, or values in too many others."""
    for name, raw in given.items():
        try:
            msgspec.json.decode(raw)
        except UNREADABLE as cause:
            return InvalidRequestError(f"{name} can't be read: {cause}.", code="invalid_json", param=name)
    return InvalidRequestError(f"The request can't be read: {error}.", code="invalid_json")


def _plain_values(value: Fields | msgspec.Raw) -> object:
    """As plain values; None where it can't be read."""
    try:
        return msgspec.json.decode(_encode(value))
    except UNREADABLE:
        return None


def is_null(raw: msgspec.Raw) -> bool:
    """Is it JSON's null?"""
    return bytes(memoryview(raw)[:1]) == b"n"


def unparsed() -> Any:
    """The default of a field that is passed on as it came. Its type is Raw alone: of a union with it, msgspec takes null only."""
    return msgspec.field(default_factory=msgspec.Raw)


def is_given(raw: msgspec.Raw) -> bool:
    """Was an unparsed field there, and not null?"""
    return bytes(memoryview(raw)[:1]) not in {b"", b"n"}


def encoded(fields: Mapping[str, object]) -> Fields:
    """Fields as a canonical request has them."""
    return {name: value if isinstance(value, msgspec.Raw) else _raw(value) for name, value in fields.items()}


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))


def decoded_answer(decode: Callable[[bytes], T], body: bytes, noun: str) -> T:
    """A worker's answer, decoded. Raises UpstreamError for one that is no such thing."""
    try:
        return decode(body)
    except UNREADABLE as error:
        raise UpstreamError(f"The worker's answer is no {noun}.") from error
