"""Turns text completions into chat completions, whole or streamed. All other fields of the worker's answer stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import msgspec

from runtimes.model_config import PromptFormatName
from supervisor.catalog.models.prompt_format import PromptFormat
from supervisor.errors import UpstreamError
from supervisor.gateway.body.typed import decoded_answer
from supervisor.gateway.filters.filters import EVENTS
from supervisor.gateway.filters.frames import FrameStream
from supervisor.gateway.filters.translation import SAME_NAMES, StreamTranslation

_encode: Final = msgspec.json.Encoder().encode
_MARKS: Final[Mapping[PromptFormatName, tuple[str, str]]] = {
    "qwen3_template": ("<think>", "</think>"),
    "gemma4_template": ("<|channel>thought\n", "<channel|>"),
}

Json = dict[str, Any]


class Thoughts:
    """Separates a model's thoughts from its answer in a stream of text. `marks` None: there are no thoughts."""

    def __init__(self, marks: tuple[str, str] | None) -> None:
        self._opening, self._closing = marks or ("", "")
        self._state: Literal["start", "thought", "gap", "answer"] = "answer" if marks is None else "start"
        self._pending = ""  # possibly the beginning of a mark

    def feed(self, text: str) -> tuple[str, str]:
        """The thought and the answer in the next piece, without the possible beginning of a mark."""
        text, thought = self._pending + text, ""
        self._pending = ""
        if self._state == "start":  # a thought would come first
            start = text.lstrip()
            if self._opening.startswith(start) and start != self._opening:
                self._pending = text
                return "", ""
            self._state = "thought" if start.startswith(self._opening) else "answer"
            text = start[len(self._opening) :] if self._state == "thought" else text
        if self._state == "thought":
            thought, closing, text = text.partition(self._closing)
            if not closing:
                length = _partial_mark_length(thought, self._closing)
                self._pending = thought[len(thought) - length :]
                return thought[: len(thought) - length], ""
            self._state = "gap"
        if self._state == "gap":  # blank lines between thought and answer belong to neither
            text = text.lstrip()
            self._state = "answer" if text else "gap"
        return thought, text

    def end(self) -> tuple[str, str]:
        """The pending rest, as thought or answer."""
        rest, self._pending = self._pending, ""
        return (rest, "") if self._state == "thought" else ("", rest)


def _partial_mark_length(text: str, mark: str) -> int:
    """The number of characters at the end of `text` that may be the beginning of `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


@dataclass(frozen=True, slots=True)
class Chats:
    """The `AnswerTranslation` of one request. `thinking`: the format of the thoughts; None: there are no thoughts."""

    ignored: Sequence[str]
    thinking: PromptFormat | None
    names: ClassVar[Mapping[str, str]] = SAME_NAMES
    content_type = b"application/json"
    stream_content_type = EVENTS

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        fields = _decode_completion(body)
        choices = fields.get("choices")
        if not isinstance(choices, list) or not choices:
            raise UpstreamError("The worker's answer is no completion.")
        fields["choices"] = [self._chat_choice(choice) for choice in choices]
        return _encode({**fields, "object": "chat.completion"})

    def stream(self) -> StreamTranslation:
        """See AnswerTranslation."""
        return Events(self)

    def thoughts(self) -> Thoughts:
        """The separator for one answer."""
        return Thoughts(None if self.thinking is None else _MARKS[self.thinking.name])

    def _chat_choice(self, choice: Json) -> Json:
        thoughts = self.thoughts()
        thought, answer = (a + b for a, b in zip(thoughts.feed(_choice_text(choice)), thoughts.end(), strict=True))
        message = {"role": "assistant", "content": answer}
        if thought.strip():
            message["reasoning_content"] = thought.strip("\n")
        return {**_other_fields(choice), "message": message}


class Events(FrameStream):
    """The translation of one stream."""

    def __init__(self, chats: Chats) -> None:
        super().__init__()
        self._chats = chats
        self._thoughts: dict[int, Thoughts] = {}  # of each answer that has begun

    def frame(self, data: bytes) -> bytes:
        """See FrameStream. Raises UpstreamError for data that is no completion."""
        if data == b"[DONE]":
            return b"data: [DONE]\n\n"
        fields = _decode_completion(data)
        if "error" not in fields:
            choices = fields.get("choices")
            fields["choices"] = [self._chunk_choice(choice) for choice in choices] if isinstance(choices, list) else []
            fields["object"] = "chat.completion.chunk"
        return b"data: " + _encode(fields) + b"\n\n"

    def _chunk_choice(self, choice: Json) -> Json:
        text = _choice_text(choice)
        delta: Json = {}
        index = choice.get("index", 0)
        if index not in self._thoughts:
            self._thoughts[index] = self._chats.thoughts()
            delta = {"role": "assistant", "content": ""}
        thoughts = self._thoughts[index]
        thought, answer = thoughts.feed(text)
        if choice.get("finish_reason") is not None:
            thought, answer = (a + b for a, b in zip((thought, answer), thoughts.end(), strict=True))
        if thought:
            delta["reasoning_content"] = thought
        if answer:
            delta["content"] = answer
        return {"finish_reason": None, **_other_fields(choice), "delta": delta}


def _other_fields(choice: Json) -> Json:
    return {name: value for name, value in choice.items() if name not in ("text", "logprobs")}


def _choice_text(choice: Any) -> str:
    text = (choice.get("text") or "") if isinstance(choice, dict) else None
    if not isinstance(text, str):
        raise UpstreamError("The worker's answer is no completion.")
    return text


_decode_object: Final = msgspec.json.Decoder(Json).decode


def _decode_completion(data: bytes) -> Json:
    return decoded_answer(_decode_object, data, "completion")
