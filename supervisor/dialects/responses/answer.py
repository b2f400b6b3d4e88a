"""The response object: by a whole chat completion here, event by event in `stream`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from pydantic import JsonValue

from supervisor.dialects import chat
from supervisor.dialects.llm_pool.metrics import metrics_of
from supervisor.dialects.responses.checks import Json
from supervisor.dialects.responses.tools import Own, Owns, text_of
from supervisor.gateway.filters.translation import Times

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed"]
Kind = Literal["reasoning", "text", "refusal"]

_CUT_SHORT: Final[Mapping[str, str]] = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PREFIXES: Final[Mapping[Kind, str]] = {"reasoning": "rs", "text": "msg", "refusal": "msg"}


def new_id(prefix: str) -> str:
    """An id as OpenAI's, told apart by its prefix."""
    return f"{prefix}_{secrets.token_hex(16)}"


def why_incomplete(finish_reason: str | None) -> str | None:
    """`incomplete_details.reason`; None for an answer that its model ended."""
    return None if finish_reason is None else _CUT_SHORT.get(finish_reason)


# ------------------------------------------------------------------------------------------------------------- items


def item_id(kind: Kind) -> str:
    """For a new item with one text."""
    return new_id(_PREFIXES[kind])


def part(kind: Kind, text: str, logprobs: Sequence[JsonValue] = ()) -> Json:
    """The one part of an item with a text."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    if kind == "refusal":
        return {"type": "refusal", "refusal": text}
    return {"type": "output_text", "annotations": [], "logprobs": [*logprobs], "text": text}


def text_item(kind: Kind, name: str, parts: list[JsonValue], status: Status) -> Json:
    """An item of the output with a text: reasoning, or a message. `name`: its id."""
    if kind == "reasoning":
        return {"id": name, "type": "reasoning", "summary": [], "content": parts, "status": status}
    return {"id": name, "type": "message", "status": status, "role": "assistant", "content": parts}


def call_item(name: str, called: str, call_id: str, arguments: str, status: Status, owns: Owns) -> Json:
    """A tool call. `name`: its id; `called`: the function's name in the chat."""
    own = owns.get(called, Own(None, called))
    item: Json = {"id": name, "type": "function_call", "status": status, "call_id": call_id}
    item |= {"type": "custom_tool_call", "input": text_of(arguments)} if own.is_custom else {"arguments": arguments}
    if own.namespace is not None:
        item["namespace"] = own.namespace
    return item | {"name": own.name}


def call_id_of(called: str, owns: Owns) -> str:
    """An id for a new item with a call."""
    return new_id("ctc" if called in owns and owns[called].is_custom else "fc")


def logprobs_of(choice: chat.Choice) -> list[JsonValue]:
    """Those of the text's tokens, which both APIs write alike."""
    tokens = choice.logprobs.get("content") if isinstance(choice.logprobs, dict) else None
    return tokens if isinstance(tokens, list) else []


def _output(choice: chat.Choice, owns: Owns) -> list[Json]:
    said = choice.message
    last: Status = "incomplete" if why_incomplete(choice.finish_reason) else "completed"
    texts: list[tuple[Kind, str, list[JsonValue]]] = [
        ("reasoning", said.thought, []),
        ("text", said.content or "", logprobs_of(choice)),
        ("refusal", said.refusal or "", []),
    ]
    items = [
        text_item(kind, item_id(kind), [part(kind, text, logprobs)], "completed")
        for kind, text, logprobs in texts
        if text
    ]
    for call in said.tool_calls or []:
        called, arguments = call.function.name or "", call.function.arguments or ""
        items.append(
            call_item(call_id_of(called, owns), called, call.id or new_id("call"), arguments, "completed", owns)
        )
    if items:
        items[-1]["status"] = last
    return items


# ---------------------------------------------------------------------------------------------------------- response


def _usage(usage: chat.Usage | None) -> Json | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is known of a response before its answer: its id, its time, and what it repeats of its request."""

    id: str
    created_at: int  # Unix seconds
    echo: Json
    times: Times | None = None  # of its request

    @classmethod
    def of(cls, echo: Json, times: Times | None = None) -> Envelope:
        """For a response that is asked for now."""
        return cls(new_id("resp"), int(time.time()), echo, times)

    def response(
        self,
        status: Status,
        output: Sequence[Json] = (),
        *,
        model: str = "",
        measured: chat.Measured | None = None,
        incomplete: str | None = None,
        error: Json | None = None,
    ) -> Json:
        """The response object. `model`: its name where the request has none; `measured`: set iff it is over."""
        found: Json = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            **self.echo,
            "model": self.echo.get("model") or model,
            "output": [*output],
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "usage": None if measured is None else _usage(measured.usage),
        }
        if measured is not None and self.times is not None:
            found["metrics"] = msgspec.structs.asdict(metrics_of(measured, self.times, time.monotonic()))
        return found

    def whole(self, answer: chat.Answer, owns: Owns) -> Json:
        """The response object for a whole chat completion, which has a choice."""
        choice = answer.choices[0]
        incomplete = why_incomplete(choice.finish_reason)
        return self.response(
            "completed" if incomplete is None else "incomplete",
            _output(choice, owns),
            model=answer.model,
            measured=chat.Measured(answer.usage, answer.timings),
            incomplete=incomplete,
        )
