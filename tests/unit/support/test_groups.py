"""Costly groups of tests are left out only as long as nothing that they read has changed since they passed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.contract.conftest import ELSEWHERE
from tests.support.daemon import REPOSITORY
from tests.support.groups import GROUPS

CONFTEST = """
from pathlib import Path
from tests.support import groups

groups.REPOSITORY = Path(__file__).parent
groups.PASSED = groups.REPOSITORY / "passed.json"
groups.GROUPS = {
    "costly": groups.Group(("test_it.py::TestCostly",), ("source",), always=("test_it.py::TestCostly::test_one",)),
    "other": groups.Group(("test_it.py::test_cheap",), ("source",)),
    "absent": groups.Group(("test_absent.py",), ("source",)),
}
pytest_addoption, pytest_configure = groups.add_option, groups.register
"""
TESTS = """
import os
import pytest

class TestCostly:
    def test_one(self): ...
    def test_two(self): assert "FAIL" not in os.environ

def test_cheap(): ...
"""
ABSENT = "import pytest\n\n@pytest.mark.skip(reason='needs what is not here')\ndef test_it(): ..."


@pytest.fixture
def project(tmp_path):
    for name, text in {
        "conftest.py": CONFTEST,
        "test_it.py": TESTS,
        "test_absent.py": ABSENT,
        "source/a.txt": "1",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(project, *words: str, code: int = 0, **env: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={project}"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env}
    done = subprocess.run([*command, *words], cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def noted(project) -> list[str]:
    return list(json.loads((project / "passed.json").read_text()))


class TestSelection:
    """What is noted, and what is left out for it."""

    def test_what_passed_is_left_out_and_said(self, project):
        assert "4 passed" not in run(project, "--note-passed")
        assert noted(project) == ["costly", "other"], "of the other nothing could run"
        told = run(project, "--skip-unchanged")
        assert "left out, unchanged since it passed: costly" in told
        assert "1 passed, 1 skipped, 2 deselected" in told
        assert "3 passed, 1 skipped" in run(project), "other runs leave nothing out"

    def test_a_change_brings_it_back(self, project):
        """Also a new file; a group that failed since is noted no more."""
        run(project, "--note-passed")
        for path in [project / "source" / "a.txt", project / "source" / "new.txt", project / "test_it.py"]:
            before = path.read_text() if path.exists() else None
            path.write_text((before or "") + "\n")
            assert "3 passed, 1 skipped" in run(project, "--skip-unchanged"), path
            if before is None:
                path.unlink()
            else:
                path.write_text(before)
        assert noted(project) == ["costly", "other"]
        run(project, "--note-passed", code=1, FAIL="1")
        assert noted(project) == ["other"]

    @pytest.mark.parametrize("part", [["test_it.py::TestCostly::test_two"], ["-k", "test_two"]])
    def test_a_part_notes_nothing(self, project, part):
        run(project, "--note-passed", *part)
        assert not (project / "passed.json").exists()

    def test_a_folder_without_files_fails(self, project):
        (project / "source" / "a.txt").unlink()
        assert "names source, where there is no file" in run(project, "--skip-unchanged", code=4)


class TestGroups:
    """The groups of this repository."""

    @pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
    def test_each_path_has_files(self, group):
        group.digest()

    def test_of_each_runtime_a_worker_runs_every_time(self):
        always = {test.partition("::")[0] for group in GROUPS.values() for test in group.always}
        elsewhere = {place for place in ELSEWHERE.values() if place.startswith("tests/")}
        assert elsewhere <= always
        assert not any(group.has("tests/contract/test_contract.py::TestReady") for group in GROUPS.values())
