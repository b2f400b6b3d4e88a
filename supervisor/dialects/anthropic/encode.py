"""Translates chat completions into Anthropic's messages, whole or event by event, and errors into Anthropic's format.

A message is a list of content blocks: reasoning, text, and tool calls. A stream has one open block at a time. The reason
for the answer's end and the token counts come last, after the worker has sent both.
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
"""Fields of chat completions → their names in Anthropic's API."""
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
_decode_count: Final = msgspec.json.Decoder(types.MessageTokensCount).decode


def error_body(fields: Mapping[str, object], status: int) -> bytes:
    """`{"type": "error", "error": {"type", "message", …}}`. Keeps all `fields` except the type, which follows from the status."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return _encode({"type": "error", "error": {**fields, "type": kind}})


def error_event(body: bytes) -> bytes:
    """The body of an error as an event of a stream."""
    return b"event: error\ndata: " + body + b"\n\n"


@dataclass(frozen=True, slots=True)
class MessageAnswers:
    """The `AnswerTranslation` of one request. `model` is the model's name in the request, or empty."""

    model: str
    stops: Sequence[str]
    ignored: Sequence[str]
    names = _NAMES
    content_type = _JSON
    stream_content_type = EVENTS

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        completion = chat.decode_completion(body)
        choice = completion.choices[0]
        message = _empty_message(completion, self.model, completion.usage)
        if thought := choice.message.thought:
            message.content.append(types.ThinkingBlock(thought))
        if text := _text_of(choice.message):
            message.content.append(types.TextBlock(text))
        calls = choice.message.tool_calls or ()
        message.content += (_tool_use(call, _call_input(call.function.arguments or "")) for call in calls)
        message.stop_reason, message.stop_sequence = _stop_reason(choice, self.stops, has_calls=bool(calls))
        return _encode(message)

    def stream(self) -> StreamTranslation:
        """See AnswerTranslation."""
        return MessageStream(self.model, self.stops)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The `AnswerTranslation` of a token count."""

    ignored: Sequence[str]
    names = _NAMES
    content_type = _JSON
    stream_content_type = EVENTS

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        return _encode(decoded_answer(_decode_count, body, "count of tokens"))

    def stream(self) -> StreamTranslation:
        """A token count is never streamed. Raises UpstreamError."""
        raise UpstreamError("The worker answered with a stream where its tokens were to be counted.")


class MessageStream(chat.ChatStream):
    """The translation of one stream."""

    def __init__(self, model: str, stops: Sequence[str]) -> None:
        super().__init__()
        self._model = model
        self._stops = stops
        self._is_begun = False
        self._open_block: type[msgspec.Struct] | None = None  # the open block's type
        self._index = -1  # of the latest block
        self._call_indices: list[int | None] = []  # of all tool calls so far
        self._last_choice: chat.Choice | None = None  # the choice with the `finish_reason`
        self._usage: chat.Usage | None = None

    def event(self, answer: chat.Answer) -> bytes:
        """See ChatStream."""
        self._usage = answer.usage or self._usage
        events = b"" if self._is_begun else self._start_events(answer)
        for choice in answer.choices:
            events += self._delta_events(choice.delta)
            if choice.finish_reason is not None:
                self._last_choice = choice
        return events

    def failed(self, error: WorkerAnswerError) -> bytes:
        """See ChatStream."""
        fields = {"message": error.message, "param": error.param, "code": error.code}
        return error_event(error_body(fields, error.status))

    def over(self) -> bytes:
        """See ChatStream. Raises UpstreamError for an incomplete stream."""
        if self._last_choice is None:
            raise UpstreamError("The worker's stream ended before its answer was complete.")
        reason, sequence = _stop_reason(self._last_choice, self._stops, has_calls=bool(self._call_indices))
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return (
            self._close_block()
            + frames.event("message_delta", {"delta": delta, "usage": _message_usage(self._usage)})
            + frames.event("message_stop", {})
        )

    def _start_events(self, answer: chat.Answer) -> bytes:
        self._is_begun = True
        message = _empty_message(answer, self._model, self._usage)
        return frames.event("message_start", {"message": message}) + frames.event("ping", {})

    def _delta_events(self, delta: chat.Message) -> bytes:
        events = b""
        if delta.thought:
            if self._open_block is not types.ThinkingBlock:
                events += self._start_block(types.ThinkingBlock(""))
            events += self._delta_event({"type": "thinking_delta", "thinking": delta.thought})
        if text := _text_of(delta):
            if self._open_block is not types.TextBlock:
                events += self._start_block(types.TextBlock(""))
            events += self._delta_event({"type": "text_delta", "text": text})
        for call in delta.tool_calls or ():
            events += self._call_events(call)
        return events

    def _call_events(self, call: chat.ToolCall) -> bytes:
        """The events for the next piece of a tool call. Raises UpstreamError if the call's block is already closed."""
        events = b""
        if call.index not in self._call_indices[-1:] or self._open_block is not types.ToolUseBlock:
            if call.index in self._call_indices:
                raise UpstreamError("The worker's stream goes back to an earlier tool call.")
            self._call_indices.append(call.index)
            events = self._start_block(_tool_use(call, {}))
        if call.function.arguments:
            events += self._delta_event({"type": "input_json_delta", "partial_json": call.function.arguments})
        return events

    def _start_block(self, block: types.TextBlock | types.ThinkingBlock | types.ToolUseBlock) -> bytes:
        closed = self._close_block()
        self._open_block = type(block)
        self._index += 1
        return closed + frames.event("content_block_start", {"index": self._index, "content_block": block})

    def _delta_event(self, delta: Mapping[str, object]) -> bytes:
        return frames.event("content_block_delta", {"index": self._index, "delta": delta})

    def _close_block(self) -> bytes:
        if self._open_block is None:
            return b""
        signed = (
            self._delta_event({"type": "signature_delta", "signature": ""})
            if self._open_block is types.ThinkingBlock
            else b""
        )
        self._open_block = None
        return signed + frames.event("content_block_stop", {"index": self._index})


def _empty_message(answer: chat.Answer, model: str, usage: chat.Usage | None) -> types.Message:
    """A message without content yet."""
    own = answer.id.removeprefix("chatcmpl-") or uuid.uuid4().hex
    return types.Message(id=f"msg_{own}", model=model or answer.model, content=[], usage=_message_usage(usage))


def _text_of(message: chat.Message) -> str:
    return (message.content or "") + (message.refusal or "")


def _tool_use(call: chat.ToolCall, arguments: dict[str, Any]) -> types.ToolUseBlock:
    return types.ToolUseBlock(call.id or f"toolu_{uuid.uuid4().hex}", call.function.name or "", arguments)


def _call_input(arguments: str) -> dict[str, Any]:
    """The input of a tool call. Arguments that are no JSON object (such as truncated ones) become a text in `arguments`."""
    try:
        return _object(arguments or "{}")
    except UNREADABLE:
        return {"arguments": arguments}


def _stop_reason(choice: chat.Choice, stops: Sequence[str], *, has_calls: bool) -> tuple[str, str | None]:
    """The reason for the end, and the stop text that ended the answer."""
    reason = _STOP_REASONS.get(choice.finish_reason or "", "end_turn")
    if reason == "end_turn" and isinstance(choice.stop_reason, str) and choice.stop_reason in stops:
        return "stop_sequence", choice.stop_reason
    return ("tool_use" if has_calls and reason == "end_turn" else reason), None


def _message_usage(usage: chat.Usage | None) -> types.MessageUsage:
    usage = usage or chat.Usage()
    return types.MessageUsage(
        input_tokens=max(usage.prompt_tokens - usage.cached_tokens, 0),
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )
