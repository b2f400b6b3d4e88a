"""Multipart forms: the positions of their fields, the values that decide about the route, and the values by which a worker
could load something (see `media`). Nothing else is decoded, especially no files. A form that two parsers could understand
differently is refused: for example a part with two names, an encoded value, or another charset.

To change a form for a virtual model, removed fields are cut out, new ones are put in front, and every other byte stays
unchanged.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from pydantic import JsonValue
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from runtimes.base import Endpoint
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body import permission
from supervisor.gateway.body.body import EXTENSION_FIELDS, PRIVATE, RESPONSE_FORMAT, Body, Bytes
from supervisor.gateway.disconnect import Scope
from supervisor.gateway.filters.translation import AnswerTranslation, Translation
from supervisor.gateway.media.media import is_content, means_loading, refusal

PARTS_LIMIT: Final = 64
VALUE_LIMIT: Final = 512  # bytes of a field that llmux reads
PARAMETERS_LIMIT: Final = 100  # parameters of a part's header
TYPE_LIMIT: Final = 1024  # bytes of the Content-Type
SLICE: Final = 32 * 1024  # bytes parsed or copied between two turns of the loop; the parser may need 0.3 ms for a KiB
EPILOGUE_LIMIT: Final = 4096  # bytes after a form's end, without meaning
_PARAMETER: Final = re.compile(rb';\s*([^\s=;"]+)\s*=\s*(?:"((?:[^"\\]|\\.)*+)"|([^\s;"]*+))\s*', re.DOTALL)
_CHARSET: Final = re.compile(rb"charset[\s\"'=]*+(?!(?:utf-?8|us-ascii|iso-8859-1|windows-1252)\b)", re.IGNORECASE)
_PLAIN_ENCODINGS: Final = frozenset({b"", b"7bit", b"8bit", b"binary"})
_READ_FIELDS: Final = EXTENSION_FIELDS | {RESPONSE_FORMAT}
_BASE64: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_ \t\r\n"


async def read_form(body: Bytes, content_type: bytes) -> Form:
    """Scan a form. Other tasks run in between.

    Raises InvalidRequestError for a body that is not a form, has too many parts, or names the model twice; and for a form without
    an end, or with a delimiter after its end: some parsers would accept its last part, or go on after its end.
    """
    if len(content_type) > TYPE_LIMIT:
        raise InvalidRequestError(f"The Content-Type is longer than {TYPE_LIMIT} bytes.")
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise InvalidRequestError("The multipart body has no boundary in its Content-Type.")
    delimiter = b"--" + boundary
    closing = body.rfind(delimiter, max(0, len(body) - EPILOGUE_LIMIT - len(delimiter)))
    last = closing + len(delimiter) + 1  # the second hyphen after it ends the form
    form = Form(body, delimiter, closing)
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": form.part_begin,
                "on_header_begin": form.header_begin,
                "on_header_field": form.header_field,
                "on_header_value": form.header_value,
                "on_header_end": form.header_end,
                "on_headers_finished": form.headers_finished,
                "on_part_data": form.part_data,
                "on_part_end": form.part_end,
                "on_end": form.end,
            },
        )
        for start in range(0, last, SLICE):
            if start:
                await asyncio.sleep(0)
            form.parsed = start
            parser.write(bytes(body[start : min(start + SLICE, last)]))
        form.parsed = last
        parser.write(bytes(body[last : last + 1]))
    except FormParserError as error:
        raise InvalidRequestError(f"The multipart body can't be read: {error}.") from error
    if not form.is_complete:
        raise InvalidRequestError("The multipart body has no end: a last boundary, followed by two hyphens.")
    form.name = form.name or None
    return form


class Form(Body):
    """One request's form, files included.

    The methods from `part_begin` to `end` are callbacks of the parser.
    """

    def __init__(self, body: Bytes, delimiter: bytes, closing: int) -> None:
        super().__init__()
        self._body = body
        self._closing = closing  # the position of the last delimiter
        self.is_complete = False
        self.allow_remote: str | None = None
        self._texts: dict[str, str] = {}
        self.parsed = 0  # bytes of the body before the slice that is being parsed
        self._delimiter = delimiter
        self._parts = 0
        self._fields: list[tuple[str, int]] = []  # name, and position of the part's first header
        self._begin: int | None = None
        self._is_named = self._is_file = self._has_other_charset = False
        self._header_name = b""
        self._header_value = b""
        self._read_field = b""  # the current field, if llmux reads it
        self._media_field = ""  # the current field, if its value could make a worker load something
        self._value = bytearray()
        self._is_base64 = True

    def part_begin(self) -> None:
        self._parts += 1
        self._begin = None
        self._is_named = self._is_file = self._has_other_charset = False
        if self._parts > PARTS_LIMIT:
            raise InvalidRequestError(f"The form has more than {PARTS_LIMIT} parts.")

    def header_begin(self) -> None:
        self._header_name = self._header_value = b""

    def header_field(self, data: bytes, start: int, end: int) -> None:
        if self._begin is None:
            self._begin = self.parsed + start
        self._header_name += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def header_end(self) -> None:
        header, value = self._header_name.lower(), self._header_value
        if header == b"content-transfer-encoding" and value.strip().lower() not in _PLAIN_ENCODINGS:
            raise InvalidRequestError("A part of the form has a Content-Transfer-Encoding; send it as it is.")
        if header == b"content-type":
            self._has_other_charset = self._has_other_charset or _CHARSET.search(value) is not None
        if header != b"content-disposition":
            return
        if self._is_named:
            raise InvalidRequestError("A part of the form has two Content-Disposition headers.")
        self._is_named = True
        options = _parse_parameters(value)
        name = options.get(b"name", b"")
        assert self._begin is not None
        text = name.decode("utf-8", "replace")
        self._fields.append((text, self._begin))
        self._is_file = bool(options.get(b"filename"))  # some parsers don't treat an empty name as a file's
        if name in (b"model", b"stream", b"allow_remote") or text in _READ_FIELDS:
            self._read_field = name
        elif not self._is_file and means_loading(text):
            self._media_field = text

    def headers_finished(self) -> None:
        if self._has_other_charset and not self._is_file:
            raise InvalidRequestError("A value in the form has another charset; send it as UTF-8.")

    def part_data(self, data: bytes, start: int, end: int) -> None:
        if self._media_field:
            piece = data[start:end]
            self._value += piece[: VALUE_LIMIT - len(self._value)] if len(self._value) < VALUE_LIMIT else b""
            self._is_base64 = self._is_base64 and not piece.translate(None, _BASE64)
        elif self._read_field:
            self._value += data[start:end]
            if len(self._value) > VALUE_LIMIT:
                name = self._read_field.decode()
                raise InvalidRequestError(f"The form field `{name}` is too long.", param=name)

    def part_end(self) -> None:
        if self._read_field == b"model":
            if self.name is not None:
                raise InvalidRequestError("The form names `model` twice.", param="model")
            try:
                self.name = self._value.decode()
            except UnicodeDecodeError as error:
                raise InvalidRequestError("The form field `model` is not UTF-8.", param="model") from error
        elif self._read_field == b"stream":
            self.stream = bytes(self._value).lower() == b"true"
        elif self._read_field == b"allow_remote":
            self.allow_remote = self._value.decode("utf-8", "replace")
        elif self._read_field:
            self._texts[self._read_field.decode()] = self._value.decode("utf-8", "replace")
            self.is_silent = False
        elif self._media_field:
            text = self._value.decode("utf-8", "replace")
            if not is_content(self._media_field, text if self._is_base64 else f"{text}:"):
                raise refusal(self._media_field, text)
        self._read_field, self._media_field, self._is_base64 = b"", "", True
        self._value.clear()

    def end(self) -> None:
        if self.parsed <= self._closing + len(self._delimiter):  # another delimiter follows
            raise InvalidRequestError("The multipart body goes on after its end.")
        self.is_complete = True

    @property
    def names(self) -> frozenset[str]:
        """The names of all fields."""
        return frozenset(name for name, _ in self._fields)

    def nameless(self, scope: Scope) -> InvalidRequestError:
        """See Body."""
        return InvalidRequestError("The form has no field `model`; GET /v1/models lists the choice.", param="model")

    def extension(self, name: str) -> JsonValue:
        """See Body. Of several fields, the last counts."""
        return self._texts.get(name) or None

    def raw(self, name: str) -> bytes | None:
        """See Body. Only for `response_format`."""
        text = self._texts.get(name) if name == RESPONSE_FORMAT else None
        return None if text is None else msgspec.json.encode(text)

    def translated(self, translation: Translation) -> tuple[Body, AnswerTranslation]:
        """See Body."""
        raise InvalidRequestError("Send this as JSON: no form is understood here.")

    def take_permission(self) -> bool:
        """See Body."""
        return permission.in_form(self.allow_remote)

    @property
    def unknown_extensions(self) -> Sequence[str]:
        """See Body."""
        return sorted(name for name in self.names if name.startswith(PRIVATE) and name not in EXTENSION_FIELDS)

    async def rewritten(self, rewrite: Rewrite, endpoint: Endpoint) -> Bytes:
        """See Body."""
        fields = rewrite.form_fields(self.names, endpoint)
        if self.allow_remote is not None:
            fields[permission.FIELD] = ()
        fields |= {name: () for name in self.names if name.startswith(PRIVATE)}
        return await self._with_fields(fields)

    async def _with_fields(self, fields: Mapping[str, tuple[str, ...]]) -> Bytes:
        """The form with other values for these fields; an empty list removes a field."""
        body = self._body
        if not fields or not self._fields:
            return body
        # The delimiter is directly before the part's first header.
        begins = [body.rfind(self._delimiter, 0, begin) for _, begin in self._fields]
        ends = [*begins[1:], self._closing]
        kept = [
            (begin, end) for (name, _), begin, end in zip(self._fields, begins, ends, strict=True) if name not in fields
        ]
        added = b"".join(self._encode_part(name, value) for name, values in fields.items() for value in values)
        changed = bytearray()
        await self._copy_slices(changed, 0, begins[0])
        changed += added
        for begin, end in (*kept, (self._closing, len(body))):
            await self._copy_slices(changed, begin, end)
        return changed

    async def _copy_slices(self, changed: bytearray, begin: int, end: int) -> None:
        for start in range(begin, end, SLICE):
            changed += self._body[start : min(start + SLICE, end)]
            await asyncio.sleep(0)

    def _encode_part(self, name: str, value: str) -> bytes:
        quoted = name.replace("\\", "\\\\").replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
        head = f'\r\nContent-Disposition: form-data; name="{quoted}"\r\n\r\n{value}\r\n'
        return self._delimiter + head.encode()


def _parse_parameters(header: bytes) -> dict[bytes, bytes]:
    """The parameters of a Content-Disposition, by their lower-case names. Raises InvalidRequestError for ambiguous ones."""
    if header.count(b";") > PARAMETERS_LIMIT:
        raise InvalidRequestError("A Content-Disposition header in the form has too many parameters.")
    found: dict[bytes, bytes] = {}
    at = len(header) if (semicolon := header.find(b";")) < 0 else semicolon
    while (parameter := _PARAMETER.match(header, at)) is not None:
        key, value = parameter[1].lower(), parameter[2] if parameter[3] is None else parameter[3]
        if key in found or key.startswith(b"name*") or (key == b"name" and b"\\" in value):
            raise InvalidRequestError("A part of the form has two names, or one in another encoding than UTF-8.")
        found[key], at = value, parameter.end()
    if header[at:].strip(b"; \t"):
        raise InvalidRequestError("A Content-Disposition header in the form can't be read.")
    if found.get(b"name", b"").lower() == b"_charset_":
        raise InvalidRequestError(
            "Forms are sent as UTF-8: leave out the field `_charset_`.", code="charset_not_supported"
        )
    return found
