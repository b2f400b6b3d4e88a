"""Keeps the bodies of requests and answers of models for which the operator switched that on (`keep_bodies`).

No header is ever kept. Of a JSON body, values that are named like a secret are masked, and pictures and sounds are replaced by
their size. All that happens in a thread, after the answer.
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

from supervisor.catalog.masking import masked, masked_text
from supervisor.errors import NotFoundError
from supervisor.io.held_body import Bytes
from supervisor.io.kept_bodies import KeptBodies
from supervisor.proxy.disconnect import Message, Send

log = structlog.get_logger("llmux.bodies")

SHOWN_BYTES: Final = 64 * 1024
READ_BYTES: Final = 8 * 1024 * 1024
"""A larger request isn't read as JSON, only its beginning is kept."""
_LONG: Final = 512
_DATA: Final = re.compile(r"data:([\w.+/-]*);base64,")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/=_-]+")


class KeptBody(msgspec.Struct):
    """A request's body and what its client got. `…_cut`: there was more."""

    request: str
    request_cut: bool
    answer: str
    answer_cut: bool
    answer_type: str


class Capture:
    """What passes of one request. `send` in place of the client's own."""

    def __init__(self, send: Send, body: Bytes | None) -> None:
        self._send = send
        self.body = b"" if body is None else bytes(body) if len(body) <= READ_BYTES else bytes(body[: SHOWN_BYTES + 1])
        self.answer = bytearray()
        self.answer_type = ""

    async def send(self, message: Message) -> None:
        """Pass it on, and keep its beginning."""
        if message["type"] == "http.response.start":
            self.answer_type = next((v for k, v in message["headers"] if k == b"content-type"), b"").decode("latin-1")
        elif (more := message.get("body", b"")) and len(self.answer) <= SHOWN_BYTES:
            self.answer += more[: SHOWN_BYTES + 1 - len(self.answer)]
        await self._send(message)

    def kept(self) -> KeptBody:
        """Without secrets and media. Takes milliseconds."""
        request, answer = _shown(self.body), _shown(bytes(self.answer))
        return KeptBody(
            request[:SHOWN_BYTES],
            len(request) > SHOWN_BYTES,
            answer[:SHOWN_BYTES],
            len(answer) > SHOWN_BYTES,
            self.answer_type,
        )


class BodyLog:
    """One for each daemon. Use from the event loop's thread."""

    def __init__(self, kept: KeptBodies, run: str) -> None:
        """`run`: what stands before the numbers of this daemon's requests."""
        self._kept = kept
        self._run = run
        self._models: Collection[str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, model: str, number: str, capture: Capture) -> None:
        """Write it soon."""
        task = asyncio.create_task(self._keep(model, f"{self._run}-{number}", capture))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, model: str, number: str, capture: Capture) -> None:
        try:
            await asyncio.to_thread(
                lambda: self._kept.keep(model, number, msgspec.json.encode(capture.kept()).decode())
            )
        except OSError as error:
            log.warning("body.not_kept", model=model, reason=str(error))

    async def find(self, number: str) -> KeptBody:
        """By a request's id. Raises NotFoundError."""
        text = await asyncio.to_thread(self._kept.find, number if "-" in number else f"{self._run}-{number}")
        if text is None:
            raise NotFoundError(
                f"No body of the request {number[:50]!r} is kept: set keep_bodies for its model, or it is too old.",
                code="body_not_found",
            )
        return msgspec.json.decode(text, type=KeptBody)

    def limit_to(self, models: Collection[str]) -> None:
        """Delete soon what was kept of all other models."""
        if models != self._models:
            self._models = models
            task = asyncio.create_task(asyncio.to_thread(self._kept.limit_to, models))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def _shown(data: bytes) -> str:
    """As people may see it."""
    text = data.decode("utf-8", "replace")
    try:
        whole = json.dumps(_clean(masked(json.loads(text), "")), ensure_ascii=False, indent=1)
        return whole.encode("utf-8", "replace").decode()  # JSON can name halves of characters
    except (ValueError, RecursionError):
        pass
    if "\0" in text or text.count("\ufffd") > len(text) // 20:
        return f"({len(data)} bytes that are no text)"
    return masked_text(text)


def _clean(value: JsonValue) -> JsonValue:
    """Pictures and sounds as their size."""
    match value:
        case dict():
            return {key: _clean(item) for key, item in value.items()}
        case list():
            return [_clean(item) for item in value]
        case str() if len(value) > _LONG and (found := _DATA.match(value)):
            return f"({found[1] or 'data'}, {len(value) - found.end()} characters of base64)"
        case str() if len(value) > _LONG and _BASE64.fullmatch(value):
            return f"({len(value)} characters of base64)"
    return value
