"""Translates chat completions into responses: a whole one into the response object, a streamed one into events.

The output grows item by item: an item begins with its first piece, and ends when the next one begins or the stream ends.
Each event ends with its number, so that an error event can continue the numbers.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from pydantic import JsonValue

from supervisor.catalog.models.rewrite import Fields
from supervisor.dialects import chat
from supervisor.dialects.llm_pool.metrics import metrics_of
from supervisor.dialects.responses.tools import ClientTool, ClientTools, text_of
from supervisor.dialects.responses.types import Json, ResponseTokens
from supervisor.errors import InvalidRequestError, UpstreamError
from supervisor.gateway.body.condensed_json import may_be_cut
from supervisor.gateway.body.typed import UNREADABLE, decoded_answer
from supervisor.gateway.filters import frames
from supervisor.gateway.filters.filters import EVENTS
from supervisor.gateway.filters.translation import StreamTranslation, Times
from supervisor.gateway.upstream_error import WorkerAnswerError

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed"]
Kind = Literal["reasoning", "text", "refusal"]

NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "chat_template_kwargs": "reasoning.effort",
    "response_format": "text.format",
    "logprobs": "include",
}
"""Canonical fields → their names in Responses."""
_CUT_SHORT: Final[Mapping[str | None, str]] = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""A chat's reason for the end → `incomplete_details.reason`."""
_PREFIXES: Final[Mapping[Kind, str]] = {"reasoning": "rs", "text": "msg", "refusal": "msg"}
_EVENTS: Final[Mapping[Kind, str]] = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "refusal": "response.refusal",
}
_UNNAMED: Final = "upstream_error"  # in a response OpenAI calls it server_error
_ECHOED: Final[Json] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "model": None,
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": {},
    "safety_identifier": None,
    "temperature": None,
    "text": {},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
    "metadata": {},
}
"""Fields that a response repeats from its request → their defaults."""
_encode: Final = msgspec.json.Encoder().encode


class _Count(msgspec.Struct):
    input_tokens: int


_decode_count: Final = msgspec.json.Decoder(_Count).decode


def new_id(prefix: str) -> str:
    """A new id in OpenAI's format: the prefix shows the kind."""
    return f"{prefix}_{secrets.token_hex(16)}"


# ---------------------------------------------------------------------------------------------------------- response


def _echo_of(fields: Fields) -> Json:
    """The request's fields that a response object repeats, except parts cut out of a large body. Raises InvalidRequestError."""
    echo = {**_ECHOED}
    for name in _ECHOED.keys() & fields.keys():
        try:
            value = msgspec.json.decode(fields[name])
        except UNREADABLE as error:
            raise InvalidRequestError(f"{name} can't be read: {error}.", code="invalid_json", param=name) from error
        if value is not None and (name == "text" or not may_be_cut(fields[name])):
            echo[name] = value
    reasoning, text = (value if isinstance(value := echo[name], dict) else {} for name in ("reasoning", "text"))
    echo["reasoning"] = {name: reasoning.get(name) for name in ("effort", "summary")}
    shape = text.get("format")
    if may_be_cut(fields.get("text", b"")) and isinstance(shape, dict):  # a large schema was cut out
        text = {"format": {**{name: shape.get(name) for name in ("type", "name", "strict")}, "schema": {}}}
    plain = {"format": {"type": "text"}, "verbosity": "medium"}
    echo["text"] = {name: value if text.get(name) is None else text[name] for name, value in plain.items()}
    return echo


def _usage_fields(usage: chat.Usage | None) -> Json | None:
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
class ResponseTemplate:
    """A response without an answer yet: its id, its time, and the repeated fields of its request."""

    id: str
    created_at: int  # Unix seconds
    echo: Json
    times: Times | None = None  # of the request

    @classmethod
    def of(cls, fields: Fields, times: Times | None = None) -> ResponseTemplate:
        """The template for a request that has just come. Raises InvalidRequestError."""
        return cls(new_id("resp"), int(time.time()), _echo_of(fields), times)

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
        """The response object. `model`: the name if the request has none; `measured`: set iff the response is over."""
        response: Json = {
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
            "usage": None if measured is None else _usage_fields(measured.usage),
        }
        if measured is not None and self.times is not None:
            response["metrics"] = metrics_of(measured, self.times, time.monotonic())
        return response


@dataclass(frozen=True, slots=True)
class ResponseAnswers:
    """The `AnswerTranslation` of one request."""

    template: ResponseTemplate
    client_tools: ClientTools
    ignored: Sequence[str]
    names = NAMES
    content_type = b"application/json"
    stream_content_type = EVENTS

    def answer(self, body: bytes) -> bytes:
        """See `AnswerTranslation`."""
        answer = chat.decode_completion(body)
        choice = answer.choices[0]
        message, incomplete = choice.message, _CUT_SHORT.get(choice.finish_reason)
        status: Status = "completed" if incomplete is None else "incomplete"
        texts: tuple[tuple[Kind, str], ...] = (
            ("reasoning", message.thought),
            ("text", message.content or ""),
            ("refusal", message.refusal or ""),
        )
        items: list[_TextItem | _CallItem] = [
            _TextItem(kind, 0, text, _logprobs_of(choice) if kind == "text" else ()) for kind, text in texts if text
        ]
        items += [
            _CallItem(call, 0, self.client_tools, call.function.arguments or "") for call in message.tool_calls or ()
        ]
        output = [item.item("completed" if item is not items[-1] else status) for item in items]
        measured = chat.Measured(answer.usage, answer.timings)
        return _encode(
            self.template.response(status, output, model=answer.model, measured=measured, incomplete=incomplete)
        )

    def stream(self) -> ResponseStream:
        """See `AnswerTranslation`."""
        return ResponseStream(self.template, self.client_tools)


@dataclass(frozen=True, slots=True)
class CountAnswers:
    """The `AnswerTranslation` of a token count."""

    ignored: Sequence[str]
    names = NAMES
    content_type = b"application/json"
    stream_content_type = EVENTS

    def answer(self, body: bytes) -> bytes:
        """See `AnswerTranslation`."""
        count = decoded_answer(_decode_count, body, "count of tokens").input_tokens
        return _encode(ResponseTokens("response.input_tokens", count))

    def stream(self) -> StreamTranslation:
        """Token counts are never streamed. Raises UpstreamError."""
        raise UpstreamError("The worker answered with a stream where its count of tokens was asked for.")


# ------------------------------------------------------------------------------------------------------------- items


def _logprobs_of(choice: chat.Choice) -> list[JsonValue]:
    """The log probabilities of the text's tokens, in the format of both APIs."""
    tokens = choice.logprobs.get("content") if isinstance(choice.logprobs, dict) else None
    return tokens if isinstance(tokens, list) else []


class _TextItem:
    """An item with a growing text: reasoning, or a message."""

    def __init__(self, kind: Kind, index: int, text: str = "", logprobs: Sequence[JsonValue] = ()) -> None:
        self.kind = kind
        self._id = new_id(_PREFIXES[kind])
        self._index = index
        self._place: Json = {"item_id": self._id, "output_index": index, "content_index": 0}
        self._pieces = [text]
        self._logprobs = [*logprobs]

    def start_events(self) -> list[Json]:
        """The events at the item's beginning."""
        item = self._item_with([], "in_progress")
        return [
            {"type": "response.output_item.added", "output_index": self._index, "item": item},
            {"type": "response.content_part.added", **self._place, "part": self._current_part()},
        ]

    def delta_event(self, piece: str, logprobs: Sequence[JsonValue]) -> Json:
        """The event for the text's next piece."""
        self._pieces.append(piece)
        self._logprobs += logprobs
        event = {"type": f"{_EVENTS[self.kind]}.delta", **self._place, "delta": piece}
        return event | self._logprobs_field(logprobs)

    def end_events(self, status: Status) -> list[Json]:
        """The events at the item's end."""
        name, part = "refusal" if self.kind == "refusal" else "text", self._current_part()
        done = {"type": f"{_EVENTS[self.kind]}.done", **self._place, name: part[name]}
        return [
            done | self._logprobs_field(self._logprobs),
            {"type": "response.content_part.done", **self._place, "part": part},
            {"type": "response.output_item.done", "output_index": self._index, "item": self.item(status)},
        ]

    def item(self, status: Status) -> Json:
        """The item in its current state."""
        return self._item_with([self._current_part()], status)

    def _item_with(self, parts: list[Json], status: Status) -> Json:
        if self.kind == "reasoning":
            return {"id": self._id, "type": "reasoning", "summary": [], "content": parts, "status": status}
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": parts}

    def _current_part(self) -> Json:
        text = "".join(self._pieces)
        match self.kind:
            case "reasoning":
                return {"type": "reasoning_text", "text": text}
            case "refusal":
                return {"type": "refusal", "refusal": text}
            case "text":
                return {"type": "output_text", "annotations": [], "logprobs": [*self._logprobs], "text": text}

    def _logprobs_field(self, logprobs: Sequence[JsonValue]) -> Json:
        return {"logprobs": [*logprobs]} if self.kind == "text" else {}


class _CallItem:
    """A function call with growing arguments."""

    def __init__(self, call: chat.ToolCall, index: int, client_tools: ClientTools, arguments: str = "") -> None:
        name = call.function.name or ""
        self.number = call.index
        self._tool = client_tools.get(name, ClientTool(None, name))
        self._id = new_id("ctc" if self._tool.is_custom else "fc")
        self._index = index
        self._call_id = call.id or new_id("call")
        self._pieces = [arguments]

    def start_events(self) -> list[Json]:
        """The event at the call's beginning."""
        return [{"type": "response.output_item.added", "output_index": self._index, "item": self.item("in_progress")}]

    def delta_events(self, piece: str) -> list[Json]:
        """The event for the next piece of the arguments; none for a custom tool, whose text needs the complete arguments."""
        self._pieces.append(piece)
        return [] if self._tool.is_custom else [self._call_event("function_call_arguments.delta", delta=piece)]

    def end_events(self, status: Status) -> list[Json]:
        """The events at the call's end."""
        item = self.item(status)
        done: Json = {"type": "response.output_item.done", "output_index": self._index, "item": item}
        if not self._tool.is_custom:
            whole = self._call_event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
            return [whole, done]
        delta = self._call_event("custom_tool_call_input.delta", delta=item["input"])
        return [delta, self._call_event("custom_tool_call_input.done", input=item["input"]), done]

    def item(self, status: Status) -> Json:
        """The call in its current state."""
        tool, arguments = self._tool, "".join(self._pieces)
        item: Json = {"id": self._id, "type": "function_call", "status": status, "call_id": self._call_id}
        item |= (
            {"type": "custom_tool_call", "input": text_of(arguments)} if tool.is_custom else {"arguments": arguments}
        )
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        return item | {"name": tool.name}

    def _call_event(self, kind: str, **fields: object) -> Json:
        return {"type": f"response.{kind}", "item_id": self._id, "output_index": self._index, **fields}


# ------------------------------------------------------------------------------------------------------------ stream


class ResponseStream(chat.ChatStream):
    """The translation of one stream."""

    def __init__(self, template: ResponseTemplate, client_tools: ClientTools) -> None:
        super().__init__()
        self._template = template
        self._client_tools = client_tools
        self._model = ""
        self._number = 0
        self._output: list[Json] = []
        self._open_item: _TextItem | _CallItem | None = None
        self._finish_reason: str | None = None
        self._measured = chat.Measured()

    def event(self, answer: chat.Answer) -> bytes:
        """See ChatStream."""
        events = self._start_events(answer.model)
        self._measured.add(answer, time.monotonic)
        for choice in answer.choices:
            delta = choice.delta
            events += self._text_events("reasoning", delta.thought)
            events += self._text_events("text", delta.content or "", _logprobs_of(choice))
            events += self._text_events("refusal", delta.refusal or "")
            for piece in delta.tool_calls or []:
                events += self._call_events(piece)
            self._finish_reason = choice.finish_reason or self._finish_reason
        return self._encode_events(events)

    def failed(self, error: WorkerAnswerError) -> bytes:
        """See ChatStream: `response.failed`."""
        shown: Json = {"code": "server_error" if error.code == _UNNAMED else error.code, "message": error.message}
        output = self._output if self._open_item is None else [*self._output, self._open_item.item("incomplete")]
        response = self._template.response("failed", output, model=self._model, measured=self._measured, error=shown)
        return self._encode_events([*self._start_events(), {"type": "response.failed", "response": response}])

    def over(self) -> bytes:
        """See ChatStream: `response.completed`, or `response.incomplete`."""
        incomplete = _CUT_SHORT.get(self._finish_reason)
        status: Status = "completed" if incomplete is None else "incomplete"
        events = self._start_events() + self._close_item(status)
        response = self._template.response(
            status, self._output, model=self._model, measured=self._measured, incomplete=incomplete
        )
        return self._encode_events([*events, {"type": f"response.{status}", "response": response}])

    def _start_events(self, model: str = "") -> list[Json]:
        """The first events of the stream, before any other event."""
        self._model = self._model or model
        if self._number:
            return []
        begun = self._template.response("in_progress", model=self._model)
        return [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]

    def _text_events(self, kind: Kind, piece: str, logprobs: Sequence[JsonValue] = ()) -> list[Json]:
        item, events = self._open_item, list[Json]()
        is_continued = isinstance(item, _TextItem) and item.kind == kind
        if not piece and not (logprobs and is_continued):  # a token may be a part of a character: logprobs, but no text
            return []
        if not isinstance(item, _TextItem) or not is_continued:
            events = self._close_item()
            item = self._open_item = _TextItem(kind, len(self._output))
            events += item.start_events()
        self.keeps(piece)
        for each in logprobs:
            self.keeps(str(each))
        return [*events, item.delta_event(piece, logprobs)]

    def _call_events(self, piece: chat.ToolCall) -> list[Json]:
        item, events = self._open_item, list[Json]()
        if not isinstance(item, _CallItem) or item.number != piece.index:
            if not piece.function.name:
                raise UpstreamError("The worker's stream goes on with a tool call that has no name, or was over.")
            events = self._close_item()
            item = self._open_item = _CallItem(piece, len(self._output), self._client_tools)
            events += item.start_events()
        arguments = piece.function.arguments
        self.keeps(arguments or "")
        return [*events, *item.delta_events(arguments)] if arguments else events

    def _close_item(self, status: Status = "completed") -> list[Json]:
        """The events that end the open item, if any."""
        item, self._open_item = self._open_item, None
        if item is None:
            return []
        self._output.append(item.item(status))
        return item.end_events(status)

    def _encode_events(self, events: list[Json]) -> bytes:
        begin, self._number = self._number, self._number + len(events)
        return b"".join(
            frames.event(str(fields["type"]), fields | {"sequence_number": number})
            for number, fields in enumerate(events, begin)
        )
