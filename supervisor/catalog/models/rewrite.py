"""The changes that a virtual model makes to a request, compiled once and applied to the request's top-level fields.

The values of the fields are unparsed JSON: untouched fields are sent byte for byte as received, and an image of ten
megabytes is skipped, not decoded. The order: `strip` removes the client's fields, `defaults` set missing fields, `force`
and the thinking switch overwrite fields, the system prompt gets its prefix, and the model gets the name that its worker
knows. `chat_template_kwargs` and the objects of the thinking switch merge key by key; every other value is replaced as a
whole, because half of a client's `response_format` is worse than none.

A form is changed likewise: `form_fields()` returns the new texts of its fields.

Fields apply to endpoints that run the model. The thinking switch and the prefix apply to endpoints that render a prompt,
also to those that only count its tokens, so that the counted prompt equals the run one. Elsewhere only the model's name
is changed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
from pydantic import JsonValue

from runtimes.base import Endpoint, Thinking
from supervisor.errors import InvalidRequestError

Fields = dict[str, msgspec.Raw]

_MERGED: Final = "chat_template_kwargs"
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Fields).decode


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
            fields[key] = msgspec.Raw(_encode(values | _object_at(fields, key)))

    def texts(self) -> dict[str, tuple[str, ...]]:
        """The changed fields of a form, as `form_fields` needs them: nothing can be merged there, and null is no value."""
        texts = dict[str, tuple[str, ...]]()
        for key, raw in (*self.whole.items(), *((key, _encode(values)) for key, values in self.merged.items())):
            value = msgspec.json.decode(raw)
            values = value if isinstance(value, list) else [] if value is None else [value]
            texts[key] = tuple(map(_form_text, values))
        return texts

    def overrule(self, fields: Fields) -> None:
        fields.update(self.whole)
        for key, values in self.merged.items():
            fields[key] = msgspec.Raw(_encode(_object_at(fields, key) | values))


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A compiled rewrite; `Rewrite.compile()` makes one, `Rewrite()` changes nothing."""

    upstream_model: str | None = None
    strip: frozenset[str] = frozenset()
    defaults: _Patch = _Patch()
    force: _Patch = _Patch()
    thinking: _Patch = _Patch()
    system_prompt_prefix: str | None = None
    outside_body: Mapping[str, msgspec.Raw] = field(default_factory=dict)  # fields in the request's headers

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
        """`thinking`: the adapter's fields for the wanted state of the thinking switch."""
        return cls(
            upstream_model,
            frozenset(strip),
            _Patch.compile(defaults or {}),
            _Patch.compile(force or {}),
            _Patch.compile(thinking or {}, merge_all=True),
            system_prompt_prefix,
        )

    def with_defaults(self, values: Mapping[str, JsonValue]) -> Rewrite:
        """The rewrite with a client's own defaults, which win over these. Stripped fields stay stripped."""
        own = _Patch.compile({key: value for key, value in values.items() if key not in self.strip})
        merged = {key: {**self.defaults.merged.get(key, {}), **value} for key, value in own.merged.items()}
        both = _Patch({**self.defaults.whole, **own.whole}, {**self.defaults.merged, **merged})
        return replace(self, defaults=both)

    def may_set(self, names: frozenset[str]) -> bool:
        """Whether the rewrite may set one of these fields."""
        return not (names.isdisjoint(self.defaults.whole) and names.isdisjoint(self.force.whole))

    def value(self, name: str, own: bytes | None) -> bytes | None:
        """The final value of this field, as JSON, in a request that runs the model. `own`: the client's value."""
        if name in self.force.whole:
            return bytes(self.force.whole[name])
        if own is not None and name not in self.strip:
            return own
        return None if (default := self.defaults.whole.get(name)) is None else bytes(default)

    def switches(self, thinking: Thinking) -> bool | None:
        """Whether the rewrite forces reasoning on or off; None: the client decides."""
        if not self.thinking:
            return None
        return self.thinking == _Patch.compile(thinking.enabled, merge_all=True)

    def with_outside_body(self, values: Mapping[str, JsonValue]) -> Rewrite:
        """The rewrite for a request with these values in its headers, which count as fields of its body."""
        return replace(self, outside_body={key: _raw(value) for key, value in values.items()})

    def touches(self, endpoint: Endpoint) -> bool:
        """Whether the rewrite may change a body sent to this endpoint."""
        return (
            self.upstream_model is not None
            or bool(self.outside_body)
            or (endpoint.meaning.role == "run" and bool(self.strip or self.defaults or self.force))
            or (endpoint.meaning.prompt is not None and bool(self.thinking or self.system_prompt_prefix is not None))
        )

    def apply(self, fields: Fields, endpoint: Endpoint) -> None:
        """Change the fields of a JSON request to `endpoint`.

        Raises InvalidRequestError for a field that must be an object, to merge into, but isn't.
        """
        fields.update(self.outside_body)
        if endpoint.meaning.role == "run":
            for name in self.strip:
                fields.pop(name, None)
            self.defaults.fill(fields)
            self.force.overrule(fields)
        if endpoint.meaning.prompt is not None:
            self.thinking.overrule(fields)
            if self.system_prompt_prefix is not None:
                _add_prefix(fields, endpoint.meaning.prompt, self.system_prompt_prefix)
        if self.upstream_model is not None:
            fields["model"] = _raw(self.upstream_model)

    def form_fields(self, names: Collection[str], endpoint: Endpoint) -> dict[str, tuple[str, ...]]:
        """The changed fields of a multipart form with fields of these `names`, and their new values; no value: removed.

        A list becomes several fields, an object becomes JSON. `x` means `x[]` as well, since clients write lists so.
        """
        if not self.touches(endpoint):
            return {}
        changed: dict[str, tuple[str, ...]] = {}
        if endpoint.meaning.role == "run":
            kept = {_without_brackets(name) for name in names} - {_without_brackets(name) for name in self.strip}
            forced = self.force.texts()
            set_here = {
                key: value for key, value in self.defaults.texts().items() if _without_brackets(key) not in kept
            } | forced
            removed = {_without_brackets(key) for key in (*self.strip, *set_here)}
            changed = set_here | {
                name: () for name in names if _without_brackets(name) in removed and name not in set_here
            }
        if self.upstream_model is not None:
            changed["model"] = (self.upstream_model,)
        return changed


NO_REWRITE: Final = Rewrite()


def _without_brackets(name: str) -> str:
    return name.removesuffix("[]")


def _form_text(value: JsonValue) -> str:
    return value if isinstance(value, str) else _encode(value).decode()


# ------------------------------------------------------------------------------------------------------- system prompts


class _Role(msgspec.Struct):
    role: msgspec.Raw = msgspec.Raw()


_roles: Final = msgspec.json.Decoder(list[_Role]).decode
_elements: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_SYSTEM_ROLES: Final = frozenset({b'"system"', b'"developer"'})
_NULL: Final = msgspec.Raw(b"null")
_OPENING: Final = re.compile(rb"\[\s*")


def _add_prefix(fields: Fields, name: str, prefix: str) -> None:
    if name != "messages":
        _add_prefix_to_text(fields, name, prefix)
        return
    try:
        roles = [bytes(message.role) for message in _roles(fields.get("messages", _NULL))]
    except msgspec.ValidationError:
        return  # no list of messages: the worker reports that best
    index = next((i for i, role in enumerate(roles) if role in _SYSTEM_ROLES), None)
    if index is None:
        message = _encode({"role": "system", "content": prefix})
        fields["messages"] = _put_first(fields["messages"], message)
        return
    messages = _elements(fields["messages"])
    system = _decode_object(messages[index])
    _add_prefix_to_text(system, "content", prefix)
    messages[index] = msgspec.Raw(_encode(system))
    fields["messages"] = msgspec.Raw(_encode(messages))


def _add_prefix_to_text(fields: Fields, name: str, prefix: str) -> None:
    """Put the prefix before text and lists of content parts, or in place of a missing value; other types stay."""
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


def _object_at(fields: Fields, name: str) -> Fields:
    value = fields.get(name)
    if value is None or bytes(value) == b"null":
        return {}
    try:
        return _decode_object(value)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f'"{name}" must be an object.', param=name) from error


def _decode_object(value: msgspec.Raw) -> Fields:
    return _decode(value)
