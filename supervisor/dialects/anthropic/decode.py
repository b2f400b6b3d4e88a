"""Translates requests to `/v1/messages`, and to its token count, into chat completions.

The content of a message is a list of blocks. Consecutive messages of one role become one message, as in Anthropic's API: many
chat templates need alternating roles. Tool results become messages of their own, before the other blocks of the user's
message; images in tool results become parts of that message. The chat template decides whether the model sees earlier reasoning.

Texts may contain marks (see `gateway.filters.translation`), so only line breaks join texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from supervisor.catalog.models.rewrite import Fields
from supervisor.dialects import chat
from supervisor.dialects.anthropic import client_tools, types
from supervisor.dialects.anthropic.encode import MessageAnswers, TokenCounts
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.typed import Reader, Remedy, encoded, is_given, is_null, top
from supervisor.gateway.filters.counting import COUNT
from supervisor.gateway.filters.translation import AnswerTranslation

Json = dict[str, object]
_SAME: Final = ("model", "max_tokens", "temperature", "top_p", "top_k")
_MISSING: Final = "missing_parameter"
_UNSUPPORTED: Final = "unsupported_parameter"
_REMEDIES: Final = (
    Remedy("messages", "messages: the field is missing.", _MISSING, "missing"),
    Remedy("max_tokens", "max_tokens: missing; say how many tokens the answer may have.", _MISSING, "missing"),
    Remedy(r".*\.role", '{place}: the role {got!r} is not supported; use "user", "assistant", or "system".'),
    Remedy(r".*\.media_type", "{place}: a picture needs a media type such as image/png."),
    Remedy(r".*\.source\.type", "{place}: {got!r} can't be used; send base64 and its `data`.", _UNSUPPORTED),
    Remedy(r".*\.source\.\w+", "{place}: missing; send base64 and its `data`.", _UNSUPPORTED, "missing"),
    Remedy(r"(messages|system)\b.*\]\.type", "{place}: no {got!r} block can be here; leave it out.", _UNSUPPORTED),
    Remedy(r"output_.*format\.\w+", '{place}: a format is of type "json_schema" and has a `schema`.', _UNSUPPORTED),
    Remedy("container", "container: no model here runs code in one; leave it out.", _UNSUPPORTED),
    Remedy("mcp_servers", "mcp_servers: no model here connects to them; offer their tools in `tools`.", _UNSUPPORTED),
    Remedy(r"context_.*\.type", "context_management: shorten the conversation yourself.", _UNSUPPORTED, "wrong"),
)
_read_message: Final = Reader(types.MessageRequest, *_REMEDIES, index="", param=top)
_read_count: Final = Reader(types.CountRequest, *_REMEDIES, index="", param=top)


class Messages:
    """`POST /v1/messages`."""

    path = chat.PATH

    def request(self, fields: Fields) -> tuple[Fields, AnswerTranslation]:
        """See Translation."""
        request, unknown = _read_message(fields)
        ignored = (*unknown, *_without_effect(request))
        return _chat_completion(request, fields), MessageAnswers(
            request.model or "", request.stop_sequences or (), ignored
        )


class CountTokens:
    """`POST /v1/messages/count_tokens`, translated to the path on which llama.cpp's server counts a chat's tokens."""

    path = COUNT

    def request(self, fields: Fields) -> tuple[Fields, AnswerTranslation]:
        """See Translation."""
        request, unknown = _read_count(fields)
        return _chat_completion(request, fields), TokenCounts((*unknown, *_without_effect(request)))


def _without_effect(request: types.MessageFields) -> Iterator[str]:
    """Declared fields without effect; `Reader` lists the unknown fields."""
    if isinstance(request.messages[-1], types.AssistantMessageParam):
        yield "prefill"  # Anthropic's older models continue such a message
    if request.context_management is not None:
        yield "context_management"


def _chat_completion(request: types.MessageFields, fields: Fields) -> Fields:
    """The request's chat completion. Raises InvalidRequestError."""
    completion: Json = {name: fields[name] for name in _SAME if name in fields and not is_null(fields[name])}
    completion["messages"] = [*_chat_messages(request)]
    if request.stop_sequences:
        completion["stop"] = request.stop_sequences
    if isinstance(request, types.MessageRequest) and request.stream:
        completion |= {"stream": True, "stream_options": {"include_usage": True}}
    functions = [_function_fields(tool) for tool in request.tools or ()]
    if (choice := request.tool_choice) is not None:
        completion["tool_choice"] = "required" if choice.type in ("any", "tool") else choice.type
        if choice.disable_parallel_tool_use is not None:
            completion["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if choice.type == "tool":  # offer only that tool: not all workers support such a choice
            functions = [function for function in functions if function["name"] == choice.name]
            if not functions:
                message = f"tool_choice: its `name` is that of a tool; there is no {(choice.name or '')[:50]!r} here."
                raise InvalidRequestError(message, param="tool_choice")
    if functions:
        completion["tools"] = [{"type": "function", "function": function} for function in functions]
    if request.thinking is not None:
        completion["chat_template_kwargs"] = {"enable_thinking": request.thinking.type != "disabled"}
    output = (request.output_config and request.output_config.format) or request.output_format
    if output is not None:
        schema = {"name": "answer", "schema": output.schema, "strict": True}
        completion["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.metadata is not None and request.metadata.user_id is not None:
        completion["user"] = request.metadata.user_id
    return encoded(completion)


def _function_fields(tool: types.ToolParam) -> Json:
    kind = tool.type or "custom"
    schema: object = client_tools.schema_of(kind)
    if schema is None:
        if kind != "custom":
            message = f"tools: a {kind[:50]!r} runs at Anthropic; offer a tool of your own instead."
            raise InvalidRequestError(message, param="tools", code=_UNSUPPORTED)
        schema = tool.input_schema
        if not bytes(tool.input_schema):
            raise InvalidRequestError(f"tools: {tool.name[:50]!r} needs an `input_schema`.", param="tools")
    function = {"name": tool.name, "parameters": schema, "description": tool.description, "strict": tool.strict}
    return {name: value for name, value in function.items() if value is not None}


def _chat_messages(request: types.MessageFields) -> Iterator[Json]:
    if system := _joined_text(_blocks_of(request.system), "\n\n"):
        yield {"role": "system", "content": system}
    for role, turns in groupby(request.messages, type):
        blocks = [block for turn in turns for block in _blocks_of(turn.content)]
        if role is types.UserMessageParam:
            yield from _user_messages(blocks)
        elif role is types.AssistantMessageParam:
            yield _assistant_message(blocks)
        else:
            yield {"role": "system", "content": _joined_text(blocks, "\n\n")}


def _blocks_of(content: str | Sequence[types.Cacheable] | None) -> Sequence[types.Cacheable]:
    return [types.TextBlockParam(text=content)] if isinstance(content, str) else content or ()


def _joined_text(blocks: Iterable[types.Cacheable], between: str = "\n") -> str:
    return between.join(block.text for block in blocks if isinstance(block, types.TextBlockParam))


def _user_messages(blocks: Sequence[types.Cacheable]) -> Iterator[Json]:
    results = [block for block in blocks if isinstance(block, types.ToolResultBlockParam)]
    parts: list[Json] = []
    for result in results:
        content = _blocks_of(result.content)
        text = f"Error: {_joined_text(content)}" if result.is_error else _joined_text(content)
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": text}
        parts += _chat_parts(block for block in content if isinstance(block, types.ImageBlockParam))
    parts += _chat_parts(blocks)
    match parts:  # a single text as a string: some chat templates accept only that
        case []:
            if not results:
                yield {"role": "user", "content": ""}
        case [{"text": only}]:
            yield {"role": "user", "content": only}
        case _:
            yield {"role": "user", "content": parts}


def _chat_parts(blocks: Iterable[types.Cacheable]) -> Iterator[Json]:
    """Texts and images as parts of a chat message. An image may be a URL: the handling of chat completions checks URLs."""
    for block in blocks:
        match block:
            case types.TextBlockParam(text=text):
                yield {"type": "text", "text": text}
            case types.ImageBlockParam(source=types.URLImageSource(url=url)):
                yield {"type": "image_url", "image_url": {"url": url}}
            case types.ImageBlockParam(source=types.Base64ImageSource(media_type=kind, data=data)):
                yield {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def _assistant_message(blocks: Sequence[types.Cacheable]) -> Json:
    text = _joined_text(blocks)
    thoughts = [block.thinking for block in blocks if isinstance(block, types.ThinkingBlockParam)]
    calls = [_chat_call(block) for block in blocks if isinstance(block, types.ToolUseBlockParam)]
    message: Json = {"role": "assistant", "content": (text or None) if calls else text}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _chat_call(block: types.ToolUseBlockParam) -> Json:
    """An earlier tool call. Its `input` stays exactly as the client sent it."""
    try:
        arguments = str(block.input, "utf-8") if is_given(block.input) else "{}"
    except UnicodeDecodeError:
        arguments = ""
    if not arguments.startswith("{"):
        raise InvalidRequestError(
            "messages: the `input` of a tool_use block must be an object, in UTF-8.", param="messages"
        )
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
