"""Rejects images for a model that takes none, before the model is loaded for them.

A prompt is decoded only if it contains the name of an image part, and only for models known to take no images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from runtimes.base import Modality
from supervisor.catalog.rewrite import Fields
from supervisor.errors import InvalidRequestError

_SIGNS: Final = (b'"image_url"', b'"input_image"')
_TYPES: Final = frozenset({"image_url", "input_image"})


def refuse_images(fields: Fields, name: str, inputs: frozenset[Modality] | None, value: Callable[[str], Any]) -> None:
    """Raises InvalidRequestError when the JSON request holds an image that `name` can't take. `inputs` None: unknown.

    `fields` are its top-level fields, `value` decodes one of them.
    """
    if inputs is None or "image" in inputs:
        return
    for key in ("messages", "input"):
        raw = fields.get(key)
        if raw is not None and any(sign in bytes(raw) for sign in _SIGNS) and _has_image(value(key)):
            takes = ", ".join(sorted(inputs))
            raise InvalidRequestError(
                f"{name} takes {takes}, no images.", code="modality_unsupported", param="messages"
            )


def _has_image(items: object) -> bool:
    """In the parts of a prompt, which lie at most two levels deep: items, and the content of items."""
    if not isinstance(items, list):
        return False
    parts = [item for item in items if isinstance(item, dict)]
    contents = [part.get("content") for part in parts]
    parts += [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return any(part.get("type") in _TYPES for part in parts)
