"""Images for a model that sees nothing are refused at once, rather than after it was loaded for them.

A body is parsed only when it has the very word of an image part in it, and only for models that are known to take none.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from runtimes.base import Modality
from supervisor.errors import InvalidRequestError

_SIGNS: Final = (b'"image_url"', b'"input_image"')
_TYPES: Final = frozenset({"image_url", "input_image"})


class _Prompt(msgspec.Struct):
    messages: Any = None
    input: Any = None


_prompt: Final = msgspec.json.Decoder(_Prompt).decode


def refuse_modality(body: bytes | bytearray, name: str, inputs: frozenset[Modality] | None) -> None:
    """Raises InvalidRequestError when the JSON request holds an image that `name` can't take. `inputs` None: unknown."""
    if inputs is None or "image" in inputs or not any(sign in body for sign in _SIGNS):
        return
    try:
        prompt = _prompt(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return  # whoever reads it next says what is wrong
    if _has_image(prompt.messages) or _has_image(prompt.input):
        takes = ", ".join(sorted(inputs))
        raise InvalidRequestError(f"{name} takes {takes}, no images.", code="modality_unsupported", param="messages")


def _has_image(items: object) -> bool:
    """In the parts of a prompt, which lie at most two levels deep: items, and the content of items."""
    if not isinstance(items, list):
        return False
    parts = [item for item in items if isinstance(item, dict)]
    contents = [part.get("content") for part in parts]
    parts += [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return any(part.get("type") in _TYPES for part in parts)
