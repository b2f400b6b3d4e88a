"""Reads the lines of a batch's input file, and writes the lines of its output. `jobs.batches` runs the batches.

A line of the input is `{"custom_id", "method", "url", "body"}`. A line of the output names the number of its input line in its
id, `batch_req_BATCH_NUMBER`. So after a restart the output files show which lines are done.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final

import msgspec

from supervisor.errors import InvalidRequestError, TooLargeError
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.body.typed import UNREADABLE
from supervisor.host.store.request_buffer import Bytes

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
CUSTOM_ID_LIMIT: Final = 512  # characters
PIECE: Final = 64 * 1024  # bytes of one read; a longer line is read as a whole
MOST_SKIPPED: Final = 256 * 1024  # bytes of unwanted lines that one read may skip
_FIELDS: Final = frozenset({"custom_id", "method", "url", "body"})
_DONE: Final = re.compile(rb'\{"id":"batch_req_[0-9a-f]+_([0-9]+)"')
_SPACES: Final = bytes.maketrans(b"\r\n", b"  ")
_encode: Final = msgspec.json.Encoder().encode
_check_json: Final = msgspec.json.Decoder(msgspec.Raw).decode
_decode_text: Final = msgspec.json.Decoder(str).decode


# ---------------------------------------------------------------------------------------------------------------- input


class Lines:
    """Reads the non-blank lines of a batch's file, with their numbers, in threads."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        """`limit`: the most bytes of a line."""
        self._file = file
        self._limit = limit
        self._number = 0
        self.is_at_end = False

    async def read(
        self, is_wanted: Callable[[int], bool] = lambda _: True, most: int = PIECE
    ) -> list[tuple[int, bytes | None]]:
        """Read the next wanted lines, about `most` bytes. The list may be empty before the end of the file: check `is_at_end`.

        None stands for a line that is too long.

        Raises OSError.
        """
        return await asyncio.to_thread(self._read, is_wanted, most)

    def _read(self, is_wanted: Callable[[int], bool], most: int) -> list[tuple[int, bytes | None]]:
        found: list[tuple[int, bytes | None]] = []
        size, end = 0, self._file.tell() + MOST_SKIPPED
        while size < most and (found or self._file.tell() < end):
            if not (line := self._file.readline(self._limit + 1)):
                self.is_at_end = True
                break
            self._number += 1
            is_long = len(line) > self._limit and not line.endswith(b"\n")
            while is_long and (more := self._file.readline(PIECE)) and not more.endswith(b"\n"):
                pass
            if self._number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip() and is_wanted(self._number):
                found.append((self._number, None if is_long else line))
                size += len(line)
        return found


async def open_line(raw: bytes | None, endpoint: str) -> tuple[str, Bytes]:
    """Parse an input line: its custom id, and the body of its request. Raises InvalidRequestError, TooLargeError."""
    if raw is None:
        raise TooLargeError("The line is larger than a request may be (limits.body_mib).")
    try:
        opened = await JsonBody.open(raw)
    except InvalidRequestError as error:
        what = error.message.replace("The request body", "The line")
        raise InvalidRequestError(what, code="invalid_json_line", param=error.param) from error
    if unknown := sorted(opened.fields.keys() - _FIELDS):
        name = unknown[0][:100]
        raise InvalidRequestError(f"{name}: unknown; a line has custom_id, method, url and body.", param=name)
    custom_id = await _text_of(opened, "custom_id")
    if not custom_id or len(custom_id) > CUSTOM_ID_LIMIT:
        message = f"custom_id must be a text of 1 to {CUSTOM_ID_LIMIT} characters."
        raise InvalidRequestError(message, code="invalid_custom_id", param="custom_id")
    if await _text_of(opened, "method") != "POST":
        raise InvalidRequestError('method must be "POST".', code="invalid_method", param="method")
    if await _text_of(opened, "url") != endpoint:
        raise InvalidRequestError(
            f'url must be "{endpoint}", the endpoint of the batch.', code="invalid_url", param="url"
        )
    body = await opened.field("body")
    if body is None or body[:1] != b"{":
        raise InvalidRequestError('"body" must be the JSON object that the endpoint takes.', param="body")
    return custom_id, body


def digest_of(custom_id: str) -> bytes:
    """A short digest of a custom id, to find duplicates among many."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


async def _text_of(opened: JsonBody, name: str) -> str | None:
    raw = await opened.field(name)
    try:
        return None if raw is None else _decode_text(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


# --------------------------------------------------------------------------------------------------------------- output


def answer_line(batch: str, number: int, custom_id: str, status: int, request_id: str, body: Bytes) -> list[Bytes]:
    """The output line of an answered request, in chunks. `body` is JSON. Raises ValueError if it isn't.

    May take long: call it in a thread.
    """
    try:
        _check_json(body)
    except UNREADABLE as error:
        raise ValueError(str(error)) from error
    head = _line_start(batch, number, custom_id)
    about = b',"response":{"status_code":%d,"request_id":%b,"body":' % (status, _encode(request_id))
    return [head + about, body.translate(_SPACES), b'},"error":null}\n']


def error_line(batch: str, number: int, custom_id: str, status: int, request_id: str, error: dict[str, Any]) -> bytes:
    """The output line of a request that was answered with an error."""
    response = {"status_code": status, "request_id": request_id, "body": {"error": error}}
    return _line_start(batch, number, custom_id) + b',"response":%b,"error":null}\n' % _encode(response)


def unsent_line(batch: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    """The output line of a request that has no answer."""
    error = {"code": code, "message": message}
    return _line_start(batch, number, custom_id) + b',"response":null,"error":%b}\n' % _encode(error)


def _line_start(batch: str, number: int, custom_id: str) -> bytes:
    name = f"batch_req_{batch.removeprefix('batch_')}_{number}"
    return b'{"id":%b,"custom_id":%b' % (_encode(name), _encode(custom_id))


def done_lines(file: BinaryIO) -> tuple[list[int], int]:
    """The numbers of the input lines that an output answers, and the end of its last whole line: a kill may have cut the next. Blocks."""
    numbers, end = [], 0
    for number, end in _whole_lines(file):  # noqa: B007  # the last one counts
        numbers.append(number)
    return numbers, end


def _whole_lines(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """The input number of each complete output line, and the offset of its end."""
    while head := file.readline(PIECE):
        rest = head
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(PIECE)
        found = _DONE.match(head)
        if not rest or found is None:
            return
        yield int(found[1]), file.tell()
