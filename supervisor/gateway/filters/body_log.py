"""Keeps the bodies of requests and answers, for models with `keep_bodies`.

No header is ever kept. Values with the name of a secret are masked, and pictures and sounds are replaced by their size: in JSON,
in streams of JSON, and in the beginning of a longer text, which is no longer JSON. This runs in a thread, after the answer.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection
from typing import Final

import msgspec
import structlog
from pydantic import JsonValue

from supervisor.catalog.document.masking import masked, masked_fields, masked_text
from supervisor.errors import NotFoundError
from supervisor.gateway.filters.filters import Filter, Head, Use
from supervisor.host.store.kept_bodies import KeptBodies
from supervisor.host.store.request_buffer import Bytes
from supervisor.schema.request import KeptBody

log = structlog.get_logger("llmux.bodies")

SHOWN_BYTES: Final = 64 * 1024
READ_BYTES: Final = 8 * 1024 * 1024
"""A larger request isn't parsed as JSON, and only its beginning is kept."""
READ_TEXT: Final = 4 * SHOWN_BYTES
"""Characters kept of one text in JSON, after a picture or sound at its beginning."""
_MIN_MEDIA_CHARS: Final = 512
_BASE64: Final = re.compile(
    r"(?:data:([\w.+/-]{1,100});base64,)?([A-Za-z0-9+/=_-]{40,}(?:(?:\\[nr/]|[\r\n])+[A-Za-z0-9+/=_-]+)*)"
)
"""Pictures and sounds, also with line breaks and JSON's escapes. Also matches long words; these are shorter than `_MIN_MEDIA_CHARS`."""
_STREAM_LINE: Final = re.compile(r"(data: ?)?(.*)", re.DOTALL)


class Capture(Filter):
    """Collects both bodies of one request, up to a limit."""

    sees_errors = True

    def __init__(self, body: Bytes | None) -> None:
        self.is_cut = body is not None and len(body) > READ_BYTES
        self.body = b"" if body is None else bytes(body[: SHOWN_BYTES + 1] if self.is_cut else body)
        self.answer = bytearray()
        self.answer_type = ""

    def head(self, head: Head) -> Use:
        """See Filter."""
        self.answer_type = head.content_type.decode("latin-1")
        return Use.PIECES

    def feed(self, piece: bytes) -> bytes:
        """See Filter. Keeps the beginning of the answer."""
        if len(self.answer) <= SHOWN_BYTES:
            self.answer += piece[: SHOWN_BYTES + 1 - len(self.answer)]
        return piece

    def error(self, head: Head, body: bytes) -> bytes:
        """See Filter."""
        self.head(head)
        return self.feed(body)

    def kept(self) -> KeptBody:
        """The bodies without secrets and media. Takes milliseconds."""
        request, answer = (  # JSON may have lone surrogates, which UTF-8 can't encode
            _display_text(data).encode(errors="replace").decode() for data in (self.body, bytes(self.answer))
        )
        return KeptBody(
            request[:SHOWN_BYTES],
            self.is_cut or len(request) > SHOWN_BYTES,
            answer[:SHOWN_BYTES],
            max(len(answer), len(self.answer)) > SHOWN_BYTES,
            self.answer_type,
        )


class BodyLog:
    """The daemon's log of bodies. Use from the event loop's thread."""

    def __init__(self, kept: KeptBodies, run: str) -> None:
        """`run` is the prefix of this daemon's request numbers."""
        self._kept = kept
        self._run = run
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, model: str, number: str, capture: Capture) -> None:
        """Write a request's bodies soon."""
        task = asyncio.create_task(self._write(model, f"{self._run}-{number}", capture))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, model: str, number: str, capture: Capture) -> None:
        try:
            await asyncio.to_thread(
                lambda: self._kept.keep(model, number, msgspec.json.encode(capture.kept()).decode())
            )
        except OSError as error:
            log.warning("body.not_kept", model=model, reason=str(error))

    async def find(self, number: str) -> KeptBody:
        """The bodies of the request with this id. Raises NotFoundError."""
        text = await asyncio.to_thread(self._kept.find, number if "-" in number else f"{self._run}-{number}")
        if text is None:
            raise NotFoundError(
                f"No body of the request {number[:50]!r} is kept: set keep_bodies for its model, or it is too old.",
                code="body_not_found",
            )
        return msgspec.json.decode(text, type=KeptBody)

    def limit_to(self, models: Collection[str]) -> None:
        """Keep bodies of these models only, and soon delete the bodies of other models."""
        if models != self._kept.models:
            self._kept.models = models
            task = asyncio.create_task(asyncio.to_thread(self._kept.delete_others))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def _display_text(data: bytes) -> str:
    """A body as text for operators, without media and secrets."""
    text = data.decode("utf-8", "replace")
    try:
        return json.dumps(masked(_clean_value(json.loads(text)), ""), ensure_ascii=False, indent=1)
    except (ValueError, RecursionError):
        pass
    if "\0" in text or text.count("\ufffd") > len(text) // 20:
        return f"({len(data)} bytes that are no text)"
    return "\n".join(_clean_line(line) for line in text.split("\n"))


def _clean_line(line: str) -> str:
    """One line of a stream, or of any other text."""
    found = _STREAM_LINE.fullmatch(line)
    assert found is not None
    try:
        value = json.loads(found[2])
        cleaned = masked(_clean_value(value), "")
    except (ValueError, RecursionError):
        return masked_text(_clean_text(line))
    return line if cleaned == value else f"{found[1] or ''}{json.dumps(cleaned, ensure_ascii=False)}"


def _clean_value(value: JsonValue) -> JsonValue:
    """A value with pictures and sounds replaced by their size, and without secrets in texts of JSON, such as a tool's arguments."""
    match value:
        case dict():
            return {key: _clean_value(item) for key, item in value.items()}
        case list():
            return [_clean_value(item) for item in value]
        case str():
            return _clean_text(value)
    return value


def _clean_text(text: str) -> str:
    """A text without media and secrets. It is cut first, beyond the shown length: each regular expression blocks the whole daemon."""
    if len(text) > _MIN_MEDIA_CHARS:
        media = _BASE64.match(text)
        rest = text if media is None else text[media.end() :]
        cut = " (cut)" if len(rest) > READ_TEXT else ""
        text = f"{_media_size_text(media) if media else ''}{_BASE64.sub(_media_size_text, rest[:READ_TEXT])}{cut}"
    return masked_fields(text[: SHOWN_BYTES + 1])


def _media_size_text(found: re.Match[str]) -> str:
    kind, size = found[1], len(found[2])
    if size <= _MIN_MEDIA_CHARS:
        return found[0]
    return f"({kind}, {size} characters of base64)" if kind else f"({size} characters of base64)"
