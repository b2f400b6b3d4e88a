"""Reading request bodies within limits, and finding the model's name in a multipart form without decoding the rest."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from supervisor.departure import ClientGoneError, Receive, Scope
from supervisor.errors import InvalidRequestError, TooLargeError

PARTS_LIMIT: Final = 64
NAME_LIMIT: Final = 512  # of the name of a model
SLICE: Final = 256 * 1024  # parsed between two turns of the loop
_UTF8: Final = re.compile(rb'[^;]*;\s*charset="?utf-?8"?[\s;]*', re.IGNORECASE)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes | bytearray:
    """The whole body. A client that stalls is disconnected by the protocol.

    Raises TooLargeError as soon as more than `limit` bytes are announced or arrive (the server ends the connection soon
    after the answer), and ClientGoneError.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > limit:
            raise _too_large(limit)
    body, more = await _next(receive)
    if len(body) > limit:
        raise _too_large(limit)
    if not more:
        return body
    grown = bytearray(body)  # grows in place: joining pieces would copy it all in one turn of the loop
    while more:
        body, more = await _next(receive)
        grown += body
        if len(grown) > limit:
            raise _too_large(limit)
    return grown


def content_type_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """What the body is said to be; empty when nothing is. Raises InvalidRequestError where a worker could read another one."""
    found = None
    for name, value in headers:
        if name == b"content-type":
            if found is not None:
                raise InvalidRequestError("The request has several Content-Type fields.")
            found = value
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise InvalidRequestError("The request body is compressed; send it as it is, without Content-Encoding.")
    return found or b""


def refuse_other_charset(content_type: bytes) -> None:
    """JSON is UTF-8: a worker that follows `charset=utf-7` would find other keys in it than those that we look at.

    Raises InvalidRequestError.
    """
    if b"charset" in content_type.lower() and _UTF8.fullmatch(content_type) is None:
        raise InvalidRequestError(
            "JSON is sent as UTF-8: leave the charset out of the Content-Type.", code="charset_not_supported"
        )


async def model_of_multipart(body: bytes | bytearray, content_type: bytes) -> str | None:
    """The value of the form field `model`; None when there is no such field.

    Gives way to other work while it searches. Raises InvalidRequestError for what is not a form, has too many parts, or
    names the model twice.
    """
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise InvalidRequestError("The multipart body has no boundary in its Content-Type.")
    form = _ModelField()
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": form.part_begin,
                "on_header_begin": form.header_begin,
                "on_header_field": form.header_field,
                "on_header_value": form.header_value,
                "on_header_end": form.header_end,
                "on_part_data": form.part_data,
                "on_part_end": form.part_end,
            },
        )
        for start in range(0, len(body), SLICE):
            if start:
                await asyncio.sleep(0)
            parser.write(bytes(body[start : start + SLICE]))
    except FormParserError as error:
        raise InvalidRequestError(f"The multipart body can't be read: {error}.") from error
    return form.model


class _ModelField:
    """Callbacks of the multipart parser that keep one short field and let everything else pass."""

    def __init__(self) -> None:
        self.model: str | None = None
        self._parts = 0
        self._header_name = b""
        self._header_value = b""
        self._value: bytearray | None = None  # of the part being read, when it is the model's

    def part_begin(self) -> None:
        self._parts += 1
        if self._parts > PARTS_LIMIT:
            raise InvalidRequestError(f"The form has more than {PARTS_LIMIT} parts.")

    def header_begin(self) -> None:
        self._header_name = self._header_value = b""

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            _, options = parse_options_header(self._header_value)
            if options.get(b"name") == b"model":
                self._value = bytearray()

    def part_data(self, data: bytes, start: int, end: int) -> None:
        if self._value is not None:
            self._value += data[start:end]
            if len(self._value) > NAME_LIMIT:
                raise InvalidRequestError("The form field `model` is too long.", param="model")

    def part_end(self) -> None:
        if self._value is None:
            return
        if self.model is not None:
            raise InvalidRequestError("The form names `model` twice.", param="model")
        try:
            self.model = self._value.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequestError("The form field `model` is not UTF-8.", param="model") from error
        self._value = None


async def _next(receive: Receive) -> tuple[bytes, bool]:
    """The next piece, and whether more follow."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"The request body is larger than {limit} bytes (limits.body_mib).")
