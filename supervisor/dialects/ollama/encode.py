"""Translates chat completions and lists of embeddings into Ollama's answers: whole ones, and streams of JSON lines.

A stream has a line for each piece of text. Tool calls come complete, in one line, once all their pieces have arrived. The
last line has the reason for the answer's end, and its figures. A request that only loads its model gets only that last line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, Literal

import msgspec

from supervisor.dialects.chat import Answer, ChatStream, Choice, Measured, Message, ToolCall, Usage, decode_completion
from supervisor.dialects.ollama.types import NAMES, OllamaVector, OllamaVectors
from supervisor.dialects.openai.completed import shorten_vector
from supervisor.errors import UpstreamError
from supervisor.gateway.body.typed import UNREADABLE, decoded_answer
from supervisor.gateway.filters.translation import StreamTranslation
from supervisor.gateway.upstream_error import WorkerAnswerError
from supervisor.schema.operation import JSON, LINES

_REASONS: Final = {"tool_calls": "stop", "function_call": "stop"}  # Ollama has no such reasons
Json = dict[str, Any]
Shape = Literal["chat", "generate"]
_encode: Final = msgspec.json.Encoder().encode
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class _OllamaTranslation:
    """See AnswerTranslation."""

    model: str  # the model's name in the request, or empty
    ignored: Sequence[str] = ()
    is_load: bool = False  # the request only loads its model
    begun: int = field(default_factory=time.monotonic_ns)
    names: ClassVar[Mapping[str, str]] = NAMES
    content_type: ClassVar[bytes] = JSON.encode()
    stream_content_type: ClassVar[bytes] = LINES.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers(_OllamaTranslation):
    """The `AnswerTranslation` for chats and prompts."""

    shape: Shape

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        answer = decode_completion(body)
        if self.is_load:
            return self.empty(answer.model, done_reason="load")
        choice = answer.choices[0]
        calls = _complete_calls(choice.message.tool_calls or [], choice.finish_reason)
        line = self.line(answer.model, choice, choice.message, calls)
        return _encode(line | self.end(Measured(answer.usage, answer.timings), choice.finish_reason))

    def stream(self) -> Lines:
        """See AnswerTranslation."""
        return Lines(self)

    def line(self, model: str, choice: Choice, message: Message, calls: Sequence[ToolCall]) -> Json:
        """One piece of the answer, or the whole answer, without the fields of `end`."""
        text, thought = message.content or message.refusal or "", message.thought
        more: Json = {"thinking": thought} if thought else {}
        if calls:
            more["tool_calls"] = [*map(_ollama_call, range(len(calls)), calls)]
        line = self._answer_fields(model, text, more)
        if (logprobs := _token_logprobs(choice.logprobs)) is not None:
            line["logprobs"] = logprobs
        return {**line, "done": False}

    def empty(self, model: str, **end: object) -> bytes:
        """The last line, or an answer without text."""
        return _encode({**self._answer_fields(model, "", {}), "done": True, **end})

    def end(self, measured: Measured, reason: str | None) -> Json:
        """The reason for the answer's end, and its figures: llama.cpp's own times, else the times measured here."""
        now, timings = time.monotonic_ns(), measured.timings
        total = now - self.begun
        prompt, answer, before = 0, now - int(measured.first_at or self.begun), 0
        if timings is not None and timings.predicted_ms is not None:
            prompt, answer = _to_ns(timings.prompt_ms), _to_ns(timings.predicted_ms)
            before = max(0, total - prompt - answer)
        usage = measured.usage or Usage()
        return {
            "done": True,
            "done_reason": _REASONS.get(reason or "stop", reason or "stop"),
            "total_duration": total,
            "load_duration": before,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": usage.completion_tokens,
            "eval_duration": answer,
        }

    def _answer_fields(self, model: str, text: str, more: Json) -> Json:
        begin: Json = {"model": self.model or model, "created_at": timestamp(time.time())}
        if self.shape == "chat":
            return {**begin, "message": {"role": "assistant", "content": text, **more}}
        return {**begin, "response": text, **more}


class Lines(ChatStream):
    """The translation of one stream."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers
        self._model = ""
        self._measured = Measured()
        self._reason: str | None = None
        self._calls: dict[int | None, ToolCall] = {}  # by index

    def event(self, answer: Answer) -> bytes:
        """See ChatStream."""
        self._model = answer.model or self._model
        self._measured.add(answer, time.monotonic_ns)
        if not answer.choices or self._answers.is_load:
            return b""
        choice = answer.choices[0]
        delta = choice.delta
        for call in delta.tool_calls or ():
            self._add_call_piece(call)
        lines = b""
        # A token may be a part of a character: it has logprobs, but no text.
        if delta.content or delta.refusal or delta.thought or _token_logprobs(choice.logprobs):
            lines = _encode(self._answers.line(self._model, choice, delta, ())) + b"\n"
        if choice.finish_reason is not None:
            self._reason = choice.finish_reason
            lines += self._take_calls_line()
        return lines

    def failed(self, error: WorkerAnswerError) -> bytes:
        """See ChatStream."""
        return _encode({"error": error.message}) + b"\n"

    def over(self) -> bytes:
        """See ChatStream."""
        end = {"done_reason": "load"} if self._answers.is_load else self._answers.end(self._measured, self._reason)
        return self._take_calls_line() + self._answers.empty(self._model, **end) + b"\n"

    def _add_call_piece(self, piece: ToolCall) -> None:
        call = self._calls.setdefault(piece.index, ToolCall())
        call.id = call.id or piece.id
        call.function.name = call.function.name or piece.function.name
        call.function.arguments = (call.function.arguments or "") + (piece.function.arguments or "")
        self.keeps(piece.function.arguments or "")

    def _take_calls_line(self) -> bytes:
        calls = _complete_calls([*self._calls.values()], self._reason)
        self._calls = {}
        return _encode(self._answers.line(self._model, Choice(), Message(), calls)) + b"\n" if calls else b""


def timestamp(seconds: float) -> str:
    """Unix seconds as an RFC 3339 timestamp."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _ollama_call(index: int, call: ToolCall) -> Json:
    """A complete canonical tool call in Ollama's format. Raises UpstreamError for arguments that are no object."""
    try:
        arguments = _object((call.function.arguments or "").strip() or "{}")
    except UNREADABLE as error:
        message = f"The model's call of {call.function.name} has arguments that are no JSON object."
        raise UpstreamError(message) from error
    function = {"index": index, "name": call.function.name or "", "arguments": arguments}
    return {"id": call.id, "function": function} if call.id else {"function": function}


def _complete_calls(calls: Sequence[ToolCall], reason: str | None) -> Sequence[ToolCall]:
    """The calls without the last one if the token limit cut it off; `done_reason` then is `length`."""
    return calls[:-1] if calls and reason == "length" and not _is_json(calls[-1].function.arguments or "") else calls


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except UNREADABLE:
        return False
    return True


def _token_logprobs(logprobs: object) -> list[Any] | None:
    """The log probabilities of the text's tokens; None for an older format."""
    tokens = logprobs.get("content") if isinstance(logprobs, dict) else None
    return tokens if isinstance(tokens, list) else None


def _to_ns(milliseconds: float | None) -> int:
    return round((milliseconds or 0.0) * 1e6)


# ---------------------------------------------------------------------------------------------------------------- vectors


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw
    index: int = 0


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    model: str = ""
    usage: Usage | None = None


_embeddings: Final = msgspec.json.Decoder(_Embeddings).decode
_numbers: Final = msgspec.json.Decoder(list[float]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorAnswers(_OllamaTranslation):
    """The `AnswerTranslation` for embeddings."""

    is_single: bool = False  # for the older path, with one vector
    dimensions: int = 0  # length of the shortened vectors; 0: unchanged

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        answer = decoded_answer(_embeddings, body, "list of embeddings")
        rows = [] if self.is_load else sorted(answer.data, key=lambda row: row.index)
        vectors = [self._shortened(row.embedding) for row in rows]
        if self.is_single:
            return _encode(OllamaVector(vectors[0] if vectors else msgspec.Raw(b"[]")))
        tokens = 0 if answer.usage is None else answer.usage.prompt_tokens
        load_ns = 0  # no worker reports it
        total_ns = time.monotonic_ns() - self.begun
        return _encode(OllamaVectors(self.model or answer.model, vectors, total_ns, load_ns, tokens))

    def _shortened(self, vector: msgspec.Raw) -> msgspec.Raw:
        if not self.dimensions:
            return vector
        numbers = decoded_answer(_numbers, bytes(vector), "list of embeddings")
        return msgspec.Raw(_encode(shorten_vector(numbers, self.dimensions)))

    def stream(self) -> StreamTranslation:
        """Embeddings are never streamed. Raises UpstreamError."""
        raise UpstreamError("The worker's answer is a stream, not a list of embeddings.")
