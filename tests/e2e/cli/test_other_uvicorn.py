"""Another uvicorn than the tested one: it serves where what we subclass is there, and is refused where it isn't."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import uvicorn

from supervisor.cli.exit_codes import ExitCode
from supervisor.server.known_uvicorn import TESTED
from tests.support.daemon import Daemon, fake

HERE = Path(uvicorn.__file__).parent
FILES = [file.relative_to(HERE) for file in HERE.rglob("*.py")]
INSIDE = "protocols/http/httptools_impl.py"


@pytest.fixture
def daemon(tmp_path):
    daemon = Daemon(tmp_path, {"models": {"plain": fake()}}, env={"PYTHONPATH": str(tmp_path / "other")})
    daemon.by_exec = True
    yield daemon
    if daemon.process is not None:
        daemon.stop()


def other(folder: Path, *changes: tuple[str, str, str]) -> None:
    """A copy of uvicorn that comes first, with these changes: file, text, other text."""
    copy = folder / "other" / "uvicorn"
    shutil.copytree(HERE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, after in (("__init__.py", uvicorn.__version__, "0.77.3"), *changes):
        text = (copy / name).read_text()
        assert before in text
        (copy / name).write_text(text.replace(before, after))


def test_one_that_fits_serves(daemon):
    other(daemon.folder)
    daemon.start()
    assert daemon.chat("plain").status_code == 200


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            [(INSIDE, "_unset_keepalive_if_required", "_unset_keepalive")],
            "HttpToolsProtocol has no _unset_keepalive_if_required",
        ),
        ([(INSIDE, "STATUS_LINE", "STATUS_LINES")], "cannot import name 'STATUS_LINE' from"),
        (
            [(str(file), "HTTPScope", "WebScope") for file in FILES if "HTTPScope" in (HERE / file).read_text()],
            "cannot import name 'HTTPScope' from",
        ),
        (
            [(INSIDE, "keep_alive: bool,", "keep_alive: bool, scheme: str,")],
            r"RequestResponseCycle.__init__\(\) missing 1 required positional argument: 'scheme'",
        ),
    ],
)
def test_one_that_does_not_fit_is_refused(daemon, changes, told):
    other(daemon.folder, *changes)
    daemon.start(wait=False)
    assert daemon.process.wait(60) == ExitCode.FAILED
    (line,) = daemon.log_text().splitlines()[-1:]
    assert re.match(f"llmux: uvicorn 0.77.3 doesn't fit: {told}", line), line
    assert line.endswith(f'tested with {TESTED}. Remedy: pip install "uvicorn=={TESTED}.*", or a newer llmux')
