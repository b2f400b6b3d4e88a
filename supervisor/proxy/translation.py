"""A path that a worker doesn't serve: its requests become canonical, and canonical responses become its own.

Canonical is OpenAI's API. A dialect gives a `Translation` for each path that it can map. It is used for the models whose
workers don't serve the path themselves; for the others, and on every other path, the bytes stay untouched. Errors are not
translated here: the dialect renders them, see `Dialect.error`.

A `TargetedTranslation` is told which model answers, and when. It is also what a request needs whose path another API has, of
which workers speak that one: such a request is translated whatever its worker serves, see `Dialect.required_translation`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

import msgspec
from pydantic import JsonValue

from runtimes.base import CHAT_TEMPLATE, Thinking
from supervisor.catalog.rewrite import Fields
from supervisor.io.held_body import SLICE, Gathered
from supervisor.io.upstream import Headers, UpstreamResponse

KEPT_PIECES: Final = 4  # of the canonical answer's end, where its usage stands
KEPT_BYTES: Final = 4096
CANONICAL: Final[Mapping[str, str]] = MappingProxyType(
    {}
)  # the names of `AnswerTranslation` where they are the client's
MOST_SHOWN: Final = 20  # of the fields without effect
_TEMPLATE: Final = "chat_template_kwargs"
_EFFORT: Final = "reasoning_effort"  # for models that have levels, whatever switches their reasoning
_BEYOND: Final = frozenset({"top_k", "min_p", "typical_p", "repetition_penalty", "repeat_last_n"})
"""Parameters that translations may give beside OpenAI's."""
_REPLACED: Final = (b"content-type", b"content-length", b"etag")


class StreamTranslation(Protocol):
    """One stream: pieces of the canonical one in, pieces of the dialect's out."""

    def feed(self, piece: bytes) -> bytes:
        """The output for the next piece, possibly empty. A piece may end anywhere."""

    def end(self) -> bytes:
        """The last output, after a stream that ended properly."""

    @property
    def gathered(self) -> int:
        """About how many bytes of memory it keeps of what came."""


class AnswerTranslation(Protocol):
    """How the answers to one request are mapped."""

    @property
    def content_type(self) -> bytes:
        """Of a whole answer."""

    @property
    def stream_content_type(self) -> bytes:
        """Of a stream."""

    @property
    def ignored(self) -> Sequence[str]:
        """The request's fields that have no effect on the canonical one: the response's `x-llmux-ignored`."""

    @property
    def names(self) -> Mapping[str, str]:
        """Canonical fields that the client knows by other names → these."""

    def answer(self, body: bytes) -> bytes:
        """The dialect's answer, by a whole canonical one. Raises UpstreamError for what is none."""

    def stream(self) -> StreamTranslation:
        """For a stream that begins now."""


class Translation(Protocol):
    """How one path of a dialect is mapped. Stateless."""

    @property
    def path(self) -> str:
        """The canonical path."""

    def request(self, fields: Fields) -> tuple[Fields, AnswerTranslation]:
        """The canonical request's top-level fields, and what its answers become. Raises InvalidRequestError.

        `model` names the model in both. Strings may hold marks for what was cut out of a large body: they are passed on
        as a whole, also within JSON that becomes a string itself. What is joined to a text from behind begins with a line
        break. A private field (`x_keep_alive_s`) that it adds counts as if the client had sent it.
        """


@dataclass(frozen=True, slots=True)
class TargetModel:
    """What a translation may have to know of the model that answers. By itself one of which nothing is known."""

    name: str = ""  # as the client asked for it
    thinking: Thinking | None = CHAT_TEMPLATE  # how to switch reasoning; None: it can't be
    thinking_modes: Sequence[str] = ("default", "enabled", "disabled")  # what a request may choose
    multi_turn: bool | None = None  # None: it can't be told
    decoding: Mapping[str, Sequence[str]] = field(default_factory=dict)  # as `Adapter.decoding`
    translates: bool = False  # from one language into another, and does nothing else


class Adapted:
    """A translation of one request to one model: `chat_template_kwargs.enable_thinking` becomes what it is switched by, and
    parameters beyond OpenAI's get the names that its worker has for them (`Adapter.decoding`).

    `ignored` has what it can't do, by the client's names, once there was a request.
    """

    def __init__(self, translation: Translation, target: TargetModel) -> None:
        self.path = translation.path
        self.ignored: list[str] = []
        self._translation = translation
        self._thinking = target.thinking
        self._only = target.thinking_modes[0] if len(target.thinking_modes) == 1 else None
        self._decoding = target.decoding

    def request(self, fields: Fields) -> tuple[Fields, AnswerTranslation]:
        """See Translation."""
        canonical, answers = self._translation.request(fields)
        for name in sorted(_BEYOND & canonical.keys()):
            theirs, value = self._decoding.get(name, ()), canonical.pop(name)
            canonical |= dict.fromkeys(theirs, value)
            self.ignored += () if theirs else called([name], answers.names)
        if _TEMPLATE not in canonical:
            return canonical, answers
        wanted = _switch(canonical[_TEMPLATE]).enable_thinking
        if self._thinking is None:
            del canonical[_TEMPLATE]
            self.ignored += () if _EFFORT in canonical else called([_TEMPLATE], answers.names)
            return canonical, answers
        if self._only == ("disabled" if wanted else "enabled"):
            self.ignored += called([_TEMPLATE], answers.names)
        if self._thinking != CHAT_TEMPLATE:
            del canonical[_TEMPLATE]
            switch = self._thinking.enabled if wanted else self._thinking.disabled
            canonical = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in switch.items()} | canonical
        return canonical, answers


class _Switch(msgspec.Struct):
    enable_thinking: bool = True


_switch: Final = msgspec.json.Decoder(_Switch).decode


class Times(Protocol):
    """When a request got where, on the clock of `time.monotonic`. It fills up while the request goes its way."""

    @property
    def arrived_at(self) -> float:
        """At the daemon."""

    @property
    def entered_at(self) -> float | None:
        """At the queue of its model."""

    @property
    def admitted_at(self) -> float | None:
        """At the worker that answers."""


@runtime_checkable
class TargetedTranslation(Protocol):
    """How requests to one path are mapped by what is known of their model, or with answers that say how long they took.

    Stateless.
    """

    @property
    def path(self) -> str:
        """The canonical path."""

    def of(self, target: TargetModel, times: Times) -> Translation:
        """For one request to this model. `times` are read when the answer comes."""


@dataclass(frozen=True, slots=True)
class Chained:
    """An `AnswerTranslation` of what another one made of the worker's answer."""

    first: AnswerTranslation
    then: AnswerTranslation

    @property
    def content_type(self) -> bytes:
        """See AnswerTranslation."""
        return self.then.content_type

    @property
    def stream_content_type(self) -> bytes:
        """See AnswerTranslation."""
        return self.then.stream_content_type

    @property
    def ignored(self) -> Sequence[str]:
        """Of both, as the client calls them."""
        return (*self.then.ignored, *called(self.first.ignored, self.names))

    @property
    def names(self) -> Mapping[str, str]:
        """See AnswerTranslation."""
        return self.then.names

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        return self.then.answer(self.first.answer(body))

    def stream(self) -> StreamTranslation:
        """See AnswerTranslation."""
        return _ChainedStream(self.first.stream(), self.then.stream())


class _ChainedStream:
    def __init__(self, first: StreamTranslation, then: StreamTranslation) -> None:
        self._first, self._then = first, then

    def feed(self, piece: bytes) -> bytes:
        """See StreamTranslation."""
        return self._then.feed(self._first.feed(piece))

    def end(self) -> bytes:
        """See StreamTranslation."""
        last = self._first.end()
        return (self._then.feed(last) if last else b"") + self._then.end()

    @property
    def gathered(self) -> int:
        """See StreamTranslation."""
        return self._first.gathered + self._then.gathered


def called(fields: Sequence[str], names: Mapping[str, str]) -> tuple[str, ...]:
    """Canonical fields, or parts of them, as a client knows them: see `AnswerTranslation.names`."""
    return tuple(names.get(field.partition(".")[0], field) for field in fields)


def shown(names: Sequence[str]) -> list[JsonValue]:
    """Fields without effect, as they may be told, each once, and how many more there are.

    Clients choose the names: only plain characters of some are repeated.
    """
    each = dict.fromkeys(names)
    told: list[JsonValue] = [
        "".join(c if c.isascii() and (c.isalnum() or c in "_-.[]") else "?" for c in name[:64])
        for name in islice(each, MOST_SHOWN)
    ]
    return told if len(each) <= MOST_SHOWN else [*told, f"and {len(each) - MOST_SHOWN} more"]


def ignored_header(names: Sequence[str]) -> str:
    """`x-llmux-ignored`."""
    return ", ".join(map(str, shown(names)))


async def whole(response: UpstreamResponse, gathered: Gathered) -> bytes:
    """The body, which `gathered` counts. Raises UpstreamError, UnavailableError."""
    parts: list[bytes] = []
    size = 0
    while not response.drained and (piece := await response.next_chunk()):
        size += len(piece)
        gathered.grow(size)
        parts.append(piece)
    return b"".join(parts)


class TranslatedResponse:
    """A worker's response as a client of the dialect gets it; see `io.upstream.UpstreamResponse`."""

    def __init__(
        self,
        response: UpstreamResponse,
        content_type: bytes,
        stream: StreamTranslation | None,
        gathered: Gathered,
    ) -> None:
        """`gathered` counts what `stream` keeps."""
        self.status = response.status
        self.headers: Headers = [item for item in response.headers if item[0] not in _REPLACED]
        self.headers.append((b"content-type", content_type))
        self.drained = False
        self.canonical: deque[bytes] = deque(maxlen=KEPT_PIECES)
        self._response = response
        self._stream = stream
        self._gathered = gathered
        self._whole, self._at = b"", 0

    @classmethod
    async def of(
        cls, response: UpstreamResponse, translation: AnswerTranslation, gathered: Gathered, *, is_stream: bool
    ) -> TranslatedResponse:
        """A whole answer is translated here, before anything is sent. Raises UpstreamError, UnavailableError: see `Gathered`."""
        if is_stream:
            return cls(response, translation.stream_content_type, translation.stream(), gathered)
        translated = cls(response, translation.content_type, None, gathered)
        body = await whole(response, gathered)
        await asyncio.sleep(0)  # other tasks run: it may be large
        translated.canonical.append(body[-KEPT_BYTES:])
        translated._whole = translation.answer(body)  # its own
        return translated

    async def next_chunk(self) -> bytes:
        """The next piece that is not empty, or the last one."""
        if self._stream is None:
            await asyncio.sleep(0)
            piece, self._at = self._whole[self._at : self._at + SLICE], self._at + SLICE
            self.drained = self._at >= len(self._whole)
            return piece
        found = b""
        while not found and not self.drained:
            if self._response.drained:  # apart, since it may fail, and the piece before it is good
                self.drained = True
                return self._stream.end()
            piece = await self._response.next_chunk()
            self.canonical.append(piece[-KEPT_BYTES:])
            found = self._stream.feed(piece)
            self._gathered.grow(self._stream.gathered)
        return found

    async def read(self, limit: int) -> bytes:
        """As the worker sent it."""
        return await self._response.read(limit)

    def close(self) -> None:
        """Let go of the worker's response."""
        self._response.close()
