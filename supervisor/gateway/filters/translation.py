"""Translation of paths that a worker doesn't serve: requests become canonical, and canonical responses become the dialect's.

The canonical API is OpenAI's. A dialect has a `Translation` for each path that it can map. The translation is used for models whose
workers don't serve the path themselves; for other models, and on every other path, the bytes stay unchanged. Errors are not
translated here: the dialect renders them, see `Dialect.error`.

A `TargetedTranslation` depends on the model that answers, or on the times of the request. A request in another form than its path's
API, which workers speak, needs one too: it is translated even if its worker serves the path, see `Dialect.required_translation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

import msgspec

from runtimes.base import CHAT_TEMPLATE, Thinking
from supervisor.catalog.models.rewrite import Fields
from supervisor.gateway.filters.filters import EVENTS, Filter, Head, Use
from supervisor.host.store.request_buffer import Bytes

SAME_NAMES: Final[Mapping[str, str]] = MappingProxyType({})  # `AnswerTranslation.names` without differences
MOST_SHOWN: Final = 20  # fields without effect
_TEMPLATE: Final = "chat_template_kwargs"
_EFFORT: Final = "reasoning_effort"  # for models with levels of reasoning
_EXTRA_PARAMETERS: Final = frozenset({"top_k", "min_p", "typical_p", "repetition_penalty", "repeat_last_n"})
"""Parameters beyond OpenAI's that translations may produce."""


class StreamTranslation(Protocol):
    """Translates one stream: pieces of the canonical stream in, pieces of the dialect's stream out."""

    def feed(self, piece: bytes) -> bytes:
        """The output for the next piece, possibly empty. A piece may end anywhere."""

    def end(self) -> bytes:
        """The last output, after a stream that ended properly."""

    @property
    def gathered(self) -> int:
        """The approximate number of the stream's bytes that the translation keeps in memory."""


class AnswerTranslation(Protocol):
    """Translates the answer to one request."""

    @property
    def content_type(self) -> bytes:
        """The content type of a whole answer."""

    @property
    def stream_content_type(self) -> bytes:
        """The content type of a stream."""

    @property
    def ignored(self) -> Sequence[str]:
        """The request's fields that have no effect on the canonical request: the response's `x-llmux-ignored`."""

    @property
    def names(self) -> Mapping[str, str]:
        """The canonical names of fields → the client's names for them, where these differ."""

    def answer(self, body: bytes) -> bytes:
        """The dialect's answer for a whole canonical answer. Raises UpstreamError for any other body."""

    def stream(self) -> StreamTranslation:
        """The translation of a stream that begins now."""


class Translation(Protocol):
    """Translates the requests to one path of a dialect. Stateless."""

    @property
    def path(self) -> str:
        """The canonical path."""

    def request(self, fields: Fields) -> tuple[Fields, AnswerTranslation]:
        """The canonical request's top-level fields, and the translation of its answers. Raises InvalidRequestError.

        `model` names the model in both requests. Strings may have marks for parts that were cut out of a large body: the translation
        must copy such strings as a whole, also within JSON that becomes a string itself. A text appended to another must begin with a
        line break. A private field (`x_keep_alive_s`) that the translation adds counts as if the client had sent it.
        """


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The facts about the answering model that a translation may need. The defaults describe an unknown model."""

    name: str = ""  # the requested name
    thinking: Thinking | None = CHAT_TEMPLATE  # how to switch reasoning; None: impossible
    thinking_modes: Sequence[str] = ("default", "enabled", "disabled")  # the modes that a request may choose
    multi_turn: bool | None = None  # None: unknown
    decoding: Mapping[str, Sequence[str]] = field(default_factory=dict)  # as `Adapter.decoding`
    translates: bool = False  # from one language into another, and does nothing else


class Adapted:
    """A translation of one request to one model.

    `chat_template_kwargs.enable_thinking` becomes the model's own switch, and parameters beyond OpenAI's get the worker's names
    (`Adapter.decoding`). After a request, `ignored` has the fields that couldn't be mapped, by the client's names.
    """

    def __init__(self, translation: Translation, target: TargetModel) -> None:
        self.path = translation.path
        self.ignored: list[str] = []
        self._translation = translation
        self._thinking = target.thinking
        self._only_mode = target.thinking_modes[0] if len(target.thinking_modes) == 1 else None
        self._decoding = target.decoding

    def request(self, fields: Fields) -> tuple[Fields, AnswerTranslation]:
        """See Translation."""
        chat_fields, answers = self._translation.request(fields)
        for name in sorted(_EXTRA_PARAMETERS & chat_fields.keys()):
            worker_names, value = self._decoding.get(name, ()), chat_fields.pop(name)
            chat_fields |= dict.fromkeys(worker_names, value)
            self.ignored += () if worker_names else called([name], answers.names)
        if _TEMPLATE not in chat_fields:
            return chat_fields, answers
        wanted = _switch(chat_fields[_TEMPLATE]).enable_thinking
        if self._thinking is None:
            del chat_fields[_TEMPLATE]
            self.ignored += () if _EFFORT in chat_fields else called([_TEMPLATE], answers.names)
            return chat_fields, answers
        if self._only_mode == ("disabled" if wanted else "enabled"):
            self.ignored += called([_TEMPLATE], answers.names)
        if self._thinking != CHAT_TEMPLATE:
            del chat_fields[_TEMPLATE]
            switch = self._thinking.enabled if wanted else self._thinking.disabled
            chat_fields = {
                name: msgspec.Raw(msgspec.json.encode(value)) for name, value in switch.items()
            } | chat_fields
        return chat_fields, answers


class _Switch(msgspec.Struct):
    enable_thinking: bool = True


_switch: Final = msgspec.json.Decoder(_Switch).decode


class Times(Protocol):
    """The times of a request, on the clock of `time.monotonic`; None: not yet."""

    @property
    def arrived_at(self) -> float:
        """The arrival at the daemon."""

    @property
    def entered_at(self) -> float | None:
        """The entry into its model's queue."""

    @property
    def admitted_at(self) -> float | None:
        """The admission to the answering worker."""


@runtime_checkable
class TargetedTranslation(Protocol):
    """Translates requests to one path by facts about their model, or with answers that report their times.

    Stateless.
    """

    @property
    def path(self) -> str:
        """The canonical path."""

    def of(self, target: TargetModel, times: Times) -> Translation:
        """The translation of one request for this model. `times` are read when the answer comes."""


@dataclass(frozen=True, slots=True)
class Chained:
    """Two `AnswerTranslation`s in sequence: `first` translates the worker's answer, `then` its output."""

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
        """The fields without effect of both translations, by the client's names."""
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
    """Canonical fields, or parts of them, by the client's names: see `AnswerTranslation.names`."""
    return tuple(names.get(field.partition(".")[0], field) for field in fields)


def shown(names: Sequence[str]) -> list[str]:
    """Names of fields without effect, safe to show, each once; and the number of further names.

    Clients choose the names: only plain characters are shown, and at most `MOST_SHOWN` names.
    """
    unique = dict.fromkeys(names)
    listed = [
        "".join(c if c.isascii() and (c.isalnum() or c in "_-.[]") else "?" for c in name[:64])
        for name in islice(unique, MOST_SHOWN)
    ]
    return listed if len(unique) <= MOST_SHOWN else [*listed, f"and {len(unique) - MOST_SHOWN} more"]


def ignored_header(names: Sequence[str]) -> str:
    """The value of `x-llmux-ignored`."""
    return ", ".join(map(str, shown(names)))


class Translate(Filter):
    """Translates a canonical answer into the dialect's."""

    translates = True

    def __init__(self, translation: AnswerTranslation) -> None:
        self._translation = translation
        self._stream: StreamTranslation | None = None

    @property
    def gathered(self) -> int:
        """See Filter."""
        return 0 if self._stream is None else self._stream.gathered

    def head(self, head: Head) -> Use:
        """See Filter."""
        if head.content_type.startswith(EVENTS):
            self._stream = self._translation.stream()
            head.changes_body(self._translation.stream_content_type)
            return Use.PIECES
        head.changes_body(self._translation.content_type)
        return Use.WHOLE

    def feed(self, piece: bytes) -> bytes:
        """See Filter."""
        assert self._stream is not None
        return self._stream.feed(piece)

    def end(self) -> bytes:
        """See Filter."""
        assert self._stream is not None
        return self._stream.end()

    async def whole(self, body: Bytes, head: Head) -> Bytes:
        """See Filter."""
        return self._translation.answer(bytes(body)) if self._stream is None else await super().whole(body, head)


class Repair(Filter):
    """Adds fields to an answer that its worker leaves out: see `Dialect.repair`."""

    def __init__(self, stream: StreamTranslation) -> None:
        self._stream = stream
        self.feed = stream.feed  # type: ignore[method-assign]  # unchanged
        self.end = stream.end  # type: ignore[method-assign]

    @property
    def gathered(self) -> int:
        """See Filter."""
        return self._stream.gathered

    def head(self, head: Head) -> Use:
        """See Filter."""
        if head.is_encoded:
            return Use.NONE
        head.changes_body()
        return Use.PIECES
