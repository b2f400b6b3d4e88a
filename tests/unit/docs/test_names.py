"""Names have the field's words: none of these stands in a name of ours, since the field has another for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.daemon import REPOSITORY

FOLDERS = ("supervisor", "runtimes", "bench", "tools")
INSTEAD = {
    "accompany": "supervise",
    "asked": "requested",
    "assembling": "wiring",
    "behind": "what follows it",
    "books": "device ledger",
    "canonical": "what it is made from",
    "departure": "disconnect",
    "dismissed": "unloaded by operator",
    "endings": "termination",
    "envelope": "template",
    "estate": "handover messages",
    "exchange": "response cycle",
    "follower": "reader",
    "gone": "exited, removed",
    "happenings": "event view",
    "held": "reserved, buffered",
    "helper": "what it does",
    "kit": "worker SDK",
    "lane": "worker pool",
    "leader": "primary replica",
    "leaving": "handing over",
    "manager": "what it does",
    "mourn": "watch the exit",
    "news": "load status",
    "nobody": "anonymous tenant",
    "outline": "condensed JSON, device summary",
    "promising": "shortlist",
    "remains": "leftovers",
    "retract": "mark unready",
    "said": "what it is",
    "spreading": "multi-device",
    "staying": "keep alive",
    "stays": "keep loaded",
    "surroundings": "worker deps",
    "tell": "publish, log, notify",
    "telling": "publish, log, notify",
    "tells": "publish, log, notify",
    "told": "what it is",
    "unasked": "background",
    "unheard": "unsupported",
    "unsaid": "unknown extensions",
    "util": "what it does",
    "utils": "what it does",
    "wish": "intent, directive",
    "wished": "wanted",
    "wording": "messages",
    "young": "residency",
}
PUBLIC = frozenset({"asked_at", "held_s"})  # fields of the API keep their names
_JS_NAMES = re.compile(r"\b(?:const|let|function|class) (?:(\w+)|\[([^]=]*)\] =)")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def named(path: Path) -> Iterator[str]:
    """The names that a module gives: its own, and those of classes, functions, arguments, variables and attributes."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name


def named_in_script(path: Path) -> Iterator[str]:
    """The names that a module of the dashboard gives: its own, those of variables, functions and their parts taken from lists."""
    yield path.stem
    for constant, several in _JS_NAMES.findall(path.read_text(encoding="utf-8")):
        yield from re.findall(r"\w+", constant or several)


def words(name: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(name)}


def test_words_of_a_name():
    assert words("_HeldBody_ofURL2") == {"held", "body", "of", "url"}


def test_no_name_has_such_a_word():
    programs = [(path, named) for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py")]
    scripts = [(path, named_in_script) for path in (REPOSITORY / "supervisor/server/ui/js").rglob("*.js")]
    assert scripts
    found = {
        f"{path.relative_to(REPOSITORY)}: {name} ({word}: {INSTEAD[word]})"
        for path, names_of in (*programs, *scripts)
        for name in names_of(path)
        if name not in PUBLIC
        for word in words(name) & INSTEAD.keys()
    }
    assert found == set()
