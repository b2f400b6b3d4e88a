"""Builds a response from tokens: text, reasoning, calls, log probabilities, counts, finish reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from runtimes.sdk.chat.detokenize import Detokenizer
from runtimes.sdk.chat.formats.harmony import HarmonyParser
from runtimes.sdk.chat.formats.pieces import CallStart, Piece, Text, Thought, merge_pieces, partial_marker
from runtimes.sdk.chat.formats.tagged import TaggedParser
from runtimes.sdk.chat.language import Language
from runtimes.sdk.chat.tokens import Ending, Reused, Token
from runtimes.sdk.chat.tools import Tools
from runtimes.sdk.worker_pool import Cancel

Finish = Literal["stop", "length", "tool_calls"]


class Plain:
    """No format: everything is the answer."""

    thinking = False
    answering = True

    def feed(self, text: str) -> list[Piece]:
        """The whole text is the answer."""
        return [Text(text)]

    def end(self) -> list[Piece]:
        """No pieces: `feed` keeps nothing back."""
        return []


class Parser(Protocol):
    """Splits generated text into pieces."""

    @property
    def thinking(self) -> bool:
        """Is the text within reasoning?"""

    @property
    def answering(self) -> bool:
        """Is the text within the answer, after its first text?"""

    def feed(self, text: str) -> list[Piece]:
        """Add text. Returns the pieces that are certain now."""

    def end(self) -> list[Piece]:
        """The remaining pieces. Call it when the text has ended."""


def parser_of(language: Language, tools: Tools, *, thinking: bool) -> Parser:
    """The parser for this model's answers."""
    if language.format == "harmony":
        return HarmonyParser(calls=bool(tools.offered))
    if language.format == "tagged":
        return TaggedParser(thinking=thinking, calls=bool(tools.offered), schemas=tools.schemas)
    return Plain()


class Stops:
    """Ends the answer before its first stop string, and outputs no part of that string, however the text is cut.

    `hit` is the stop string that was found.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._tail = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Add text. Returns the text that can be output now."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        text = self._tail + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.hit = min(found)  # the stop string that is complete first, as if read letter by letter
            self._tail = ""
            return text[:at]
        keep = partial_marker(text, self._stops)
        self._tail = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """The text held back as the possible beginning of a stop string."""
        tail, self._tail = self._tail, ""
        return tail


@dataclass(slots=True)
class Outcome:
    """Finish reason, the stop string that was found, and token counts."""

    finish: Finish = "stop"
    stop: str | None = None
    tokens: int = 0
    reasoning_tokens: int = 0
    reused_tokens: int | None = None  # of the prompt; None: unknown


@dataclass(slots=True)
class ResponseBuilder:
    """Builds one response. `outcome` is updated with each token. `logprobs` belong to tokens of the answer not yet output.

    Each entry has its token's offset in the generated text, in characters.
    """

    language: Language
    parser: Parser
    stops: Sequence[str] = ()
    parallel: bool = True
    shows_special: bool = False  # include special tokens in the text
    outcome: Outcome = field(default_factory=Outcome)
    logprobs: list[tuple[int, Token]] = field(default_factory=list)

    def read(self, results: Iterable[Token | Ending | Reused], enough: Cancel) -> Iterator[list[Piece]]:
        """The pieces of each token, perhaps none. Sets `enough` when no more tokens are needed."""
        text, stops = Detokenizer(self.language.decode), Stops(self.stops)
        called, begin = False, 0
        skipped = self.language.ends if self.shows_special else self.language.ends | self.language.hidden
        for item in results:
            if isinstance(item, str):
                self.outcome.finish = item
                break
            if isinstance(item, Reused):
                self.outcome.reused_tokens = item.tokens
                continue
            self.outcome.tokens += 1
            self.outcome.reasoning_tokens += self.parser.thinking
            if item.id in skipped:
                continue
            new = text.feed(item.id)
            pieces = list(self._until_stop(self.parser.feed(new), stops))
            if self.parser.answering:
                self.logprobs.append((begin, item))
            begin += len(new)
            starts = [piece for piece in pieces if isinstance(piece, CallStart)]
            if starts and not self.parallel and any(piece.index > 0 for piece in starts):
                pieces = pieces[: pieces.index(next(piece for piece in starts if piece.index > 0))]
                enough.set()
            called = called or bool(starts)
            if stops.hit is not None:
                enough.set()
            yield merge_pieces(pieces)
            if enough.is_set:
                break
        if not enough.is_set:
            yield merge_pieces(self._last_pieces(text, stops))
        self.outcome.stop = stops.hit
        if called and self.outcome.finish == "stop":
            self.outcome.finish = "tool_calls"

    def _last_pieces(self, text: Detokenizer, stops: Stops) -> Iterator[Piece]:
        yield from self._until_stop([*self.parser.feed(text.end()), *self.parser.end()], stops)
        if stops.hit is None:
            yield Text(stops.end())

    @staticmethod
    def _until_stop(pieces: Iterable[Piece], stops: Stops) -> Iterator[Piece]:
        """The pieces up to a stop string. Stop strings count in the answer only, not in reasoning or calls."""
        for piece in pieces:
            if stops.hit is not None:
                return
            if isinstance(piece, Text):
                yield Text(stops.feed(piece.text))
            else:
                if not isinstance(piece, Thought):
                    yield Text(stops.end())  # the answer ended before the call
                yield piece
