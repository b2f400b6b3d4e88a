"""Chat completions in the form that translations read: whole answers, and streams event by event.

Only the fields that translations need are decoded; a field that a worker leaves out has its default.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from supervisor.errors import UpstreamError
from supervisor.gateway.body.typed import UNREADABLE, decoded_answer
from supervisor.gateway.filters.frames import FrameStream
from supervisor.gateway.filters.stream_end import INCOMPLETE, StreamFailedError, failure, is_reason
from supervisor.gateway.upstream_error import WorkerAnswerError

PATH: Final = "/v1/chat/completions"


class Function(msgspec.Struct):
    """The function that a tool call names, with its arguments; in a stream, the next piece of both."""

    name: str | None = None
    arguments: str | None = None  # JSON


class ToolCall(msgspec.Struct):
    """One tool call; in a stream, a piece of the call with this `index`, which `ChatStream` adds where workers leave it out."""

    index: int | None = None
    id: str | None = None
    function: Function = msgspec.field(default_factory=Function)


class Message(msgspec.Struct):
    """The answer's message, or the next piece of it."""

    content: str | None = None
    reasoning_content: str | None = None  # llama.cpp, our own workers
    reasoning: str | None = None  # vLLM
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def thought(self) -> str:
        """The reasoning, from either field."""
        return self.reasoning_content or self.reasoning or ""


class Choice(msgspec.Struct):
    """One answer of several: a whole one has a `message`, an event of a stream has a `delta`."""

    index: int = 0
    message: Message = msgspec.field(default_factory=Message)
    delta: Message = msgspec.field(default_factory=Message)
    text: str | None = None  # of a text completion, instead of `message` and `delta`
    finish_reason: str | None = None
    stop_reason: object = None  # vLLM: the text of `stop` that ended the answer, or a token's id
    logprobs: object = None  # decoded: msgspec accepts only null for a union with msgspec.Raw


class PromptDetails(msgspec.Struct):
    """Details of a prompt's tokens."""

    cached_tokens: int | None = None


class CompletionDetails(msgspec.Struct):
    """Details of an answer's tokens."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens of the whole request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that came from a cache."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details is not None else 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the answer that were reasoning."""
        details = self.completion_tokens_details
        return (details.reasoning_tokens or 0) if details is not None else 0


class Timings(msgspec.Struct):
    """llama.cpp's own figures, in milliseconds."""

    prompt_ms: float | None = None
    predicted_ms: float | None = None
    predicted_per_second: float | None = None


class Answer(msgspec.Struct):
    """A chat completion, or one event of a streamed chat completion."""

    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    timings: Timings | None = None
    error: object = None  # decoded; set iff the stream ends with this error


@dataclass(slots=True)
class Measured:
    """The figures that a worker reported for one answer, and when its first piece came. None: not reported, or not streamed."""

    usage: Usage | None = None
    timings: Timings | None = None
    first_at: float | None = None  # on the caller's clock

    def add(self, event: Answer, clock: Callable[[], float]) -> None:
        """Add the figures of a stream's next event, which has just arrived."""
        self.usage, self.timings = event.usage or self.usage, event.timings or self.timings
        if self.first_at is None and event.choices:
            delta = event.choices[0].delta
            if delta.content or delta.thought or delta.refusal or delta.tool_calls:
                self.first_at = clock()


_answer: Final = msgspec.json.Decoder(Answer).decode


def decode_completion(body: bytes) -> Answer:
    """Decode a whole answer. Raises UpstreamError for anything but a chat completion with a choice."""
    answer = decoded_answer(_answer, body, "chat completion")
    if not answer.choices:
        raise UpstreamError("The worker's answer is a chat completion without a choice.")
    answer.choices[0].message.content = answer.choices[0].message.content or answer.choices[0].text
    return answer


class ChatStream(FrameStream):
    """Splits a streamed chat completion into its events. Subclasses translate these, as a `StreamTranslation`."""

    def __init__(self) -> None:
        super().__init__()
        self._failure: WorkerAnswerError | None = None  # set iff a worker's error ended the stream
        self._finished = False  # whether the worker gave a reason for the end
        self._last_index = -1  # index of the latest tool call

    @abc.abstractmethod
    def event(self, answer: Answer) -> bytes:
        """The translation of the next event, possibly nothing. `answer.choices` has the first choice only, or none."""

    @abc.abstractmethod
    def failed(self, error: WorkerAnswerError) -> bytes:
        """The translation of a worker's error within its stream. Nothing follows it."""

    @abc.abstractmethod
    def over(self) -> bytes:
        """The bytes that end the stream."""

    def end(self) -> bytes:
        """See StreamTranslation. Raises UpstreamError for an incomplete or failed stream."""
        found = super().end()
        if self._failure is not None:
            raise StreamFailedError(self._failure.message, code=self._failure.code)
        if not self._finished:
            raise UpstreamError(INCOMPLETE)
        return found + self.over()

    def frame(self, data: bytes) -> bytes:
        """See FrameStream."""
        if data == b"[DONE]" or self._failure is not None:
            return b""
        try:
            answer = _answer(data)
        except UNREADABLE as error:
            raise UpstreamError("The worker's stream is no chat completion.") from error
        if answer.error is None:
            answer.choices = [choice for choice in answer.choices if choice.index == 0][:1]
            for choice in answer.choices:
                choice.delta.content = choice.delta.content or choice.text
                self._finished = self._finished or is_reason(choice.finish_reason)
                self._number_calls(choice.delta.tool_calls or ())
            return self.event(answer)
        self._failure = failure(answer.error)
        return self.failed(self._failure)

    def _number_calls(self, pieces: Iterable[ToolCall]) -> None:
        """Set missing indices: a piece without an index begins a new call if it has a name, else it continues the latest call."""
        for piece in pieces:
            if piece.index is None:
                piece.index = self._last_index + 1 if piece.function.name or self._last_index < 0 else self._last_index
            self._last_index = piece.index
