"""Workers that die, never come up, or stop answering, while clients talk to them and to others."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.support.clients import Call, Stream, code, starts, stats, worker_tree
from tests.support.counts import times
from tests.support.daemon import FAKE_WORKER, fake, running, wait_until

SLOW = {"chunks": 4000, "chunk_delay": 0.05}


def script(folder: Path, text: str) -> dict[str, object]:
    """A model whose start is this shell script; `$PORT` and `$FAKE` (the fake worker's command line) are set."""
    path = folder / "start.sh"
    path.write_text(f'PORT=$1; FAKE="$(command -v python3) -I -S {FAKE_WORKER} --port $PORT"\n{text}\n')
    return {"runtime": "command", "cmd": ["/bin/sh", str(path), "${port}"], "vram_mib": 100}


def served_again(daemon, model: str, since: float) -> tuple[float, list[int]]:
    """Seconds from `since` until the model answers, and the statuses of the answers until then."""
    statuses = []
    while True:
        status = daemon.chat(model).status_code
        if status == 200:
            return time.monotonic() - since, statuses
        statuses.append(status)
        assert time.monotonic() - since < 30


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    config = {
        "models": {"victim": fake("--daemonize", "--fork"), "other": fake()},
        "limits": {"crash_limit": 1000, "backoff_first_s": 1, "backoff_max_s": 1, "backoff_jitter": 0},
    }
    with running(tmp_path_factory.mktemp("killed"), config) as daemon:
        yield daemon


class Test10CrashMidStream:
    """A stream whose worker dies says so before it ends, and is never sent a second time."""

    @pytest.mark.parametrize("whom", ["pid", "shim_pid"], ids=["worker", "shim"])
    def test_mid_stream(self, busy, whom, measured):
        """kill -9: an in-band error and never a clean end, no second try, served again soon, others untouched, no remains."""
        daemon = busy
        for _ in range(times(1, 40)):
            assert daemon.chat("victim").status_code == 200
            bystander = Stream(daemon, "other", fake={"chunks": 40, "chunk_delay": 0.05})
            stream = Stream(daemon, "victim", fake=SLOW)
            plain = Call(daemon, "victim", fake={"delay": 60})
            wait_until(lambda: stream.chunks >= 3)
            wait_until(lambda: stats(daemon, "victim")["active"] == 2)
            seen = stats(daemon, "victim")["ids"]
            view = daemon.model("victim")
            tree = worker_tree(daemon, "victim", view["generation"])
            assert len(tree) == 4, "shim, leader, child, and a grandchild in a session of its own"

            os.kill(view["worker"][whom], signal.SIGKILL)
            killed_at = time.monotonic()
            stream.result(20)
            plain.result(20)
            wait_until(lambda: not worker_tree(daemon, "victim", view["generation"]), what="the tree is gone")
            gone_s = time.monotonic() - killed_at
            again_s, refused = served_again(daemon, "victim", killed_at)

            assert stream.status == 200
            assert not stream.ended_cleanly
            assert stream.error is None, "the stream ends with the error; aiohttp would report a cut connection instead"
            assert "in the middle of its answer: " in stream.text, "and says why its worker ended"
            assert '"error"' in stream.text.rpartition("\n\ndata: ")[2]
            assert "[DONE]" not in stream.text
            assert (plain.status, code(plain.response)) == (502, "upstream_error")
            after = stats(daemon, "victim")
            assert after["pid"] != view["worker"]["pid"]
            assert [seen.count(sent.headers["x-request-id"]) for sent in (stream, plain.response)] == [1, 1]
            assert not set(seen) & set(after["ids"]), "nothing was sent a second time"
            bystander.result()
            assert bystander.ended_cleanly
            assert bystander.chunks == 40
            measured(
                stream_broken_s=stream.ended_at - killed_at,
                tree_gone_s=gone_s,
                served_again_s=again_s,
                refused_meanwhile=refused,
            )


class Test15ResetBeforeHeaders:
    """Only a request of which no byte was written is sent again."""

    def test_requests_that_did_not_reach_it_wait_for_the_next(self, tmp_path, measured):
        """Before anybody knows that it ended, requests find nobody at its port: nothing was sent, so they are queued again."""
        answers: list[httpx.Response] = []
        over = threading.Event()
        limits = {"crash_limit": 1000, "backoff_first_s": 0.05, "backoff_max_s": 0.05}
        with running(tmp_path, {"models": {"m": fake()}, "limits": limits}) as daemon:

            def ask(stream: bool) -> None:
                body = {"model": "m", "messages": [], "stream": stream}
                with daemon.client() as client:
                    while not over.is_set():
                        with contextlib.suppress(httpx.RemoteProtocolError):  # it broke off in the middle of its answer
                            answers.append(client.post("/v1/chat/completions", json=body))

            clients = [threading.Thread(target=ask, args=(number % 2 == 0,)) for number in range(4)]
            for client in clients:
                client.start()
            try:
                for _ in range(times(8, 100)):
                    wait_until(lambda: daemon.model("m")["state"] == "ready")
                    seen = len(answers)
                    wait_until(lambda seen=seen: len(answers) > seen + 20)
                    pid = daemon.model("m")["worker"]["pid"]
                    os.kill(pid, signal.SIGKILL)
                    daemon.wait_gone("m", pid)
            finally:
                over.set()
                for client in clients:
                    client.join()
        told = {answer.json()["error"]["message"] for answer in answers if answer.status_code != 200}
        assert told <= {"The worker closed the connection without an answer."}
        measured(kills=times(8, 100), answered=len(answers), not_sent_again=sum(a.status_code != 200 for a in answers))


class Test09NeverReady:
    """A worker that never becomes ready is given up with its cause, and callers are refused at once."""

    def test_given_up_and_reset(self, tmp_path, measured):
        """A worker that keeps exiting is given up with its last words; callers hear it at once; `load` tries again."""
        flag = tmp_path / "fixed"
        dud = script(tmp_path, f'[ -e {flag} ] && exec $FAKE; echo "these are my last words"; exit 3')
        config = {"models": {"dud": dud}, "limits": {"backoff_first_s": 0.05, "backoff_max_s": 0.1}}
        with running(tmp_path, config) as daemon:
            first = Call(daemon, "dud").result(30)
            assert (first.status, code(first.response)) == (503, "model_failed")
            assert starts(daemon, "dud") == 5
            view = daemon.model("dud")
            assert view["state"] == "failed"
            assert view["crash"]["exit_code"] == 3
            second = Call(daemon, "dud").result()
            error = second.response.json()["error"]
            assert (second.status, error["code"]) == (503, "model_failed")
            assert "these are my last words" not in second.response.text, "they are for operators"
            assert "llmux load dud" in error["message"]
            assert second.response.headers["x-should-retry"] == "false", "no client waits for ten minutes"
            assert starts(daemon, "dud") == 5, "it is not tried again by itself"
            assert second.elapsed_s < 15, "at once: it would have waited for minutes"

            again = daemon.post("/v1/admin/models/dud/load")
            assert (again.status_code, code(again)) == (503, "load_failed")
            assert "these are my last words" in again.json()["error"]["detail"]
            assert starts(daemon, "dud") == 10
            flag.touch()
            assert daemon.post("/v1/admin/models/dud/load").status_code == 200
            assert daemon.chat("dud").status_code == 200
            measured(starts_before_failed=5, refused_in_s=second.elapsed_s)

    def test_start_timeout(self, tmp_path, measured):
        """A start that makes no progress is ended after its patience, and told from one that exited."""
        model = fake("--no-listen", startup_timeout_s=1.0, grace_s=10)
        with running(tmp_path, {"models": {"mute": model}, "limits": {"crash_limit": 1}}) as daemon:
            call = Call(daemon, "mute").result(30)
            assert (call.status, code(call.response)) == (503, "model_failed")
            assert daemon.model("mute")["crash"]["class"] == "start_timeout"
            assert "no progress for 1 s" in call.response.json()["error"]["message"]
            wait_until(lambda: not daemon.workers(), what="it is gone")
            measured(given_up_after_s=call.elapsed_s)


class Test05StoppedWorker:
    """SIGSTOP of a ready worker takes it out of rotation; only failing liveness replaces it."""

    def test_unready_and_back(self, tmp_path, measured):
        """SIGSTOP takes a worker out of rotation, SIGCONT brings it back: it is not replaced for want of readiness."""
        limits = {"readiness_interval_s": 0.1}  # six failures of liveness, every ten seconds, are far away
        with running(tmp_path, {"models": {"frozen": fake()}, "limits": limits}) as daemon:
            assert daemon.chat("frozen").status_code == 200
            before = daemon.model("frozen")["worker"]["pid"]
            seen = stats(daemon, "frozen")["requests"]
            stopped_at = time.monotonic()
            os.kill(before, signal.SIGSTOP)
            wait_until(lambda: not daemon.model("frozen")["answering"], what="it is unready")
            unready_s = time.monotonic() - stopped_at
            call = Call(daemon, "frozen")
            wait_until(lambda: daemon.model("frozen")["queued"] == 1)
            os.kill(before, signal.SIGCONT)
            assert call.result().status == 200
            assert daemon.model("frozen")["worker"]["pid"] == before, "it was not replaced"
            assert stats(daemon, "frozen")["requests"] == seen + 1, "what waited was sent once"
            measured(unready_s=unready_s)

    def test_replaced(self, tmp_path, measured):
        """Only failing liveness replaces a worker that is stopped; who asks meanwhile waits for the next one."""
        limits = {
            "readiness_interval_s": 0.1,
            "liveness_interval_s": 0.5,
            "backoff_first_s": 0.1,
            "backoff_max_s": 0.1,
        }
        with running(tmp_path, {"models": {"frozen": fake()}, "limits": limits}) as daemon:
            assert daemon.chat("frozen").status_code == 200
            before = daemon.model("frozen")["worker"]["pid"]
            stopped_at = time.monotonic()
            os.kill(before, signal.SIGSTOP)
            wait_until(lambda: not daemon.model("frozen")["answering"], what="it is unready")
            call = Call(daemon, "frozen").result()
            replaced_s = time.monotonic() - stopped_at
            assert call.status == 200
            assert daemon.model("frozen")["worker"]["pid"] != before
            crash = next(decision for decision in daemon.decisions("frozen") if decision["kind"] == "crash")
            assert crash["reason"].startswith("unresponsive")
            assert replaced_s > 5 * limits["liveness_interval_s"], "six failures, not fewer"
            measured(replaced_s=replaced_s)
