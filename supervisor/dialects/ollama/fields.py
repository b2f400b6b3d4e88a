"""The fields that Ollama's requests have in common: options, durations, formats, and which of them have no effect.

Null is the same as absent, as with Ollama. Values pass unparsed where the canonical API has the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.body import KEEP_ALIVE
from supervisor.gateway.body.tolerance import level_of
from supervisor.gateway.identity.identity import LONGEST_KEEP_ALIVE_S

OPTIONS: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repeat_last_n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Options for sampling, and what they are called in a canonical request. All others are about how a model is loaded, which
its configuration says here; clients send them by default, so that a refusal would leave nothing of them."""
NAMES: Final[Mapping[str, str]] = {
    **{canonical: f"options.{option}" for option, canonical in OPTIONS.items()},
    "chat_template_kwargs": "think",
    "reasoning_effort": "think",
    "response_format": "format",
}
"""Canonical fields → what they are called here."""
_LEVELS: Final = ("low", "medium", "high", "max")
_NULL: Final = b"null"
_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION: Final = re.compile(rf"([+-]?)((?:{_PART.pattern})+|\d+(?:\.\d*)?)")
_UNITS: Final[Mapping[str, float]] = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode


def raw(value: object) -> msgspec.Raw:
    """A value of a canonical field."""
    return msgspec.Raw(encode(value))


def present(fields: Fields) -> Fields:
    """Those that are not null."""
    return {key: value for key, value in fields.items() if bytes(memoryview(value)[:5]).rstrip() != _NULL}


def decoded(fields: Fields, name: str) -> Any:
    """A field's value; None where it is absent. Raises InvalidRequestError."""
    value = fields.get(name)
    if value is None:
        return None
    try:
        return _decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f'"{name}" can\'t be read: {error}.', code="invalid_json", param=name) from error


def text(fields: Fields, name: str) -> str:
    """A field that is a text; empty where it is absent. Raises InvalidRequestError."""
    value = decoded(fields, name)
    if value is None or isinstance(value, str):
        return value or ""
    raise InvalidRequestError(f'"{name}" must be a text.', param=name)


def flag(fields: Fields, name: str, *, default: bool = False) -> bool:
    """A field that is true or false. Raises InvalidRequestError."""
    value = decoded(fields, name)
    if value is None or isinstance(value, bool):
        return default if value is None else value
    raise InvalidRequestError(f'"{name}" must be true or false.', param=name)


def sampling(fields: Fields) -> tuple[Fields, list[str]]:
    """What `options` become, and the names of those without effect. Raises InvalidRequestError."""
    value = fields.get("options")
    if value is None:
        return {}, []
    try:
        options = present(msgspec.json.decode(value, type=Fields))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError('"options" must be an object.', param="options") from error
    found = {OPTIONS[name]: each for name, each in options.items() if name in OPTIONS}
    if "max_tokens" in found:
        most = decoded(options, "num_predict")
        if not isinstance(most, int | float) or isinstance(most, bool) or most != int(most):
            raise InvalidRequestError('"options.num_predict" must be a whole number.', param="options.num_predict")
        if most <= 0:  # -1, -2: as many as fit, which is what a canonical request without it gets
            del found["max_tokens"]
        else:
            found["max_tokens"] = raw(int(most))
    return found, [f"options.{name}" for name in options if name not in OPTIONS]


def thinking(fields: Fields) -> Fields:
    """What `think` becomes: true, false, or how much. Raises InvalidRequestError."""
    value = decoded(fields, "think")
    if value is None:
        return {}
    if isinstance(value, bool):
        return {"chat_template_kwargs": raw({"enable_thinking": value})}
    if isinstance(value, str) and value in _LEVELS:
        level = level_of(value)
        return {
            "reasoning_effort": raw(level),
            "chat_template_kwargs": raw({"enable_thinking": True, "reasoning_effort": level}),
        }
    raise InvalidRequestError('"think" must be true, false, "low", "medium", "high" or "max".', param="think")


def response_format(fields: Fields) -> Fields:
    """What `format` becomes: "json", or a JSON schema. Raises InvalidRequestError."""
    value = fields.get("format")
    if value is None:
        return {}
    start = bytes(memoryview(value)[:1])
    if start == b"{":
        return {"response_format": raw({"type": "json_schema", "json_schema": {"name": "response", "schema": value}})}
    match decoded(fields, "format"):
        case "":
            return {}
        case "json":
            return {"response_format": raw({"type": "json_object"})}
    raise InvalidRequestError('"format" must be "json" or a JSON schema.', param="format")


def log_probabilities(fields: Fields) -> tuple[Fields, list[str]]:
    """`logprobs` and `top_logprobs`, and what has no effect: the canonical API takes the second with the first only."""
    found: Fields = {name: fields[name] for name in ("logprobs", "top_logprobs") if name in fields}
    return (found, []) if flag(fields, "logprobs") else ({}, [*found])


def keep_alive_s(fields: Fields) -> float | None:
    """For how many seconds the model is to stay; negative ones, for ever, are as many as can be. None: it isn't said.

    A number of seconds, or a duration of Go's, such as "5m" or "1h30m"; as a text, a number alone is seconds as well.
    Raises InvalidRequestError.
    """
    value = decoded(fields, "keep_alive")
    if value is None or value == "":
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds: float = value
    elif isinstance(value, str) and (found := _DURATION.fullmatch(value)) is not None:
        parts = [float(number) * _UNITS[unit] for number, unit in _PART.findall(found[2])]
        seconds = sum(parts) if parts else float(found[2])
        seconds = -seconds if found[1] == "-" else seconds
    else:
        raise InvalidRequestError(
            '"keep_alive" must be a number of seconds, or a duration such as "5m" (-1: for ever).',
            code="invalid_keep_alive",
            param="keep_alive",
        )
    return LONGEST_KEEP_ALIVE_S if seconds < 0 else min(seconds, LONGEST_KEEP_ALIVE_S)


def staying(fields: Fields) -> tuple[Fields, list[str]]:
    """What `keep_alive` becomes, and its name where it has no effect: no request unloads a model as soon as it is over."""
    seconds = keep_alive_s(fields)
    if seconds is None:
        return {}, []
    return ({KEEP_ALIVE: raw(seconds)}, []) if seconds else ({}, ["keep_alive"])


def common(fields: Fields) -> tuple[Fields, list[str]]:
    """What chats and prompts have in common, as canonical fields, and the names of what has no effect."""
    sampled, unused = sampling(fields)
    kept, unkept = staying(fields)
    likely, unlikely = log_probabilities(fields)
    return {**sampled, **thinking(fields), **response_format(fields), **likely, **kept}, unused + unlikely + unkept


def refuse(fields: Fields, name: str, instead: str) -> None:
    """Raises InvalidRequestError unless a field that nothing can be made of is absent or empty."""
    if decoded(fields, name):
        raise InvalidRequestError(f'"{name}" is not supported: {instead}', param=name)
