"""`POST /v1/responses` as a chat completion: the fields that an answer needs, and what its answers become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.dialects import chat
from supervisor.dialects.responses.answer import Envelope
from supervisor.dialects.responses.checks import Json, a_list, count, flag, text
from supervisor.dialects.responses.request import NAMES, Asked, conversation, encoded
from supervisor.dialects.responses.stream import ResponseStream
from supervisor.dialects.responses.tools import Owns
from supervisor.gateway.filters.filters import EVENTS
from supervisor.gateway.filters.translation import TargetModel, Times

_ONLY_TOLD: Final = ("safety_identifier", "prompt_cache_key", "max_tool_calls")
"""They say something to whoever runs the API, or about tools that are not called here. The answer repeats them."""
_LOGPROBS: Final = "message.output_text.logprobs"


class ResponseAnswers:
    """What the answers to one request become; see `AnswerTranslation`."""

    names = NAMES
    content_type = b"application/json"
    stream_content_type = EVENTS

    def __init__(self, envelope: Envelope, owns: Owns, ignored: Sequence[str]) -> None:
        self.ignored = ignored
        self._envelope = envelope
        self._owns = owns

    def answer(self, body: bytes) -> bytes:
        """See `AnswerTranslation`."""
        return msgspec.json.encode(self._envelope.whole(chat.whole(body), self._owns))

    def stream(self) -> ResponseStream:
        """See `AnswerTranslation`."""
        return ResponseStream(self._envelope, self._owns)


class CreateResponse:
    """See `Translation` and `TargetedTranslation`. Its answers have no metrics where their times aren't known."""

    path = chat.PATH

    def __init__(self, times: Times | None = None) -> None:
        self._times = times

    def of(self, target: TargetModel, times: Times) -> CreateResponse:
        """See `TargetedTranslation`."""
        return CreateResponse(times)

    def request(self, fields: Fields) -> tuple[Fields, ResponseAnswers]:
        """See `Translation`."""
        asked = Asked(fields)
        request, tools = conversation(asked)
        for field in ("temperature", "top_p", "user"):
            if (value := asked.take(field)) is not None:
                request[field] = value
        if (most := asked.take("max_output_tokens")) is not None:
            request["max_tokens"] = count(most, "max_output_tokens", 1)
        request |= _logprobs(asked)
        stream, options = asked.take("stream"), asked.take_object("stream_options")
        if stream is not None and flag(stream, "stream"):
            request |= {"stream": True, "stream_options": {"include_usage": True}}
        is_plain = options.get("include_obfuscation") is False  # as all streams are here
        asked.ignore_rest("stream_options", options, *(["include_obfuscation"] if is_plain else []))
        asked.ignore(*(field for field in _ONLY_TOLD if asked.take(field) is not None))
        asked.ignore(*(["service_tier"] if asked.take("service_tier") not in (None, "auto", "default") else []))
        envelope = Envelope.of(echo_of(asked), self._times)
        return encoded(request), ResponseAnswers(envelope, tools.owns, asked.ignored)


def _logprobs(asked: Asked) -> Json:
    """Where `include` asks for them."""
    given = asked.take("include")
    include = [] if given is None else [text(one, "include") for one in a_list(given, "include")]
    top = asked.take("top_logprobs")
    asked.ignore(*(f"include[{one}]" for one in include if one != _LOGPROBS))
    if top is not None:
        count(top, "top_logprobs")
    if _LOGPROBS not in include:
        asked.ignore(*(["top_logprobs"] if top else []))
        return {}
    return {"logprobs": True} | ({"top_logprobs": top} if top else {})


def echo_of(asked: Asked) -> Json:
    """What the response object repeats of its request, with what holds for the rest."""
    reasoning, tools = asked.echo("reasoning"), asked.echo("tools")
    thought = reasoning if isinstance(reasoning, dict) else {}
    asked.take_object("metadata")  # which it must be
    return {
        "instructions": asked.echo("instructions"),
        "max_output_tokens": asked.echo("max_output_tokens"),
        "max_tool_calls": asked.echo("max_tool_calls"),
        "model": asked.echo("model"),
        "parallel_tool_calls": asked.take("parallel_tool_calls") is not False,
        "prompt_cache_key": asked.echo("prompt_cache_key"),
        "reasoning": {key: thought.get(key) for key in ("effort", "summary")},
        "safety_identifier": asked.echo("safety_identifier"),
        "temperature": asked.echo("temperature"),
        "text": _text_echo(asked),
        "tool_choice": asked.echo("tool_choice") or "auto",
        "tools": [] if tools is None else tools,
        "top_logprobs": asked.echo("top_logprobs") or 0,
        "top_p": asked.echo("top_p"),
        "truncation": asked.echo("truncation") or "disabled",
        "user": asked.echo("user"),
        "metadata": asked.echo("metadata") or {},
    }


def _text_echo(asked: Asked) -> Json:
    """`text` with what holds for what it leaves out."""
    told, given = asked.echo("text"), asked.take_object("text")
    found: Json = {"format": {"type": "text"}, "verbosity": "medium"}
    schema = given.get("format")
    if told is None and isinstance(schema, dict):  # a large one, of which no more is at hand
        return found | {"format": {key: schema.get(key) for key in ("type", "name", "strict")} | {"schema": {}}}
    return found | {key: given[key] for key in found if given.get(key) is not None}
