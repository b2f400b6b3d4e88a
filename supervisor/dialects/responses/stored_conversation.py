"""Requests that continue a stored response, or have a response to store; see `gateway.filters.stored_conversation`.

The request's input gets the earlier conversation in front, so that every worker can answer it, regardless of its API. The answer of
the worker or the translation passes unchanged, except for the fields that only llmux knows: `store`, `previous_response_id`,
`background`.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Final

import msgspec

from supervisor.catalog.models.rewrite import Fields
from supervisor.dialects.chat import Measured, Usage
from supervisor.dialects.llm_pool.metrics import metrics_of
from supervisor.dialects.responses.decode import storage_fields_of
from supervisor.dialects.responses.stored_response import prepend_conversation, previous_response, response_of
from supervisor.dialects.responses.types import Json
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.body import Body, Bytes
from supervisor.gateway.body.condensed_json import SMALL, CondensedJson
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.filters import frames
from supervisor.gateway.filters.filters import EVENTS, Head, Use
from supervisor.gateway.filters.stored_conversation import ConversationStore, StoredConversation
from supervisor.host.store.request_buffer import RequestBuffer
from supervisor.host.store.response_store import EventLog, Part, StoredResponse

_FRAME: Final = b"\n\n"
_DATA: Final = b"data:"
_RESPONSE: Final = b'"response"'  # as a field's name: within a text its quotes are escaped
_BEARING: Final = re.compile(rb'"type"\s*:\s*"response\.(?:created|queued|in_progress|completed|incomplete|failed)"')
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


async def conversation_of(
    body: Body, conversations: ConversationStore, *, is_counted: bool
) -> tuple[Body, StoredConversation | None]:
    """See `Dialect.conversation`. `is_counted`: the request only counts tokens."""
    if not conversations.store.is_on or not isinstance(body, JsonBody):
        return body, None
    if conversations.response is not None:
        return body, await _background_conversation(conversations.response, conversations)
    storage = storage_fields_of(body.fields)
    previous, keeps = storage.previous_response_id, storage.store is not False and not is_counted
    if previous is None and not keeps:
        return body, None
    is_changed = previous is not None or storage.store is True
    if is_changed:
        body = body.changed({"previous_response_id": None, "store": None})
    if previous is not None:
        stored = await previous_response(
            conversations.store, previous, conversations.owner, is_admin=conversations.is_admin
        )
        body = await prepend_conversation(body, previous, stored)
    if is_counted:
        return body, None
    own: Json = {"background": False, "previous_response_id": previous, "store": keeps}
    items = (await body.field("input") or b"null") if keeps else None
    return body, StoredResponseConversation(conversations, items, _encoded_values(own), is_shown=is_changed)


async def _background_conversation(name: str, conversations: ConversationStore) -> StoredConversation | None:
    stored = await conversations.store.find(name, conversations.owner, is_admin=True)
    if stored is None:  # deleted
        return None
    begun = await response_of(stored)
    own = {key: begun.get(key) for key in ("id", "created_at", "background", "previous_response_id", "store")}
    return StoredResponseConversation(conversations, None, _encoded_values(own), background=(stored, begun))


def _encoded_values(values: Json) -> Fields:
    return {key: msgspec.Raw(_encode(value)) for key, value in values.items()}


class StoredResponseConversation(StoredConversation):
    """See `StoredConversation`."""

    settles = True

    def __init__(
        self,
        conversations: ConversationStore,
        items: Bytes | None,
        own: Fields,
        *,
        is_shown: bool = True,
        background: tuple[StoredResponse, Json] | None = None,
    ) -> None:
        """Raises UnavailableError if there is no room to keep the request's items.

        `items`: all items of the conversation; None: the response isn't stored. `own`: llmux's fields of the response; with `is_shown`
        a response without them gets them, too. `background`: the stored response that a job generates, and its object.
        """
        self._conversations = conversations
        self._own_fields = own
        self._is_shown = is_shown
        self._stored = None if background is None else background[0]
        self._log: EventLog | None = None
        if background is not None and background[0].is_streamed:
            self._log = event_log_of(conversations.store.logs, conversations.response or "", background[1])
            self._log.cut(BEGINNING)  # later events are from an earlier try
        self._items: RequestBuffer | None = None
        if items is not None:
            self._items = RequestBuffer(conversations.bodies)
            self._items.expect(len(items))
            self._items.keep(items)
            self._items.wait()  # until the answer is there
        self._first_at: float | None = None  # time of the first delta of a stream
        self._finished: tuple[str, str, Bytes] | None = None  # the complete response's name, status and object
        self._is_stream = False
        self._is_opaque = False  # a stream without readable events passes unchanged
        self._incomplete_event = b""

    def release(self) -> None:
        """See StoredConversation."""
        if self._items is not None:
            self._items.release()

    @property
    def gathered(self) -> int:
        """See Filter."""
        return len(self._incomplete_event) + (0 if self._log is None else self._log.size)

    def head(self, head: Head) -> Use:
        """See Filter. An answer that is too long to gather isn't stored."""
        if head.status != 200 or head.is_encoded:
            return Use.NONE
        self._is_stream = head.content_type.startswith(EVENTS)
        if not self._is_stream and not head.content_type.startswith(b"application/json"):
            return Use.NONE
        head.changes_body()
        return Use.PIECES if self._is_stream else Use.WHOLE_IF_SMALL

    async def whole(self, body: Bytes, head: Head) -> Bytes:
        """See Filter."""
        if self._is_stream:
            return await super().whole(body, head)
        data = await self._process_response(body)
        await self.settle()
        head.headers.append((b"content-length", b"%d" % len(data)))
        return data

    def feed(self, piece: bytes) -> bytes:
        """See Filter: the complete events so far."""
        return self._process_piece(piece, is_last=False)

    def end(self) -> bytes:
        """See Filter."""
        return self._process_piece(b"", is_last=True)

    def error(self, head: Head, body: bytes) -> bytes:
        """See Filter."""
        if not head.content_type.startswith(EVENTS):
            return body
        return self._process_piece((_FRAME if self._incomplete_event and body else b"") + body, is_last=True)

    # ------------------------------------------------------------------------------------------------------------ answer

    async def _process_response(self, data: Bytes) -> Bytes:
        """A response object with llmux's fields. Remembers it for `settle`."""
        condensed = CondensedJson()
        try:
            text = data if len(data) <= SMALL else await condensed.add(data)
        except InvalidRequestError:  # it has more values than a request may have
            text = data
        try:
            fields = _fields(text)
            if _text(fields["object"]) != "response":
                return data
            fields["id"] = msgspec.Raw(await condensed.restored(bytes(fields["id"])))
            fields, changed = self._with_own_fields(fields, text, is_over=True)
            if changed is not text:
                data = await condensed.restored(changed)
            self._remember_finished(fields, data)
        except (KeyError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            pass  # not a response: pass it unchanged
        return data

    def _with_own_fields(self, fields: Fields, data: Bytes, *, is_over: bool) -> tuple[Fields, Bytes]:
        """The response's fields and data with llmux's own fields. `is_over`: with metrics, too."""
        changes = {
            key: value
            for key, value in self._own_fields.items()
            if (key in fields or self._is_shown) and bytes(fields.get(key, b"")) != bytes(value)
        }
        # Translations add metrics themselves.
        if is_over and (times := self._conversations.times) is not None and "metrics" not in fields:
            measured = Measured(_chat_usage(fields.get("usage")), first_at=self._first_at)
            changes["metrics"] = msgspec.Raw(_encode(metrics_of(measured, times, time.monotonic())))
        if not changes:
            return fields, data
        fields = fields | changes
        return fields, _encode(fields)

    def _remember_finished(self, fields: Fields, data: Bytes) -> None:
        """Remember a complete response for `settle`. Raises KeyError or MsgspecError if it has no id or status."""
        self._finished = _text(fields["id"]), _text(fields["status"]), data

    async def settle(self) -> None:
        """See Filter: store the response if it is complete. Requests can find it before its client has the end of it."""
        finished, self._finished = self._finished, None
        if finished is None:
            return
        name, status, data = finished
        if self._stored is not None:
            over = replace(self._stored, response=Part(data), status=status)
            self._conversations.store.keep(name, over, replaces=True)
        elif self._items is not None:
            self._items.run()
            items = bytearray()
            async for piece in self._items.pieces():
                items += piece
            self._conversations.store.keep(
                name, StoredResponse(self._conversations.owner, Part(data), Part(items), status)
            )

    # ------------------------------------------------------------------------------------------------------------ stream

    def _process_piece(self, piece: bytes, *, is_last: bool) -> bytes:
        """The output for a piece of a stream: its complete events."""
        if self._is_opaque:
            return piece
        if self._first_at is None and _DELTA in piece:
            self._first_at = time.monotonic()
        if self._log is None and not self._incomplete_event and piece.endswith(_FRAME) and _RESPONSE not in piece:
            return piece  # the fast path for nearly all events
        text = self._incomplete_event + piece
        if b"\r" in text:  # many Python servers use these line ends
            text = text.replace(b"\r\n", b"\n")
        if b"\r" in text[:-1] or len(self._incomplete_event) > frames.EVENT_LIMIT:  # an event's end can't be found
            self._is_opaque, self._incomplete_event = True, b""
            return text
        *whole, self._incomplete_event = text.split(_FRAME)
        events = b"".join([self._process_event(frame) + _FRAME for frame in whole])
        return events + self._incomplete_event if is_last else events

    def _process_event(self, frame: bytes) -> bytes:
        at = frame.find(_DATA)
        if at < 0 or (self._log is None and _BEARING.search(frame, at) is None):
            return frame
        try:
            event = _fields(frame[at + len(_DATA) :])
            kind = _text(event["type"])
            response = event.get("response")
            changed: Fields = {}
            if response is not None:
                whole = bytes(response)
                changed, data = self._with_own_fields(_fields(whole), whole, is_over=kind in FINAL)
                if data is not whole:
                    event["response"] = msgspec.Raw(data)
                if kind in FINAL:
                    self._remember_finished(changed, data)
            if self._log is not None:
                if kind == _BEGUN:  # the log has it already
                    return b""
                event["sequence_number"] = msgspec.Raw(b"%d" % len(self._log.events))
            if self._log is not None or (response is not None and event["response"] is not response):
                frame = b"event: %b\ndata: %b" % (kind.encode(), _encode(event))
            if self._log is not None:
                self._log.add(frame + _FRAME)
        except (KeyError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return frame
        return frame


def _chat_usage(raw: msgspec.Raw | None) -> Usage | None:
    """A response's usage in the format of chat completions; None if it can't be read."""
    try:
        found = None if raw is None else _counts(raw)
    except msgspec.MsgspecError:  # it isn't in OpenAI's format
        return None
    return None if found is None else Usage(found.input_tokens, found.output_tokens)


# -------------------------------------------------------------------------------------------------- events in background

BEGINNING: Final = 2
"""The number of llmux's events before the worker's events."""


def event(kind: str, number: int, **fields: object) -> bytes:
    """An event of a stream, with its number."""
    return frames.event(kind, fields | {"sequence_number": number})


def event_log_of(logs: dict[str, EventLog], name: str, begun: Json) -> EventLog:
    """The event log of a response in the background; a new one if there is none."""
    if name not in logs:
        logs[name] = EventLog(
            [event(_BEGUN, 0, response=begun), event("response.queued", 1, response=begun)],
        )
    return logs[name]
