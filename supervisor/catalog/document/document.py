"""Configuration text as a tree in which every value knows its place in the file.

The tree is built here from YAML's events rather than by a YAML constructor, because a constructor forgets positions, lets
the last of two equal keys win, expands aliases without a bound and reads `no` as False. Plain scalars follow the core
schema of YAML 1.2: only `true` and `false` are booleans, so `flash_attn: on` is the text it looks like, and keys are
always text. Aliases and `<<` work, but their expansion is bounded.

The same tree serves environment variables and flags, so that one merge and one validation work for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""The path to a value: keys and list indexes from the root."""


class Layer(StrEnum):
    """The origin of a value; later layers win."""

    FILE = "file"
    LOCAL = "local"
    ENVIRONMENT = "env"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Source:
    """A file, a variable or a flag. `directory`: the base of relative paths in it."""

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
    """A scalar. `place`: of its key, if it has one."""

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


def whole_number(text: str) -> int | None:
    """The number of these decimal digits; None for any other text, and for more than 18 digits."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


def plain(node: Node) -> JsonValue:
    """The value without its places."""
    match node:
        case Leaf():
            return node.value
        case Items():
            return [plain(item) for item in node.nodes]
        case Table():
            return {key: plain(value) for key, value in node.entries.items()}


def tree_of(value: object, place: Place) -> Node:
    """A tree of plain data with a single place, such as a flag. Raises TypeError for a value that YAML can't express."""
    if isinstance(value, Mapping):
        return Table({str(key): tree_of(item, place) for key, item in value.items()}, place)
    if isinstance(value, str | int | float | bool | None):
        return Leaf(value, place)
    if isinstance(value, Path):
        return Leaf(str(value), place)
    if isinstance(value, Sequence):
        return Items(tuple(tree_of(item, place) for item in value), place)
    raise TypeError(f"no configuration value: {value!r}")


def merge(base: Node, over: Node) -> Node:
    """`over` wins, mappings key by key. A null in `over` removes the key, so that its default returns."""
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


# -------------------------------------------------------------------------------------------------------------- reading

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEAN = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_BASED = re.compile(r"0x[0-9a-fA-F]{1,15}|0o[0-7]{1,20}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]{1,30}|[0-9]{1,30}(?:\.[0-9]{0,30})?)(?:[eE][-+]?[0-9]{1,3})?")


def scalar(text: str) -> str | int | float | bool | None:
    """The value of an unquoted word."""
    if text in _NULL:
        return None
    if text in _BOOLEAN:
        return _BOOLEAN[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    # A number with leading zeros is an identifier, not a float.
    if _FLOAT.fullmatch(text) and not re.match(r"[-+]?0[0-9]", text):
        return float(text)
    return text


def read(path: Path, source: Source) -> tuple[Node | None, list[Problem]]:
    """The tree of a file and the problems of its text; None for a tree when it is empty or unreadable. Blocks on the file."""
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
    """The tree of one YAML document, and its problems."""
    reader = _Reader(text, source)
    try:
        return reader.document(), reader.problems
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        for suspect in (error.problem_mark, error.context_mark):
            if suspect is not None and (found := _find_lookalike(text, suspect.line)) is not None:
                column, what = found
                return None, [*reader.problems, Problem(Place(source, suspect.line + 1, column), (), what)]
        place = Place(source, mark.line + 1, mark.column + 1) if mark else Place(source)
        message = ", ".join(part for part in (error.problem, error.context) if part)
        return None, [*reader.problems, Problem(place, (), f"not valid YAML: {message}")]
    except yaml.YAMLError as error:
        return None, [*reader.problems, Problem(Place(source), (), f"not valid YAML: {str(error).splitlines()[0]}")]
    except _StopError as stop:
        return None, [*reader.problems, stop.problem]


_CURLY = "“”„‟‘’‚‛"
_BLANKS = {"\u00a0": "non-breaking space", "\u202f": "non-breaking space", "\u2007": "non-breaking space"} | {
    "\u3000": "wide space",
    "\u200b": "invisible space",
    "\ufeff": "invisible space",
}
_BLANK = re.compile(f"[{''.join(_BLANKS)}]")
_LOOKALIKE = re.compile(f"[{_CURLY}{''.join(_BLANKS)}]")


def _find_lookalike(text: str, number: int) -> tuple[int, str] | None:
    """A character in an unreadable line that looks like valid YAML but isn't: its column, and a message about it."""
    line = "".join(text.split("\n")[number : number + 1])
    indent = line[: len(line) - len(line.lstrip())]
    if "\t" in indent:
        return indent.index("\t") + 1, "a tab indents this line, and YAML takes only spaces there"
    if blank := _BLANK.search(line):
        return blank.start() + 1, _blank_problem(blank[0])
    if curly := re.search(f"[{_CURLY}]", line):
        return curly.start() + 1, _curly_problem(curly[0])
    return None


def _curly_problem(character: str) -> str:
    return f'{character} is a curly quote, which means nothing to YAML: type a straight one (")'


def _blank_problem(character: str) -> str:
    return f"a {_BLANKS[character]} (U+{ord(character):04X}), which YAML takes for a letter: type a plain space"


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StopError(Exception):
    def __init__(self, place: Place, trail: Trail, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(place, trail, message)


class _Reader:
    """Makes a tree of YAML events, by a recursion that MAX_DEPTH bounds, and collects problems on the way."""

    def __init__(self, text: str, source: Source) -> None:
        self.problems: list[Problem] = []
        self._source = source
        self._lines = text.split("\n") if _LOOKALIKE.search(text) else []
        self._events: Iterator[yaml.Event] = yaml.parse(text, Loader=_LOADER)
        self._anchors: dict[str, tuple[Node, int]] = {}

    def document(self) -> Node | None:
        """The root; None for an empty text. Raises _StopError and yaml.YAMLError."""
        root: Node | None = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise _StopError(self._place(event, ()), (), "a second document begins; one file holds one")
                root, _ = self._node(next(self._events), ())
        return root

    def _place(self, event: yaml.Event, trail: Trail) -> Place:
        mark = event.start_mark
        assert mark is not None
        place = Place(self._source, mark.line + 1, mark.column + 1)
        tag = event.tag if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) else None
        if tag is not None and tag != "!":
            self.problems.append(Problem(place, trail, f"the tag {tag} has no meaning here"))
        return place

    def _node(self, event: yaml.Event, trail: Trail) -> tuple[Node, int]:
        """The node that begins with this event, and the number of its values."""
        place = self._place(event, trail)
        assert isinstance(event, yaml.NodeEvent)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise _StopError(place, trail, f"*{event.anchor} stands for nothing that is complete at this point")
            node, size = self._anchors[event.anchor]
            return replace(node, place=place), size
        if isinstance(event, yaml.ScalarEvent):
            self._check_scalar(event, trail)
            node, size = Leaf(scalar(event.value) if event.implicit[0] else str(event.value), place), 1
        elif len(trail) >= MAX_DEPTH:
            raise _StopError(place, trail, f"nested more than {MAX_DEPTH} deep")
        elif isinstance(event, yaml.SequenceStartEvent):
            node, size = self._items(place, trail)
        else:
            node, size = self._table(place, trail)
        if event.anchor is not None:
            self._anchors[event.anchor] = node, size
        return node, size

    def _check_scalar(self, event: yaml.ScalarEvent, trail: Trail) -> None:
        """Report a curly quote at the beginning of unquoted text, and any blank in it other than a plain space."""
        mark, text = event.start_mark, str(event.value)
        if not self._lines or not event.implicit[0] or mark is None:
            return
        if text and text[0] in _CURLY:
            self.problems.append(
                Problem(Place(self._source, mark.line + 1, mark.column + 1), trail, _curly_problem(text[0]))
            )
        if blank := _BLANK.search(text):
            line = "".join(self._lines[mark.line : mark.line + 1])
            column = max(line.find(blank[0], mark.column), mark.column) + 1
            what = f"{_blank_problem(blank[0])}, or quote the text if it is meant"
            self.problems.append(Problem(Place(self._source, mark.line + 1, column), trail, what))

    def _items(self, place: Place, trail: Trail) -> tuple[Items, int]:
        nodes, size = list[Node](), 1
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            node, size = self._counted_node(event, (*trail, len(nodes)), size)
            nodes.append(node)
        return Items(tuple(nodes), place), size

    def _table(self, place: Place, trail: Trail) -> tuple[Table, int]:
        entries, inherited, size = dict[str, Node](), list[Node](), 1
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            at = self._place(event, trail)
            if not isinstance(event, yaml.ScalarEvent):
                raise _StopError(at, trail, "a key must be text")
            self._check_scalar(event, trail)
            key = str(event.value)
            if key in entries:
                first = entries[key].place.line
                self.problems.append(Problem(at, trail, f'duplicate key "{key}"; it is already there in line {first}'))
            elif not key:
                self.problems.append(Problem(at, trail, "an empty key"))
            node, size = self._counted_node(next(self._events), (*trail, key), size)
            if key == "<<":
                inherited.append(node)
            else:
                entries.setdefault(key, replace(node, place=at))
        for node in inherited:
            entries = self._inherit(entries, node, trail)
        return Table(entries, place), size

    def _counted_node(self, event: yaml.Event, trail: Trail, size: int) -> tuple[Node, int]:
        node, more = self._node(event, trail)
        if size + more > MAX_NODES:
            raise _StopError(node.place, trail, f"more than {MAX_NODES} values, aliases expanded")
        return node, size + more

    def _inherit(self, entries: dict[str, Node], node: Node, trail: Trail) -> dict[str, Node]:
        match node:
            case Table():
                return {**node.entries, **entries}
            case Items(nodes=nodes) if all(isinstance(item, Table) for item in nodes):
                for item in nodes:
                    entries = self._inherit(entries, item, trail)
            case _:
                self.problems.append(Problem(node.place, trail, "<< takes a mapping or a list of mappings"))
        return entries
