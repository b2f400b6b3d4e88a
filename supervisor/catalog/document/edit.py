"""Changes entries in the text of a configuration; all other lines stay as they are, comments too.

The text is cut at the positions that YAML's parser gives. The new text is then parsed again: unless its value is exactly the
old value with the change and nothing else, the edit is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Final

import yaml
from pydantic import JsonValue

from supervisor.catalog.document.document import Layer, Source, parse, plain
from supervisor.catalog.document.yaml_writer import flow, to_yaml
from supervisor.errors import LlmuxError

MODELS: Final = "models"
Document = dict[str, JsonValue]


class EditError(LlmuxError):
    """The text can't be edited safely; `detail` has the lines to add by hand."""

    status = HTTPStatus.CONFLICT
    type = "invalid_request_error"
    code = "configuration_not_edited"


def with_model(text: str, name: str, entry: Mapping[str, JsonValue]) -> str:
    """The text with this model after the others. Raises EditError."""
    return with_entries(text, {name: entry})


def with_entries(text: str, entries: Mapping[str, Mapping[str, JsonValue]], section: str = MODELS) -> str:
    """The text with these entries after the others of the section. Raises EditError."""
    try:
        edited, before = _text_with_entries(text, entries, section), _parsed(text)
        there, new = _entries_of(before, section), {name: dict(entry) for name, entry in entries.items()}
        _require(there.keys().isdisjoint(new) and _parsed(edited) == before | {section: there | new})
    except (yaml.YAMLError, ValueError) as error:
        raise EditError(
            f"The file is written in a way that can't be edited safely. Add these lines below `{section}:` yourself:",
            detail=tuple(_entry_lines(entries, 2).splitlines()),
        ) from error
    return edited


def without_entry(text: str, name: str, section: str = MODELS) -> str:
    """The text without this entry, and without the comments inside of it. Raises EditError."""
    try:
        edited, before = _text_without_entry(text, name, section), _parsed(text)
        left = {key: entry for key, entry in _entries_of(before, section).items() if key != name}
        _require(_parsed(edited) == before | {section: left})
    except (yaml.YAMLError, ValueError) as error:
        raise EditError(
            f"The file is written in a way that can't be edited safely. Take out {section}.{name} yourself."
        ) from error
    return edited


def with_keys(text: str, name: str, keys: Mapping[str, JsonValue]) -> str:
    """The text with these keys in the model's entry; None removes a key, so that its default returns. Raises EditError."""
    try:
        before = _parsed(text)
        models = _entries_of(before, MODELS)
        entry = models.get(name)
        _require(isinstance(entry, dict))
        assert isinstance(entry, dict)
        wanted = {key: value for key, value in (entry | dict(keys)).items() if value is not None or key not in keys}
        edited = text
        for key, value in keys.items():
            if key in entry or value is not None:
                edited = _with_key(edited, name, key, value)
        _require(_parsed(edited) == before | {MODELS: models | {name: wanted}})
    except (yaml.YAMLError, ValueError) as error:
        lines = [f"    {key}: {flow(value)}" for key, value in keys.items() if value is not None]
        removed = [key for key, value in keys.items() if value is None]
        remedy = f" Take out {', '.join(removed)} there." if removed else ""
        raise EditError(
            f"The file is written in a way that can't be edited safely. Change models.{name} yourself.{remedy}",
            detail=(f"  {name}:", *lines) if lines else (),
        ) from error
    return edited


def _require(sure: bool) -> None:
    if not sure:
        raise ValueError


def _parsed(text: str) -> Document:
    """The value of the text, a mapping. Raises ValueError if it has mistakes, or is no mapping."""
    node, problems = parse(text, Source(Layer.FILE, "edited", Path()))
    value = plain(node) if node is not None else {}
    _require(not problems and isinstance(value, dict))
    return value if isinstance(value, dict) else {}


def _entries_of(document: Document, section: str) -> Document:
    """The section's entries; none for an empty section. Raises ValueError for anything but a mapping."""
    entries = document.get(section) or {}
    _require(isinstance(entries, dict))
    return entries if isinstance(entries, dict) else {}


def _entry_lines(entries: Mapping[str, Mapping[str, JsonValue]], indent: int) -> str:
    """The lines of the entries, indented by `indent`."""
    lines = to_yaml({MODELS: {name: dict(entry) for name, entry in entries.items()}}).splitlines()[1:]
    return "".join(f"{' ' * (indent - 2)}{line}\n" if indent >= 2 else f"{line[2 - indent :]}\n" for line in lines)


def _text_with_entries(text: str, entries: Mapping[str, Mapping[str, JsonValue]], name: str) -> str:
    root = _compose(text)
    newline = "\r\n" if "\r\n" in text else "\n"
    text += "" if not text or text.endswith("\n") else newline
    lines = text.splitlines(keepends=True)
    section = _find_pair(root, name)
    if section is None:
        gap = newline if lines and lines[-1].strip() else ""
        return text + gap + f"{name}:{newline}" + _entry_lines(entries, 2).replace("\n", newline)
    key, there = section
    indent = 2
    if there.value and isinstance(there, yaml.MappingNode) and not there.flow_style:
        indent = there.value[0][0].start_mark.column
    else:  # nothing, `{}`, `null` or `~`
        at, line = there.start_mark.line, lines[there.start_mark.line]
        kept = line[there.end_mark.column :]
        lines[at] = line[: there.start_mark.column].rstrip() + ("" if kept.isspace() else " ") + kept.lstrip(" ")
    end = _end_of_block(lines, key.start_mark.line + 1, _next_key_line(root, key, len(lines)), indent)
    return "".join((*lines[:end], _entry_lines(entries, indent).replace("\n", newline), *lines[end:]))


def _text_without_entry(text: str, name: str, section: str) -> str:
    root = _compose(text)
    found = _find_pair(root, section)
    own = _find_pair(found[1], name) if found is not None else None
    if found is None or own is None:
        raise ValueError
    lines, (key, entries) = text.splitlines(keepends=True), found
    first, end = _block_of(lines, root, key, entries, own[0])
    if len(entries.value) == 1:
        at = key.start_mark.line
        head, colon, rest = lines[at].partition(":")
        lines[at] = f"{head}{colon} {{}}{rest}"
    return "".join((*lines[:first], *lines[end:]))


def _with_key(text: str, name: str, key: str, value: JsonValue) -> str:
    """The text with one key of a model set, or, with None, removed. Raises ValueError."""
    root = _compose(text)
    section = _find_pair(root, MODELS)
    entry = _find_pair(section[1], name) if section is not None else None
    if section is None or entry is None or not isinstance(entry[1], yaml.MappingNode):
        raise ValueError
    mapping, own = entry[1], _find_pair(entry[1], key)
    if mapping.flow_style:
        if own is not None and value is not None:
            return _with_replaced_node(text, own[1], flow(value))
        if "#" in (written := text[mapping.start_mark.index : mapping.end_mark.index]) and "\n" in written:
            raise ValueError  # it may be a comment, which would get lost
        rest = {each.value: text[each.start_mark.index : node.end_mark.index] for each, node in mapping.value}
        rest.pop(key, None)
        added = [f"{flow(key)}: {flow(value)}"] if value is not None else []
        return _with_replaced_node(text, mapping, "{" + ", ".join([*rest.values(), *added]) + "}")
    newline = "\r\n" if "\r\n" in text else "\n"
    text += "" if text.endswith("\n") else newline
    lines = text.splitlines(keepends=True)
    line = "" if value is None else f"{' ' * mapping.value[0][0].start_mark.column}{flow(key)}: {flow(value)}{newline}"
    if own is None:
        end = _block_of(lines, root, section[0], section[1], entry[0])[1]
        return "".join((*lines[:end], line, *lines[end:]))
    if value is not None and own[1].start_mark.line == own[1].end_mark.line == own[0].start_mark.line:
        return _with_replaced_node(text, own[1], flow(value))  # a comment beside it stays
    last = _next_key_line(section[1], entry[0], _next_key_line(root, section[0], len(lines)))
    end = _end_of_block(
        lines, own[0].start_mark.line + 1, _next_key_line(mapping, own[0], last), own[0].start_mark.column + 1
    )
    return "".join((*lines[: own[0].start_mark.line], line, *lines[end:]))


def _with_replaced_node(text: str, node: yaml.Node, new: str) -> str:
    return text[: node.start_mark.index] + new + text[node.end_mark.index :]


def _block_of(
    lines: list[str], root: yaml.Node | None, section: yaml.Node, entries: yaml.Node, own: yaml.Node
) -> tuple[int, int]:
    """The lines of an entry: the first, and the one after the last."""
    first, column = own.start_mark.line, own.start_mark.column
    return first, _end_of_block(
        lines, first + 1, _next_key_line(entries, own, _next_key_line(root, section, len(lines))), column + 1
    )


def _compose(text: str) -> yaml.Node | None:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None and (not isinstance(root, yaml.MappingNode) or root.flow_style):
        raise ValueError
    return root


def _find_pair(mapping: yaml.Node | None, key: str) -> tuple[yaml.Node, yaml.Node] | None:
    pairs = mapping.value if isinstance(mapping, yaml.MappingNode) else []
    return next((pair for pair in pairs if pair[0].value == key), None)


def _next_key_line(mapping: yaml.Node | None, key: yaml.Node, end: int) -> int:
    """The line of the mapping's next key, else `end`."""
    assert isinstance(mapping, yaml.MappingNode)
    later = (other.start_mark.line for other, _ in mapping.value if other.start_mark.line > key.start_mark.line)
    return min(later, default=end)


def _end_of_block(lines: list[str], first: int, end: int, indent: int) -> int:
    """The line after the block that begins in `first`. Empty lines at its end, and comments further left, don't belong to it."""
    while end > first:
        line = lines[end - 1]
        bare = line.strip()
        if bare and not (bare.startswith("#") and len(line) - len(line.lstrip()) < indent):
            break
        end -= 1
    return end
