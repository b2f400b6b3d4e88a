"""What chat completions become for Ollama's clients: whole answers, and streams of JSON lines.

A stream has a line for each piece of text. Tool calls come whole, in one line, when all pieces of them are there. The last
line says how it ended, and has the figures. A request for nothing, which only loads its model, gets that last line alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, Literal

import msgspec

from supervisor.dialects.chat import Answer, ChatStream, Choice, Measured, Message, ToolCall, Usage, whole
from supervisor.dialects.ollama.fields import NAMES, encode
from supervisor.dialects.ollama.messages import tool_calls
from supervisor.gateway.upstream_error import WorkerAnswerError

JSON: Final = b"application/json"
LINES: Final = b"application/x-ndjson"
_REASONS: Final = {"tool_calls": "stop", "function_call": "stop"}  # Ollama says nothing else of them
Json = dict[str, Any]
Shape = Literal["chat", "generate"]


@dataclass(frozen=True, slots=True)
class Answers:
    """See AnswerTranslation. `model` as it was asked for, if the request names one."""

    shape: Shape
    model: str
    ignored: Sequence[str] = ()
    is_load: bool = False  # nothing was asked for: the model only had to be there
    begun: float = field(default_factory=time.monotonic)
    names: ClassVar[Mapping[str, str]] = NAMES
    content_type: bytes = JSON
    stream_content_type: bytes = LINES

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        answer = whole(body)
        choice = answer.choices[0]
        if self.is_load:
            return encode(self.loaded(answer.model))
        calls = choice.message.tool_calls or []
        said = self.said(answer.model, choice, choice.message, _finished(calls, choice.finish_reason))
        return encode({**said, **self.end(Measured(answer.usage, answer.timings), choice.finish_reason)})

    def stream(self) -> Lines:
        """See AnswerTranslation."""
        return Lines(self)

    def said(self, model: str, choice: Choice, message: Message, calls: Sequence[ToolCall]) -> Json:
        """A line, or an answer as far as its text is concerned."""
        text, thought = message.content or message.refusal or "", message.thought
        more: Json = {"thinking": thought} if thought else {}
        if calls:
            more["tool_calls"] = tool_calls(calls)
        line = self._head(model)
        if self.shape == "chat":
            line["message"] = {"role": "assistant", "content": text, **more}
        else:
            line |= {"response": text, **more}
        if (told := _logprobs(choice.logprobs)) is not None:
            line["logprobs"] = told
        return {**line, "done": False}

    def loaded(self, model: str) -> Json:
        """What says that the model is there."""
        return {**self._empty(model), "done": True, "done_reason": "load"}

    def last(self, model: str, measured: Measured, reason: str | None) -> Json:
        """The last line."""
        return {**self._empty(model), **self.end(measured, reason)}

    def end(self, measured: Measured, reason: str | None) -> Json:
        """How it ended, and its figures. llama.cpp times its work; otherwise it is what the client waited for."""
        timings, now = measured.timings, time.monotonic()
        total = _ns(1000 * (now - self.begun))
        prompt, answer, before = 0, _ns(1000 * (now - (measured.first_at or self.begun))), 0
        if timings is not None and timings.predicted_ms is not None:
            prompt, answer = _ns(timings.prompt_ms), _ns(timings.predicted_ms)
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

    def _head(self, model: str) -> Json:
        return {"model": self.model or model, "created_at": timestamp(time.time())}

    def _empty(self, model: str) -> Json:
        rest = {"message": {"role": "assistant", "content": ""}} if self.shape == "chat" else {"response": ""}
        return {**self._head(model), **rest}


class Lines(ChatStream):
    """One stream; see StreamTranslation."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers
        self._model = ""
        self._measured = Measured()
        self._reason: str | None = None
        self._calls: dict[int | None, ToolCall] = {}  # by their numbers

    def event(self, answer: Answer) -> bytes:
        """See ChatStream."""
        self._model = answer.model or self._model
        self._measured.add(answer, time.monotonic)
        if not answer.choices or self._answers.is_load:
            return b""
        choice = answer.choices[0]
        delta = choice.delta
        for call in delta.tool_calls or ():
            self._add(call)
        found = b""
        if delta.content or delta.refusal or delta.thought or _logprobs(choice.logprobs):  # also within a character
            found = _line(self._answers.said(self._model, choice, delta, ()))
        if choice.finish_reason is not None:
            self._reason = choice.finish_reason
            found += self._called()
        return found

    def failed(self, error: WorkerAnswerError) -> bytes:
        """See ChatStream."""
        return _line({"error": error.message})

    def over(self) -> bytes:
        """See ChatStream."""
        if self._answers.is_load:
            return _line(self._answers.loaded(self._model))
        return self._called() + _line(self._answers.last(self._model, self._measured, self._reason))

    def _add(self, piece: ToolCall) -> None:
        call = self._calls.setdefault(piece.index, ToolCall())
        call.id = call.id or piece.id
        call.function.name = call.function.name or piece.function.name
        call.function.arguments = (call.function.arguments or "") + (piece.function.arguments or "")
        self.keeps(piece.function.arguments or "")

    def _called(self) -> bytes:
        calls = _finished([*self._calls.values()], self._reason)
        self._calls = {}
        return _line(self._answers.said(self._model, Choice(), Message(), calls)) if calls else b""


def timestamp(seconds: float) -> str:
    """Unix seconds as RFC 3339 has them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _finished(calls: Sequence[ToolCall], reason: str | None) -> Sequence[ToolCall]:
    """Without the last one if the answer ended within it, as its `done_reason` says."""
    return calls[:-1] if calls and reason == "length" and not _is_json(calls[-1].function.arguments or "") else calls


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _logprobs(told: object) -> list[Any] | None:
    """Those of the text's tokens; None in an older form."""
    found = told.get("content") if isinstance(told, dict) else None
    return found if isinstance(found, list) else None


def _ns(milliseconds: float | None) -> int:
    return round((milliseconds or 0.0) * 1e6)


def _line(value: Json) -> bytes:
    return encode(value) + b"\n"
