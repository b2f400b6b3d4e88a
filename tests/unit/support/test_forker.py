"""A forked program finds what an exec'ed one finds, and ends as one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forker
from tests.support.daemon import REPOSITORY, Daemon, fake, wait_until
from tests.support.limits import LIMIT_S

PROBE = ("-m", "tests.support.start_state", "one", "two words")
OWN = {"A_VARIABLE": "ä value", "TZ": "Asia/Tokyo"}


@pytest.fixture
def unusual(monkeypatch):
    """What a test may have set by the time that it starts something."""
    before = os.umask(0o027)
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    yield dict(os.environ)
    os.umask(before)


def forked(folder: Path, argv: tuple[str, ...], env: dict[str, str]) -> tuple[forker.Forked, Path]:
    output = folder / f"output{len(list(folder.iterdir()))}"
    with output.open("w") as stdout, open(os.devnull) as nothing:
        process = forker.start(argv, cwd=REPOSITORY, env=env, stdin=nothing, stdout=stdout, stderr=stdout)
    return process, output


def ended(process: forker.Forked, output: Path) -> str:
    assert process.wait(LIMIT_S) == 0, output.read_text()
    return output.read_text()


class TestState:
    """Nothing that a process has from its parent, or a module from an earlier use, tells a fork from an exec."""

    def test_all_that_a_start_finds(self, tmp_path, unusual):
        output = tmp_path / "output0"  # as that of the other: the descriptor's name is compared, too
        with output.open("w") as stdout:
            subprocess.run(
                [sys.executable, *PROBE],
                cwd=REPOSITORY,
                env=unusual,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stdout,
                start_new_session=True,
                check=True,
            )
        expected = json.loads(output.read_text())
        output.unlink()
        found = json.loads(ended(*forked(tmp_path, PROBE, unusual)))
        names = found["same"].keys() | expected["same"].keys()
        both = {name: (found["same"].get(name), expected["same"].get(name)) for name in names}
        assert {name: pair for name, pair in both.items() if pair[0] != pair[1]} == {}
        assert not found["drawn"].items() & expected["drawn"].items()
        assert expected["same"]["orig_argv"] == [sys.executable, *PROBE]
        assert (expected["same"]["Umask"], expected["same"]["timezone"][0]) == ("0027", "JST")

    def test_nothing_is_drawn_twice(self, tmp_path):
        """Ids of requests, and whatever else a module draws."""
        first, second = (json.loads(ended(*forked(tmp_path, PROBE, dict(os.environ))))["drawn"] for _ in range(2))
        assert not first.items() & second.items()
        assert "supervisor.server.request_id._random" in first

    def test_of_a_daemon(self, tmp_path):
        """It leads its session; whatever is open, it has opened; another that runs beside it gives other ids."""
        daemons = [Daemon(tmp_path / name, {"models": {"a": fake()}}) for name in "ab"]
        try:
            for daemon in daemons:
                daemon.folder.mkdir()
                daemon.start()
                assert isinstance(daemon.process, forker.Forked)
                pid = daemon.process.pid
                assert os.getsid(pid) == os.getpgid(pid) == pid
            links = []
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                    links.append(os.readlink(path))
            assert not [link for link in links if str(daemons[0].folder) in link]
            assert len({daemon.get("/health").headers["x-request-id"] for daemon in daemons}) == 2
        finally:
            assert [daemon.stop() for daemon in daemons if daemon.process] == [0, 0]


class TestEnd:
    """What became of it is known as from `Popen`."""

    def test_codes(self, tmp_path):
        env = dict(os.environ)
        done, output = forked(tmp_path, (*forker.LLMUX, "--version"), env)
        assert "llmux" in ended(done, output)
        assert done.poll() == done.wait() == 0
        wrong, output = forked(tmp_path, (*forker.LLMUX, "no-such-command"), env)
        assert wrong.wait(LIMIT_S) == 2
        assert "no-such-command" in output.read_text()
        broken, output = forked(tmp_path, ("-m", "tests.support.no_such_module"), env)
        assert broken.wait(LIMIT_S) == 1
        assert "ImportError" in output.read_text()

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_by_a_signal(self, tmp_path, number):
        """Python ends itself by the signal where Ctrl-C was not caught."""
        process, output = forked(tmp_path, (*PROBE, "--and-wait"), dict(os.environ))
        wait_until(lambda: output.read_text().endswith("\n"), what="it waits: a Ctrl-C in an import may be lost")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(LIMIT_S) == -number
        process.kill()  # nobody is meant any more

    def test_the_tests_end(self):
        """Also by kill -9, what they started ends, and so does the forker."""
        program = (
            "import os, sys; from pathlib import Path; from tests.support import forker\n"
            "with open(os.devnull, 'r+') as no:\n"
            f"    one = forker.start({(*PROBE, '--and-wait')}, cwd=Path('/'), env=dict(os.environ), stdin=no, stdout=no, stderr=no)\n"
            "print(one.pid, Path(f'/proc/{one.pid}/stat').read_text().split()[3], flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", program]
        with subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as tests:
            assert tests.stdout is not None
            pids = tests.stdout.readline().split()
            assert os.getsid(int(pids[1])) == os.getsid(0), "else a hunt for strays takes it for one"
            tests.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what=f"{pids} have ended")


class TestForker:
    """It forks only while it has one thread and has opened nothing."""

    @pytest.mark.parametrize(
        "has",
        ["threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "asyncio.new_event_loop()"],
        ids=["thread", "event loop"],
    )
    def test_refuses(self, has):
        program = (
            "import asyncio, socket, sys, threading, time; from tests.support import forker\n"
            "receive = socket.recv_fds\n"
            "def receive_late(*words):\n"
            "    global kept\n"
            f"    kept = {has}\n"
            "    return receive(*words)\n"
            "socket.recv_fds = receive_late\n"
            "forker.serve(socket.socket(fileno=int(sys.argv[1])))"
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, open(os.devnull) as nothing:
            socket.send_fds(ours, [json.dumps({"argv": ["-m", "supervisor.cli"]}).encode()], [nothing.fileno()] * 3)
            done = subprocess.run(
                [sys.executable, "-c", program, str(theirs.fileno())],
                cwd=REPOSITORY,
                pass_fds=[theirs.fileno()],
                capture_output=True,
                text=True,
            )
        assert done.returncode == 1
        assert "AssertionError" in done.stderr

    def test_what_needs_an_exec(self, monkeypatch):
        """Another program, a pipe, another argument, and a variable that Python or a library reads early."""
        env = dict(os.environ)
        assert forker.can_start(forker.LLMUX, env, {"stdin": 0})
        assert forker.can_start((*forker.FAULTY, "stuck"), env, {})
        assert not forker.can_start(("-c", "pass"), env, {})
        assert not forker.can_start(forker.LLMUX, env, {"stdout": subprocess.PIPE})
        assert not forker.can_start(forker.LLMUX, env, {"start_new_session": True})
        for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX", "NO_COLOR"):
            assert not forker.can_start(forker.LLMUX, env | {name: "another"}, {})

    def test_what_is_read_early(self):
        """Every variable that is looked up while all is imported is one that needs an exec, or may change."""
        program = (
            "import os, sys\n"
            "get, seen = os._Environ.__getitem__, set()\n"
            "def note(environ, name):\n"
            "    caller = sys._getframe(1)\n"
            "    while caller.f_code.co_filename in (os.__file__, '<frozen os>', '<frozen _collections_abc>'):\n"
            "        caller = caller.f_back\n"
            "    if caller.f_code.co_name != 'read_environ':  # of wsgiref, which takes all and uses none\n"
            "        seen.add(name)\n"
            "    return get(environ, name)\n"
            "from tests.support import forker\n"
            "os._Environ.__getitem__ = note\n"
            "forker.import_all()\n"
            "print(*(name for name in seen if not name.startswith(forker.READ_EARLY)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        assert set(done.stdout.split()) <= {"HOME", "_PYTHON_PROJECT_BASE", "_PYTHON_SYSCONFIGDATA_NAME"}
