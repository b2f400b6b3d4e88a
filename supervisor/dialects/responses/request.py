"""A request for a response, as one for a chat completion.

Each field is mapped, refused, or named as ignored: `Asked` knows which ones nobody looked at. What is null is absent.
"""

from __future__ import annotations

from typing import Final

import msgspec
from pydantic import JsonValue

from supervisor.catalog.rewrite import Fields
from supervisor.dialects.responses.checks import Json, an_object, flag, name, one_of, others, shown, unsupported
from supervisor.dialects.responses.items import messages_of
from supervisor.dialects.responses.state import FIELDS as STATE_FIELDS
from supervisor.dialects.responses.state import stateless
from supervisor.dialects.responses.tools import Tools, tools_of
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.outline import may_be_cut

NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "chat_template_kwargs": "reasoning.effort",
    "response_format": "text.format",
    "logprobs": "include",
}
"""Canonical fields → what they are called here."""
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_UNTHINKING: Final = frozenset({"none", "minimal"})


class Asked:
    """A request's fields, decoded as they are asked for, and which of them have no effect."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._seen: set[str] = set()
        self._ignored: list[str] = []

    def take(self, field: str) -> JsonValue:
        """Its value; None where it is null or missing. Raises InvalidRequestError for one that can't be read."""
        self._seen.add(field)
        raw = self._fields.get(field)
        if raw is None:
            return None
        try:
            value: JsonValue = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"{field} can't be read: {error}.", code="invalid_json", param=field) from error
        return value

    def take_object(self, field: str) -> Json:
        """The same of one that must be an object; empty where it is missing."""
        value = self.take(field)
        return {} if value is None else an_object(value, field)

    def ignore(self, *names: str) -> None:
        """These have no effect."""
        self._ignored += names

    def ignore_rest(self, field: str, value: Json, *known: str) -> None:
        """All of an object has none but what is known."""
        self.ignore(*others(value, field, *known))

    def echo(self, field: str) -> JsonValue:
        """The value as the answer repeats it: not if parts of it are elsewhere while the body is read."""
        raw = self._fields.get(field)
        return None if raw is None or may_be_cut(raw) else self.take(field)

    @property
    def ignored(self) -> list[str]:
        """All that has no effect, unknown fields included."""
        unknown = (key for key, raw in self._fields.items() if key not in self._seen and bytes(raw) != b"null")
        return [*self._ignored, *unknown]


def conversation(asked: Asked) -> tuple[Json, Tools]:
    """What a chat is about, and how its answer is to be: the fields that matter when its tokens are counted.

    Raises InvalidRequestError.
    """
    asked.ignore(*stateless({field: asked.take(field) for field in STATE_FIELDS}))
    request: Json = {}
    if (model := asked.take("model")) is not None:
        request["model"] = model
    messages, unused, more = messages_of(asked.take("input"), asked.take("instructions"))
    asked.ignore(*unused)
    if not messages:
        raise InvalidRequestError("input is missing: send a text, or a list of items.", param="input")
    request["messages"] = [*messages]
    tools = tools_of(asked.take("tools"), asked.take("tool_choice"), more)
    parallel = asked.take("parallel_tool_calls")
    asked.ignore(*tools.ignored)
    if parallel is not None:
        flag(parallel, "parallel_tool_calls")
    if tools.functions:
        request |= {"tools": tools.functions, "tool_choice": tools.choice}
        if parallel is not None:
            request["parallel_tool_calls"] = parallel
    request |= _text(asked) | _reasoning(asked)
    if (truncation := asked.take("truncation")) is not None:
        one_of(truncation, ("auto", "disabled"), "truncation")
        asked.ignore(*(["truncation"] if truncation == "auto" else []))
    return request, tools


def encoded(request: Json) -> Fields:
    """The fields as they go on."""
    return {key: msgspec.Raw(msgspec.json.encode(value)) for key, value in request.items()}


def _text(asked: Asked) -> Json:
    """The answer's format."""
    value = asked.take_object("text")
    verbosity = value.get("verbosity")
    asked.ignore_rest("text", value, "format", *(["verbosity"] if verbosity == "medium" else []))
    if (found := value.get("format")) is None:
        return {}
    given = an_object(found, "text.format")
    known = ("type", "name", "schema", "description", "strict") if given.get("type") == "json_schema" else ("type",)
    asked.ignore_rest("text.format", given, *known)
    match given.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            schema: Json = {
                "name": name(given.get("name"), "text.format.name"),
                "schema": an_object(given.get("schema"), "text.format.schema"),
            }
            schema |= {key: given[key] for key in ("description", "strict") if given.get(key) is not None}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case kind:
            message = f"{shown(kind)} is no format of answers here; it can be text, json_object or json_schema."
            raise unsupported("text.format", message)


def _reasoning(asked: Asked) -> Json:
    """Whether to think, in the words of chat templates that can be told, and how much, in OpenAI's."""
    value = asked.take_object("reasoning")
    asked.ignore_rest("reasoning", value, "effort")
    if value.get("effort") is None:
        return {}
    effort = one_of(value["effort"], _EFFORTS, "reasoning.effort")
    return {
        "reasoning_effort": "low" if effort == "minimal" else effort,  # the least that models with levels know
        "chat_template_kwargs": {"enable_thinking": effort not in _UNTHINKING},
    }
