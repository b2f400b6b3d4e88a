"""Media in prompts come as `data:` URLs or plain base64, never by reference.

Runtimes fetch the `http:` and open the `file:` URLs and the paths that they are given: a client could reach what only this
machine reaches, or read its files. So a prompt that refers to anything is refused before a worker sees it.

Text may speak of URLs as it likes: what counts is the value under a key that is called like something to be loaded, outside
of texts, tools and their calls, citations and the like. Most prompts are nothing but text, which parsing them into just
that proves in little time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.errors import InvalidRequestError

_LOADED: Final = re.compile(
    r"(?:.*_)?(?:ur[li]|data|image|audio|video|file|path|mask)s?(?:\[\])?|.*(?:Ur[li]|Data|Image|Audio|Video|File|Path)s?",
    re.DOTALL,
)
_SMALL: Final = 64 * 1024
_PATH: Final = re.compile(r"(?:.*_)?paths?|.*Paths?", re.DOTALL)
_SCHEME: Final = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,30}):")
_INERT_FIELDS: Final = frozenset(
    {
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "response_format",
        "text",
        "json_schema",
        "grammar",
        "metadata",
        "chat_template_kwargs",
    }
)
_INERT_TYPES: Final = frozenset(
    {
        "text",
        "input_text",
        "output_text",
        "refusal",
        "thinking",
        "redacted_thinking",
        "reasoning",
        "web_search_result",
        "web_fetch_result",
    }
)
_INERT_KEYS: Final = frozenset({"annotations", "citations", "tool_calls", "metadata"})
_NESTING_KEYS: Final = ("content", "output")  # a prompt's parts may lie below these, whatever a type claims
_NUMBERS: Final = re.compile(rb"[\[\s]*[-\d]")
_USUAL: Final = frozenset({"role", "content", "type", "text", "name", "id"})  # no need to look at these closely
_USUAL_FIELDS: Final = frozenset(
    {"model", "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p"}
)
_decode: Final = msgspec.json.Decoder().decode


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | None = None
    name: str | None = None


class _Plain(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt of nothing but text. No field may be added here that can hold an object, or that `_LOADED` matches."""

    model: str | None = None
    messages: list[_Said] | None = None
    input: str | list[str] | None = None
    prompt: str | list[str] | None = None
    instructions: str | None = None
    system: str | None = None
    stream: bool | None = None
    stream_options: dict[Literal["include_usage"], bool] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None


_plain: Final = msgspec.json.Decoder(_Plain).decode


def may_refer(body: bytes | bytearray) -> bool:
    """Is it worth a closer look? Not a small one whose every field is known, and is text or a number where that is used.

    Every one of two fields of the same name is looked at, and names are compared as they are without their escapes.
    """
    if len(body) > _SMALL:
        return True
    try:
        _plain(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return True
    return False


def refuse_remote_media(fields: Fields) -> None:
    """Raises InvalidRequestError when a JSON request with these fields has a worker load something from elsewhere."""
    try:
        values = [_decode(raw) for raw in _worth_reading(fields)]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The request body can't be read: {error}.", code="invalid_json") from error
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += [item for item in value if isinstance(item, list | dict)]
        elif isinstance(value, dict):
            values += _parts(value)


def _worth_reading(fields: Fields) -> Iterator[msgspec.Raw]:
    """The fields that hold objects, and those to be loaded themselves. Not the million numbers of an embedding's input."""
    for key, raw in fields.items():
        if key in _INERT_FIELDS:
            continue
        nested = memoryview(raw)[0] in b"[{"
        if nested and _NUMBERS.match(raw) and b'"' not in bytes(raw):
            continue
        if key not in _USUAL_FIELDS and _LOADED.fullmatch(key):
            _refuse(key, _decode(raw))
        if nested:
            yield raw


def _parts(part: dict[str, Any]) -> list[Any]:
    """What is to be looked at below `part`. Raises InvalidRequestError for a reference in it."""
    kind = part.get("type")
    if isinstance(kind, str) and (kind in _INERT_TYPES or kind.endswith(("_call", "tool_use"))):
        return [part[key] for key in _NESTING_KEYS if isinstance(part.get(key), list | dict)]
    below = []
    for key, value in part.items():
        if isinstance(value, list | dict) and key not in _INERT_KEYS:
            below.append(value)
        if key not in _USUAL and _LOADED.fullmatch(key):
            _refuse(key, value)
    return below


def _refuse(key: str, value: object) -> None:
    """Raises InvalidRequestError for a reference, or a list with one. Base64 has no colon, and `data:` is no reference."""
    for text in value if isinstance(value, list) else (value,):
        if not isinstance(text, str) or text[:64].lstrip()[:5].lower() == "data:":
            continue
        if ":" in text or (_PATH.fullmatch(key) and text):  # parsers of URLs pass over tabs and the like in `ht\ttp:`
            scheme = _SCHEME.match(text)
            what = f"a {scheme[1][:10]}: address" if scheme is not None else "something"
            raise InvalidRequestError(
                f"{key[:50]} refers to {what}, which is not loaded for clients. "
                f"Send the content itself, as data:<type>;base64,<content>.",
                code="remote_media_refused",
                param=key[:50],
            )
