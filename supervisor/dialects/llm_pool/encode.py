"""Translates chat completions into llm-pool's answers: one object, or a stream of four kinds of events.

A stream is `response.created`, `response.output_text.delta` for each piece of text as it comes, `response.metrics` and
`response.completed` with the whole answer. Reasoning is not part of the text.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from supervisor.dialects import chat
from supervisor.dialects.llm_pool.metrics import metrics_of
from supervisor.dialects.llm_pool.types import AnswerMetrics, LlmPoolOutput, LlmPoolResponse
from supervisor.gateway.filters import frames
from supervisor.gateway.filters.filters import EVENTS
from supervisor.gateway.filters.translation import StreamTranslation, Times
from supervisor.gateway.upstream_error import WorkerAnswerError

_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Answers:
    """The `AnswerTranslation` of one request. `model` is the client's name for the model. `times`: None if unknown."""

    model: str
    ignored: Sequence[str]
    times: Times | None
    clock: Callable[[], float]
    names: Mapping[str, str]  # see AnswerTranslation
    content_type = b"application/json"
    stream_content_type = EVENTS

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        answer = chat.decode_completion(body)
        metrics = metrics_of(chat.Measured(answer.usage, answer.timings), self.times, self.clock())
        return _encode(_response(new_id(), self.model, _text_of(answer.choices[0].message), metrics))

    def stream(self) -> StreamTranslation:
        """See AnswerTranslation."""
        return Events(self.model, self.times, self.clock)


class Events(chat.ChatStream):
    """The translation of one stream."""

    def __init__(self, model: str, times: Times | None, clock: Callable[[], float]) -> None:
        super().__init__()
        self._id = new_id()
        self._model = model
        self._times = times
        self._clock = clock
        self._measured = chat.Measured()
        self._texts: list[str] = []
        self._is_begun = False

    def event(self, answer: chat.Answer) -> bytes:
        """See ChatStream."""
        self._measured.add(answer, self._clock)
        text = _text_of(answer.choices[0].delta) if answer.choices else ""
        if not text:
            return self._created_event()
        self._texts.append(text)
        self.keeps(text)
        return self._created_event() + frames.event("response.output_text.delta", {"delta": text})

    def failed(self, error: WorkerAnswerError) -> bytes:
        """See ChatStream."""
        return frames.event("error", {"code": error.code, "message": error.message, "param": error.param})

    def over(self) -> bytes:
        """See ChatStream."""
        metrics = metrics_of(self._measured, self._times, self._clock())
        whole = _response(self._id, self._model, "".join(self._texts), metrics)
        return (
            self._created_event()
            + frames.event("response.metrics", {"metrics": metrics})
            + frames.event("response.completed", {"response": whole})
        )

    def _created_event(self) -> bytes:
        if self._is_begun:
            return b""
        self._is_begun = True
        begun = {"id": self._id, "object": "response", "model": self._model, "output": []}
        return frames.event("response.created", {"response": begun})


def new_id() -> str:
    """An id for an answer that begins."""
    return f"resp_{uuid.uuid4().hex}"


def _response(name: str, model: str, text: str, metrics: AnswerMetrics) -> LlmPoolResponse:
    return LlmPoolResponse(id=name, model=model, output=[LlmPoolOutput(text)], output_text=text, metrics=metrics)


def _text_of(message: chat.Message) -> str:
    return message.content or message.refusal or ""
