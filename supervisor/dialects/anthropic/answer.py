"""Chat completions as Anthropic's messages: whole, and event by event.

A message is a list of content blocks: thoughts, text, and calls of tools. In a stream one block is open at a time. What
ended the answer and its tokens come last, after the worker said both.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.dialects import chat
from supervisor.dialects.anthropic import errors
from supervisor.dialects.anthropic.request import NAMES, Canonical, require_max_tokens
from supervisor.errors import UpstreamError
from supervisor.gateway.filters import frames
from supervisor.gateway.filters.counting import COUNT
from supervisor.gateway.filters.filters import EVENTS
from supervisor.gateway.filters.translation import AnswerTranslation, StreamTranslation
from supervisor.gateway.upstream_error import WorkerAnswerError

Json = dict[str, object]

_JSON: Final = b"application/json"
_STOPS: Final = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_encode: Final = msgspec.json.Encoder().encode
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Messages:
    """`POST /v1/messages`."""

    path = chat.PATH

    def request(self, fields: Fields) -> tuple[Fields, AnswerTranslation]:
        """See Translation."""
        require_max_tokens(fields)
        canonical = Canonical(fields)
        return canonical.fields, Answers(_model(fields), tuple(canonical.stops), tuple(canonical.ignored))


class CountTokens:
    """`POST /v1/messages/count_tokens`, by the path where llama.cpp's server counts those of a chat."""

    path = COUNT

    def request(self, fields: Fields) -> tuple[Fields, AnswerTranslation]:
        """See Translation."""
        canonical = Canonical({name: raw for name, raw in fields.items() if name != "stream"})
        ignored = (*canonical.ignored, "stream") if "stream" in fields else tuple(canonical.ignored)
        return canonical.fields, Counts(ignored)


@dataclass(frozen=True, slots=True)
class Answers:
    """What becomes of the answers to one request. `model`: the name that was asked, empty if none was."""

    model: str
    stops: tuple[str, ...]
    ignored: tuple[str, ...]
    names = NAMES
    content_type = _JSON
    stream_content_type = EVENTS

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        whole = chat.whole(body)
        choice = whole.choices[0]
        said, content = choice.message, list[Json]()
        if said.thought:
            content.append({"type": "thinking", "thinking": said.thought, "signature": ""})
        if text := _text(said):
            content.append({"type": "text", "text": text})
        calls = said.tool_calls or []
        content += (
            _call(call.id, call.function.name) | {"input": _arguments(call.function.arguments or "")} for call in calls
        )
        reason, sequence = _stop(choice, self.stops, has_calls=bool(calls))
        message = _message(whole, self.model) | {"content": content, "stop_reason": reason, "stop_sequence": sequence}
        return _encode(message | {"usage": _usage(whole.usage)})

    def stream(self) -> StreamTranslation:
        """See AnswerTranslation."""
        return Stream(self.model, self.stops)


class _Count(msgspec.Struct):
    input_tokens: int


_count: Final = msgspec.json.Decoder(_Count).decode


@dataclass(frozen=True, slots=True)
class Counts:
    """What becomes of a count."""

    ignored: tuple[str, ...]
    names = NAMES
    content_type = _JSON
    stream_content_type = EVENTS

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        try:
            return _encode(_count(body))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UpstreamError("The worker's answer is no count of tokens.") from error

    def stream(self) -> StreamTranslation:
        """See AnswerTranslation. Raises UpstreamError: there is none."""
        raise UpstreamError("The worker answered with a stream where its tokens were to be counted.")


class Stream(chat.ChatStream):
    """One streamed message."""

    def __init__(self, model: str, stops: tuple[str, ...]) -> None:
        super().__init__()
        self._model = model
        self._stops = stops
        self._is_begun = False
        self._open = ""  # the type of the block that is open
        self._index = -1  # of the last block
        self._calls: list[int | None] = []  # their numbers
        self._last: chat.Choice | None = None  # the one that said why the answer ended
        self._usage: chat.Usage | None = None

    def event(self, answer: chat.Answer) -> bytes:
        """See ChatStream."""
        self._usage = answer.usage or self._usage
        found = b"" if self._is_begun else self._begin(answer)
        for choice in answer.choices:
            found += self._delta(choice.delta)
            if choice.finish_reason is not None:
                self._last = choice
        return found

    def failed(self, error: WorkerAnswerError) -> bytes:
        """See ChatStream."""
        fields = {"message": error.message, "param": error.param, "code": error.code}
        return errors.event(errors.body(fields, error.status))

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
        message = _message(answer, self._model) | {"content": [], "stop_reason": None, "stop_sequence": None}
        return frames.event("message_start", {"message": message | {"usage": _usage(self._usage)}}) + frames.event(
            "ping", {}
        )

    def _delta(self, delta: chat.Message) -> bytes:
        found = b""
        if delta.thought:
            if self._open != "thinking":
                found += self._start({"type": "thinking", "thinking": "", "signature": ""})
            found += self._add({"type": "thinking_delta", "thinking": delta.thought})
        if text := _text(delta):
            if self._open != "text":
                found += self._start({"type": "text", "text": ""})
            found += self._add({"type": "text_delta", "text": text})
        for call in delta.tool_calls or ():
            found += self._piece(call)
        return found

    def _piece(self, call: chat.ToolCall) -> bytes:
        """The next piece of a call. Raises UpstreamError for one of a call whose block is closed."""
        found = b""
        if call.index not in self._calls[-1:] or self._open != "tool_use":
            if call.index in self._calls:
                raise UpstreamError("The worker's stream goes back to an earlier tool call.")
            self._calls.append(call.index)
            found = self._start(_call(call.id, call.function.name) | {"input": {}})
        if call.function.arguments:
            found += self._add({"type": "input_json_delta", "partial_json": call.function.arguments})
        return found

    def _start(self, block: Json) -> bytes:
        closed = self._close()
        self._open = str(block["type"])
        self._index += 1
        return closed + frames.event("content_block_start", {"index": self._index, "content_block": block})

    def _add(self, delta: Json) -> bytes:
        return frames.event("content_block_delta", {"index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = self._add({"type": "signature_delta", "signature": ""}) if self._open == "thinking" else b""
        self._open = ""
        return signed + frames.event("content_block_stop", {"index": self._index})


def _model(fields: Fields) -> str:
    raw = fields.get("model")
    return msgspec.json.decode(raw, type=str) if raw is not None else ""


def _message(answer: chat.Answer, model: str) -> Json:
    own = answer.id.removeprefix("chatcmpl-") or uuid.uuid4().hex
    return {"id": f"msg_{own}", "type": "message", "role": "assistant", "model": model or answer.model}


def _text(message: chat.Message) -> str:
    return (message.content or "") + (message.refusal or "")


def _call(name: str | None, function: str | None) -> Json:
    return {"type": "tool_use", "id": name or f"toolu_{uuid.uuid4().hex}", "name": function or ""}


def _arguments(text: str) -> object:
    """A call's input. What is no JSON object, as where it was cut off, stands in `arguments`: nothing of it is lost."""
    try:
        return _object(text or "{}")
    except (msgspec.MsgspecError, RecursionError):
        return {"arguments": text}


def _stop(choice: chat.Choice, stops: tuple[str, ...], *, has_calls: bool) -> tuple[str, str | None]:
    """The reason, and the text that ended the answer."""
    reason = _STOPS.get(choice.finish_reason or "", "end_turn")
    if reason == "end_turn" and isinstance(choice.stop_reason, str) and choice.stop_reason in stops:
        return "stop_sequence", choice.stop_reason
    return ("tool_use" if has_calls and reason == "end_turn" else reason), None


def _usage(usage: chat.Usage | None) -> Json:
    usage = usage or chat.Usage()
    return {
        "input_tokens": max(usage.prompt_tokens - usage.cached_tokens, 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
