"""A program's output as a chat completion, whole or in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from runtimes.claude_cli.worker.output import Result, Usage

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer in OpenAI's JSON, made from pieces of text followed by the result."""

    model: str
    include_usage: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def to_object(self, pieces: Iterable[str | Result]) -> Json:
        """The answer as one object."""
        *texts, result = pieces
        assert isinstance(result, Result)
        message = {"role": "assistant", "content": "".join(map(str, texts)), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": result.finish_reason}
        usage = {} if result.usage is None else {"usage": _usage_json(result.usage)}
        return self._response_object("chat.completion", [choice], **usage)

    def chunks(self, pieces: Iterable[str | Result]) -> Iterator[Json]:
        """The answer as a stream, one chunk for each piece of text."""
        role = {"role": "assistant"}
        for piece in pieces:
            if isinstance(piece, str):
                yield self._chunk({**role, "content": piece})
                role = {}
                continue
            if role:
                yield self._chunk({**role, "content": ""})
            yield self._chunk({}, piece.finish_reason)
            if self.include_usage:
                usage = None if piece.usage is None else _usage_json(piece.usage)
                yield self._response_object("chat.completion.chunk", [], usage=usage)

    def _chunk(self, delta: Json, reason: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._response_object(
            "chat.completion.chunk", [choice], **({"usage": None} if self.include_usage else {})
        )

    def _response_object(self, kind: str, choices: list[Json], **more: Json | None) -> Json:
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**about, "choices": choices, **more}


def _usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
