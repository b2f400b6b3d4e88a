"""A JSON request, parsed once into its top-level fields, their values unparsed.

All decisions about a request use these fields: its route, its permission, its changes. Without a change the body is forwarded
byte for byte. A large body is condensed before it is parsed (`condensed_json`), so that megabytes of pictures are skipped and
other requests don't wait.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final
from zlib import crc32

import msgspec
from pydantic import JsonValue

from runtimes.base import Endpoint, TextReferences
from runtimes.model_config import Modality
from supervisor.catalog.models.rewrite import NO_REWRITE, Fields, Rewrite
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body import permission
from supervisor.gateway.body.body import EXTENSION_FIELDS, PRIVATE, Body, Bytes, refuse_other_charset
from supervisor.gateway.body.condensed_json import SMALL, CondensedJson
from supervisor.gateway.body.typed import UNREADABLE
from supervisor.gateway.disconnect import Scope
from supervisor.gateway.filters.translation import AnswerTranslation, Translation
from supervisor.gateway.media.media import Texts, references, refuse_media
from supervisor.gateway.media.media_address import LONGEST
from supervisor.gateway.media.media_loading import NOTHING, Loading, Wanted

_LARGE_BYTES: Final = 256 * 1024  # a smaller body is parsed as a whole unless it is mainly pictures, or has many values
_FEW_STRINGS: Final = 100
_FEW_VALUES: Final = 30_000
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode
_text: Final = msgspec.json.Decoder(str).decode
_fields: Final = msgspec.json.Decoder(Fields).decode
_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_KEY: Final = re.compile(rb'[\s,]*("[^"\\]*+(?:\\.[^"\\]*+)*+")\s*:\s*')
_OBJECT_END: Final = re.compile(rb"\s*\}\s*")
_HIGH_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB]")
_SLICE: Final = 1 << 20  # bytes decoded between two turns of the loop
_COUNTED_BYTES: Final = 1 << 16
_MOST_FIELDS: Final = 1000
PREFIX_BYTES: Final = 1024
"""The number of bytes of a prompt that identify its conversation."""
_LIST_OR_NULL: Final = b"[n"
_WITH_MESSAGES: Final = frozenset({"messages", "system"})  # places of the system prompt, in APIs with messages

_FORM_TYPE: Final = b"application/x-www-form-urlencoded"  # curl's default, also for JSON
_NOT_A_FORM: Final = (
    f"The request body is a form of the kind {_FORM_TYPE.decode()}. Send a JSON object, or, where a file is needed, a form of the "
    "kind multipart/form-data."
)


class _Message(msgspec.Struct):
    role: str = ""


_role: Final = msgspec.json.Decoder(_Message).decode


class JsonBody(Body):
    """One request's JSON body."""

    __slots__ = ("_condensed", "_decoded", "_is_changed", "_private", "_raw")

    def __init__(self, raw: Bytes, fields: Fields, condensed: CondensedJson | None = None) -> None:
        self._raw = raw
        self.fields = fields
        self._condensed = condensed
        self._is_changed = False
        self._decoded: dict[str, Any] = {}
        self.name, self.stream = _model_name(fields), "stream" in fields and _read_flag(fields, "stream")
        if self.name is None and fields.pop("model", None) is not None:  # null
            self._is_changed = True
        self.is_silent = True
        self._private: Fields = {}
        for key in fields:  # rarely found
            if key[:2] == PRIVATE:
                self.is_silent = False
        if not self.is_silent:
            for key in [key for key in fields if key[:2] == PRIVATE]:
                self._private[key] = fields.pop(key)
            self._is_changed = True

    @classmethod
    async def open(cls, raw: Bytes) -> JsonBody:
        """Parse a body; other tasks run while a large one is scanned. Raises InvalidRequestError."""
        if len(raw) <= SMALL or (len(raw) <= _LARGE_BYTES and _is_cheap_to_parse(raw)):
            return cls(raw, open_object(raw))
        condensed = await CondensedJson.of(raw)
        await asyncio.sleep(0)  # other tasks run between two scans of a possibly large text, here and below
        return cls(raw, open_object(condensed.text), condensed)

    def nameless(self, scope: Scope) -> InvalidRequestError:
        """See Body."""
        return InvalidRequestError(
            'The field "model" is missing; GET /v1/models lists the choice.', code="missing_model", param="model"
        )

    def rename(self, name: str) -> None:
        """See Body."""
        if self.name is not None and self.name != name:
            self.name, self._is_changed = name, True
            self.fields["model"] = msgspec.Raw(_encode(name))

    def extension(self, name: str) -> JsonValue:
        """See Body."""
        raw = self._private.get(name)
        if raw is None:
            return None
        try:
            value: JsonValue = _decode(raw)
        except UNREADABLE as error:
            raise _parse_error(raw, error) from error
        return None if value == "" else value

    @property
    def unknown_extensions(self) -> Sequence[str]:
        """See Body."""
        return [name for name in self._private if name not in EXTENSION_FIELDS] if self._private else ()

    async def field(self, name: str) -> Bytes | None:
        """The value of a field as sent, as JSON; None without this field."""
        raw = self.fields.get(name)
        if raw is None or self._condensed is None:
            return None if raw is None else bytes(raw)
        return await self._condensed.restored(bytes(raw))

    @property
    def condensed(self) -> CondensedJson:
        """The condensed JSON of the body, and of anything added to the body."""
        if self._condensed is None:
            self._condensed = CondensedJson()
        return self._condensed

    def changed(self, changes: Mapping[str, bytes | None]) -> JsonBody:
        """The body with these top-level fields replaced, given as (condensed) JSON; None removes a field."""
        fields = {name: raw for name, raw in (self.fields | self._private).items() if name not in changes}
        fields |= {name: msgspec.Raw(value) for name, value in changes.items() if value is not None}
        body = JsonBody(self._raw, fields, self._condensed)
        body._is_changed = True
        return body

    async def whole(self) -> Bytes:
        """The whole body as JSON, with private fields, for llmux itself."""
        text: Bytes = _encode(self.fields | self._private)
        return text if self._condensed is None else await self._condensed.restored(text)

    def raw(self, name: str) -> bytes | None:
        """See Body."""
        found = self.fields.get(name)
        return None if found is None else bytes(found)

    def prefix(self) -> int | None:
        """See Body. Covers the messages up to the user's first, inclusive, or the beginning of a prompt."""
        messages, prompt = self.fields.get("messages"), self.fields.get("prompt")
        if messages is None:
            return None if prompt is None else crc32(bytes(prompt)[:PREFIX_BYTES])
        found = 0
        try:
            for message in _items(messages):
                found = crc32(message, found)
                if _role(message).role == "user":
                    break
        except msgspec.MsgspecError:  # the worker reports the error
            return None
        return found

    def translated(self, translation: Translation) -> tuple[JsonBody, AnswerTranslation]:
        """See Body. The new body has only the private fields that the translation adds."""
        fields, answers = translation.request(dict(self.fields))
        body = JsonBody(self._raw, fields, self._condensed)
        body._is_changed = True
        return body, answers

    def applied(self, rewrite: Rewrite, endpoint: Endpoint) -> JsonBody:
        """See Body."""
        rewrite.apply(fields := dict(self.fields), endpoint)
        return JsonBody(self._raw, fields, self._condensed)

    def take_permission(self) -> bool:
        """See Body. Removes the field: no model gets it."""
        if permission.FIELD not in self.fields:
            return False
        permitted = _read_flag(self.fields, permission.FIELD)
        del self.fields[permission.FIELD]
        self._is_changed = True
        return permitted

    async def check(
        self,
        name: str,
        inputs: frozenset[Modality] | None,
        endpoint: Endpoint,
        loading: Loading = NOTHING,
        texts: TextReferences | None = None,
    ) -> Sequence[Wanted]:
        """See Body. No model may get references, and only some models may get media."""
        if endpoint.meaning.prompt in _WITH_MESSAGES:
            raw = self.fields.get("messages")
            if raw is not None and memoryview(raw)[0] not in _LIST_OR_NULL:
                raise InvalidRequestError('"messages" must be a list of messages.', param="messages")
        types: set[str] = set()
        wanted: list[Wanted] = []
        decoded: dict[str, Any] = {}
        for found in references(self.fields, self._decode_field, types, decoded):
            if found is None:
                await asyncio.sleep(0)
            else:
                text = await self.whole_text(found.text) if loading.is_on else found.text
                wanted.append(loading.wanted(found, text, len(wanted)))
        if types:
            refuse_media(types, name, inputs, "messages" if "messages" in self.fields else "input")
        if texts is not None:
            await self._find_text_references(texts, loading, wanted, decoded)
        if wanted:
            self._decoded = decoded
        return wanted

    async def _find_text_references(
        self, marks: TextReferences, loading: Loading, wanted: list[Wanted], decoded: dict[str, Any]
    ) -> None:
        texts = Texts(marks)
        for each in texts.of(self.fields, self._decode_field, decoded):
            if each is None:
                await asyncio.sleep(0)
                continue
            field, place, index, key = each
            text = await self.whole_text(place[index], sys.maxsize)
            for found in texts.found(field, place, index, key, text):
                if found is None:
                    await asyncio.sleep(0)
                else:
                    wanted.append(loading.wanted(found, found.text, len(wanted)))
                    place[index] = text

    async def load(self, wanted: Sequence[Wanted], loading: Loading) -> None:
        """See Body."""
        contents = await loading.load(wanted)
        for one in wanted:
            content = contents[one.source]
            one.reference.replace(content.type, self.condensed.mark(content.base64))
        for field in {one.reference.field for one in wanted}:
            self.fields[field] = msgspec.Raw(_encode(self._decoded[field]))
        self._decoded, self._is_changed = {}, True

    async def whole_text(self, text: str, most: int = 2 * LONGEST) -> str:
        """The text with its cut part restored; empty if it is longer than `most`, or a list of numbers."""
        if self._condensed is None or not text.endswith(("-", "-:")):  # the ends of marks
            return text
        whole = await self._condensed.restored(_encode(text))
        if len(whole) > most or not whole.startswith(b'"'):
            return ""
        parts, at, last = list[str](), 1, len(whole) - 1
        while at < last:
            end = last if last - at <= _SLICE else _split_point(whole, at, at + _SLICE)
            try:
                parts.append(_text(b'"%b"' % bytes(whole[at:end])))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the cut part was never decoded
                raise _parse_error(b"text", error) from error
            at = end
            await asyncio.sleep(0)
        return "".join(parts)

    async def rewritten(self, rewrite: Rewrite, endpoint: Endpoint) -> Bytes:
        """See Body."""
        fields = self.fields
        if rewrite is not NO_REWRITE and rewrite.touches(endpoint):
            rewrite.apply(fields := dict(fields), endpoint)
        elif not self._is_changed:
            return self._raw
        if self._condensed is None:
            return _encode(fields)
        await asyncio.sleep(0)
        return await self._condensed.restored(_encode(fields))

    def _decode_field(self, key: str) -> Any:
        """A field's decoded value. Raises InvalidRequestError for a value that is nested too deeply."""
        try:
            return _decode(self.fields[key])
        except UNREADABLE as error:
            raise InvalidRequestError(f"The request body can't be read: {error}.", code="invalid_json") from error


def _split_point(text: Bytes, first: int, last: int) -> int:
    """The position at or shortly before `last` that splits the inside of a JSON string within no escape and no character.

    `first`, far before `last`, is such a position.
    """
    escape = text.rfind(b"\\", last - 12, last)
    if escape < 0:
        while text[last] & 0xC0 == 0x80:
            last -= 1
        return last
    begin = escape + 1 - _count_backslashes(text, first, escape + 1)
    if begin == first:
        return first + (escape + 1 - first) // 2 * 2
    high = begin - 6  # possibly the high half of a surrogate pair
    is_high = _HIGH_SURROGATE.match(text, high) is not None and _count_backslashes(text, first, high + 1) % 2 == 1
    return high if is_high else begin


def _count_backslashes(text: Bytes, first: int, last: int) -> int:
    """The number of backslashes directly before `last`."""
    return last - first - len(text[first:last].rstrip(b"\\"))


def _is_cheap_to_parse(raw: Bytes) -> bool:
    """Is the body parsed faster as a whole than condensed?"""
    return raw.count(b'"') > 2 * _FEW_STRINGS and sum(map(raw.count, (b",", b"[", b"{"))) <= _FEW_VALUES


async def open_json(raw: Bytes, content_type: bytes) -> JsonBody:
    """Parse a body that must be JSON, whatever its Content-Type. Raises InvalidRequestError."""
    if b";" in content_type:
        refuse_other_charset(content_type)
    try:
        return JsonBody(raw, open_object(raw)) if len(raw) <= SMALL else await JsonBody.open(raw)
    except InvalidRequestError as error:
        if error.code == "invalid_json" and content_type.lower().startswith(_FORM_TYPE):
            raise InvalidRequestError(_NOT_A_FORM, code="invalid_form") from error
        raise


def open_object(body: Bytes) -> Fields:
    """The top-level fields of a JSON object, values unparsed. Raises InvalidRequestError."""
    try:
        fields = _fields(body)
    except UNREADABLE as error:
        raise _parse_error(body, error) from error
    # Two braces; for each field two quotes, a colon and a comma, except after the last. Most clients write no blanks.
    if len(body) != 1 + 4 * len(fields) + sum(map(len, fields)) + sum(map(len, fields.values())):
        _refuse_duplicates(body, fields)
    if len(fields) > _MOST_FIELDS:
        raise InvalidRequestError(f"The request body has more than {_MOST_FIELDS} fields.", code="too_many_values")
    return fields


def _model_name(fields: Fields) -> str | None:
    """The model's name; None if missing or null."""
    raw = fields.get("model")
    if raw is None:
        return None
    try:
        return _text(raw)
    except msgspec.ValidationError as error:
        if bytes(raw) == b"null":
            return None
        raise InvalidRequestError('"model" must be a string.', param="model") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _parse_error(raw, error) from error


def _read_flag(fields: Fields, name: str) -> bool:
    raw = fields.get(name)
    if raw is None:
        return False
    value = bytes(raw)
    if value not in (b"true", b"false", b"null"):
        raise InvalidRequestError(f'"{name}" must be true or false.', param=name)
    return value == b"true"


def _refuse_duplicates(body: Bytes, fields: Fields) -> None:
    """Raises InvalidRequestError for a duplicate key: the text is then longer than its parsed fields."""
    if len(fields) > _MOST_FIELDS:
        return  # refused by the caller
    if len(body) < _COUNTED_BYTES and body.count(b'"') == 2 * len(fields) + b"".join(fields.values()).count(b'"'):
        return  # a second key would add two quotes
    position = body.index(b"{") + 1
    for key, value in fields.items():
        found = _KEY.match(body, position)
        if found is None or _text(found[1]) != key:
            break
        position = found.end() + len(value)
    if _OBJECT_END.fullmatch(body, position) is None:
        raise InvalidRequestError("The request body has the same key twice.", code="duplicate_key")


def _parse_error(body: Bytes | msgspec.Raw, error: Exception) -> InvalidRequestError:
    if not bytes(body).strip():
        return InvalidRequestError('The request body is empty; it must be a JSON object with a "model".')
    if isinstance(error, RecursionError):
        return InvalidRequestError("The request body is nested too deeply.")
    if not isinstance(error, msgspec.ValidationError):
        return InvalidRequestError(f"The request body is not valid JSON: {error}.", code="invalid_json")
    return InvalidRequestError("The request body must be a JSON object.")
