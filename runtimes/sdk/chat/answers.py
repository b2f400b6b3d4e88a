"""OpenAI's JSON for chats and completions, whole or in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runtimes.sdk.chat.detokenize import BROKEN
from runtimes.sdk.chat.formats.pieces import CallArguments, CallStart, Piece, Text, Thought
from runtimes.sdk.chat.language import Language
from runtimes.sdk.chat.response_builder import Outcome, ResponseBuilder
from runtimes.sdk.chat.tokens import Token

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer in OpenAI's JSON. `prompt`: tokens of its prompt; `logprobs`: whether to include them."""

    kind: Literal["chat", "text"]
    model: str
    language: Language
    builder: ResponseBuilder
    prompt: int
    logprobs: bool
    usage: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def chunks(self, pieces: Iterable[list[Piece]]) -> Iterator[Json]:
        """The answer as a stream. The first chunk comes with the first token."""
        begun = False
        for brought in pieces:
            if not begun and self.kind == "chat":
                yield self._chunk({"role": "assistant", "content": ""})
            begun = True
            for piece in brought:
                yield self._chunk(_delta(piece), self._take_logprobs(piece))
        last = self._chunk({}, self._take_logprobs(None), self.builder.outcome.finish)
        last["choices"][0] |= self._stop_field()
        yield last
        if self.usage:
            yield {**self._common_fields(chunk=True), "choices": [], "usage": usage(self.prompt, self.builder.outcome)}

    def to_object(self, pieces: Iterable[list[Piece]]) -> Json:
        """The answer as one object."""
        all_pieces = [piece for brought in pieces for piece in brought]
        text = "".join(piece.text for piece in all_pieces if isinstance(piece, Text))
        choice: Json = {"index": 0, "finish_reason": self.builder.outcome.finish, "logprobs": self._take_logprobs(None)}
        choice |= self._stop_field()
        if self.kind == "text":
            choice["text"] = text
        else:
            calls = _tool_calls(all_pieces)
            message: Json = {"role": "assistant", "content": text if text or not calls else None}
            thoughts = "".join(piece.text for piece in all_pieces if isinstance(piece, Thought))
            if thoughts:
                message["reasoning_content"] = thoughts
            if calls:
                message["tool_calls"] = calls
            choice["message"] = message
        return {
            **self._common_fields(chunk=False),
            "choices": [choice],
            "usage": usage(self.prompt, self.builder.outcome),
        }

    def _stop_field(self) -> Json:
        """The field for the stop string that ended the answer, as in vLLM."""
        stop = self.builder.outcome.stop
        return {} if stop is None else {"stop_reason": stop}

    def _common_fields(self, *, chunk: bool) -> Json:
        prefix, name = "cmpl", "text_completion"
        if self.kind == "chat":
            prefix, name = "chatcmpl", "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": f"{prefix}-{self.id}", "object": name, "created": self.created, "model": self.model}

    def _chunk(self, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
        choice: Json = {"index": 0, "finish_reason": finish, "logprobs": logprobs}
        if self.kind == "chat":
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        return {**self._common_fields(chunk=True), "choices": [choice]}

    def _take_logprobs(self, piece: Piece | None) -> Json | None:
        """The log probabilities to send with this piece; without a piece, those left at the end."""
        if not self.logprobs or not (piece is None or isinstance(piece, Text)):
            return None
        tokens, self.builder.logprobs = self.builder.logprobs, []
        if piece is not None and not tokens:
            return None
        if self.kind == "chat":
            return {"content": [_token_logprobs(self.language, token) for _, token in tokens], "refusal": None}
        return _logprob_columns(self.language, tokens)


def usage(prompt: int, outcome: Outcome) -> Json:
    """Token counts of prompt and answer, of reasoning, and of the prompt's reused tokens, if the runtime reports them."""
    reused = outcome.reused_tokens
    return {
        **({} if reused is None else {"prompt_tokens_details": {"cached_tokens": reused}}),
        "prompt_tokens": prompt,
        "completion_tokens": outcome.tokens,
        "total_tokens": prompt + outcome.tokens,
        "completion_tokens_details": {"reasoning_tokens": outcome.reasoning_tokens},
    }


def _delta(piece: Piece) -> Json:
    match piece:
        case Text(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text}
        case CallStart(index, name):
            return {"tool_calls": [{"index": index, **_new_tool_call(name)}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _tool_calls(pieces: Sequence[Piece]) -> list[Json]:
    calls: list[Json] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append(_new_tool_call(piece.name))
        elif isinstance(piece, CallArguments):
            calls[piece.index]["function"]["arguments"] += piece.text
    return calls


def _new_tool_call(name: str) -> Json:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }


def _token_logprobs(language: Language, token: Token) -> Json:
    def entry(number: int, logprob: float) -> Json:
        text = language.decode([number])
        return {
            "token": text,
            "logprob": max(logprob, -9999.0),
            "bytes": None if BROKEN in text else list(text.encode()),
        }

    return {**entry(token.id, token.logprob), "top_logprobs": [entry(*other) for other in token.top]}


def _logprob_columns(language: Language, tokens: Sequence[tuple[int, Token]]) -> Json:
    """Log probabilities in the form of completions. Offsets are positions in the whole answer, across all chunks of a stream."""
    return {
        "tokens": [language.decode([token.id]) for _, token in tokens],
        "token_logprobs": [max(token.logprob, -9999.0) for _, token in tokens],
        "top_logprobs": [
            {language.decode([other]): max(value, -9999.0) for other, value in token.top} for _, token in tokens
        ],
        "text_offset": [begin for begin, _ in tokens],
    }
