"""A request of llm-pool's as a chat completion: each field is mapped, refused by its name, or named as ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.permission import FIELD as PERMISSION
from supervisor.gateway.filters.translation import TargetModel

_encode: Final = msgspec.json.Encoder().encode
_KNOWN: Final = frozenset(
    {
        "model",
        "input",
        "messages",
        "instructions",
        "source_lang_code",
        "target_lang_code",
        "stream",
        "thinking",
        "decoding",
        PERMISSION,  # read before, and never forwarded
    }
)
_MODES: Final = ("default", "enabled", "disabled")
_ROLES: Final = ("user", "assistant")
_DETAILS: Final = ("auto", "low", "high")

_NUMBER: Final = (float, "a number")
_DECODING: Final[dict[str, tuple[Any, str]]] = {
    "beam_size": (int, "a whole number, at least 1"),
    "top_k": (int, "a whole number"),
    "top_p": _NUMBER,
    "temperature": _NUMBER,
    "repetition_penalty": _NUMBER,
    "max_tokens": (int, "a whole number, at least 1"),
    "stop": (list[str], "a list of texts"),
}
NAMES: Final = {
    **{name: f"decoding.{name}" for name in _DECODING},
    "repeat_penalty": "decoding.repetition_penalty",
    "chat_template_kwargs": "thinking",
    "reasoning_effort": "thinking",
}
"""Canonical fields → what they are called here."""
_NAMES_OF_ONE_TURN: Final = {**NAMES, "messages": "input"}
_AT_LEAST_1: Final = frozenset({"beam_size", "max_tokens"})
_OPENAIS: Final = frozenset({"top_p", "temperature", "max_tokens", "stop"})  # which chat completions have everywhere


def given(fields: Fields, name: str) -> msgspec.Raw | None:
    """A field's value, unparsed; None where it is missing or null, which llm-pool doesn't tell apart."""
    value = fields.get(name)
    return None if value is None or bytes(memoryview(value)[:1]) == b"n" else value


class Request:
    """One request, mapped for one model. Raises InvalidRequestError for what llm-pool doesn't take, or the model."""

    def __init__(self, fields: Fields, target: TargetModel) -> None:
        self._fields = fields
        self._target = target
        self.names: Mapping[str, str] = NAMES if given(fields, "input") is None else _NAMES_OF_ONE_TURN
        self.ignored: list[str] = sorted(fields.keys() - _KNOWN)
        model = given(fields, "model")
        self.model: str = target.name or ("" if model is None else _read(model, str, "model", "a text"))
        self._name = self.model or "The model"
        self.canonical: Fields = {} if model is None else {"model": model}
        languages = self._languages()
        self.canonical["messages"] = _raw([*self._system(), *self._conversation(languages)])
        if given(fields, "stream") is not None:
            self.canonical["stream"] = fields["stream"]
            if _read(fields["stream"], bool, "stream", "true or false"):
                self.canonical["stream_options"] = _raw({"include_usage": True})
        self._think()
        self._decode()

    # ------------------------------------------------------------------------------------------------------------ prompt

    def _system(self) -> list[dict[str, object]]:
        instructions = given(self._fields, "instructions")
        if instructions is None:
            return []
        _read(instructions, str, "instructions", "a text")
        if self._target.translates:
            message = f"{self._name} translates, and takes nothing but the text: leave `instructions` out."
            raise InvalidRequestError(message, param="instructions")
        return [{"role": "system", "content": instructions}]

    def _conversation(self, languages: Fields) -> list[dict[str, object]]:
        single, messages = given(self._fields, "input"), given(self._fields, "messages")
        if single is not None and messages is not None:
            message = "`input` is one turn, `messages` are several: send one of them, not both."
            raise InvalidRequestError(message, param="messages")
        if single is not None:
            content = _content(single, "input")
            if languages and bytes(memoryview(content)[:1]) == b'"':
                content = _raw([{"type": "text", **languages, "text": content}])
            return [{"role": "user", "content": content}]
        if messages is None:
            message = "There is nothing to answer: send `input`, a text or a list of parts, or `messages`."
            raise InvalidRequestError(message, param="input")
        if self._target.multi_turn is False:
            message = f"{self._name} takes single turns only: send `input` instead of `messages`."
            raise InvalidRequestError(message, param="messages", code="multi_turn_unsupported")
        listed = _read(messages, list[Fields], "messages", "a list of messages")
        found = [_message(message, f"messages[{at}]") for at, message in enumerate(listed)]
        if not found or found[-1]["role"] != "user":
            raise InvalidRequestError("The last of `messages` must have the role user.", param="messages")
        return found

    def _languages(self) -> Fields:
        """What a translation model is told beside the text, and no other may be."""
        found: Fields = {}
        for name in ("source_lang_code", "target_lang_code"):
            code = given(self._fields, name)
            if code is not None:
                _read(code, str, name, "a text")
                found[name] = code
                if not self._target.translates:
                    message = (
                        f"{self._name} can't be told a language: leave `{name}` out. Ask a chat model in `instructions`; "
                        "a translation model for one pair of languages knows them."
                    )
                    raise InvalidRequestError(message, param=name)
        if self._target.translates and "target_lang_code" not in found:
            message = f"{self._name} translates: say into which language with `target_lang_code`, such as en."
            raise InvalidRequestError(message, param="target_lang_code")
        return found

    # -------------------------------------------------------------------------------------------------------- parameters

    def _think(self) -> None:
        raw = given(self._fields, "thinking")
        mode = "default" if raw is None else _one_of(raw, _MODES, "thinking")
        if mode == "default":
            return
        switch, modes = self._target.thinking, tuple(self._target.thinking_modes)
        is_unknown = modes == ("default",)  # whether it thinks: then a switch may have an effect
        if switch is not None and (is_unknown or (mode in modes and len(modes) > 1)):
            wanted = switch.enabled if mode == "enabled" else switch.disabled
            self.canonical |= {name: _raw(value) for name, value in wanted.items()}
        elif mode not in modes:  # otherwise it never does anything else
            message = (
                f"{self._name} has no known switch for thinking: leave `thinking` out."
                if is_unknown
                else f"{self._name} takes `thinking`: {', '.join(modes)}; not {mode}."
            )
            raise InvalidRequestError(message, param="thinking", code="thinking_unsupported")

    def _decode(self) -> None:
        raw = given(self._fields, "decoding")
        decoding = {} if raw is None else _read(raw, Fields, "decoding", "an object")
        for name in decoding:
            param = f"decoding.{name[:50]}"
            if name not in _DECODING:
                message = f"`{param}` is no known parameter; `decoding` takes {', '.join(_DECODING)}."
                raise InvalidRequestError(message, param=param)
            value = given(decoding, name)
            if value is None:
                continue
            kind, expected = _DECODING[name]
            number = _read(value, kind, param, expected)
            if name in _AT_LEAST_1 and number < 1:
                raise _wrong(param, expected)
            theirs = (name,) if name in _OPENAIS else self._target.decoding.get(name, ())
            self.canonical |= dict.fromkeys(theirs, value)
            if not theirs:
                self.ignored.append(param)


def _message(message: Fields, at: str) -> dict[str, object]:
    _refuse_others(message, {"role", "content"}, at)
    role = _one_of(_needed(message, "role", at), _ROLES, f"{at}.role")
    return {"role": role, "content": _content(_needed(message, "content", at), f"{at}.content")}


def _content(raw: msgspec.Raw, at: str) -> msgspec.Raw:
    """A text as it is, texts joined to one, and parts among which there is an image as parts."""
    if bytes(memoryview(raw)[:1]) == b'"':
        _read(raw, str, at, "a text")
        return raw
    parts = _read(raw, list[Fields], at, "a text or a list of parts")
    if not parts:
        raise InvalidRequestError(f"`{at}` is empty.", param=at)
    found = [_part(part, f"{at}[{index}]") for index, part in enumerate(parts)]
    if all("text" in part for part in found):
        return _raw("".join(msgspec.json.decode(part["text"], type=str) for part in found))
    return _raw(found)


def _part(part: Fields, at: str) -> Fields:
    """A text or an image, as in a chat completion."""
    kind = _needed(part, "type", at)
    name = _one_of(kind, ("text", "image_url"), f"{at}.type")
    _refuse_others(part, {"type", name}, at)
    value = _needed(part, name, at)
    at = f"{at}.{name}"
    if name == "text":
        _read(value, str, at, "a text")
        return {"type": kind, "text": value}
    image = _read(value, Fields, at, "an object with a url")
    _refuse_others(image, {"url", "detail"}, at)
    found = {"url": _needed(image, "url", at)}
    _read(found["url"], str, f"{at}.url", "a text")
    if (detail := given(image, "detail")) is not None:
        _one_of(detail, _DETAILS, f"{at}.detail")
        found["detail"] = detail
    return {"type": kind, "image_url": _raw(found)}


def _needed(fields: Fields, name: str, at: str) -> msgspec.Raw:
    value = given(fields, name)
    if value is None:
        raise InvalidRequestError(f"`{at}.{name}` is missing.", param=f"{at}.{name}")
    return value


def _refuse_others(fields: Fields, known: set[str], at: str) -> None:
    for name in fields:
        if name not in known and given(fields, name) is not None:
            param = f"{at}.{name[:50]}"
            raise InvalidRequestError(f"`{param}` is not known: leave it out.", param=param)


def _read(raw: msgspec.Raw, kind: Any, name: str, expected: str) -> Any:
    """A value of this type. Raises InvalidRequestError, which says what was expected."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _wrong(name, expected) from error


def _one_of(raw: msgspec.Raw, choices: tuple[str, ...], name: str) -> str:
    expected = f"one of {', '.join(choices)}"
    text: str = _read(raw, str, name, expected)
    if text not in choices:
        raise _wrong(name, expected)
    return text


def _wrong(name: str, expected: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{name}` must be {expected}.", param=name)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))
