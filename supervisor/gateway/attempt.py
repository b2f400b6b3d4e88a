"""One attempt to let a model answer a request: the worker's request, and the outcome."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from runtimes.base import Endpoint
from supervisor.core.types import ModelId
from supervisor.engine.ticket import Ticket
from supervisor.gateway.filters.filters import TAIL_BYTES, TAIL_PIECES, remember
from supervisor.gateway.filters.model_name import Renaming
from supervisor.gateway.filters.translation import SAME_NAMES, AnswerTranslation, StreamTranslation
from supervisor.host.store.request_buffer import RequestBuffer
from supervisor.host.upstream.upstream import Headers

if TYPE_CHECKING:
    from supervisor.schema.request import Step

_TOKENS: Final = b'_tokens"'
_COUNT: Final = re.compile(rb'"(prompt|input|completion|output)_tokens"\s*:\s*(\d{1,15})\b')
# llama.cpp's own figures: a stream whose client didn't request the usage ends with these alone.
_TIMINGS: Final = b'"timings"'
_TIMING_COUNT: Final = re.compile(rb'"(cache|prompt|predicted)_n"\s*:\s*(\d{1,15})\b')
_CACHE: Final = b'"cache'
_CACHED: Final = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens|cache_n)"\s*:\s*(\d{1,15})\b')


class Usage(NamedTuple):
    """Token counts from the response's own usage; None for a missing count."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None  # of the prompt's tokens


NO_USAGE: Final = Usage()


def _usage_in_timings(tail: bytes) -> Usage:
    start = tail.rfind(_TIMINGS)
    if start < 0:
        return NO_USAGE
    counts = {kind: int(number) for kind, number in _TIMING_COUNT.findall(tail, start)}
    prompt = counts.get(b"prompt")
    cached = counts.get(b"cache")
    return Usage(prompt if prompt is None else prompt + (cached or 0), counts.get(b"predicted"), cached)


@dataclass(slots=True)
class Outcome:
    """The result of a forwarded request, updated as it runs, so it is correct after a cancellation, too."""

    status: int = 0  # 0: no answer came
    bytes_sent: int = 0  # of the body
    first_byte_s: float | None = None  # from sending the request to the first chunk of the body
    first_byte_at: float | None = None  # loop time of that chunk
    error: str | None = None  # the code of the error that broke it off; the exception would keep its traceback's frames
    error_status: int = 0  # the status of that error
    error_message: str | None = None  # from that error, or from the worker's error response
    started: bool = False  # the client has the response's head
    stream_type: bytes = b""  # the content type of a stream whose client takes an error as its last event
    ignored: Sequence[str] = ()  # the request's fields without effect, reported by the worker
    # The end of the worker's stream before its translation, with the worker's usage:
    worker_tail: deque[bytes] | None = None
    _head: bytes = b""  # the start of the body: Anthropic's streams begin with the prompt's tokens
    _tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=TAIL_PIECES))

    def usage(self) -> Usage:
        """The usage at the end of the response. Each call searches for it."""
        tail = self.tail() if self.worker_tail is None else b"".join(self.worker_tail)
        if self.bytes_sent > len(tail) and _TOKENS in self._head:
            tail = self._head + tail
        start = tail.find(_TOKENS)
        if start < 0:
            return _usage_in_timings(tail)
        counts = {kind: int(number) for kind, number in _COUNT.findall(tail, max(0, start - len(b'"completion')))}
        if not counts:  # it was another field, such as `max_tokens`
            return _usage_in_timings(tail)
        cached = _CACHED.findall(tail) if _CACHE in tail else None
        return Usage(
            counts.get(b"prompt", counts.get(b"input")),
            counts.get(b"completion", counts.get(b"output")),
            int(cached[-1]) if cached else None,
        )

    def keep(self, chunk: bytes) -> None:
        """Count a chunk of the body, and keep its end."""
        if not self.bytes_sent:
            self._head = chunk[:TAIL_BYTES]
        self.bytes_sent += len(chunk)
        remember(self._tail, chunk)

    def tail(self) -> bytes:
        """The end of the sent body."""
        return b"".join(self._tail)


_NO_BODY: Final = RequestBuffer()


@dataclass(slots=True)
class Attempt:
    """One attempt. A request has several if a worker ended too early, or if its task has further candidates."""

    model: ModelId | None = None  # set iff the target is known, and with it all that the worker gets
    endpoint: Endpoint | None = None
    path: bytes = b""  # the worker's path and query, as they go on the wire
    headers: Headers = field(default_factory=list)  # the client's headers that the worker gets
    body: RequestBuffer = _NO_BODY
    only_looks: bool = False  # does the request only read the worker's state? Such a request isn't counted
    prefix: int | None = None  # a fingerprint of the conversation, where several replicas could answer
    tokens: int = 0  # needed of the context that the worker's requests share
    text_bytes: int = 0  # of the prompt; 0: it has more than text, or the model's requests share no context
    reuses: bool = True  # may the worker reuse cached prompts?
    # For the answer:
    is_known: bool = True  # is the form of a stream known before the worker answers?
    translation: AnswerTranslation | None = None
    names: Renaming | None = None
    repair: StreamTranslation | None = None  # adds missing fields to an answer
    end: re.Pattern[bytes] | None = None  # matches the end of a complete stream that passes untranslated
    ignored: Sequence[str] = ()  # the request's fields and headers without effect
    own: Headers = field(default_factory=list)  # headers that llmux adds
    # The outcome:
    ticket: Ticket | None = None  # set at admission
    outcome: Outcome = field(default_factory=Outcome)
    step: Step | None = None  # the worker's last report of progress; see `daemon.observability.steps`
    was_sent_again: bool = False

    @property
    def called(self) -> Mapping[str, str]:
        """The canonical names of fields → the client's names for them, where these differ."""
        return SAME_NAMES if self.translation is None else self.translation.names

    def again(self) -> Attempt:
        """A new attempt with the same request to the worker."""
        return replace(self, ticket=None, outcome=Outcome(), step=None, was_sent_again=True)
