"""Translates chat completions into Anthropic's messages, whole and event by event; and errors into Anthropic's shape.

A message is a list of content blocks: thoughts, text, and tool calls. In a stream one block is open at a time. The reason
for the answer's end and its tokens come last, after the worker has sent both.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from supervisor.dialects import chat
from supervisor.dialects.anthropic import types
from supervisor.errors import UpstreamError
from supervisor.gateway.body.typed import UNREADABLE, decoded_answer
from supervisor.gateway.filters import frames
from supervisor.gateway.filters.filters import EVENTS
from supervisor.gateway.filters.translation import StreamTranslation
from supervisor.gateway.upstream_error import WorkerAnswerError

_JSON: Final = b"application/json"
_NAMES: Final = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "chat_template_kwargs": "thinking",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Fields of chat completions → their names here."""
_STOP_REASONS: Final = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_encode: Final = msgspec.json.Encoder().encode
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_count: Final = msgspec.json.Decoder(types.MessageTokensCount).decode


def error_body(fields: Mapping[str, object], status: int) -> bytes:
    """`{"type": "error", "error": {"type", "message", …}}`. All `fields` are kept but the type, which follows from the status."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return _encode({"type": "error", "error": {**fields, "type": kind}})


def error_event(body: bytes) -> bytes:
    """The body of an error as an event of a stream."""
    return b"event: error\ndata: " + body + b"\n\n"


@dataclass(frozen=True, slots=True)
class MessageAnswers:
    """The `AnswerTranslation` of one request. `model` is the name in the request, empty without one."""

    model: str
    stops: Sequence[str]
    ignored: Sequence[str]
    names = _NAMES
    content_type = _JSON
    stream_content_type = EVENTS

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        completion = chat.whole(body)
        choice = completion.choices[0]
        message = _message(completion, self.model, completion.usage)
        if thought := choice.message.thought:
            message.content.append(types.ThinkingBlock(thought))
        if text := _text(choice.message):
            message.content.append(types.TextBlock(text))
        calls = choice.message.tool_calls or ()
        message.content += (_tool_use(call, _input(call.function.arguments or "")) for call in calls)
        message.stop_reason, message.stop_sequence = _stop(choice, self.stops, has_calls=bool(calls))
        return _encode(message)

    def stream(self) -> StreamTranslation:
        """See AnswerTranslation."""
        return MessageStream(self.model, self.stops)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The `AnswerTranslation` of a count."""

    ignored: Sequence[str]
    names = _NAMES
    content_type = _JSON
    stream_content_type = EVENTS

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        return _encode(decoded_answer(_count, body, "count of tokens"))

    def stream(self) -> StreamTranslation:
        """See AnswerTranslation. Raises UpstreamError: there is none."""
        raise UpstreamError("The worker answered with a stream where its tokens were to be counted.")


class MessageStream(chat.ChatStream):
    """The translation of one stream."""

    def __init__(self, model: str, stops: Sequence[str]) -> None:
        super().__init__()
        self._model = model
        self._stops = stops
        self._is_begun = False
        self._open: type[msgspec.Struct] | None = None  # the kind of the block that is open
        self._index = -1  # of the last block
        self._calls: list[int | None] = []  # their numbers
        self._last: chat.Choice | None = None  # the one that said why the answer ended
        self._usage: chat.Usage | None = None

    def event(self, answer: chat.Answer) -> bytes:
        """See ChatStream."""
        self._usage = answer.usage or self._usage
        events = b"" if self._is_begun else self._begin(answer)
        for choice in answer.choices:
            events += self._delta(choice.delta)
            if choice.finish_reason is not None:
                self._last = choice
        return events

    def failed(self, error: WorkerAnswerError) -> bytes:
        """See ChatStream."""
        fields = {"message": error.message, "param": error.param, "code": error.code}
        return error_event(error_body(fields, error.status))

    def over(self) -> bytes:
        """See ChatStream. Raises UpstreamError for a stream that ended before its answer did."""
        if self._last is None:
            raise UpstreamError("The worker's stream ended before its answer was complete.")
        reason, sequence = _stop(self._last, self._stops, has_calls=bool(self._calls))
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return (
            self._close()
            + frames.event("message_delta", {"delta": delta, "usage": _usage(self._usage)})
            + frames.event("message_stop", {})
        )

    def _begin(self, answer: chat.Answer) -> bytes:
        self._is_begun = True
        message = _message(answer, self._model, self._usage)
        return frames.event("message_start", {"message": message}) + frames.event("ping", {})

    def _delta(self, delta: chat.Message) -> bytes:
        events = b""
        if delta.thought:
            if self._open is not types.ThinkingBlock:
                events += self._start(types.ThinkingBlock(""))
            events += self._add({"type": "thinking_delta", "thinking": delta.thought})
        if text := _text(delta):
            if self._open is not types.TextBlock:
                events += self._start(types.TextBlock(""))
            events += self._add({"type": "text_delta", "text": text})
        for call in delta.tool_calls or ():
            events += self._piece(call)
        return events

    def _piece(self, call: chat.ToolCall) -> bytes:
        """The event of the next piece of a call. Raises UpstreamError for a piece of a call whose block is closed."""
        events = b""
        if call.index not in self._calls[-1:] or self._open is not types.ToolUseBlock:
            if call.index in self._calls:
                raise UpstreamError("The worker's stream goes back to an earlier tool call.")
            self._calls.append(call.index)
            events = self._start(_tool_use(call, {}))
        if call.function.arguments:
            events += self._add({"type": "input_json_delta", "partial_json": call.function.arguments})
        return events

    def _start(self, block: types.TextBlock | types.ThinkingBlock | types.ToolUseBlock) -> bytes:
        closed = self._close()
        self._open = type(block)
        self._index += 1
        return closed + frames.event("content_block_start", {"index": self._index, "content_block": block})

    def _add(self, delta: Mapping[str, object]) -> bytes:
        return frames.event("content_block_delta", {"index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._add({"type": "signature_delta", "signature": ""}) if self._open is types.ThinkingBlock else b""
        self._open = None
        return signed + frames.event("content_block_stop", {"index": self._index})


def _message(answer: chat.Answer, model: str, usage: chat.Usage | None) -> types.Message:
    """A message without content, for the beginning of a stream."""
    own = answer.id.removeprefix("chatcmpl-") or uuid.uuid4().hex
    return types.Message(id=f"msg_{own}", model=model or answer.model, content=[], usage=_usage(usage))


def _text(message: chat.Message) -> str:
    return (message.content or "") + (message.refusal or "")


def _tool_use(call: chat.ToolCall, arguments: dict[str, Any]) -> types.ToolUseBlock:
    return types.ToolUseBlock(call.id or f"toolu_{uuid.uuid4().hex}", call.function.name or "", arguments)


def _input(arguments: str) -> dict[str, Any]:
    """The input of a call. Arguments that are no JSON object, such as cut-off ones, become a text in the field `arguments`."""
    try:
        return _object(arguments or "{}")
    except UNREADABLE:
        return {"arguments": arguments}


def _stop(choice: chat.Choice, stops: Sequence[str], *, has_calls: bool) -> tuple[str, str | None]:
    """The reason for the end, and the stop text that ended the answer."""
    reason = _STOP_REASONS.get(choice.finish_reason or "", "end_turn")
    if reason == "end_turn" and isinstance(choice.stop_reason, str) and choice.stop_reason in stops:
        return "stop_sequence", choice.stop_reason
    return ("tool_use" if has_calls and reason == "end_turn" else reason), None


def _usage(usage: chat.Usage | None) -> types.MessageUsage:
    usage = usage or chat.Usage()
    return types.MessageUsage(
        input_tokens=max(usage.prompt_tokens - usage.cached_tokens, 0),
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )
