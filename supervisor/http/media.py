"""Media in prompts come as `data:` URLs or plain base64, never by reference.

Runtimes fetch the `http:` and open the `file:` URLs that they are given: a client could reach what only this machine
reaches, or read its files. So a prompt that refers to anything is refused before a worker sees it.

Most bodies are let through by looking for a few bytes. Only those that could hold a reference are parsed, because text may
speak of URLs as it likes: what counts is the value under a key that runtimes load from, outside of texts, tool calls and
citations.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from supervisor.errors import InvalidRequestError

# A key that ends like one of `_LOADED`, or any character written as an escape: `"\u0075rl"` is a key too.
_KEY_ENDS: Final = (b'url"', b'data"')
_ESCAPE: Final = b"\\u00"
_SPARSE: Final = 2048  # with fewer quotes than one in so many bytes, looking at each is quicker than searching
_LOADED: Final = frozenset({"url", "image_url", "audio_url", "video_url", "file_url", "data", "file_data", "image"})
_SCHEME: Final = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,30}):")
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
    }
)
_INERT_KEYS: Final = frozenset({"annotations", "citations", "tool_calls"})
_NESTING_KEYS: Final = ("content", "output")  # a prompt's parts may lie below these, whatever a type claims


class _Prompt(msgspec.Struct):
    messages: Any = None
    input: Any = None


_prompt: Final = msgspec.json.Decoder(_Prompt).decode


def refuse_remote_media(body: bytes | bytearray) -> None:
    """Raises InvalidRequestError when the JSON request `body` has a worker load something from elsewhere."""
    if not _has_sign(body):
        return
    try:
        prompt = _prompt(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The request body can't be read: {error}.", code="invalid_json") from error
    values: list[Any] = [prompt.messages, prompt.input]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += [item for item in value if isinstance(item, list | dict)]
        elif isinstance(value, dict):
            values += _parts(value)


def _has_sign(body: bytes | bytearray) -> bool:
    if b"\\" in body and _ESCAPE in body:
        return True
    end = 0
    for _ in range(len(body) // _SPARSE):
        end = body.find(b'"', end) + 1
        if end == 0 or body.endswith(_KEY_ENDS, 0, end):
            return end > 0
    return any(body.find(sign, end) >= 0 for sign in _KEY_ENDS)


def _parts(part: dict[str, Any]) -> list[Any]:
    """What is to be looked at below `part`. Raises InvalidRequestError for a reference in it."""
    kind = part.get("type")
    if isinstance(kind, str) and (kind in _INERT_TYPES or kind.endswith(("_call", "tool_use"))):
        return [part[key] for key in _NESTING_KEYS if isinstance(part.get(key), list | dict)]
    below = []
    for key, value in part.items():
        if isinstance(value, list | dict):
            if key not in _INERT_KEYS:
                below.append(value)
        elif key in _LOADED and isinstance(value, str):
            scheme = _SCHEME.match(value)
            if scheme is not None and scheme[1].lower() != "data":
                raise InvalidRequestError(
                    f"{key} refers to a {scheme[1][:10]}: address, which is not loaded for clients. "
                    f"Send the content itself, as data:<type>;base64,<content>.",
                    code="remote_media_refused",
                    param=key,
                )
    return below
