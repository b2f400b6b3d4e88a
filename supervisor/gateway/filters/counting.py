"""Counts the tokens of a chat for workers without such an endpoint: a completion of one token reports its prompt's tokens.

Unlike a worker's own count, such a count waits in the queue and costs as much as a short answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import msgspec

from runtimes.base import Endpoint
from supervisor.catalog.models.rewrite import Fields
from supervisor.errors import InvalidRequestError, UpstreamError
from supervisor.gateway.body.typed import decoded_answer
from supervisor.gateway.filters.translation import SAME_NAMES, StreamTranslation

COUNT: Final = "/v1/chat/completions/input_tokens"
CHAT: Final = "/v1/chat/completions"
_LENGTH_FIELDS: Final = ("max_completion_tokens", "max_tokens")
"""OpenAI's reasoning models accept only the first, most other servers only the second."""
_DROPPED_FIELDS: Final = frozenset({"stream", "stream_options", "n", "min_tokens", "logprobs", "top_logprobs"})
"""Fields that would make the answer longer, or that aren't allowed with so short an answer."""
_NULL: Final = msgspec.Raw(b"null")


def by_answer(chat: Endpoint) -> Endpoint:
    """An endpoint that counts tokens by this endpoint's chat completions."""
    return replace(chat, path=COUNT, upstream_path=chat.upstream_path or chat.path)


def is_by_answer(endpoint: Endpoint) -> bool:
    """Was this endpoint made by `by_answer`?"""
    return endpoint.path == COUNT and endpoint.meaning.role == "run"


class Counting:
    """The `Translation` of a chat into the shortest one with the same prompt. `name`: the model's."""

    path: Final = CHAT

    def __init__(self, name: str) -> None:
        self._name = name

    def request(self, fields: Fields) -> tuple[Fields, Counts]:
        """See Translation."""
        length = next(
            (name for name in _LENGTH_FIELDS if bytes(fields.get(name, _NULL)) != b"null"), _LENGTH_FIELDS[-1]
        )
        kept = {key: raw for key, raw in fields.items() if key not in _LENGTH_FIELDS and key not in _DROPPED_FIELDS}
        return kept | {length: msgspec.Raw(b"1")}, Counts(self._name)


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answer: Final = msgspec.json.Decoder(_Answer).decode


@dataclass(frozen=True, slots=True)
class Counts:
    """Translates the answer into the count, in the form of llama.cpp's server."""

    name: str
    content_type = b"application/json"
    stream_content_type = b"text/event-stream"
    ignored = ()
    names: ClassVar[Mapping[str, str]] = SAME_NAMES

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation. Raises InvalidRequestError for an answer without its prompt's token count."""
        usage = decoded_answer(_answer, body, "chat completion").usage
        if usage is None or not usage.prompt_tokens:  # 0: unknown, because no prompt is empty
            raise InvalidRequestError(
                f"{self.name} doesn't count tokens, and its answers don't say how many their prompts had (usage).",
                code="endpoint_not_supported",
                param="model",
            )
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": usage.prompt_tokens})

    def stream(self) -> StreamTranslation:
        """Counts are never streamed. Raises UpstreamError."""
        raise UpstreamError("The worker answered with a stream where its prompt's tokens were to be counted.")
