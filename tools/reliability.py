"""The tables of docs/reliability.md: each fault and each attack with its tests and their latest measurements."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from tests.faults.table import TABLE, Fault
from tools.locks import ROOT

FIGURES: Final = ROOT / "tests" / "figures.json"
ATTACKS: Final = "tests.security.test_attacks_table"
_NUMBERED: Final = re.compile(r"Test(\d\d)")
_UNITS: Final = {"s": " s", "ms": " ms", "mib": " MiB"}

Row = tuple[str, ...]


def faults() -> list[Row]:
    """Rows of promise, mechanism, tests and latest figures."""
    return [
        (f"{fault.number}. {fault.what}", fault.promise, fault.mechanism, _links(tests_of(fault)), _figures_text(fault))
        for fault in TABLE
    ]


def soak() -> str:
    """The latest measurements of the soak test."""
    found = measured("tests/faults/test_soak.py")
    return "\n".join(f"- {words(name)}: {shown(name, value)}" for name, value in found.items()) or "Not run yet."


def measured_on() -> str:
    """The date and machine of the figures."""
    kept = _recorded_figures()
    return f"Measured on {kept['date']}, {kept['machine']}, with other programs running beside." if kept else ""


def attacks() -> list[Row]:
    """Rows of an attack and its tests; empty while the table is missing."""
    if not (ROOT / f"{ATTACKS.replace('.', '/')}.py").exists():
        return []
    table: Mapping[str, Iterable[str]] = importlib.import_module(ATTACKS).TABLE
    return [(attack.replace("_", " ").capitalize(), _links(tests)) for attack, tests in table.items()]


def tests_of(fault: Fault) -> tuple[str, ...]:
    """The tests whose class has the fault's number, and the tests that the fault names."""
    return (*sorted(test for number, test in _numbered_tests() if number == fault.number), *fault.also)


def is_there(test: str) -> bool:
    """Whether the test exists: a file, a class or function, or a method: path, path::name or path::Class::name."""
    path, *names = test.split("::")
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text(encoding="utf-8")).body if (ROOT / path).exists() else []
    if not body:
        return False
    for name in names:
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True


@cache
def _numbered_tests() -> tuple[tuple[int, str], ...]:
    """Number and test id of every class with a fault's number."""
    return tuple(
        (int(match[1]), f"{path.relative_to(ROOT).as_posix()}::{node.name}")
        for path in sorted((ROOT / "tests" / "faults").rglob("test_*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and (match := _NUMBERED.match(node.name))
    )


@cache
def _recorded_figures() -> Mapping[str, object]:
    found: Mapping[str, object] = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    return found


def measured(test: str) -> dict[str, object]:
    """The figures of a test, or of all tests in a class or file; of a number from several tests, the maximum."""
    tests = _recorded_figures().get("tests", {})
    assert isinstance(tests, dict)
    found: dict[str, object] = {}
    for name, figures in tests.items():
        if name == test or name.startswith((f"{test}::", f"{test}[")):
            for key, value in figures.items():
                before = found.get(key)
                both = isinstance(before, int | float) and isinstance(value, int | float)
                found[key] = max(before, value) if both else value
    return found


def _figures_text(fault: Fault) -> str:
    if fault.missing:
        return fault.missing
    figures = {
        name: value
        for test in tests_of(fault)
        for name, value in measured(test).items()
        if isinstance(value, int | float) and name != "seed"
    }
    return "; ".join(f"{words(name)} {shown(name, value)}" for name, value in figures.items()) or "–"


def words(name: str) -> str:
    """A figure's name without its unit."""
    head, _, unit = name.rpartition("_")
    return (head if unit in _UNITS else name).replace("_", " ")


def shown(name: str, value: object) -> str:
    """A figure with its unit."""
    unit = _UNITS.get(name.rpartition("_")[2], "")
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return " → ".join(shown("", item) for item in value) + unit
    return (f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)) + unit


def _links(tests: Iterable[str]) -> str:
    return "<br>".join(_link(test) for test in tests) or "–"


def _link(test: str) -> str:
    path, _, inside = test.partition("::")
    return f"[{inside or Path(path).stem}](../{path})"


def all_tests() -> Iterator[str]:
    """Each test that a table names."""
    for fault in TABLE:
        yield from tests_of(fault)
    if (ROOT / f"{ATTACKS.replace('.', '/')}.py").exists():
        for tests in importlib.import_module(ATTACKS).TABLE.values():
            yield from tests
