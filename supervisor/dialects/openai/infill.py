"""Translates completions with a `suffix` to llama.cpp's `/infill`, which fills in a text between two others."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import msgspec

from supervisor.catalog.models.rewrite import Fields
from supervisor.dialects.chat import Timings
from supervisor.errors import InvalidRequestError, LlmuxError, UpstreamError
from supervisor.gateway.body.typed import decoded_answer
from supervisor.gateway.filters.filters import EVENTS
from supervisor.gateway.filters.frames import FrameStream
from supervisor.gateway.filters.stream_end import INCOMPLETE, failure

PATH: Final = "/infill"
NAMES: Final = {"n_predict": "max_tokens", "input_prefix": "prompt", "input_suffix": "suffix"}
_SAME: Final = frozenset(
    [
        "model",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "seed",
        "stop",
        "presence_penalty",
        "frequency_penalty",
        "repeat_penalty",
        "repetition_penalty",
        "repeat_last_n",
        "cache_prompt",
    ]
)
_REASONS: Final = {"limit": "length"}
_text: Final = msgspec.json.Decoder(str | list[str]).decode
_encode: Final = msgspec.json.Encoder().encode


class _Filled(msgspec.Struct):
    content: str = ""
    model: str = ""
    stop: bool = False
    stop_type: str = ""
    tokens_evaluated: int = 0
    tokens_predicted: int = 0
    timings: Timings | None = None
    error: object = None


_filled: Final = msgspec.json.Decoder(_Filled).decode


class Infill:
    """See Translation."""

    path = PATH

    def request(self, fields: Fields) -> tuple[Fields, Infilled]:
        """See Translation."""
        given = {name: raw for name, raw in fields.items() if bytes(raw) != b"null"}
        mapped = {name: raw for name, raw in given.items() if name in _SAME}
        mapped["input_prefix"] = _one_text(given.pop("prompt", msgspec.Raw(b'""')), "prompt")
        mapped["input_suffix"] = _one_text(given.pop("suffix"), "suffix")
        if (most := given.pop("max_tokens", None)) is not None:
            mapped["n_predict"] = most
        given.pop("stream_options", None)  # the last event always has the usage
        return mapped, Infilled([name for name in given if name not in _SAME])


def _one_text(raw: msgspec.Raw, name: str) -> msgspec.Raw:
    try:
        found = _text(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = []
    if isinstance(found, list) and len(found) != 1:
        raise InvalidRequestError(f'"{name}" must be a text where something is filled in before a suffix.', param=name)
    return raw if isinstance(found, str) else msgspec.Raw(_encode(found[0]))


@dataclass(frozen=True, slots=True)
class Infilled:
    """The `AnswerTranslation` into text completions."""

    ignored: Sequence[str] = ()
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    names: ClassVar = NAMES
    content_type: bytes = b"application/json"
    stream_content_type: bytes = EVENTS

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        return _encode(self.completion(read(body), is_last=True))

    def stream(self) -> _Stream:
        """See AnswerTranslation."""
        return _Stream(self)

    def completion(self, filled: _Filled, *, is_last: bool) -> dict[str, object]:
        """A text completion with the worker's text, or with a piece of it."""
        reason = _REASONS.get(filled.stop_type, "stop") if is_last else None
        choice = {"text": filled.content, "index": 0, "logprobs": None, "finish_reason": reason}
        fields: dict[str, object] = {"id": self.id, "object": "text_completion", "created": self.created}
        fields |= {"model": filled.model, "choices": [choice]}
        if is_last:
            before, after = filled.tokens_evaluated, filled.tokens_predicted
            fields["usage"] = {"prompt_tokens": before, "completion_tokens": after, "total_tokens": before + after}
            fields |= {} if filled.timings is None else {"timings": filled.timings}
        return fields


def read(body: bytes) -> _Filled:
    """A worker's answer, or an event of its stream. Raises UpstreamError."""
    return decoded_answer(_filled, body, "text that was filled in")


class _Stream(FrameStream):
    def __init__(self, answers: Infilled) -> None:
        super().__init__()
        self._answers = answers
        self._failure: LlmuxError | None = UpstreamError(INCOMPLETE)  # until the last event

    def frame(self, data: bytes) -> bytes:
        """See FrameStream."""
        if data == b"[DONE]":
            return b""
        filled = read(data)
        if filled.error is not None:
            self._failure = failure(filled.error)
            return b""
        if filled.stop:
            self._failure = None
        event = b"data: " + _encode(self._answers.completion(filled, is_last=filled.stop)) + b"\n\n"
        return event + b"data: [DONE]\n\n" if filled.stop else event

    def end(self) -> bytes:
        """See StreamTranslation. Raises LlmuxError for an incomplete or failed stream."""
        found = super().end()
        if self._failure is not None:
            raise self._failure
        return found
