"""Anthropic's tools that clients run themselves. Requests leave out their parameters, because Anthropic's models know them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

Json = dict[str, Any]

_VERSION: Final = re.compile(r"_20\d{6}$")
_TEXT: Final[Json] = {"type": "string"}
_NUMBER: Final[Json] = {"type": "integer"}
_PLACE: Final[Json] = {"type": "array", "items": _NUMBER}
_EDITS: Final[Mapping[str, Json]] = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _NUMBER,
    "insert_text": _TEXT,
    "view_range": _PLACE,
}
_ACTIONS: Final = (
    "key type mouse_move left_click left_click_drag right_click middle_click double_click triple_click screenshot "
    "cursor_position scroll wait hold_key left_mouse_down left_mouse_up zoom"
)


def _object_schema(required: str, **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": [required]}


def _enum_schema(words: str) -> Json:
    return {"type": "string", "enum": words.split()}


_SCHEMAS: Final[Mapping[str, Json]] = {
    "bash": {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    "text_editor": _object_schema(
        "command", command=_enum_schema("view create str_replace insert undo_edit"), **_EDITS
    ),
    "memory": _object_schema(
        "command",
        command=_enum_schema("view create str_replace insert delete rename"),
        old_path=_TEXT,
        new_path=_TEXT,
        **_EDITS,
    ),
    "computer": _object_schema(
        "action",
        action=_enum_schema(_ACTIONS),
        coordinate=_PLACE,
        start_coordinate=_PLACE,
        region=_PLACE,
        text=_TEXT,
        duration={"type": "number"},
        scroll_direction=_enum_schema("up down left right"),
        scroll_amount=_NUMBER,
    ),
}


def schema_of(kind: str) -> Json | None:
    """The JSON schema of the tool's parameters. None: the tool is unknown, or clients don't run it."""
    return _SCHEMAS.get(_VERSION.sub("", kind)) if _VERSION.search(kind) else None
