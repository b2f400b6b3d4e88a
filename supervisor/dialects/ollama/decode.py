"""Translates requests of `/api/chat`, `/api/generate`, `/api/embed` and `/api/embeddings` into canonical ones.

A chat without messages, or an empty prompt or input, only asks to load the model. The canonical request then makes the model
compute as little as possible: it waits in the queue, counts, and keeps its model loaded like every other request.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import msgspec

from supervisor.catalog.models.rewrite import Fields
from supervisor.dialects import chat
from supervisor.dialects.ollama import types
from supervisor.dialects.ollama.encode import Answers, Shape, VectorAnswers
from supervisor.dialects.openai.infill import PATH as INFILL
from supervisor.dialects.openai.infill import Infill
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.body import KEEP_ALIVE
from supervisor.gateway.body.tolerance import level_of
from supervisor.gateway.body.typed import Reader, Remedy, Sent, encoded, is_given
from supervisor.gateway.filters.translation import (
    AnswerTranslation,
    Chained,
    TargetedTranslation,
    TargetModel,
    Times,
    Translation,
)
from supervisor.gateway.identity.identity import LONGEST_KEEP_ALIVE_S

CHAT: Final = "/api/chat"
GENERATE: Final = "/api/generate"
EMBED: Final = "/api/embed"
EMBEDDINGS: Final = "/api/embeddings"
Json = dict[str, Any]
_ABSENT: Final = msgspec.Raw()
_S = TypeVar("_S", bound=Sent)
_EMPTY: Final = re.compile(rb'""|\[\s*\]|\{\s*\}')
_PART: Final = re.compile(r"([0-9.]+)([^0-9.]+)")
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_REMEDIES: Final = (
    Remedy(r"(messages\[\]\.)?images.*", 'Each of "images" must be a JPEG, PNG, WebP, GIF or BMP in base64.'),
    Remedy(
        "keep_alive",
        '"keep_alive" must be a number of seconds, or a duration such as "5m" (-1: for ever).',
        "invalid_keep_alive",
    ),
    Remedy(
        r"messages\[\]\.tool_calls.*",
        '"tool_calls" of a message must be a list of {{"function": {{"name": NAME, "arguments": {{…}}}}}}.',
    ),
    Remedy("think", '"think" must be true, false, "low", "medium", "high" or "max".'),
    Remedy("format", '"format" must be "json" or a JSON schema.'),
    Remedy("template", '"template" is not supported: a model\'s configuration chooses its template.'),
    Remedy("context", '"context" is not supported: send the conversation to /api/chat instead.'),
    Remedy(r"options\.num_predict", '"options.num_predict" must be a whole number.'),
)


def _error_param(place: str) -> str:
    """The field to name in an error: a field of the request, or `images` of a message."""
    return "images" if ".images" in place else place.partition("[")[0]


def _reader_for(kind: type[_S]) -> Reader[_S]:
    return Reader(kind, *_REMEDIES, index="[]", param=_error_param)


read_load: Final = _reader_for(types.OllamaLoad)
_read_chat: Final = _reader_for(types.OllamaChatRequest)
_read_generate: Final = _reader_for(types.OllamaGenerateRequest)
_read_embed: Final = _reader_for(types.OllamaEmbedRequest)
_read_embeddings: Final = _reader_for(types.OllamaEmbeddingsRequest)


def _read_request(reader: Reader[_S], fields: Fields) -> tuple[_S, list[str]]:
    """The request, and the names of fields without effect, except empty ones: Ollama's own client sends many."""
    request, ignored = reader(fields)
    return request, [name for name in ignored if name not in fields or not _is_empty(fields[name])]


def _is_empty(value: msgspec.Raw) -> bool:
    return _EMPTY.match(memoryview(value)) is not None


# -------------------------------------------------------------------------------------------------------- chats, prompts


@dataclass(frozen=True, slots=True)
class _FunctionTranslation:
    """A `Translation` and `TargetedTranslation` by a function."""

    path: str
    request: Callable[[Fields], tuple[Fields, AnswerTranslation]]

    def of(self, target: TargetModel, times: Times) -> Translation:
        """See TargetedTranslation."""
        return self


def _translate_chat(fields: Fields) -> tuple[Fields, Answers]:
    if is_load(CHAT, fields):
        return _translate_load("chat", fields)
    request, ignored = _read_request(_read_chat, fields)
    calls = _Calls()
    chat_fields = _common_fields(request, ignored)
    chat_fields["messages"] = [_chat_message(message, calls) for message in request.messages or ()]
    if is_given(request.tools):  # already in the canonical format
        chat_fields["tools"] = request.tools
    return _finish_request("chat", request, chat_fields, ignored)


def _translate_prompt(fields: Fields) -> tuple[Fields, Answers]:
    if is_load(GENERATE, fields):
        return _translate_load("generate", fields)
    request, ignored = _read_request(_read_generate, fields)
    chat_fields = _common_fields(request, ignored)
    system = [{"role": "system", "content": request.system}] if request.system else []
    chat_fields["messages"] = [
        *system,
        {"role": "user", "content": _content_with_images(request.prompt, request.images)},
    ]
    return _finish_request("generate", request, chat_fields, ignored)


def _translate_raw_prompt(fields: Fields) -> tuple[Fields, AnswerTranslation]:
    """A prompt without a template. With a suffix, the model fills in the text between prompt and suffix."""
    for name in ("images", "template", "context"):
        if is_given(value := fields.get(name, _ABSENT)) and not _is_empty(value):
            message = f'"{name}" is not supported: leave it out where the prompt goes to the model as it is.'
            raise InvalidRequestError(message, param=name)
    request, ignored = _read_request(_read_generate, fields)
    ignored += [name for name in ("think", "system") if getattr(request, name)]
    request.think = None
    chat_fields = _common_fields(request, ignored) | {"prompt": request.prompt}
    completion, answers = _finish_request("generate", request, chat_fields, ignored)
    if not request.suffix:
        return completion, answers
    infill, completions = Infill().request(completion | {"suffix": fields["suffix"]})
    return infill, Chained(completions, answers)


def raw_prompt_translation(fields: Fields) -> TargetedTranslation | None:
    """The translation of a prompt that goes to its model without a template; None for any other request."""
    if is_load(GENERATE, fields):
        return None
    request, _ = _read_generate({name: fields[name] for name in ("raw", "suffix") if name in fields})
    path = INFILL if request.suffix else "/v1/completions" if request.raw else None
    return None if path is None else _FunctionTranslation(path, _translate_raw_prompt)


def _common_fields(request: types.OllamaRequest, ignored: list[str]) -> Json:
    """The canonical fields that chats and prompts share. Adds fields without effect to `ignored`."""
    options = request.options
    values = ((name, getattr(options, name)) for name in options.__struct_fields__)
    chat_fields: Json = {name: value for name, value in values if isinstance(value, msgspec.Raw) and is_given(value)}
    if options.max_tokens is not None and options.max_tokens > 0:  # -1 and -2 mean no limit, the default
        chat_fields["max_tokens"] = int(options.max_tokens)
    if isinstance(request.think, str):
        level = level_of(request.think)
        chat_fields["reasoning_effort"] = level
        chat_fields["chat_template_kwargs"] = {"enable_thinking": True, "reasoning_effort": level}
    elif request.think is not None:
        chat_fields["chat_template_kwargs"] = {"enable_thinking": request.think}
    if isinstance(request.format, dict):
        schema = {"name": "response", "schema": request.format}
        chat_fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif request.format:
        chat_fields["response_format"] = {"type": "json_object"}
    if request.logprobs:
        chat_fields["logprobs"] = True
    if is_given(request.top_logprobs):
        if request.logprobs:  # the canonical API accepts top_logprobs only with logprobs
            chat_fields["top_logprobs"] = request.top_logprobs
        else:
            ignored.append("top_logprobs")
    return chat_fields | _keep_alive_field(request.keep_alive, ignored)


def _finish_request(
    shape: Shape, request: types.OllamaLoad, chat_fields: Json, ignored: list[str], *, is_load: bool = False
) -> tuple[Fields, Answers]:
    if request.model:
        chat_fields["model"] = request.model
    if request.stream:
        chat_fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return encoded(chat_fields), Answers(request.model, tuple(ignored), is_load, shape=shape)


# ----------------------------------------------------------------------------------------------------- loads, keep-alives


def is_load(path: str, fields: Fields) -> bool:
    """Whether this chat or prompt only asks to load its model."""
    content = fields.get("messages" if path == CHAT else "prompt", _ABSENT)
    return not is_given(content) or _is_empty(content)


def is_unload(path: str, fields: Fields) -> bool:
    """Whether this chat or prompt only asks to unload its model. Raises InvalidRequestError for an invalid duration."""
    if "keep_alive" not in fields or not is_load(path, fields):
        return False
    request, _ = read_load({"keep_alive": fields["keep_alive"]})
    return _keep_alive_seconds(request.keep_alive) == 0


def _translate_load(shape: Shape, fields: Fields) -> tuple[Fields, Answers]:
    request, ignored = _read_request(read_load, fields)
    chat_fields = _keep_alive_field(request.keep_alive, ignored)
    chat_fields |= {"messages": [{"role": "user", "content": "."}], "max_tokens": 1}
    return _finish_request(shape, request, chat_fields, ignored, is_load=True)


def _keep_alive_field(value: float | str, ignored: list[str]) -> Json:
    """The canonical field for a keep-alive. 0 has no effect: no request unloads its model at its end."""
    seconds = _keep_alive_seconds(value)
    if seconds == 0:
        ignored.append("keep_alive")
    return {KEEP_ALIVE: seconds} if seconds else {}


def _keep_alive_seconds(value: float | str) -> float | None:
    """How long the model stays loaded after the request; None: not given. A negative time means the longest possible.

    A text is a duration in Go's format, such as "1h30m", or a number of seconds.
    """
    if isinstance(value, str):
        value = value.strip()  # the pattern allows a final line break
        if not value:
            return None
        parts = [float(number) * _UNITS[unit] for number, unit in _PART.findall(value)]
        seconds = sum(parts) if parts else float(value.lstrip("+-"))
        value = -seconds if value.startswith("-") else seconds
    return LONGEST_KEEP_ALIVE_S if value < 0 else min(value, LONGEST_KEEP_ALIVE_S)


# --------------------------------------------------------------------------------------------------------------- messages


class _Calls:
    """The tool calls without a result so far. A call without an id gets a generated id.

    Older clients send no ids: then the tool's name, else the order, finds the call of a result.
    """

    def __init__(self) -> None:
        self._open = OrderedDict[str, str]()  # id → the tool's name, oldest first
        self._by_name = defaultdict[str, OrderedDict[str, None]](OrderedDict)
        self._made = 0

    def add(self, name: str, known: str | None) -> str:
        """Add a call. Returns its id: `known`, else a generated one."""
        call = known or self._new_id()
        self._open[call] = name
        self._by_name[name][call] = None
        return call

    def answer(self, name: str, known: str | None) -> str:
        """The id of the call of a result: `known`, else that of the oldest open call (of the tool `name`, if given), else a new id."""
        calls = self._by_name[name] if name else self._open
        call = known or next(iter(calls), None) or self._new_id()  # a worker may refuse a result without an id
        self._by_name[self._open.pop(call, name)].pop(call, None)
        return call

    def _new_id(self) -> str:
        self._made += 1
        return f"call_{self._made}"


def _chat_message(message: types.OllamaMessage, calls: _Calls) -> Json:
    chat_fields: Json = {"role": message.role, "content": _content_with_images(message.content or "", message.images)}
    if message.thinking:
        chat_fields["reasoning_content"] = message.thinking
    if message.tool_calls:
        chat_fields["tool_calls"] = [_chat_call(call, calls) for call in message.tool_calls]
    name = message.tool_name or message.name or ""
    if message.role == "tool":
        chat_fields["tool_call_id"] = calls.answer(name, message.tool_call_id)
    if name:
        chat_fields["name"] = name
    return chat_fields


def _chat_call(call: types.OllamaCall, calls: _Calls) -> Json:
    name, arguments = call.function.name, call.function.arguments
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
    return {
        "id": calls.add(name, call.id if isinstance(call.id, str) else None),
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


def _content_with_images(text: str, images: list[str] | None) -> str | list[Json]:
    """A text with its images. The images come first, as in Ollama."""
    if not images:
        return text
    parts: list[Json] = [{"type": "image_url", "image_url": {"url": _image_url(image)}} for image in images]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _image_url(image: str) -> str:
    kinds = (kind for start, kind in types.PICTURES.items() if image.startswith(start))
    return image if image.startswith("data:") else f"data:image/{next(kinds)};base64,{image}"


# ---------------------------------------------------------------------------------------------------------------- vectors


def _translate_embed(fields: Fields) -> tuple[Fields, VectorAnswers]:
    given = {name: raw for name, raw in fields.items() if name != "dimensions" or not _is_empty(raw)}
    request, ignored = _read_request(_read_embed, given)
    chat_fields, answers = _embedding_request(request, fields.get("input"), ignored)
    return chat_fields, replace(answers, dimensions=request.dimensions)


def _translate_embeddings(fields: Fields) -> tuple[Fields, VectorAnswers]:
    """The request of the older path, with one text."""
    request, ignored = _read_request(_read_embeddings, fields)
    chat_fields, answers = _embedding_request(request, fields.get("prompt"), ignored)
    return chat_fields, replace(answers, is_single=True)


def _embedding_request(
    request: types.OllamaEmbedRequest | types.OllamaEmbeddingsRequest, text: msgspec.Raw | None, ignored: list[str]
) -> tuple[Fields, VectorAnswers]:
    ignored += [f"options.{name}" for name in request.options or ()]  # there is nothing to sample
    chat_fields = _keep_alive_field(request.keep_alive, ignored)
    if request.model:
        chat_fields["model"] = request.model
    chat_fields |= {"input": text if request.input else ".", "encoding_format": "float", "truncate": request.truncate}
    return encoded(chat_fields), VectorAnswers(request.model, tuple(ignored), is_load=not request.input)


TRANSLATIONS: Final[Mapping[str, Translation]] = {
    CHAT: _FunctionTranslation(chat.PATH, _translate_chat),
    GENERATE: _FunctionTranslation(chat.PATH, _translate_prompt),
    EMBED: _FunctionTranslation("/v1/embeddings", _translate_embed),
    EMBEDDINGS: _FunctionTranslation("/v1/embeddings", _translate_embeddings),
}
