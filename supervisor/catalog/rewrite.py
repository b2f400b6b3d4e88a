"""What a virtual model does to a request body, compiled once and applied to bytes.

A body is opened one level deep, as `dict[str, msgspec.Raw]`: what isn't touched leaves byte for byte as it came, and an
image of ten megabytes is skipped over, not decoded. Order of work: `strip` takes the client's fields away, `defaults`
fill what the client didn't send, `force` and the thinking switch overrule it, the system prompt gets its prefix, and
the model gets the name its worker knows. `chat_template_kwargs` and the objects of the thinking switch merge key by
key; every other value is replaced whole, because half of somebody else's `response_format` is worse than none.

A form is changed likewise: `form_fields()` says which fields get which text.

Fields go to paths that generate or embed; the thinking switch and the prefix to paths that render a prompt, the
counting ones included, so that what is counted is what is run. Elsewhere only the model's name is touched.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
from pydantic import JsonValue

from supervisor.errors import InvalidRequestError

Fields = dict[str, msgspec.Raw]

_FIELD_PATHS: Final = frozenset(
    {
        "/chat/completions",
        "/completions",
        "/completion",
        "/responses",
        "/messages",
        "/embeddings",
        "/embedding",
        "/rerank",
        "/reranking",
        "/infill",
        "/audio/speech",
        "/audio/transcriptions",
        "/audio/translations",
        "/images/generations",
        "/images/edits",
        "/images/variations",
    }
)
_PROMPT_PATHS: Final = {
    "/chat/completions": "messages",
    "/chat/completions/input_tokens": "messages",
    "/apply-template": "messages",
    "/responses": "instructions",
    "/responses/input_tokens": "instructions",
    "/messages": "system",
    "/messages/count_tokens": "system",
}
"""Paths that render a prompt → the field that holds the system prompt."""

_MERGED: Final = "chat_template_kwargs"
_encode: Final = msgspec.json.Encoder().encode


def _raw(value: JsonValue) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))


@dataclass(frozen=True, slots=True)
class _Patch:
    """Fields to set: whole values, and objects to merge into the client's."""

    whole: Mapping[str, msgspec.Raw] = field(default_factory=dict)
    merged: Mapping[str, Fields] = field(default_factory=dict)

    @classmethod
    def compile(cls, values: Mapping[str, JsonValue], *, merge_all: bool = False) -> _Patch:
        whole, merged = dict[str, msgspec.Raw](), dict[str, Fields]()
        for key, value in values.items():
            if isinstance(value, dict) and (merge_all or key == _MERGED):
                merged[key] = {inner: _raw(item) for inner, item in value.items()}
            else:
                whole[key] = _raw(value)
        return cls(whole, merged)

    def __bool__(self) -> bool:
        return bool(self.whole or self.merged)

    def fill(self, fields: Fields) -> None:
        for key, value in self.whole.items():
            fields.setdefault(key, value)
        for key, values in self.merged.items():
            fields[key] = msgspec.Raw(_encode(values | _object(fields, key)))

    def texts(self) -> dict[str, tuple[str, ...]]:
        """The same for a form, where nothing can be merged; null is no value."""
        texts = dict[str, tuple[str, ...]]()
        for key, raw in (*self.whole.items(), *((key, _encode(values)) for key, values in self.merged.items())):
            value = msgspec.json.decode(raw)
            values = value if isinstance(value, list) else [] if value is None else [value]
            texts[key] = tuple(map(_text, values))
        return texts

    def overrule(self, fields: Fields) -> None:
        fields.update(self.whole)
        for key, values in self.merged.items():
            fields[key] = msgspec.Raw(_encode(_object(fields, key) | values))


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A compiled rewrite; `Rewrite.compile()` makes one, `Rewrite()` changes nothing."""

    upstream_model: str | None = None
    strip: frozenset[str] = frozenset()
    defaults: _Patch = _Patch()
    force: _Patch = _Patch()
    thinking: _Patch = _Patch()
    system_prompt_prefix: str | None = None
    _touched: frozenset[str] = field(init=False, repr=False, compare=False, default=frozenset())

    def __post_init__(self) -> None:
        touched = _FIELD_PATHS if self.strip or self.defaults or self.force else frozenset[str]()
        if self.thinking or self.system_prompt_prefix is not None:
            touched |= _PROMPT_PATHS.keys()
        object.__setattr__(self, "_touched", touched)  # every request asks

    @classmethod
    def compile(
        cls,
        *,
        upstream_model: str | None = None,
        strip: Iterable[str] = (),
        defaults: Mapping[str, JsonValue] | None = None,
        force: Mapping[str, JsonValue] | None = None,
        thinking: Mapping[str, JsonValue] | None = None,
        system_prompt_prefix: str | None = None,
    ) -> Rewrite:
        """`thinking`: the fields of the adapter that switch it as wanted."""
        return cls(
            upstream_model,
            frozenset(strip),
            _Patch.compile(defaults or {}),
            _Patch.compile(force or {}),
            _Patch.compile(thinking or {}, merge_all=True),
            system_prompt_prefix,
        )

    @property
    def is_identity(self) -> bool:
        """Does it leave every request as it is?"""
        return self == _IDENTITY

    def touches(self, path: str) -> bool:
        """May it change a body sent to this public path?"""
        return self.upstream_model is not None or path.removeprefix("/v1") in self._touched

    def apply(self, body: bytes | bytearray, path: str) -> bytes | bytearray:
        """The body to send upstream for a JSON request to the public `path`.

        Raises InvalidRequestError: not a JSON object, duplicate keys, nested too deeply, or a field that must be an
        object to be merged into isn't one.
        """
        if not self.touches(path):
            return body
        endpoint = path.removeprefix("/v1")
        fields = open_object(body)
        if endpoint in _FIELD_PATHS:
            for name in self.strip:
                fields.pop(name, None)
            self.defaults.fill(fields)
            self.force.overrule(fields)
        if (prompt := _PROMPT_PATHS.get(endpoint)) is not None:
            self.thinking.overrule(fields)
            if self.system_prompt_prefix is not None:
                _prefix(fields, prompt, self.system_prompt_prefix)
        if self.upstream_model is not None:
            fields["model"] = _raw(self.upstream_model)
        return _encode(fields)

    def form_fields(self, names: Collection[str], path: str) -> dict[str, tuple[str, ...]]:
        """The fields that change in a multipart form with fields of these `names`, and their new values; none: it goes.

        Lists become as many fields, objects JSON. `x` stands for `x[]` as well, which is how clients write lists.
        """
        if not self.touches(path):
            return {}
        changed: dict[str, tuple[str, ...]] = {}
        if path.removeprefix("/v1") in _FIELD_PATHS:
            kept = {_plain(name) for name in names} - {_plain(name) for name in self.strip}
            forced = self.force.texts()
            set_here = {key: value for key, value in self.defaults.texts().items() if _plain(key) not in kept} | forced
            gone = {_plain(key) for key in (*self.strip, *set_here)}
            changed = set_here | {name: () for name in names if _plain(name) in gone and name not in set_here}
        if self.upstream_model is not None:
            changed["model"] = (self.upstream_model,)
        return changed


_IDENTITY: Final = Rewrite()


def _plain(name: str) -> str:
    return name.removesuffix("[]")


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else _encode(value).decode()


# ------------------------------------------------------------------------------------------------------ system prompts


class _Role(msgspec.Struct):
    role: msgspec.Raw = msgspec.Raw()


_roles: Final = msgspec.json.Decoder(list[_Role]).decode
_elements: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_SYSTEM_ROLES: Final = frozenset({b'"system"', b'"developer"'})
_NULL: Final = msgspec.Raw(b"null")
_OPENING: Final = re.compile(rb"\[\s*")


def _prefix(fields: Fields, name: str, prefix: str) -> None:
    if name != "messages":
        _prefix_text(fields, name, prefix)
        return
    try:
        roles = [bytes(message.role) for message in _roles(fields.get("messages", _NULL))]
    except msgspec.ValidationError:
        return  # no list of messages: the worker's own answer says it best
    index = next((i for i, role in enumerate(roles) if role in _SYSTEM_ROLES), None)
    if index is None:
        message = _encode({"role": "system", "content": prefix})
        fields["messages"] = _put_first(fields["messages"], message)
        return
    messages = _elements(fields["messages"])
    system = _object_of(messages[index])
    _prefix_text(system, "content", prefix)
    messages[index] = msgspec.Raw(_encode(system))
    fields["messages"] = msgspec.Raw(_encode(messages))


def _prefix_text(fields: Fields, name: str, prefix: str) -> None:
    """Text and lists of content parts get it in front; nothing at all becomes the prefix; the rest stays."""
    value = fields.get(name, _NULL)
    match bytes(memoryview(value)[:1]):
        case b"n":
            fields[name] = _raw(prefix)
        case b'"':
            # Spliced rather than decoded: keeps the client's escapes as they are.
            fields[name] = msgspec.Raw(_encode(f"{prefix}\n\n")[:-1] + bytes(value)[1:])
        case b"[":
            fields[name] = _put_first(value, _encode({"type": "text", "text": prefix}))
        case _:
            pass


def _put_first(array: msgspec.Raw, item: bytes) -> msgspec.Raw:
    # One copy, not three: messages carry images.
    view = memoryview(array)
    opening = _OPENING.match(view)
    assert opening is not None
    rest = view[opening.end() :]
    return msgspec.Raw(b"".join((b"[", item, b"" if bytes(rest[:1]) == b"]" else b",", rest)))


# ------------------------------------------------------------------------------------------------------ opening bodies


class _Head(msgspec.Struct):
    model: str
    stream: bool | None = None


_head: Final = msgspec.json.Decoder(_Head).decode
_fields: Final = msgspec.json.Decoder(Fields).decode
_KEY: Final = re.compile(rb'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')
_COUNTED: Final = 1 << 16
_MOST_FIELDS: Final = 1000
_MOST_MARKS: Final = {b"{": 300_000, b"[": 300_000, b'"': 1_000_000}
"""Bounds on what a body may consist of: parsed, 32 MiB of `{},{},` are a gigabyte and ten seconds of everybody's time."""
_SMALL: Final = 2048
_RARE: Final = 1000
_END: Final = re.compile(rb"\s*\}\s*")


def model_of(body: bytes | bytearray) -> tuple[str, bool]:
    """`model` and `stream` of a JSON request. Raises InvalidRequestError with what is wrong and where."""
    # Two are told apart from one only by looking at the keys one by one; counting is the quick answer for small bodies,
    # unless an ASCII letter may be written as an escape.
    if len(body) > _COUNTED:
        _refuse_bomb(body)
    if len(body) > _COUNTED or body.count(b'"model"') > 1 or b"\\u00" in body:
        try:
            fields = open_object(body)
        except InvalidRequestError:
            _read_head(body)  # what is wrong with these two comes first
            raise
        body = _encode({name: fields[name] for name in _Head.__struct_fields__ if name in fields})
    head = _read_head(body)
    return head.model, bool(head.stream)


def _read_head(body: bytes | bytearray) -> _Head:
    try:
        return _head(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _refusal(body, error) from error


def open_object(body: bytes | bytearray) -> Fields:
    """The top-level fields of a JSON object, values unparsed. Raises InvalidRequestError."""
    try:
        fields = _fields(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _refusal(body, error) from error
    _refuse_duplicates(body, fields)
    return fields


def _refuse_bomb(body: bytes | bytearray) -> None:
    if any(not _is_rare(body, mark) and body.count(mark) > most for mark, most in _MOST_MARKS.items()):
        raise InvalidRequestError("The request body consists of too many pieces.", code="too_many_values")


def _is_rare(body: bytes | bytearray, mark: bytes) -> bool:
    """Finding a byte is ten times as fast as counting it where it is rare: an image has few marks."""
    end = 0
    for _ in range(_RARE):
        end = body.find(mark, end) + 1
        if end == 0:
            return True
    return False


def _refuse_duplicates(body: bytes | bytearray, fields: Fields) -> None:
    """Walks the text along the parsed fields: with a key twice the two don't line up to the closing brace."""
    if len(fields) > _MOST_FIELDS:
        raise InvalidRequestError(f"The request body has more than {_MOST_FIELDS} fields.", code="too_many_values")
    if len(body) < _SMALL and b"\\" not in body and all(body.count(b'"%b"' % key.encode()) == 1 for key in fields):
        return  # quicker, and true of most small ones
    position = body.index(b"{") + 1
    for key, value in fields.items():
        found = _KEY.match(body, position)
        if found is None or msgspec.json.decode(found[1]) != key:
            break
        position = found.end() + memoryview(value).nbytes
    if _END.fullmatch(body, position) is None:
        raise InvalidRequestError("The request body has the same key twice.", code="duplicate_key")


def _object(fields: Fields, name: str) -> Fields:
    value = fields.get(name)
    if value is None or bytes(value) == b"null":
        return {}
    try:
        return _object_of(value)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f'"{name}" must be an object.', param=name) from error


def _object_of(value: msgspec.Raw) -> Fields:
    return _fields(value)


def _refusal(body: bytes | bytearray, error: Exception) -> InvalidRequestError:
    text = str(error)
    if not body.strip():
        return InvalidRequestError('The request body is empty; it must be a JSON object with a "model".')
    if isinstance(error, RecursionError):
        return InvalidRequestError("The request body is nested too deeply.")
    if not isinstance(error, msgspec.ValidationError):
        return InvalidRequestError(f"The request body is not valid JSON: {text}.", code="invalid_json")
    if "missing required field" in text:
        return InvalidRequestError(
            'The field "model" is missing; GET /v1/models lists the choice.', code="missing_model", param="model"
        )
    if "$.model" in text:
        return InvalidRequestError('"model" must be a string.', param="model")
    if "$.stream" in text:
        return InvalidRequestError('"stream" must be true or false.', param="stream")
    return InvalidRequestError("The request body must be a JSON object.")
