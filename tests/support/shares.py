"""Who runs which tests where several processes run them side by side (`pytest -n auto`, as `make test` does).

A file is run by one process, from its first test to its last, so that what its tests share is made once. Files that cost
most begin first, by what tests/costs.json says of the last `make costs`; otherwise a long one would be left for the end,
with nothing to run beside it. Files in `TOGETHER` share what takes long to start, as a browser, or the one GPU, and so one
process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections import defaultdict
from math import inf
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
COSTS = TESTS / "costs.json"
TOGETHER = {
    f"{folder}/test_{name}.py": folder
    for folder, names in {
        "tests/e2e/runtimes/transcription": ("answers", "files", "turns"),
        "tests/e2e/dashboard": ("access", "dashboard", "editing", "extras", "operating", "pictures", "playground"),
        "tests/gpu": ("exllamav3", "nvml", "runtimes"),
    }.items()
    for name in names
}
MOST = 8  # of processes: some tests start workers that take gigabytes


def processes() -> int:
    """More than there are processors: tests wait half of their time for others to start and end."""
    return min(MOST, 3 * len(os.sched_getaffinity(0)))


def compile_share(config: pytest.Config) -> None:
    """In a fresh clone every process would compile every file. Each compiles some, which are read when the others come to them."""
    if not hasattr(config, "workerinput") or config.args_source is not config.ArgsSource.TESTPATHS:
        return
    own, count = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
    for file in sorted(TESTS.rglob("test_*.py"))[own::count]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # told when it is collected
            importlib.import_module(".".join(file.relative_to(TESTS.parent).with_suffix("").parts))


def scheduler(config: pytest.Config, log: object) -> object:
    """xdist's, which hands out whole files in the order of the collection."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return share_of(nodeid)

    config.option.loadscopereorder = False
    return Files(config, log)


def sort(items: list[pytest.Item], *, is_built: bool) -> None:
    """Those of expensive shares first, after new ones, of which nothing is known yet. Those that need a llama-server come last,
    while it isn't built: they wait for it.
    """
    late = set() if is_built else {share_of(item.nodeid) for item in items if item.get_closest_marker("binary")}
    costs: dict[str, float] = defaultdict(float)
    for file, (_count, seconds, _cpu) in (json.loads(COSTS.read_text())["files"] if COSTS.exists() else {}).items():
        costs[share_of(file)] += seconds
    items.sort(key=lambda item: (share_of(item.nodeid) in late, -costs.get(share_of(item.nodeid), inf)))


def share_of(nodeid: str) -> str:
    """What one process runs as a whole; the id of a test, or a file."""
    file = nodeid.partition("::")[0]
    return TOGETHER.get(file, file)
