"""The text of a program's output as a chat completion, whole or as events."""

from __future__ import annotations

import secrets
import time

import msgspec

from runtimes.claude_cli.adapter.output import Output, Result, Usage


class _Answer:
    """What both have."""

    def __init__(self, output: Output, model: str, *, include_usage: bool) -> None:
        self._output = output
        self._include_usage = include_usage
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._model = model
        self._created = int(time.time())

    def _object(self, kind: str, choices: list[object], **more: object) -> bytes:
        about = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return msgspec.json.encode({**about, "choices": choices, **more})


class WholeAnswer(_Answer):
    """One object at the end."""

    content_type = "application/json"

    def __init__(self, output: Output, model: str, *, include_usage: bool) -> None:
        super().__init__(output, model, include_usage=include_usage)
        self._texts: list[str] = []

    def feed(self, output: bytes) -> bytes:
        """See `ProgramAnswer`."""
        self._texts.append(self._output.feed(output))
        return b""

    def finish(self) -> bytes:
        """See `ProgramAnswer`."""
        result = self._output.end()
        message = {"role": "assistant", "content": "".join((*self._texts, result.text)), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": result.finish_reason}
        usage = {} if result.usage is None else {"usage": _usage(result.usage)}
        return self._object("chat.completion", [choice], **usage)


class StreamedAnswer(_Answer):
    """Events, as the text comes."""

    content_type = "text/event-stream"
    _begun = False

    def feed(self, output: bytes) -> bytes:
        """See `ProgramAnswer`."""
        return self._text(self._output.feed(output))

    def finish(self) -> bytes:
        """See `ProgramAnswer`."""
        result = self._output.end()
        events = [self._text(result.text, is_last=True), self._chunk({}, result)]
        if self._include_usage:
            usage = None if result.usage is None else _usage(result.usage)
            events.append(self._event([], usage=usage))
        return b"".join((*events, b"data: [DONE]\n\n"))

    def _text(self, text: str, *, is_last: bool = False) -> bytes:
        if not text and (self._begun or not is_last):
            return b""
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        return self._chunk({**role, "content": text})

    def _chunk(self, delta: dict[str, str], result: Result | None = None) -> bytes:
        reason = None if result is None else result.finish_reason
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._event([choice], **({"usage": None} if self._include_usage else {}))

    def _event(self, choices: list[object], **more: object) -> bytes:
        return b"data: " + self._object("chat.completion.chunk", choices, **more) + b"\n\n"


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
