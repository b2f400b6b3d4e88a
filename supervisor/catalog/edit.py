"""Puts a model into the text of a configuration, or takes one out; all other lines stay as they are, comments too.

The text is cut at the places that YAML's parser tells. The new text is then read again: if it doesn't say exactly what the
old one said, with the model or without it, nothing comes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml
from pydantic import JsonValue

from supervisor.catalog.document import Layer, Source, parse, plain
from supervisor.catalog.yaml_writer import to_yaml
from supervisor.errors import LlmuxError

MODELS: Final = "models"
Document = dict[str, JsonValue]


class EditError(LlmuxError):
    """The text is written in a way that can't be edited safely; `detail` has the lines for a person to add."""

    code = "configuration_not_edited"


def with_model(text: str, name: str, entry: Mapping[str, JsonValue]) -> str:
    """The text with this model behind the others. Raises EditError."""
    return with_models(text, {name: entry})


def with_models(text: str, entries: Mapping[str, Mapping[str, JsonValue]]) -> str:
    """The same for several."""
    try:
        edited, before = _added(text, entries), _value(text)
        models, new = _models(before), {name: dict(entry) for name, entry in entries.items()}
        _check(models.keys().isdisjoint(new) and _value(edited) == before | {MODELS: models | new})
    except (yaml.YAMLError, ValueError) as error:
        raise EditError(
            f"The file is written in a way that can't be edited safely. Add these lines below `{MODELS}:` yourself:",
            detail=tuple(_lines(entries, 2).splitlines()),
        ) from error
    return edited


def without_model(text: str, name: str) -> str:
    """The text without this model, and without the comments inside of its entry. Raises EditError."""
    try:
        edited, before = _taken(text, name), _value(text)
        left = {key: model for key, model in _models(before).items() if key != name}
        _check(_value(edited) == before | {MODELS: left})
    except (yaml.YAMLError, ValueError) as error:
        raise EditError(
            f"The file is written in a way that can't be edited safely. Take out models.{name} yourself."
        ) from error
    return edited


def _check(sure: bool) -> None:
    if not sure:
        raise ValueError


def _value(text: str) -> Document:
    """What the text says. Raises ValueError where it has mistakes, or is no mapping."""
    node, problems = parse(text, Source(Layer.FILE, "edited", Path()))
    value = plain(node) if node is not None else {}
    _check(not problems and isinstance(value, dict))
    return value if isinstance(value, dict) else {}


def _models(document: Document) -> Document:
    """The section; nothing stands for an empty one. Raises ValueError for anything else."""
    models = document.get(MODELS) or {}
    _check(isinstance(models, dict))
    return models if isinstance(models, dict) else {}


def _lines(entries: Mapping[str, Mapping[str, JsonValue]], indent: int) -> str:
    """The lines of models, so far to the right."""
    lines = to_yaml({MODELS: {name: dict(entry) for name, entry in entries.items()}}).splitlines()[1:]
    return "".join(f"{' ' * (indent - 2)}{line}\n" if indent >= 2 else f"{line[2 - indent :]}\n" for line in lines)


def _added(text: str, entries: Mapping[str, Mapping[str, JsonValue]]) -> str:
    root = _composed(text)
    newline = "\r\n" if "\r\n" in text else "\n"
    text += "" if not text or text.endswith("\n") else newline
    lines = text.splitlines(keepends=True)
    section = _pair(root, MODELS)
    if section is None:
        gap = newline if lines and lines[-1].strip() else ""
        return text + gap + f"{MODELS}:{newline}" + _lines(entries, 2).replace("\n", newline)
    key, models = section
    indent = 2
    if models.value and isinstance(models, yaml.MappingNode) and not models.flow_style:
        indent = models.value[0][0].start_mark.column
    else:  # nothing, `{}`, `null` or `~`
        at, line = models.start_mark.line, lines[models.start_mark.line]
        kept = line[models.end_mark.column :]
        lines[at] = line[: models.start_mark.column].rstrip() + ("" if kept.isspace() else " ") + kept.lstrip(" ")
    end = _end(lines, key.start_mark.line + 1, _next(root, key, len(lines)), indent)
    return "".join((*lines[:end], _lines(entries, indent).replace("\n", newline), *lines[end:]))


def _taken(text: str, name: str) -> str:
    root = _composed(text)
    section = _pair(root, MODELS)
    found = _pair(section[1], name) if section is not None else None
    if section is None or found is None:
        raise ValueError
    lines, (key, models), own = text.splitlines(keepends=True), section, found[0]
    first, column = own.start_mark.line, own.start_mark.column
    end = _end(lines, first + 1, _next(models, own, _next(root, key, len(lines))), column + 1)
    if len(models.value) == 1:
        at = key.start_mark.line
        head, colon, rest = lines[at].partition(":")
        lines[at] = f"{head}{colon} {{}}{rest}"
    return "".join((*lines[:first], *lines[end:]))


def _composed(text: str) -> yaml.Node | None:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None and (not isinstance(root, yaml.MappingNode) or root.flow_style):
        raise ValueError
    return root


def _pair(mapping: yaml.Node | None, key: str) -> tuple[yaml.Node, yaml.Node] | None:
    pairs = mapping.value if isinstance(mapping, yaml.MappingNode) else []
    return next((pair for pair in pairs if pair[0].value == key), None)


def _next(mapping: yaml.Node | None, key: yaml.Node, end: int) -> int:
    """The line in which the next key of the mapping stands, else `end`."""
    assert isinstance(mapping, yaml.MappingNode)
    behind = (other.start_mark.line for other, _ in mapping.value if other.start_mark.line > key.start_mark.line)
    return min(behind, default=end)


def _end(lines: list[str], first: int, end: int, indent: int) -> int:
    """Where the part that begins in `first` ends: empty lines behind it, and comments further left, are not its own."""
    while end > first:
        line = lines[end - 1]
        bare = line.strip()
        if bare and not (bare.startswith("#") and len(line) - len(line.lstrip()) < indent):
            break
        end -= 1
    return end
