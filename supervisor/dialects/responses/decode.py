"""Translates requests for a response, and for its token count, into chat completions. A null field counts as missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, get_args

import msgspec

from supervisor.catalog.models.rewrite import Fields
from supervisor.dialects.chat import PATH
from supervisor.dialects.responses.encode import CountAnswers, ResponseAnswers, ResponseTemplate
from supervisor.dialects.responses.items import messages_of
from supervisor.dialects.responses.tools import ClientTools, tools_of
from supervisor.dialects.responses.types import (
    AdditionalTools,
    InputMessage,
    Item,
    JsonFormat,
    ResponseRequest,
    ResponseTokensRequest,
    SchemaFormat,
    StorageFields,
)
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.typed import UNREADABLE, Reader, Remedy, encoded, is_given
from supervisor.gateway.filters.counting import COUNT
from supervisor.gateway.filters.translation import TargetModel, Times

UNSUPPORTED: Final = "unsupported_parameter"
OFF: Final = "responses are not kept here (limits.responses_mib is 0)."
_REFUSED: Final = {
    "previous_response_id": f"{OFF} Send the whole conversation as input.",
    "conversation": "conversations are not kept here. Send the whole one as input, or previous_response_id.",
    "prompt": "prompt templates are not kept here. Send their text as instructions and input.",
    "background": f"{OFF} Send the request without it, or with stream.",
}
"""Fields that a translation can't support. The first and the last get here only if no responses are stored."""
_REMEDIES: Final = (
    Remedy("input", "{place}: expected a text, or a list of items."),
    Remedy(
        r"input\[\]\.type",
        "{place}: items can't be referred to here. Send the item itself, or previous_response_id.",
        UNSUPPORTED,
    ),
    Remedy(
        r"input\[\]\..*\[\]\.file_id",
        "{place}: no files are kept here. Send the image itself as image_url, as data:image/png;base64,<content>.",
        UNSUPPORTED,
    ),
    Remedy(
        r"input\[\]\.(content|output)\[\]\.type",
        "{place}: expected a part that this model takes: input_text, output_text, refusal, input_image or input_audio. No model "
        "here opens files: send the text of an input_file as input_text.",
        UNSUPPORTED,
    ),
    Remedy(
        r".*tools\[\]\.type",
        "{place}: expected a tool that this model can use. Leave any other out; it calls functions, which you run.",
        UNSUPPORTED,
    ),
    Remedy(r"tool_choice\.type", "{place}: this model calls functions only; no other can be chosen.", UNSUPPORTED),
    Remedy(r"text\.format\.type", "{place}: a format of answers can be text, json_object or json_schema.", UNSUPPORTED),
)
_LEFT_OUT: Final = ("web_search", "image_generation", "local_shell", "tool_search")
"""Prefixes of tool types that Codex always offers, needed or not."""
_ITEMS: Final = {kind.__struct_config__.tag for kind in get_args(Item)} | {"item_reference"}
_NULL: Final = msgspec.Raw(b"null")
_MESSAGE: Final = msgspec.Raw(b'"message"')
_STORAGE_FIELDS: Final = ("previous_response_id", "store", "background")
_LOGPROBS: Final = "message.output_text.logprobs"
_UNTHINKING: Final = frozenset({"none", "minimal"})


def _error_param(place: str) -> str:
    """The field to name in an error about an unknown type: the object with that type."""
    return place.removesuffix(".type")


_read_storage_fields: Final = Reader(StorageFields)
_read_request: Final = Reader(ResponseRequest, *_REMEDIES, param=_error_param)
_read_count_request: Final = Reader(ResponseTokensRequest, *_REMEDIES, param=_error_param)
_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_fields: Final = msgspec.json.Decoder(Fields).decode
_value: Final = msgspec.json.Decoder().decode


def unsupported(param: str) -> InvalidRequestError:
    """The error for a field that OpenAI's API has and llmux doesn't support."""
    return InvalidRequestError(f"{param}: {_REFUSED[param]}", code=UNSUPPORTED, param=param)


def storage_fields_of(fields: Fields) -> StorageFields:
    """The request's fields about the previous response and about storing its own. Raises InvalidRequestError."""
    return _read_storage_fields({name: fields[name] for name in _STORAGE_FIELDS if name in fields})[0]


class CreateResponse:
    """See `Translation` and `TargetedTranslation`. Its answers have metrics only if `times` is given."""

    path = PATH

    def __init__(self, times: Times | None = None) -> None:
        self._times = times

    def of(self, target: TargetModel, times: Times) -> CreateResponse:
        """See `TargetedTranslation`."""
        return CreateResponse(times)

    def request(self, fields: Fields) -> tuple[Fields, ResponseAnswers]:
        """See `Translation`."""
        known, ignored = _without_unknown(fields)
        request, unused = _read_request(known)
        chat_fields, client_tools = _chat_fields(request, ignored)
        for name in ("temperature", "top_p", "user"):
            if is_given(getattr(request, name)):
                chat_fields[name] = fields[name]
        if request.max_output_tokens is not None:
            chat_fields["max_tokens"] = request.max_output_tokens
        if request.stream:
            chat_fields |= {"stream": True, "stream_options": {"include_usage": True}}
        include = request.include or []
        if _LOGPROBS in include:
            chat_fields |= {"logprobs": True} | ({"top_logprobs": request.top_logprobs} if request.top_logprobs else {})
        elif request.top_logprobs:
            ignored.append("top_logprobs")
        ignored += [f"include[{name}]" for name in include if name != _LOGPROBS]
        options = request.stream_options
        if options is not None and options.include_obfuscation not in (None, False):  # llmux's streams have none
            ignored.append("stream_options.include_obfuscation")
        if request.service_tier not in (None, "auto", "default"):
            ignored.append("service_tier")
        template = ResponseTemplate.of(fields, self._times)
        return encoded(chat_fields), ResponseAnswers(template, client_tools, [*ignored, *unused])


class CountTokens:
    """See `Translation`."""

    path = COUNT

    def request(self, fields: Fields) -> tuple[Fields, CountAnswers]:
        """See `Translation`."""
        known, ignored = _without_unknown(fields)
        request, unused = _read_count_request(known)
        chat_fields, _ = _chat_fields(request, ignored)
        return encoded(chat_fields), CountAnswers([*ignored, *unused])


def _chat_fields(request: ResponseTokensRequest, ignored: list[str]) -> tuple[dict[str, object], ClientTools]:
    """The chat completion's fields that affect its token count, and the client's names of its tools.

    Adds to `ignored`. Raises InvalidRequestError.
    """
    for name in _REFUSED:
        if getattr(request, name) not in (None, False):
            raise unsupported(name)
    items = [InputMessage("user", request.input)] if isinstance(request.input, str) else request.input or []
    messages = messages_of(items, request.instructions)
    if not messages:
        raise InvalidRequestError("input is missing: send a text, or a list of items.", param="input")
    chat: dict[str, object] = {} if request.model is None else {"model": request.model}
    chat["messages"] = messages
    brought = [tool for item in items if isinstance(item, AdditionalTools) for tool in item.tools]
    names = [name for name in ignored if name.startswith("tools")]
    tools, client_tools = tools_of([*(request.tools or ()), *brought], request.tool_choice, names)
    chat |= tools
    if tools and request.parallel_tool_calls is not None:
        chat["parallel_tool_calls"] = request.parallel_tool_calls
    if request.store:
        ignored.append("store")
    if request.truncation == "auto":
        ignored.append("truncation")
    if (text := request.text) is not None:
        chat |= _response_format(text.format)
        if text.verbosity not in (None, "medium"):
            ignored.append("text.verbosity")
    if request.reasoning is not None and (effort := request.reasoning.effort) is not None:
        chat["reasoning_effort"] = "low" if effort == "minimal" else effort  # the lowest level that models support
        chat["chat_template_kwargs"] = {"enable_thinking": effort not in _UNTHINKING}
    return chat, client_tools


def _response_format(wanted: object) -> dict[str, object]:
    """The chat completion's field for the format of the answer, if any."""
    match wanted:
        case JsonFormat():
            return {"response_format": {"type": "json_object"}}
        case SchemaFormat():
            more = {"description": wanted.description, "strict": wanted.strict}
            schema: dict[str, object] = {"name": wanted.name, "schema": wanted.schema}
            schema |= {name: value for name, value in more.items() if is_given(value)}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {}


# ------------------------------------------------------------------------------------------------------- unknown types


def _without_unknown(fields: Fields) -> tuple[Fields, list[str]]:
    """The request with nulls in place of items and tools that chats don't support, and their names.

    A message may leave out its type.
    """
    names: list[str] = []

    def item(fields: Fields) -> Fields | None:
        kind = _type_of(fields)
        if kind is None and "role" in fields:
            return fields | {"type": _MESSAGE}
        if kind == "additional_tools":
            return fields | {"tools": _change_objects(fields.get("tools", _NULL), tool)}
        if not isinstance(kind, str) or kind in _ITEMS:
            return fields
        names.append(f"input[{kind}]")
        return None

    def tool(fields: Fields) -> Fields | None:
        kind = _type_of(fields)
        if kind == "namespace":
            return fields | {"tools": _change_objects(fields.get("tools", _NULL), tool)}
        for left_out in _LEFT_OUT:
            if isinstance(kind, str) and kind.startswith(left_out):
                names.append(f"tools[{left_out}]")
                return None
        return fields

    changes = {"input": item, "tools": tool}
    return {
        name: _change_objects(raw, changes[name]) if name in changes else raw for name, raw in fields.items()
    }, names


def _change_objects(objects: msgspec.Raw, change: Callable[[Fields], Fields | None]) -> msgspec.Raw:
    """Change each object in a list. Any other value stays: the reader reports the error."""
    if bytes(memoryview(objects)[:1]) != b"[":
        return objects
    try:
        items = [change(_fields(item)) if bytes(memoryview(item)[:1]) == b"{" else item for item in _items(objects)]
        return msgspec.Raw(msgspec.json.encode(items))
    except UNREADABLE:
        return objects


def _type_of(fields: Fields) -> object:
    return _value(fields.get("type", _NULL))
