"""The daemon's log: every line is one JSON object, whoever wrote it and whatever is in it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
from structlog.dev import ConsoleRenderer, plain_traceback

from supervisor.cli.serving import log_lines
from supervisor.cli.serving.log_lines import LONGEST, Lines, for_terminals, json_line
from tests.support import forker
from tests.support.daemon import REPOSITORY, Daemon, fake, wait_until
from tests.support.limits import LIMIT_S


def told(code: str, form: str = "json", level: str = "info") -> str:
    """What a program writes to stderr in which `code` runs after logging was set up."""
    head = "import asyncio, gc, logging, structlog, sys, threading, warnings\nfrom supervisor.cli.serving.log_setup import configure\n"
    program = f"{head}configure({level!r}, {form!r})\nlog = structlog.get_logger('x')\n{code}"
    with open(os.devnull) as nothing, TemporaryFile() as stdout, TemporaryFile() as stderr:
        streams = {"stdin": nothing, "stdout": stdout, "stderr": stderr}
        process = forker.start(["-m", "tests.support.snippet", program], cwd=REPOSITORY, env=os.environ, **streams)
        try:
            process.wait(LIMIT_S)
        finally:
            process.kill()
            process.wait()
        stdout.seek(0)
        assert stdout.read() == b""
        stderr.seek(0)
        return stderr.read().decode()


def lines(text: str) -> list[dict[str, Any]]:
    """Of the log; fails where one is no JSON object."""
    assert text.endswith("\n")
    found = [json.loads(line) for line in text.removesuffix("\n").split("\n")]
    for line in found:
        assert {"timestamp", "level", "event"} <= line.keys()
    return found


def line_of(code: str, **keys: str) -> dict[str, Any]:
    (line,) = lines(told(code, **keys))
    return line


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Troubled(Daemon):
    """Its stderr alone is its log."""

    program = ("-m", "tests.support.faulty_daemon", "troubled")

    def lines(self) -> list[dict[str, Any]]:
        text = self.log_text()
        return lines(text[: text.rindex("\n") + 1])

    def line_with(self, event: str) -> dict[str, Any] | None:
        return next((line for line in self.lines() if event in line["event"]), None)


@pytest.fixture(scope="module")
def troubled(tmp_path_factory) -> Iterator[Troubled]:
    daemon = Troubled(tmp_path_factory.mktemp("troubled"), {"models": {"a": fake()}})
    try:
        yield daemon.start()
    finally:
        assert daemon.stop() == 0
        assert daemon.lines()[-1]["event"] == "daemon.stopped"


class TestRealDaemon:
    """Whatever goes wrong in a real daemon: each of its lines is an object, the traceback in it."""

    @pytest.mark.parametrize(
        ("path", "level", "event", "error"),
        [
            ("application", "error", "http.application_failed", "in an application"),
            ("silence", "error", "http.response_incomplete", None),
            ("task", "error", "Task exception was never retrieved\nfuture: <Task finished", "in a task"),
            ("callback", "error", "Exception in callback", "in a callback"),
            ("coroutine", "warning", "coroutine 'fail_later' was never awaited", None),
            ("warning", "warning", "UserWarning: not\nlike this", None),
            ("thread", "error", "exception.uncaught", "in a thread"),
            ("end", "error", "exception.unraisable", "in an end"),
        ],
    )
    def test_trouble(self, troubled, path, level, event, error):
        assert troubled.get(f"/trouble/{path}").status_code == 500
        line = wait_until(lambda: troubled.line_with(event), what=f"{event} is logged")
        assert line["level"] == level
        if error is None:
            assert "exception" not in line
        else:
            assert line["exception"].startswith("Traceback (most recent call last):\n")
            assert f'Trouble: {error}\n{{"event": "forged"}}\r\x1b[2J\\ud800' in line["exception"]
        assert troubled.chat("a").status_code == 200

    def test_server(self, tmp_path):
        """uvicorn's own line, of a request that doesn't end."""
        daemon = Troubled(tmp_path, {"models": {"a": fake()}})
        try:
            daemon.start()
            with socket.create_connection(("127.0.0.1", daemon.port)) as connection:
                connection.sendall(b"GET /trouble/eternity HTTP/1.1\r\nHost: localhost\r\n\r\n")
                wait_until(lambda: daemon.line_with("forever begins"))
                assert daemon.stop() == 0
        finally:
            daemon.kill()
        line = daemon.line_with("Cancel 1 running task(s), timeout graceful shutdown exceeded")
        assert line is not None
        assert (line["logger"], line["level"]) == ("uvicorn.error", "error")
        assert daemon.lines()[-1]["event"] == "daemon.stopped"

    def test_what_ends_it(self, tmp_path):
        """What the system refuses is told in one line, without where in the program that was."""
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "logs").write_text("no folder")
        daemon = Troubled(tmp_path, {"models": {"a": fake()}})
        daemon.program = Daemon.program
        daemon.start(wait=False)
        assert daemon.process is not None
        assert daemon.process.wait(LIMIT_S) == 1
        *before, last = daemon.log_text().splitlines()
        assert last == f"llmux: {tmp_path}/state/logs: File exists."
        assert "Traceback" not in "".join(before)


class TestFromElsewhere:
    """What is not logged by us comes along."""

    def test_logging(self):
        line = line_of("logging.getLogger('a.library').warning('%d of %s', 3, 'all')")
        assert line == {"logger": "a.library", "event": "3 of all", "level": "warning", "timestamp": line["timestamp"]}
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d{4}", line["timestamp"])

    @pytest.mark.parametrize(
        ("level", "heard"),
        [("debug", ["warning", "critical"]), ("info", ["warning", "critical"]), ("error", ["critical"])],
    )
    def test_from_warning_on(self, level, heard):
        code = "for name in ('debug', 'info', 'warning', 'critical'): getattr(logging, name)('something')"
        assert [line["level"] for line in lines(told(code, level=level))] == heard

    @pytest.mark.parametrize(
        ("number", "level"), [("35", "warning"), ("99", "critical"), ("logging.FATAL", "critical"), ("45", "error")]
    )
    def test_levels_of_ones_own(self, number, level):
        assert line_of(f"logging.log({number}, 'something')")["level"] == level

    def test_traceback(self):
        line = line_of("try: 1/0\nexcept Exception: logging.exception('failed')")
        assert line["exception"].endswith("\nZeroDivisionError: division by zero")
        assert line["level"] == "error"

    @pytest.mark.parametrize("args", ["1, 2", "'x'", "Mute()"])
    def test_arguments_that_do_not_fit(self, args):
        mute = "class Mute:\n    def __str__(self): raise ValueError\n    __repr__ = __str__\n"
        assert "%d of" in line_of(f"{mute}logging.warning('%d of', {args})")["event"]

    def test_no_object_that_fails_fails_the_library(self):
        mute = "class Mute:\n    def __str__(self): raise ValueError\n    __repr__ = __str__\n"
        assert line_of(f"{mute}logging.warning(Mute())")["event"] == "<Mute>"

    def test_handlers_of_others_are_replaced(self):
        told_twice = "logging.basicConfig(); configure('info', 'json'); logging.warning('once')"
        assert line_of(told_twice)["event"] == "once"

    def test_uncaught(self):
        line = line_of("def f(): raise KeyError('x')\nf()")
        assert (line["event"], line["level"]) == ("exception.uncaught", "error")
        assert line["exception"].endswith("in f\nKeyError: 'x'")

    def test_exit_of_a_thread_is_none_of_it(self):
        assert told("t = threading.Thread(target=sys.exit); t.start(); t.join()") == ""

    def test_asyncio_without_uvloop(self):
        code = (
            "async def f(): raise KeyError('x')\n"
            "async def main():\n    asyncio.create_task(f())\n    await asyncio.sleep(0)\n    await asyncio.sleep(0)\n    gc.collect()\n"
            "asyncio.run(main())"
        )
        line = line_of(code)
        assert line["logger"] == "asyncio"
        assert line["exception"].endswith("KeyError: 'x'")


class TestValues:
    """Whatever a value is, its line is one object that a reader can take apart."""

    @pytest.mark.parametrize(
        "text", ["two\nlines\r\n", '"}', "\x00\x1b[2J\x7f", "\x85\x9b31m", "\u2028\u2029", "\u202eb\u2066", "Grüße 🙂"]
    )
    def test_text(self, text):
        line = json_line({"event": "x", "value": text})
        assert json.loads(line)["value"] == text
        assert len(line.decode().splitlines()) == 1
        assert not set("\x9b\u202e\u2066") & set(line.decode())

    def test_readable(self):
        assert "Grüße 🙂".encode() in json_line({"event": "Grüße 🙂"})

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            ("a\ud800b", "a\\ud800b"),
            (Mute(), "<Mute>"),
            ([1, Mute()], "<list>"),
            (ValueError("x"), "x"),
            ({1, 2}, [1, 2]),
            (Path("/a"), "/a"),
            (float("inf"), None),
            (2**70, 2**70),
            (None, None),
        ],
    )
    def test_others(self, value, said):
        line = json.loads(json_line({"event": "x", "value": value, "kept": [1, "a"]}))
        assert line == {"event": "x", "value": said, "kept": [1, "a"]}

    def test_bytes(self):
        assert isinstance(json.loads(json_line({"value": b"\xff\n"}))["value"], str)

    def test_what_holds_itself(self):
        ring: list[object] = []
        ring.append(ring)
        assert json.loads(json_line({"value": ring})) == {"value": "[[...]]"}

    @pytest.mark.parametrize("char", ["x", "\x01", "\x9b", "é", "\ud800", "🙂"])
    def test_long(self, char):
        line = json_line({"event": "x", "value": f"begin{char * 1_000_000}end", "number": 3, "more": [char * 100_000]})
        assert len(line) <= LONGEST
        read = json.loads(line)
        assert read["value"].startswith("begin")
        assert read["value"].endswith("end")
        assert "characters left out" in read["value"]
        assert read["number"] == 3

    def test_deep_traceback_ends_with_its_error(self):
        code = "def f(n):\n    try: f(n - 1) if n else 1 / 0\n    except Exception as e: raise KeyError('x' * 999) from e\nf(300)"
        line = line_of(code)
        assert "KeyError: 'xxx" in line["exception"].splitlines()[-1]
        assert "characters left out" in line["exception"]

    @pytest.mark.parametrize("way", ["info('x', ", "warning('x', ", "info('%s', 1, "])
    def test_every_way_to_log(self, way):
        line = line_of(f"log.bind(bound=1).{way}value='a\\ud800\\n')")
        assert (line["value"], line["bound"]) == ("a\\ud800\n", 1)


class TestTerminal:
    """The same lines in columns."""

    def test_line(self):
        text = told("log.warning('a.b', name='x y', number=3, items=['a'])", form="console")
        assert re.fullmatch(r"\S+ \[warning *\] a\.b +items=\['a'\] name='x y' number=3\n", text)

    def test_from_elsewhere(self):
        text = told("logging.getLogger('a.library').error('no\\nway'); warnings.warn('old'); 1/0", form="console")
        first, second, third, *traceback = text.splitlines()
        assert r"no\nway" in first
        assert first.endswith("[a.library]")
        assert "UserWarning: old" in second
        assert "exception.uncaught" in third
        assert traceback[0].startswith("Traceback")
        assert traceback[-1] == "ZeroDivisionError: division by zero"

    def test_no_local_variables(self):
        assert "sesame" not in told("def f(key): raise ValueError('no')\nf('ses' + 'ame')", form="console")

    @pytest.mark.parametrize(
        "value", ["a\x1b[2J", "a\nb", "a\x9b b", "\u202e", "\ud800", "\r", Mute(), ["\x1b", Mute()], 3, None]
    )
    def test_controls(self, value):
        event = {"level": "info", **dict.fromkeys(("event", "exception", "value"), value)}
        renderer = ConsoleRenderer(colors=False, exception_formatter=plain_traceback)
        line = renderer(None, "info", for_terminals(event))
        assert all(char.isprintable() or char == "\n" for char in line)
        assert line.count("\n") <= 2  # before a traceback, and in it

    def test_long(self):
        assert len(told("log.info('x' * 1_000_000, value='y' * 1_000_000)", form="console")) < 3 * LONGEST


class TestWriting:
    """Lines stay whole, and a reader that is slow or gone harms nobody."""

    @pytest.fixture
    def pipe(self):
        reader, writer = os.pipe()
        with open(reader, "rb", buffering=0) as reads, open(writer, "wb", buffering=0) as writes:
            yield reads, writes

    @pytest.fixture
    def sockets(self):
        one, other = socket.socketpair()
        with one, other:
            yield one, other

    async def test_together_at_the_end_of_the_turn(self, tmp_path):
        with (tmp_path / "log").open("wb") as file:
            log = Lines(file.fileno())
            log.info(b"one")
            log.error(b"two")
            assert (tmp_path / "log").read_bytes() == b""
            await asyncio.sleep(0)
            assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"

    def test_at_once_without_a_loop(self, tmp_path):
        with (tmp_path / "log").open("wb") as file:
            Lines(file.fileno()).info(b"one")
            assert (tmp_path / "log").read_bytes() == b"one\n"

    def test_what_an_ended_loop_left(self):
        code = "loop = asyncio.new_event_loop()\nloop.call_soon(lambda: (log.info('last'), loop.stop()))\nloop.run_forever()\nloop.close()"
        assert line_of(code)["event"] == "last"

    async def test_threads(self, pipe):
        """Longer than what a pipe takes in one piece, from several threads and the loop at once."""
        reader, writer = pipe
        log = Lines(writer.fileno())
        names = ["a", "b", "c", "d"]
        read = asyncio.create_task(asyncio.to_thread(read_lines, reader, 100))

        def write(name: str) -> None:
            for number in range(25):
                log.info(json_line({"name": name, "number": number, "long": name * 9000}))

        threads = [threading.Thread(target=write, args=(name,)) for name in names[1:]]
        for thread in threads:
            thread.start()
        for number in range(25):
            log.info(json_line({"name": "a", "number": number, "long": "a" * 9000}))
            await asyncio.sleep(0)
        for thread in threads:
            await asyncio.to_thread(thread.join)
        written = [json.loads(line) for line in await read]
        assert all(line["long"] == line["name"] * 9000 for line in written)
        numbers = {name: sorted(line["number"] for line in written if line["name"] == name) for name in names}
        assert numbers == {name: list(range(25)) for name in names}

    def test_nothing_is_lost_while_the_reader_pauses(self, pipe):
        """A pipe that takes only half of a line: nobody waits for it, and the rest comes when there is space again."""
        reader, writer = pipe
        log = Lines(writer.fileno())
        for number in range(100):
            log.info(json_line({"number": number, "long": "x" * 4999}))
        assert [json.loads(line)["number"] for line in read_lines(reader, 100)] == [*range(100)]
        assert log.dropped == 0
        assert os.get_blocking(writer.fileno()), "the open file is also its other users'"

    @pytest.mark.filterwarnings("ignore:unclosed <socket")  # the process's log is never closed
    @pytest.mark.parametrize("kind", ["pipe", "socket", "somebody else's pipe"])
    def test_the_oldest_are_lost_where_nobody_reads(self, kind, pipe, sockets, monkeypatch):
        """Bounded memory, whatever it is connected to; a line says how many are missing, in their place."""
        if kind == "somebody else's pipe":
            monkeypatch.setattr(log_lines.os, "open", refuse)
        reader, writer = pipe
        ours, theirs = sockets if kind == "socket" else (writer, reader)
        log = Lines(ours.fileno())
        for number in range(9000):
            log.info(str(number).zfill(500).encode())
            assert sum(map(len, log._lines)) < log_lines.MOST_WAITING + log_lines.LOOK_EVERY * 500
        assert log.dropped > 0
        text = b""
        while not text.endswith(b"8999\n"):
            text += os.read(theirs.fileno(), 1 << 16)
        lines = text.splitlines()
        gap = lines.index(b"%d lines dropped" % log.dropped)
        assert [int(line) for line in lines[:gap]] == [*range(gap)]
        assert [int(line) for line in lines[gap + 1 :]] == [*range(gap + log.dropped, 9000)]
        log.info(b"again")
        assert os.read(theirs.fileno(), 100) == b"again\n"

    def test_the_end_waits_a_moment_for_the_reader(self, pipe, monkeypatch):
        reader, writer = pipe
        log = Lines(writer.fileno())
        log.info(b"x" * 200_000)
        monkeypatch.setattr(log_lines, "EXIT_WAIT_S", 0.1)
        log.flush()
        assert log._is_reader_stuck
        reading = threading.Thread(target=read_lines, args=(reader, 1))
        monkeypatch.setattr(log_lines, "EXIT_WAIT_S", LIMIT_S)
        reading.start()
        log.flush()
        reading.join()
        assert not log._is_reader_stuck

    def test_reader_gone(self, pipe):
        reader, writer = pipe
        reader.close()
        Lines(writer.fileno()).error(b"nobody hears it")

    @pytest.mark.parametrize("form", ["json", "auto"])
    def test_no_stderr(self, form):
        code = f"from supervisor.cli.serving.log_setup import configure; configure('info', '{form}'); 1/0"
        done = subprocess.run(
            ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code], cwd=REPOSITORY, timeout=LIMIT_S
        )
        assert done.returncode == 1

    def test_full_disk(self):
        with open("/dev/full", "wb", buffering=0) as full:
            Lines(full.fileno()).error(b"no space for it")

    def test_logs_while_it_writes(self, tmp_path, monkeypatch):
        """As an object's `__del__` may, whenever garbage is collected."""
        with (tmp_path / "log").open("wb") as file:
            more = [b"inner"]
            write = os.write

            def writing(descriptor: int, data: bytes) -> int:
                if more:
                    log.error(more.pop())
                return write(descriptor, data)

            monkeypatch.setattr(log_lines.os, "write", writing)
            log = Lines(file.fileno())
            log.info(b"outer")
        assert (tmp_path / "log").read_bytes() == b"outer\ninner\n"

    def test_more_comes_while_it_adds_up(self, pipe):
        """Another thread may log then, or an object's `__del__`."""

        class Growing(deque[bytes]):
            def __iter__(self):
                for line in super().__iter__():
                    if added:
                        self.append(added.pop())
                    yield line

        added = [b"meanwhile"]
        log = Lines(pipe[1].fileno())
        log._lines = Growing()
        for _ in range(5000):
            log.info(b"x" * 500)
        assert not added
        assert 0 < sum(map(len, log._lines)) < log_lines.MOST_WAITING + log_lines.LOOK_EVERY * 500
        read_lines(pipe[0], 5002 - log.dropped)  # the thread that waits ends before the pipe


def read_lines(reader, count: int) -> list[bytes]:
    read = b""
    while read.count(b"\n") < count:
        read += reader.read(1 << 20)
    return read.splitlines()


def refuse(*_: object) -> int:
    raise PermissionError
