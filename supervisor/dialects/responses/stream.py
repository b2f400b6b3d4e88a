"""A streamed chat completion as the events of a response.

The output grows item by item: an item begins with its first piece, and is done when another one begins or the stream ends.
Each event has its number, which stands at its end: there it is found when an error must follow it.
"""

from __future__ import annotations

import time
from typing import Final

from pydantic import JsonValue

from supervisor.dialects import chat
from supervisor.dialects.responses.answer import (
    Envelope,
    Kind,
    Status,
    call_id_of,
    call_item,
    item_id,
    logprobs_of,
    new_id,
    part,
    text_item,
    why_incomplete,
)
from supervisor.dialects.responses.checks import Json
from supervisor.dialects.responses.tools import Owns
from supervisor.errors import UpstreamError
from supervisor.gateway.filters import frames
from supervisor.gateway.upstream_error import WorkerAnswerError

_EVENTS: Final[dict[Kind, str]] = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "refusal": "response.refusal",
}
_UNNAMED: Final = "upstream_error"  # OpenAI's word for it within a response is another


class _Text:
    """An item with a text that grows: reasoning, or a message."""

    def __init__(self, kind: Kind, index: int) -> None:
        self.kind = kind
        self.id = item_id(kind)
        self.index = index
        self._pieces: list[str] = []
        self._logprobs: list[JsonValue] = []

    def begun(self) -> list[Json]:
        """The events at its beginning."""
        return [
            {
                "type": "response.output_item.added",
                "output_index": self.index,
                "item": text_item(self.kind, self.id, [], "in_progress"),
            },
            {"type": "response.content_part.added", **self._place(), "part": part(self.kind, "")},
        ]

    def grown(self, piece: str, logprobs: list[JsonValue]) -> Json:
        """The event of its next piece."""
        self._pieces.append(piece)
        self._logprobs += logprobs
        event: Json = {"type": f"{_EVENTS[self.kind]}.delta", **self._place(), "delta": piece}
        return event | self._known(logprobs)

    def ended(self, status: Status) -> list[Json]:
        """The events at its end."""
        whole = "".join(self._pieces)
        done: Json = {"type": f"{_EVENTS[self.kind]}.done", **self._place()}
        done["refusal" if self.kind == "refusal" else "text"] = whole
        item = self.item(status)
        return [
            done | self._known(self._logprobs),
            {
                "type": "response.content_part.done",
                **self._place(),
                "part": part(self.kind, whole, self._logprobs),
            },
            {"type": "response.output_item.done", "output_index": self.index, "item": item},
        ]

    def item(self, status: Status) -> Json:
        """As it is now."""
        parts: list[JsonValue] = [part(self.kind, "".join(self._pieces), self._logprobs)]
        return text_item(self.kind, self.id, parts, status)

    def _place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    def _known(self, logprobs: list[JsonValue]) -> Json:
        return {"logprobs": [*logprobs]} if self.kind == "text" else {}


class _Call:
    """A function call whose arguments grow."""

    def __init__(self, piece: chat.ToolCall, index: int, owns: Owns) -> None:
        self.number = piece.index
        self.id = call_id_of(piece.function.name or "", owns)
        self.index = index
        self._call_id = piece.id or new_id("call")
        self._name = piece.function.name or ""
        self._owns = owns
        self._is_custom = self._name in owns and owns[self._name].is_custom
        self._pieces: list[str] = []

    def is_continued_by(self, piece: chat.ToolCall) -> bool:
        """Is this a piece of the same call?"""
        return piece.index == self.number

    def begun(self) -> list[Json]:
        """The event at its beginning."""
        return [
            {"type": "response.output_item.added", "output_index": self.index, "item": self.item("in_progress")},
        ]

    def grown(self, piece: str) -> list[Json]:
        """The event of the next piece of its arguments. A custom tool's text is known when they are whole."""
        self._pieces.append(piece)
        return [] if self._is_custom else [self._event("function_call_arguments.delta", delta=piece)]

    def ended(self, status: Status) -> list[Json]:
        """The events at its end."""
        item = self.item(status)
        done: Json = {"type": "response.output_item.done", "output_index": self.index, "item": item}
        if not self._is_custom:
            said = self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
            return [said, done]
        said = self._event("custom_tool_call_input.delta", delta=item["input"])
        return [said, self._event("custom_tool_call_input.done", input=item["input"]), done]

    def item(self, status: Status) -> Json:
        """As it is now."""
        return call_item(self.id, self._name, self._call_id, "".join(self._pieces), status, self._owns)

    def _event(self, kind: str, **fields: JsonValue) -> Json:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **fields}


class ResponseStream(chat.ChatStream):
    """One stream; see `StreamTranslation`."""

    def __init__(self, envelope: Envelope, owns: Owns) -> None:
        super().__init__()
        self._envelope = envelope
        self._owns = owns
        self._model = ""
        self._number = 0
        self._output: list[Json] = []
        self._open: _Text | _Call | None = None
        self._finish_reason: str | None = None
        self._measured = chat.Measured()

    def event(self, answer: chat.Answer) -> bytes:
        """See ChatStream."""
        found = self._begun(answer.model)
        self._measured.add(answer, time.monotonic)
        for choice in answer.choices:
            said = choice.delta
            found += self._text("reasoning", said.thought)
            found += self._text("text", said.content or "", logprobs_of(choice))
            found += self._text("refusal", said.refusal or "")
            for piece in said.tool_calls or []:
                found += self._call(piece)
            self._finish_reason = choice.finish_reason or self._finish_reason
        return self._sent(found)

    def failed(self, error: WorkerAnswerError) -> bytes:
        """See ChatStream: `response.failed`."""
        found = self._begun()
        output = self._output if self._open is None else [*self._output, self._open.item("incomplete")]
        response = self._envelope.response(
            "failed",
            output,
            model=self._model,
            measured=self._measured,
            error={"code": "server_error" if error.code == _UNNAMED else error.code, "message": error.message},
        )
        return self._sent([*found, {"type": "response.failed", "response": response}])

    def over(self) -> bytes:
        """See ChatStream: `response.completed`, or `response.incomplete`."""
        incomplete = why_incomplete(self._finish_reason)
        status: Status = "completed" if incomplete is None else "incomplete"
        found = self._begun() + self._ended(status)
        response = self._envelope.response(
            status, self._output, model=self._model, measured=self._measured, incomplete=incomplete
        )
        return self._sent([*found, {"type": f"response.{status}", "response": response}])

    def _begun(self, model: str = "") -> list[Json]:
        """The events before all others."""
        self._model = self._model or model
        if self._number:
            return []
        begun = self._envelope.response("in_progress", model=self._model)
        return [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]

    def _text(self, kind: Kind, piece: str, logprobs: list[JsonValue] | None = None) -> list[Json]:
        item, found = self._open, list[Json]()
        is_continued = isinstance(item, _Text) and item.kind == kind
        if not piece and not (logprobs and is_continued):  # tokens within a character have probabilities as well
            return []
        if not isinstance(item, _Text) or not is_continued:
            found = self._ended()
            item = self._open = _Text(kind, len(self._output))
            found += item.begun()
        self.keeps(piece)
        for each in logprobs or ():
            self.keeps(str(each))
        return [*found, item.grown(piece, logprobs or [])]

    def _call(self, piece: chat.ToolCall) -> list[Json]:
        item, found = self._open, list[Json]()
        if not isinstance(item, _Call) or not item.is_continued_by(piece):
            if not piece.function.name:
                raise UpstreamError("The worker's stream goes on with a tool call that has no name, or was over.")
            found = self._ended()
            item = self._open = _Call(piece, len(self._output), self._owns)
            found += item.begun()
        arguments = piece.function.arguments
        self.keeps(arguments or "")
        return [*found, *item.grown(arguments)] if arguments else found

    def _ended(self, status: Status = "completed") -> list[Json]:
        """The end of the item that is open, if one is."""
        item, self._open = self._open, None
        if item is None:
            return []
        self._output.append(item.item(status))
        return item.ended(status)

    def _sent(self, events: list[Json]) -> bytes:
        begin, self._number = self._number, self._number + len(events)
        return b"".join(
            frames.event(str(fields["type"]), fields | {"sequence_number": number})
            for number, fields in enumerate(events, begin)
        )
