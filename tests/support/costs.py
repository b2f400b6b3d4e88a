"""What each folder of tests costs: seconds, and processor seconds with its daemons and workers; and the slowest ten.

    pytest --costs               prints it at the end
    pytest --costs-to=FILE       writes it there as JSON, too

A test's processor time is what its process and everything below it took between the test's start and its end. What a
shared daemon takes counts for whoever was running meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
SLOWEST = 10


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--costs", action="store_true", help="tell seconds and CPU seconds of each folder")
    parser.addoption("--costs-to", metavar="FILE", help="tell them, and write them there as JSON")


def register(config: pytest.Config) -> None:
    if config.getoption("--costs") or config.getoption("--costs-to"):
        config.pluginmanager.register(Costs(config), "costs")


def cpu_s() -> float:
    """Processor seconds of this process, of all that it has reaped, and of all that lives below it."""
    return sum(_ticks(os.getpid())) / TICKS


def _ticks(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # one that ends while it is looked at
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
        yield sum(int(field) for field in fields[11:15])  # its own, and its reaped children's
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split():
                yield from _ticks(int(child))


class Costs:
    """One a process; where tests run side by side, each process measures and the first one adds up."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._before = 0.0
        self._tests: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # seconds, CPU seconds

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        self._before = cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]):
        report = yield
        if call.when == "teardown":
            now = cpu_s()
            report.user_properties.append(("cpu_s", max(0.0, now - self._before)))
            self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self._tests[report.nodeid]
        found[0] += report.duration
        if report.when == "teardown":
            found[1] += sum(value for name, value in report.user_properties if name == "cpu_s")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if hasattr(self._config, "workerinput") or not self._tests:
            return
        folders = self._sums(lambda file: "/".join(file.split("/")[1:-1]) or file)
        everything = self._sums(lambda _file: "all")
        terminalreporter.section("costs")
        write = terminalreporter.write_line
        write(f"{'folder':30} {'tests':>6} {'seconds':>9} {'CPU s':>9}")
        for name, (count, seconds, cpu) in {**folders, **everything}.items():
            write(f"{name:30} {count:6.0f} {seconds:9.1f} {cpu:9.1f}")
        slowest = sorted(self._tests.items(), key=lambda row: -row[1][0])[:SLOWEST]
        for name, (seconds, _cpu) in slowest:
            write(f"{seconds:9.1f} s  {name}")
        if path := self._config.getoption("--costs-to"):
            Path(path).write_text(f'{{\n"folders": {_lines(folders)},\n"files": {_lines(self._sums(str))}\n}}\n')

    def _sums(self, group) -> dict[str, list[float]]:
        """Tests, seconds and CPU seconds of each group of files; what costs most comes first."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        for test, (seconds, cpu) in self._tests.items():
            found = sums[group(test.partition("::")[0])]
            found[:] = found[0] + 1, round(found[1] + seconds, 1), round(found[2] + cpu, 1)
        return dict(sorted(sums.items(), key=lambda row: -row[1][2]))


def _lines(rows: Mapping[str, list[float]]) -> str:
    """As JSON, each in a line."""
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()) + "\n}"
