"""Configuration text as a tree in which every value knows its place.

YAML is read as events and built here rather than by a YAML constructor, because a constructor forgets positions, lets
the last of two equal keys win, expands aliases without end and reads `no` as False. Plain scalars follow the core
schema of YAML 1.2: only `true` and `false` are booleans, so `flash_attn: on` is the text it looks like, and keys are
always text. Aliases and `<<` work, within a bound on what they expand to.

The same tree serves environment variables and flags, so that one merge and one validation work for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import yaml
from pydantic import JsonValue

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 50_000
"""Nodes after the expansion of aliases."""

Key = str | int
Trail = tuple[Key, ...]
"""Where a value is in the tree: keys and list indexes from the root."""


class Layer(StrEnum):
    """Who set a value; later layers win."""

    FILE = "file"
    LOCAL = "local"
    ENVIRONMENT = "env"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Source:
    """A file, a variable or a flag. `directory`: what relative paths in it start from."""

    layer: Layer
    label: str
    directory: Path


@dataclass(frozen=True, slots=True)
class Place:
    """A position; line and column count from 1 and are 0 where the source has none."""

    source: Source
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source.label}:{self.line}:{self.column}" if self.line else self.source.label


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong at a place; its text is one line."""

    place: Place
    trail: Trail
    message: str

    def __str__(self) -> str:
        crumb = f" {dotted(self.trail)}" if self.trail else ""
        return f"{self.place}{crumb}: {self.message}"


def dotted(trail: Trail) -> str:
    """`models.qwen.n_ctx`, `devices[0].index`."""
    text = ""
    for key in trail:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


@dataclass(frozen=True, slots=True)
class Leaf:
    """A scalar. `place` is that of its key, where it has one."""

    value: str | int | float | bool | None
    place: Place


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    nodes: tuple[Node, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping, in the order of the file."""

    entries: Mapping[str, Node]
    place: Place


Node = Leaf | Items | Table


# -------------------------------------------------------------------------------------------------------- work on trees


def plain(node: Node) -> JsonValue:
    """The value without its places."""
    match node:
        case Leaf():
            return node.value
        case Items():
            return [plain(item) for item in node.nodes]
        case Table():
            return {key: plain(value) for key, value in node.entries.items()}


def grow(value: object, place: Place) -> Node:
    """A tree from plain data that has one place, such as a flag. Raises TypeError for what YAML couldn't say."""
    if isinstance(value, Mapping):
        return Table({str(key): grow(item, place) for key, item in value.items()}, place)
    if isinstance(value, str | int | float | bool | None):
        return Leaf(value, place)
    if isinstance(value, Path):
        return Leaf(str(value), place)
    if isinstance(value, Sequence):
        return Items(tuple(grow(item, place) for item in value), place)
    raise TypeError(f"no configuration value: {value!r}")


def merge(base: Node, over: Node) -> Node:
    """`over` wins, mappings key by key; a null in `over` takes the key away, so that its default returns."""
    if not (isinstance(base, Table) and isinstance(over, Table)):
        return over
    entries = dict(base.entries)
    for key, node in over.entries.items():
        if isinstance(node, Leaf) and node.value is None and key in entries:
            del entries[key]
        else:
            entries[key] = merge(entries[key], node) if key in entries else node
    return replace(base, entries=entries)


def find(root: Node, trail: Iterable[Key]) -> tuple[Node, Trail]:
    """The node at `trail`, or the deepest one on the way to it, with the part of the trail that was found."""
    node, walked = root, list[Key]()
    for key in trail:
        if isinstance(node, Table) and key in node.entries:
            node = node.entries[str(key)]
        elif isinstance(node, Items) and isinstance(key, int) and key < len(node.nodes):
            node = node.nodes[key]
        else:
            break
        walked.append(key)
    return node, tuple(walked)


def places(root: Node, trail: Trail = ()) -> dict[Trail, Place]:
    """The place of every value below `root`."""
    found = {trail: root.place}
    match root:
        case Table():
            for key, node in root.entries.items():
                found |= places(node, (*trail, key))
        case Items():
            for index, node in enumerate(root.nodes):
                found |= places(node, (*trail, index))
        case Leaf():
            pass
    return found


# ------------------------------------------------------------------------------------------------------------- reading

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEAN = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_BASED = re.compile(r"0x[0-9a-fA-F]{1,15}|0o[0-7]{1,20}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]{1,30}|[0-9]{1,30}(?:\.[0-9]{0,30})?)(?:[eE][-+]?[0-9]{1,3})?")


def scalar(text: str) -> str | int | float | bool | None:
    """What an unquoted word means."""
    if text in _NULL:
        return None
    if text in _BOOLEAN:
        return _BOOLEAN[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    # A number with leading zeros is somebody's identifier, not a float.
    if _FLOAT.fullmatch(text) and not re.match(r"[-+]?0[0-9]", text):
        return float(text)
    return text


def read(path: Path, source: Source) -> tuple[Node | None, list[Problem]]:
    """The tree of a file and what is wrong with its text; None when it is empty or unreadable. Blocks on the file."""
    start = Place(source)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        return None, [Problem(start, (), f"can't be read: {error.strerror or error}")]
    if len(raw) > MAX_BYTES:
        return None, [Problem(start, (), f"larger than {MAX_BYTES >> 20} MiB")]
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return None, [Problem(Place(source, line, 1), (), "not UTF-8 text")]
    return parse(text, source)


def parse(text: str, source: Source) -> tuple[Node | None, list[Problem]]:
    """The tree of one YAML document and what is wrong with it."""
    builder = _Builder(source)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(source, mark.line + 1, mark.column + 1) if mark else Place(source)
        message = ", ".join(part for part in (error.problem, error.context) if part)
        return None, [*builder.problems, Problem(place, (), f"not valid YAML: {message}")]
    except yaml.YAMLError as error:
        return None, [*builder.problems, Problem(Place(source), (), f"not valid YAML: {str(error).splitlines()[0]}")]
    except _StopError as stop:
        return None, [*builder.problems, stop.problem]
    return builder.root, builder.problems


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StopError(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(slots=True)
class _Frame:
    """A mapping or list whose end has not come yet."""

    place: Place
    anchor: str | None
    entries: dict[str, Node] | None  # None: a list
    nodes: list[Node] = field(default_factory=list)
    key: tuple[str, Place] | None = None  # waits for its value
    inherited: list[Node] = field(default_factory=list)  # values of `<<`
    size: int = 1


class _Builder:
    """Takes YAML events, keeps a stack instead of recursing, and collects problems on the way."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.root: Node | None = None
        self.problems: list[Problem] = []
        self._stack: list[_Frame] = []
        self._anchors: dict[str, tuple[Node, int]] = {}
        self._documents = 0

    def take(self, event: yaml.Event) -> None:
        mark = event.start_mark
        assert mark is not None
        place = Place(self.source, mark.line + 1, mark.column + 1)
        tag = getattr(event, "tag", None)
        if tag is not None and isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and tag != "!":
            self._problem(place, f"the tag {tag} has no meaning here")
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise _StopError(Problem(place, (), "a second document begins; one file holds one"))
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                self._open(event, place)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                self._close()
            case yaml.ScalarEvent():
                self._scalar(event, place)
            case yaml.AliasEvent(anchor=str(name)):
                self._alias(name, place)
            case _:
                pass

    def _trail(self) -> Trail:
        return tuple(
            frame.key[0] if frame.key else len(frame.nodes)
            for frame in self._stack
            if frame.key is not None or frame.entries is None
        )

    def _problem(self, place: Place, message: str) -> None:
        self.problems.append(Problem(place, self._trail(), message))

    def _stop(self, place: Place, message: str) -> _StopError:
        return _StopError(Problem(place, self._trail(), message))

    def _wants_key(self) -> bool:
        return bool(self._stack) and self._stack[-1].entries is not None and self._stack[-1].key is None

    def _open(self, event: yaml.CollectionStartEvent, place: Place) -> None:
        if self._wants_key():
            raise self._stop(place, "a key must be text")
        if len(self._stack) >= MAX_DEPTH:
            raise self._stop(place, f"nested more than {MAX_DEPTH} deep")
        entries: dict[str, Node] | None = {} if isinstance(event, yaml.MappingStartEvent) else None
        self._stack.append(_Frame(place, event.anchor, entries))

    def _close(self) -> None:
        frame = self._stack.pop()
        node: Node
        if frame.entries is None:
            node = Items(tuple(frame.nodes), frame.place)
        else:
            for inherited in frame.inherited:
                frame.entries = self._inherit(frame.entries, inherited)
            node = Table(frame.entries, frame.place)
        self._put(node, frame.anchor, frame.size)

    def _inherit(self, entries: dict[str, Node], node: Node) -> dict[str, Node]:
        match node:
            case Table():
                return {**node.entries, **entries}
            case Items(nodes=nodes) if all(isinstance(item, Table) for item in nodes):
                for item in nodes:
                    entries = self._inherit(entries, item)
                return entries
            case _:
                self._problem(node.place, "<< takes a mapping or a list of mappings")
                return entries

    def _scalar(self, event: yaml.ScalarEvent, place: Place) -> None:
        if not self._wants_key():
            value = scalar(event.value) if event.implicit[0] else str(event.value)
            self._put(Leaf(value, place), event.anchor, 1)
            return
        frame, key = self._stack[-1], str(event.value)
        assert frame.entries is not None
        if key in frame.entries:
            first = frame.entries[key].place
            self._problem(place, f'duplicate key "{key}"; it is already there in line {first.line}')
        elif not key:
            self._problem(place, "an empty key")
        frame.key = (key, place)

    def _alias(self, name: str, place: Place) -> None:
        if self._wants_key():
            raise self._stop(place, "a key must be text")
        if name not in self._anchors:
            raise self._stop(place, f"*{name} stands for nothing that is complete at this point")
        node, size = self._anchors[name]
        self._put(replace(node, place=place), None, size)

    def _put(self, node: Node, anchor: str | None, size: int) -> None:
        if anchor is not None:
            self._anchors[anchor] = (node, size)
        if not self._stack:
            self.root = node
            return
        frame = self._stack[-1]
        frame.size += size
        if frame.size > MAX_NODES:
            raise self._stop(node.place, f"more than {MAX_NODES} values, aliases expanded")
        if frame.entries is None:
            frame.nodes.append(node)
            return
        assert frame.key is not None
        (key, place), frame.key = frame.key, None
        if key == "<<":
            frame.inherited.append(node)
        else:
            frame.entries.setdefault(key, replace(node, place=place))
