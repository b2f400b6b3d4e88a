"""`POST /v1/responses/input_tokens` as the count of a chat completion's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.dialects.responses.request import NAMES, Asked, conversation, encoded
from supervisor.errors import UpstreamError
from supervisor.gateway.filters.counting import COUNT
from supervisor.gateway.filters.translation import StreamTranslation


class _Count(msgspec.Struct):
    input_tokens: int


_count: Final = msgspec.json.Decoder(_Count).decode


class CountTokens:
    """See `Translation`."""

    path = COUNT

    def request(self, fields: Fields) -> tuple[Fields, CountAnswers]:
        """See `Translation`."""
        asked = Asked(fields)
        request, _ = conversation(asked)
        return encoded(request), CountAnswers(asked.ignored)


class CountAnswers:
    """The count, as the Responses API says it."""

    names = NAMES
    content_type = b"application/json"
    stream_content_type = b"text/event-stream; charset=utf-8"

    def __init__(self, ignored: Sequence[str]) -> None:
        self.ignored = ignored

    def answer(self, body: bytes) -> bytes:
        """See `AnswerTranslation`."""
        try:
            count = _count(body).input_tokens
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise UpstreamError("The worker's answer is no count of tokens.") from error
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": count})

    def stream(self) -> StreamTranslation:
        """Raises UpstreamError: nobody asked for one."""
        raise UpstreamError("The worker answered with a stream where its count of tokens was asked for.")
