"""Media in prompts come as `data:` URLs or plain base64, never by reference.

Runtimes fetch the `http:` URLs and open the `file:` URLs and paths in a prompt. So a client could reach what only this
machine can reach, or read its files. A prompt with any such reference is therefore rejected before a worker sees it.

Text may contain URLs. A reference is the value of a key whose name means loading, outside of texts, tools and their calls,
citations and the like.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.errors import InvalidRequestError

_LOADED: Final = re.compile(
    r"(?:.*_)?(?:ur[li]|data|image|audio|video|file|path|mask)s?(?:\[\])?|.*(?:Ur[li]|Data|Image|Audio|Video|File|Path)s?",
    re.DOTALL,
)
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
_INERT_TYPE: Final = re.compile(
    r"(?:input_|output_)?text|refusal|(?:redacted_)?thinking|reasoning|web_(?:search|fetch)_result|.*(?:_call|tool_use)",
    re.DOTALL,
)
_INERT_KEYS: Final = frozenset({"annotations", "citations", "tool_calls", "metadata"})
_NESTING_KEYS: Final = ("content", "output")  # a prompt's parts may lie below these, whatever a type claims
_SHORTEST: Final = len('{"url":"a:"}')
_NUMBERS: Final = re.compile(rb"[\[\s]*[-\d]")
_USUAL: Final = frozenset({"role", "content", "type", "text", "name", "id"})  # no need to look at these closely
_USUAL_FIELDS: Final = frozenset(
    [
        "model",
        "messages",
        "stream",
        "stream_options",
        "input",
        "prompt",
        "instructions",
        "system",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "n",
        "seed",
        "stop",
        "user",
        "encoding_format",
        "dimensions",
    ]
)
"""No key here may match `_LOADED`."""


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message of text only. Never add a field here that can hold an object, or that `_LOADED` matches."""

    role: str
    content: str | None = None
    name: str | None = None


_texts: Final = msgspec.json.Decoder(list[_Message]).decode


def refuse_references(fields: Fields, value: Callable[[str], Any]) -> None:
    """Raises InvalidRequestError if a JSON request would make a worker load something from elsewhere.

    `fields` are its top-level fields, `value` decodes one of them.
    """
    values: list[Any] = []
    for key, raw in fields.items():
        if key in _USUAL_FIELDS and len(raw) < _SHORTEST:
            continue
        is_nested = memoryview(raw)[0] in b"[{"
        if key in _USUAL_FIELDS and (not is_nested or (key == "messages" and is_text(raw))):
            continue
        if key in _INERT_FIELDS or (is_nested and _NUMBERS.match(raw) and b'"' not in bytes(raw)):
            continue
        if key not in _USUAL_FIELDS and _LOADED.fullmatch(key):
            _refuse(key, value(key))
        if is_nested:
            values.append(value(key))
    while values:
        item = values.pop()
        if isinstance(item, list):
            values += [inner for inner in item if isinstance(inner, list | dict)]
        elif isinstance(item, dict):
            values += _parts(item)


def is_text(messages: msgspec.Raw) -> bool:
    """Most prompts are text only; decoding them into just that type proves it quickly."""
    try:
        _texts(messages)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return True


def _parts(part: dict[str, Any]) -> list[Any]:
    """The values below `part` still to check. Raises InvalidRequestError for a reference in it."""
    kind = part.get("type")
    if isinstance(kind, str) and _INERT_TYPE.fullmatch(kind):
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
