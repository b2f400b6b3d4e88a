"""Translates llm-pool's requests into chat completions: each field is translated, refused by name, or listed as ignored.

A null field counts as missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from supervisor.catalog.models.rewrite import Fields
from supervisor.dialects import chat
from supervisor.dialects.llm_pool.encode import Answers
from supervisor.dialects.llm_pool.types import Content, LlmPoolDecoding, LlmPoolRequest, LlmPoolText
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.typed import UNREADABLE, Reader, Remedy, encoded, is_null
from supervisor.gateway.filters.translation import TargetModel, Times

_OWN_FIELDS: Final = frozenset({"messages", "decoding", "thinking", "source_lang_code", "target_lang_code"})
_DECODING: Final = LlmPoolDecoding.__struct_fields__
_OPENAIS: Final = frozenset({"top_p", "temperature", "max_tokens", "stop"})  # all chat completions have these
_NAMES: Final = {
    **{name: f"decoding.{name}" for name in _DECODING},
    "repeat_penalty": "decoding.repetition_penalty",
    "chat_template_kwargs": "thinking",
    "reasoning_effort": "thinking",
}
"""Canonical fields → their names in llm-pool's API."""
_UNKNOWN: Final = TargetModel()

_read_request: Final = Reader(
    LlmPoolRequest,
    Remedy(r"(.*\.)?(input|content)", "{place}: expected a text, or a list of parts that isn't empty."),
)


class _Part(msgspec.Struct):
    type: str = ""


_parts: Final = msgspec.json.Decoder(list[_Part]).decode
_fields: Final = msgspec.json.Decoder(Fields).decode


def is_llm_pool(fields: Fields) -> bool:
    """Whether these are the top-level fields of an llm-pool request.

    True if a field of llm-pool's own is not null, or if `input` consists of parts that only llm-pool has.
    """
    return any(not is_null(fields[name]) for name in _OWN_FIELDS & fields.keys()) or _has_parts(fields.get("input"))


def _has_parts(content: msgspec.Raw | None) -> bool:
    if content is None or bytes(memoryview(content)[:1]) != b"[":
        return False
    try:
        parts = _parts(content)
    except UNREADABLE:  # the reader of the request reports the error
        return False
    return bool(parts) and all(part.type in {"text", "image_url"} for part in parts)


@dataclass(frozen=True, slots=True)
class LlmPool:
    """A `TargetedTranslation`, also for an unknown model."""

    target: TargetModel = _UNKNOWN
    times: Times | None = None
    clock: Callable[[], float] = time.monotonic
    path = chat.PATH

    def of(self, target: TargetModel, times: Times) -> LlmPool:
        """See TargetedTranslation."""
        return LlmPool(target, times, self.clock)

    def request(self, fields: Fields) -> tuple[Fields, Answers]:
        """See Translation."""
        request, ignored = _read_request(fields)
        decoding, unused = self._decoding_fields(fields.get("decoding"))
        passed = {name: fields[name] for name in ("model", "stream") if getattr(request, name) is not None}
        chat_fields = passed | encoded(
            {
                "messages": [
                    *self._system_messages(request),
                    *self._turn_messages(request, self._language_fields(request)),
                ],
                **({"stream_options": {"include_usage": True}} if request.stream else {}),
                **self._thinking_fields(request.thinking or "default"),
                **decoding,
            }
        )
        names = _NAMES if request.input is None else {**_NAMES, "messages": "input"}
        return chat_fields, Answers(
            self.target.name or request.model or "", [*ignored, *unused], self.times, self.clock, names
        )

    @property
    def _model_name(self) -> str:
        return self.target.name or "The model"

    def _system_messages(self, request: LlmPoolRequest) -> list[dict[str, object]]:
        if request.instructions is None:
            return []
        if self.target.translates:
            message = f"{self._model_name} translates, and takes nothing but the text: leave `instructions` out."
            raise InvalidRequestError(message, param="instructions")
        return [{"role": "system", "content": request.instructions}]

    def _language_fields(self, request: LlmPoolRequest) -> Mapping[str, str]:
        """The language fields. A translation model needs them besides the text; all other models refuse them."""
        codes = {"source_lang_code": request.source_lang_code, "target_lang_code": request.target_lang_code}
        given = {name: code for name, code in codes.items() if code is not None}
        if self.target.translates and "target_lang_code" not in given:
            message = f"{self._model_name} translates: say into which language with `target_lang_code`, such as en."
            raise InvalidRequestError(message, param="target_lang_code")
        if given and not self.target.translates:
            name = next(iter(given))
            message = (
                f"{self._model_name} can't be told a language: leave `{name}` out. Ask a chat model in `instructions`; "
                "a translation model for one pair of languages knows them."
            )
            raise InvalidRequestError(message, param=name)
        return given

    def _turn_messages(self, request: LlmPoolRequest, languages: Mapping[str, str]) -> list[dict[str, object]]:
        if request.messages is None:
            if request.input is None:
                message = "There is nothing to answer: send `input`, a text or a list of parts, or `messages`."
                raise InvalidRequestError(message, param="input")
            content = _joined_content(request.input)
            if languages and isinstance(content, str):
                content = [{"type": "text", **languages, "text": content}]
            return [{"role": "user", "content": content}]
        if request.input is not None:
            message = "`input` is one turn, `messages` are several: send one of them, not both."
            raise InvalidRequestError(message, param="messages")
        if self.target.multi_turn is False:
            message = f"{self._model_name} takes single turns only: send `input` instead of `messages`."
            raise InvalidRequestError(message, param="messages", code="multi_turn_unsupported")
        if request.messages[-1].role != "user":
            raise InvalidRequestError("The last of `messages` must have the role user.", param="messages")
        return [{"role": message.role, "content": _joined_content(message.content)} for message in request.messages]

    def _thinking_fields(self, mode: str) -> Mapping[str, object]:
        switch, modes = self.target.thinking, tuple(self.target.thinking_modes)
        is_unknown = modes == ("default",)  # unknown whether the model thinks: its switch may have an effect
        if mode == "default":
            return {}
        if switch is not None and (is_unknown or (mode in modes and len(modes) > 1)):
            return switch.enabled if mode == "enabled" else switch.disabled
        if mode in modes:  # the model's only mode
            return {}
        message = (
            f"{self._model_name} has no known switch for thinking: leave `thinking` out."
            if is_unknown
            else f"{self._model_name} takes `thinking`: {', '.join(modes)}; not {mode}."
        )
        raise InvalidRequestError(message, param="thinking", code="thinking_unsupported")

    def _decoding_fields(self, raw: msgspec.Raw | None) -> tuple[Fields, list[str]]:
        """The decoding parameters under the worker's names, and the names of parameters that the worker lacks."""
        found: Fields = {}
        unused: list[str] = []
        for name, value in ({} if raw is None or is_null(raw) else _fields(raw)).items():
            if not is_null(value):
                theirs: Sequence[str] = (name,) if name in _OPENAIS else self.target.decoding.get(name, ())
                found |= dict.fromkeys(theirs, value)
                unused += () if theirs else (f"decoding.{name}",)
        return found, unused


def _joined_content(content: Content) -> object:
    """A text stays; several text parts become one text; a list with an image stays a list of parts."""
    if isinstance(content, str):
        return content
    texts = [part.text for part in content if isinstance(part, LlmPoolText)]
    return "".join(texts) if len(texts) == len(content) else content


LLM_POOL: Final = LlmPool()
