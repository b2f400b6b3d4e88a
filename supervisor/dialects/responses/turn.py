"""A request whose response is kept, or which goes on from one that is; see `proxy.turn`.

What was said before is put in front of its input, so every worker can answer it, whatever it speaks. The answer passes as the
worker or the translation gives it, but for the fields that only llmux knows: `store`, `previous_response_id`, `background`.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from typing import Final

import msgspec
from pydantic import JsonValue

from supervisor.catalog.rewrite import Fields
from supervisor.dialects.chat import Measured, Usage
from supervisor.dialects.llm_pool.metrics import metrics_of
from supervisor.dialects.responses.checks import Json
from supervisor.dialects.responses.kept import continued, earlier, response_of
from supervisor.dialects.responses.state import wish_of
from supervisor.errors import InvalidRequestError, LlmuxError
from supervisor.gateway.body.body import Body, Bytes
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.body.outline import Outline
from supervisor.gateway.disconnect import Message, Send
from supervisor.gateway.filters import frames
from supervisor.gateway.filters.filters import EVENTS
from supervisor.gateway.filters.turn import Memory, Turn
from supervisor.io.held_body import Gathered, HeldBody
from supervisor.io.response_store import PIECE, EventLog, Kept, Part

_FRAME: Final = b"\n\n"
_DATA: Final = b"data:"
_RESPONSE: Final = b'"response"'  # as a name; within a text its quotes are escaped
_TOLD: Final = re.compile(rb'"type"\s*:\s*"response\.(?:created|queued|in_progress|completed|incomplete|failed)"')
FINAL: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_BEGUN: Final = "response.created"
_DELTA: Final = b'.delta"'


class _Counts(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0


_counts: Final = msgspec.json.Decoder(_Counts | None).decode
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode: Final = msgspec.json.Encoder().encode
_text: Final = msgspec.json.Decoder(str).decode


async def turn_of(body: Body, memory: Memory, *, is_counted: bool) -> tuple[Body, Turn | None]:
    """See `Dialect.turn`. `is_counted`: its tokens are, and nothing is generated."""
    if not memory.store.is_on or not isinstance(body, JsonBody):
        return body, None
    if memory.response is not None:
        return body, await _in_background(memory.response, memory)
    wish = wish_of(body.fields)
    keeps = wish.store is not False and not is_counted
    if wish.previous is None and not keeps:
        return body, None
    is_changed = wish.previous is not None or wish.store is True
    if is_changed:
        body = body.changed({"previous_response_id": None, "store": None})
    if wish.previous is not None:
        kept = await earlier(memory.store, wish.previous, memory.owner, is_admin=memory.is_admin)
        body = await continued(body, wish.previous, kept)
    if is_counted:
        return body, None
    told: Json = {"background": False, "previous_response_id": wish.previous, "store": keeps}
    items = (await body.field("input") or b"null") if keeps else None
    return body, ResponseTurn(memory, items, _raw(told), is_told=is_changed)


async def _in_background(name: str, memory: Memory) -> Turn | None:
    kept = await memory.store.find(name, memory.owner, is_admin=True)
    if kept is None:  # deleted
        return None
    begun = await response_of(kept)
    told = {key: begun.get(key) for key in ("id", "created_at", "background", "previous_response_id", "store")}
    return ResponseTurn(memory, None, _raw(told), again=(kept, begun))


def _raw(values: Json) -> Fields:
    return {key: msgspec.Raw(_encode(value)) for key, value in values.items()}


class ResponseTurn:
    """See `Turn`."""

    def __init__(
        self,
        memory: Memory,
        items: Bytes | None,
        told: Fields,
        *,
        is_told: bool = True,
        again: tuple[Kept, Json] | None = None,
    ) -> None:
        """Raises UnavailableError if what must be kept of the request has no room.

        `items`: all that the worker gets; None: the response isn't kept. `told`: fields of the response, also of one that
        lacks them if `is_told`. `again`: what is kept of one that is generated in the background, and its object.
        """
        self._memory = memory
        self._told = told
        self._is_told = is_told
        self._kept = None if again is None else again[0]
        self._log: EventLog | None = None
        if again is not None and again[0].is_streamed:
            self._log = log_of(memory.store.logs, memory.response or "", again[1])
            self._log.cut(BEGINNING)  # the rest is of an earlier try
        self._items: HeldBody | None = None
        if items is not None:
            self._items = HeldBody(memory.bodies)
            self._items.expect(len(items))
            self._items.keep(items)
            self._items.wait()  # for the answer
        self._first_at: float | None = None  # the first piece of a stream's text, or of what else its model says
        self._finished: tuple[str, str, Bytes] | None = None  # the response's name, status and object, once it is over
        self._gathered = Gathered(memory.bodies, memory.most)  # the whole answer, or its log
        self._head: Message | None = None  # of a whole answer, until it is there
        self._whole = bytearray()
        self._is_stream = False
        self._rest = b""

    def release(self) -> None:
        """See Turn."""
        self._gathered.release()
        if self._items is not None:
            self._items.release()

    def observed(self, send: Send) -> Send:
        """See Turn."""

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start":
                if self._begin(message):
                    return
            elif self._head is not None:
                self._whole += message.get("body", b"")
                is_last = not message.get("more_body", False)
                if not is_last and self._has_room(len(self._whole)):
                    return
                head, self._head = self._head, None
                data: Bytes = self._whole
                self._whole = bytearray()
                if is_last:
                    data = await self._response(data)
                    headers = [item for item in head["headers"] if item[0] != b"content-length"]
                    head["headers"] = [*headers, (b"content-length", b"%d" % len(data))]
                    await self._keep()
                await send(head)
                at = 0
                while len(data) - at > PIECE:
                    await send({"type": message["type"], "body": bytes(data[at : at + PIECE]), "more_body": True})
                    await asyncio.sleep(0)
                    at += PIECE
                message["body"] = bytes(data[at:])
            elif self._is_stream:
                is_last = not message.get("more_body", False)
                message["body"] = self._fed(message.get("body", b""), is_last=is_last)
                if not is_last:
                    self._gathered.grow(len(self._rest) + (0 if self._log is None else self._log.size))
                await self._keep()
            await send(message)

        return observe

    def _has_room(self, size: int) -> bool:
        """May so much of a whole answer be gathered? One that is longer passes as it is, and isn't kept."""
        try:
            self._gathered.grow(size)
        except LlmuxError:
            return False
        return True

    def _begin(self, head: Message) -> bool:
        """Look at the head of an answer. Is it to be sent with the body?"""
        headers = dict(head["headers"])
        if head["status"] != 200 or headers.get(b"content-encoding", b"identity") != b"identity":
            return False
        content_type: bytes = headers.get(b"content-type", b"")
        self._is_stream = content_type.startswith(EVENTS)
        is_whole = content_type.startswith(b"application/json")
        self._head = head if is_whole else None
        return is_whole

    # ------------------------------------------------------------------------------------------------------------ answer

    async def _response(self, data: Bytes) -> Bytes:
        """A response object as the client gets it; kept if it is over."""
        outline = Outline()
        try:
            text = await outline.add(data)
        except InvalidRequestError:  # of more values than a request may have
            text = data
        try:
            fields = _fields(text)
            if _text(fields["object"]) != "response":
                return data
            fields["id"] = msgspec.Raw(await outline.restored(bytes(fields["id"])))
            fields, changed = self._changed(fields, text, is_over=True)
            if changed is not text:
                data = await outline.restored(changed)
            self._finish(fields, data)
        except (KeyError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            pass  # whatever it is, it is no response
        return data

    def _changed(self, fields: Fields, data: Bytes, *, is_over: bool) -> tuple[Fields, Bytes]:
        """With what only llmux knows."""
        changes = {
            key: value
            for key, value in self._told.items()
            if (key in fields or self._is_told) and bytes(fields.get(key, b"")) != bytes(value)
        }
        if is_over and (times := self._memory.times) is not None and "metrics" not in fields:  # no translation's
            measured = Measured(_usage(fields.get("usage")), first_at=self._first_at)
            changes["metrics"] = msgspec.Raw(_encode(metrics_of(measured, times, time.monotonic())))
        if not changes:
            return fields, data
        fields = fields | changes
        return fields, _encode(fields)

    def _finish(self, fields: Fields, data: Bytes) -> None:
        """Remember a response that is over. Raises KeyError or MsgspecError for one that doesn't say who and how it is."""
        self._finished = _text(fields["id"]), _text(fields["status"]), data

    async def _keep(self) -> None:
        """Keep the response if it is over. It can be found before its client has the end of it."""
        finished, self._finished = self._finished, None
        if finished is None:
            return
        name, status, data = finished
        if self._kept is not None:
            over = replace(self._kept, response=Part(data), status=status)
            self._memory.store.keep(name, over, replaces=True)
        elif self._items is not None:
            self._items.run()
            items = bytearray()
            async for piece in self._items.pieces():
                items += piece
            self._memory.store.keep(name, Kept(self._memory.owner, Part(data), Part(items), status))

    # ------------------------------------------------------------------------------------------------------------ stream

    def _fed(self, piece: bytes, *, is_last: bool) -> bytes:
        """What a piece of a stream becomes: the events that are complete."""
        if self._first_at is None and _DELTA in piece:
            self._first_at = time.monotonic()
        if self._log is None and not self._rest and piece.endswith(_FRAME) and _RESPONSE not in piece:
            return piece  # as nearly all are
        text = self._rest + piece
        if b"\r" in text:  # many Python servers end lines so
            text = text.replace(b"\r\n", b"\n")
        if b"\r" in text[:-1] or len(self._rest) > frames.EVENT_LIMIT:  # no event would be seen to end
            self._is_stream = False
            return text
        *whole, self._rest = text.split(_FRAME)
        told = b"".join([self._event(frame) + _FRAME for frame in whole])
        return told + self._rest if is_last else told

    def _event(self, frame: bytes) -> bytes:
        at = frame.find(_DATA)
        if at < 0 or (self._log is None and _TOLD.search(frame, at) is None):
            return frame
        try:
            event = _fields(frame[at + len(_DATA) :])
            kind = _text(event["type"])
            response = event.get("response")
            changed: Fields = {}
            if response is not None:
                whole = bytes(response)
                changed, data = self._changed(_fields(whole), whole, is_over=kind in FINAL)
                if data is not whole:
                    event["response"] = msgspec.Raw(data)
                if kind in FINAL:
                    self._finish(changed, data)
            if self._log is not None:
                if kind == _BEGUN:  # which it has
                    return b""
                event["sequence_number"] = msgspec.Raw(b"%d" % len(self._log.events))
            if self._log is not None or (response is not None and event["response"] is not response):
                frame = b"event: %b\ndata: %b" % (kind.encode(), _encode(event))
            if self._log is not None:
                self._log.add(frame + _FRAME)
        except (KeyError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return frame
        return frame


def _usage(raw: msgspec.Raw | None) -> Usage | None:
    """A response's, as a chat completion has it."""
    try:
        found = None if raw is None else _counts(raw)
    except msgspec.MsgspecError:  # it has none of OpenAI's
        return None
    return None if found is None else Usage(found.input_tokens, found.output_tokens)


# -------------------------------------------------------------------------------------------------- events in background

BEGINNING: Final = 2
"""Events that come before the worker's."""


def event(kind: str, number: int, **fields: JsonValue) -> bytes:
    """An event of a stream."""
    return frames.event(kind, fields | {"sequence_number": number})


def log_of(logs: dict[str, EventLog], name: str, begun: Json) -> EventLog:
    """The events of a response that is still to come; begun where none has come yet."""
    if name not in logs:
        logs[name] = EventLog(
            [event(_BEGUN, 0, response=begun), event("response.queued", 1, response=begun)],
        )
    return logs[name]
