"""What processes tell each other, given in any pieces and with anything between: taken or passed over, and soon."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.api.metrics import together
from supervisor.core.types import Crash
from supervisor.host.process import logs
from supervisor.host.process.process import WorkerProcess
from supervisor.host.process.reap import Mark
from supervisor.host.process.spawn import SHIM
from tests.support.counts import examples
from tests.support.fuzzing import damaged, pieces


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def of_data(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


class TestShim:
    """What daemon and shim tell each other, whatever is lost, added or cut on the way."""

    @settings(max_examples=examples(15), deadline=None)
    @given(data=st.data())
    def test_reports_in_any_pieces(self, data):
        """A worker may write into its shim's output, too: garbage is no report, and what follows it counts."""
        garbage = st.one_of(
            st.binary(max_size=30).map(lambda said: said.replace(b"\n", b"")),
            st.sampled_from(
                (b"null", b"7", b"[]", b'"gone"', b'{"pid": "x"}', b'{"pid": 1e999}', b'{"gone": 1}', b"{}")
            ),
            st.sampled_from((b"[" * 60_000, b"9" * 6000, b"x" * 200_000)),
        )
        lines = [*data.draw(st.lists(garbage, max_size=3)), b'{"pid": 4242}', *data.draw(st.lists(garbage, max_size=3))]
        lines.append(b'{"exited": 7}')
        said = data.draw(pieces(b"".join(line + b"\n" for line in lines)))
        assert asyncio.run(self.heard(said)) == (4242, 7, [])

    def puppet(self) -> tuple[WorkerProcess, io.FileIO]:
        """A worker whose shim says what one writes."""
        shim = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert shim.stdin is not None
        say = io.FileIO(f"/proc/self/fd/{shim.stdin.fileno()}", "w")  # opened anew, it blocks when the pipe is full
        return WorkerProcess("fuzz:1", Mark(f"fuzz-{shim.pid}", "fuzz:1"), None, shim), say

    async def heard(self, said: list[bytes]) -> tuple[int, int | None, list[dict[str, object]]]:
        failures: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        worker, say = self.puppet()
        with say:
            for piece in said:
                await asyncio.to_thread(say.write, piece)
        async with asyncio.timeout(30):
            await worker.main_ended.wait()
            worker.abandon()
            ended = await worker.wait()
        return worker.pid, ended.code, failures

    def test_a_flood_without_an_end_of_line_takes_no_memory(self):
        flood = [b"x" * 65536] * (4000 if examples(1) > 1 else 400)

        async def fed() -> int:
            worker, say = self.puppet()
            with say:
                for piece in flood:
                    await asyncio.to_thread(say.write, piece)
                kept = len(worker._partial_report)
            worker.abandon()
            await worker.wait()
            return kept

        assert asyncio.run(fed()) <= 1 << 20

    def shim(self, folder: Path, said: list[bytes]) -> list[dict[str, object]]:
        """What a real shim reports that is told this, piece by piece, and then nothing more."""
        with subprocess.Popen(
            [sys.executable, "-I", "-S", str(SHIM), "fuzz"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        ) as shim:
            assert shim.stdin is not None
            try:
                for piece in said:
                    shim.stdin.write(piece)
            except BrokenPipeError:
                pass  # it refused already
            out, complaint = shim.communicate(timeout=60)
        assert complaint == b""
        assert shim.returncode == 0
        return [json.loads(line) for line in out.splitlines()]

    def order(self, folder: Path, **changes: object) -> bytes:
        order = {"parent": os.getpid(), "argv": ["/bin/sleep", "600"], "env": {}, "cwd": None, "cgroup": None}
        order |= {"log": str(folder / "shim.log"), "log_limit": 4096, "stop_argv": None, "leftovers": None}
        return json.dumps(order | changes).encode() + b"\n"

    @settings(max_examples=examples(4))
    @given(data=st.data())
    def test_an_order_in_any_pieces(self, folder, data):
        """Also with the next words behind it in the same piece."""
        said = data.draw(
            pieces(self.order(folder) + data.draw(st.sampled_from((b"", b"term\n", b"kill\n", b"what\nterm\n"))))
        )
        reports = self.shim(folder, said)
        assert [sorted(report) for report in reports] == [["pid"], ["exited"], ["gone"]]

    @settings(max_examples=examples(4))
    @given(data=st.data())
    def test_no_order(self, folder, data):
        whole = self.order(folder)
        said = data.draw(
            st.one_of(
                damaged(whole[:-1]).map(lambda order: order.replace(b"\n", b"") + b"\n"),
                st.sampled_from((b"", b"\n", b"term\n", b"[]\n", b"{}\n", b"[" * 100_000 + b"\n", b"\xff\n")),
                st.sampled_from(("argv", "env", "log", "cwd")).flatmap(
                    lambda key: st.sampled_from((None, 7, "", [], {}, ["\0"], {"a": 7})).map(
                        lambda value: self.order(folder, **{key: value})
                    )
                ),
            )
        )
        reports = self.shim(folder, [said])
        assert {key for report in reports for key in report} <= {
            "failed",
            "step",
            "text",
            "pid",
            "unlogged",
            "exited",
            "gone",
        }


class TestWorkersWords:
    """A worker's log and metrics are anybody's text."""

    @settings(max_examples=examples(100))
    @given(
        data=st.one_of(st.binary(max_size=300), damaged(b"E error: out of memory\r\x1b[31mCUDA error\x1b[0m\n" * 4)),
        code=st.none() | st.integers(-1000, 1000) | st.sampled_from((1 << 70, -(1 << 70))),
    )
    def test_logs(self, folder, data, code):
        path = of_data(folder / "worker.log", data)
        lines = logs.tail(path, logs.CRASH_LINES)
        crash = logs.classify(code, lines)
        assert isinstance(crash, Crash)
        for line in (*lines, crash.summary):
            assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", line)
        follower = logs.LogReader(path)
        assert len(follower.begin(5)) <= 5
        follower.read()

    @pytest.mark.parametrize(
        "piece", ["(", "mlock ", "unable to ", "1.00.000.000 I srv ", "\x1b[", "\x1b]", "a" * 10, "E "]
    )
    def test_no_line_takes_long_to_classify(self, piece):
        lines = [(piece * 1000)[:500]] * logs.CRASH_LINES
        used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        logs.cleaned("\n".join([piece * 100_000] * 2))
        logs.classify(1, lines)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - used < 5.0

    METRICS = b'# HELP a:b_total What "it" is\n# TYPE a:b_total counter\na:b_total{model="x",le="+Inf"} 1e3 170\nc 3\n'
    SAMPLE = re.compile(
        r'[a-zA-Z_:][a-zA-Z0-9_:]*\{model="m\\"x"(,[a-zA-Z_]\w*="([^"\\\n]|\\[\\"n])*")*\} \S+( -?\d+)?'
    )

    @settings(max_examples=examples(100))
    @given(
        data=st.one_of(st.binary(max_size=200), damaged(METRICS, words=(b'"', b"{", b"}", b"\\", b"\n", b",", b"NaN")))
    )
    def test_metrics(self, data):
        for line in together([('m"x', data)], set()).decode().split("\n"):
            assert not line or line.startswith("#") or self.SAMPLE.fullmatch(line), line

    @pytest.mark.parametrize("line", ['a{b="' + "\\\\" * 50_000, "a{" + '"" ' * 50_000, "a" * 100_000, "1" * 100_000])
    def test_no_metric_takes_long_to_read(self, line):
        used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        together([("m", line.encode())], set())
        assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - used < 5.0
