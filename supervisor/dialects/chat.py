"""Chat completions as translations read them: whole answers, and streams event by event.

Only what translations need is decoded; what workers leave out has its default.
"""

from __future__ import annotations

import abc
from typing import Final

import msgspec

from supervisor.errors import UpstreamError

PATH: Final = "/v1/chat/completions"
EVENT_LIMIT: Final = 16 * 1024 * 1024
NOTHING: Final = msgspec.Raw()
"""The default of unparsed fields. Their type is no union: msgspec would take nothing but null for one with `Raw` in it."""
_FRAME: Final = b"\n\n"


def is_set(raw: msgspec.Raw) -> bool:
    """Was an unparsed field there, and not null?"""
    return bytes(raw) not in {b"", b"null"}


class Function(msgspec.Struct):
    """What a tool call asks for; in a stream, the next piece of it."""

    name: str | None = None
    arguments: str | None = None  # JSON


class ToolCall(msgspec.Struct):
    """One tool call; in a stream, `index` says which one a piece belongs to."""

    index: int | None = None
    id: str | None = None
    function: Function = msgspec.field(default_factory=Function)


class Message(msgspec.Struct):
    """What was answered, or the next piece of it."""

    content: str | None = None
    reasoning_content: str | None = None  # llama.cpp, our own workers
    reasoning: str | None = None  # vLLM
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def thought(self) -> str:
        """The reasoning, whatever its field is called."""
        return self.reasoning_content or self.reasoning or ""


class Choice(msgspec.Struct):
    """One of the answers: a whole one has a `message`, a stream's event a `delta`."""

    index: int = 0
    message: Message = msgspec.field(default_factory=Message)
    delta: Message = msgspec.field(default_factory=Message)
    finish_reason: str | None = None
    logprobs: msgspec.Raw = NOTHING


class PromptDetails(msgspec.Struct):
    """Of a prompt's tokens."""

    cached_tokens: int | None = None


class CompletionDetails(msgspec.Struct):
    """Of an answer's tokens."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens of the whole request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Of the prompt's, those that were met again."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details is not None else 0

    @property
    def reasoning_tokens(self) -> int:
        """Of the answer's, those that were thought."""
        details = self.completion_tokens_details
        return (details.reasoning_tokens or 0) if details is not None else 0


class Timings(msgspec.Struct):
    """llama.cpp's own figures, in milliseconds."""

    prompt_ms: float | None = None
    predicted_ms: float | None = None
    predicted_per_second: float | None = None


class Answer(msgspec.Struct):
    """A chat completion, or an event of one that is streamed."""

    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    timings: Timings | None = None
    error: msgspec.Raw = NOTHING  # set iff the stream ends with it


_answer: Final = msgspec.json.Decoder(Answer).decode


def whole(body: bytes) -> Answer:
    """A whole answer. Raises UpstreamError for what is none."""
    try:
        answer = _answer(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UpstreamError("The worker's answer is no chat completion.") from error
    if not answer.choices:
        raise UpstreamError("The worker's answer is a chat completion without a choice.")
    return answer


class ChatStream(abc.ABC):
    """A streamed chat completion, taken apart; a `StreamTranslation` but for what becomes of its parts."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_over = False  # an error ended it

    @abc.abstractmethod
    def event(self, answer: Answer) -> bytes:
        """What the next event becomes; possibly nothing."""

    @abc.abstractmethod
    def failed(self, error: msgspec.Raw) -> bytes:
        """What becomes of an error of the worker within its stream. Nothing follows."""

    @abc.abstractmethod
    def over(self) -> bytes:
        """What ends the stream."""

    def feed(self, piece: bytes) -> bytes:
        """See StreamTranslation. Raises UpstreamError for what is no chat completion."""
        *frames, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(_FRAME)
        if len(self._rest) > EVENT_LIMIT:
            raise UpstreamError("The worker's stream has an event that is too large to be translated.")
        return b"".join(map(self._frame, frames))

    def end(self) -> bytes:
        """See StreamTranslation."""
        last, self._rest = self._rest, b""
        found = self._frame(last) if last.strip() else b""
        return found if self._is_over else found + self.over()

    def _frame(self, frame: bytes) -> bytes:
        lines = [line[5:].strip() for line in frame.split(b"\n") if line.startswith(b"data:")]
        data = b"\n".join(lines)
        if not data or data == b"[DONE]" or self._is_over:
            return b""
        try:
            answer = _answer(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise UpstreamError("The worker's stream is no chat completion.") from error
        if not is_set(answer.error):
            return self.event(answer)
        self._is_over = True
        return self.failed(answer.error)
