"""What tests measured (the fixture `measured` of the fault tests), kept for docs/reliability.md.

    pytest --figures-to=FILE PATH

writes the figures of the tests that ran into the file as JSON, over their earlier ones; those of other tests stay.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path

import pytest


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--figures-to", metavar="FILE", help="keep what the tests measured there, as JSON")


def register(config: pytest.Config) -> None:
    if (path := config.getoption("--figures-to")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Figures(Path(path)), "figures")


class Figures:
    """Where tests run side by side, the first process has the reports of all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, dict[str, object]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed and report.user_properties:
            self._found[report.nodeid] = dict(report.user_properties)

    def pytest_sessionfinish(self) -> None:
        earlier = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        tests = earlier.get("tests", {}) | self._found
        kept = {"date": str(dt.datetime.now(dt.UTC).date()), "machine": machine()}
        text = json.dumps(kept | {"tests": dict(sorted(tests.items()))}, indent=1)
        self._path.write_text(text + "\n", encoding="utf-8")


def machine() -> str:
    """In words."""
    cards = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return f"{len(os.sched_getaffinity(0))} cores, {cards or 'no'} GPU{'s' if cards > 1 else ''}"
