"""SIGTERM while requests run, wait and arrive, and while something is stuck."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import httpx
import psutil
import pytest

from tests.faults.test_hung_successor import Hanging
from tests.support.clients import Call, Stream, code, stats
from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.limits import LIMIT_S

MODELS = {
    "busy": fake(),
    "one": fake(target_inflight=1),
    "stubborn": fake("--ignore-term", "--daemonize", grace_s=1),
    "slow": fake("--start-delay", "60"),
}


class Test30SigtermUnderLoad:
    """SIGTERM drains for a bounded time, then nothing is left."""

    def test_drains(self, tmp_path, measured):
        """Running streams end, waiting requests get 503, new ones too; then exit code 0 and no process left."""
        daemon = Daemon(tmp_path, {"models": MODELS, "limits": {"loads_per_device": 8}}).start()
        assert daemon.chat("stubborn").status_code == 200
        streams = [Stream(daemon, "busy", fake={"chunks": 160, "chunk_delay": 0.05}) for _ in range(5)]
        first = Call(daemon, "one", fake={"delay": 8})
        wait_until(lambda: daemon.model("one")["in_flight"] == 1)
        queued, loading = Call(daemon, "one"), Call(daemon, "slow")
        wait_until(lambda: daemon.model("one")["queued"] == 1 and daemon.model("slow")["state"] == "starting")
        wait_until(lambda: all(stream.chunks > 2 for stream in streams))

        daemon.signal(signal.SIGTERM)
        asked_at = time.monotonic()
        for waiting in (queued, loading):
            waiting.result()
            assert (waiting.status, code(waiting.response)) == (503, "shutting_down")
        refused_s = time.monotonic() - asked_at
        late = daemon.chat("busy")
        assert (late.status_code, code(late)) == (503, "shutting_down")
        assert daemon.get("/health").status_code == 503
        assert any(stream.is_alive() for stream in streams), "all of that while streams still run"
        assert [stream.result().ended_cleanly for stream in streams] == [True] * 5
        assert {stream.chunks for stream in streams} == {160}
        assert first.result().status == 200
        assert daemon.process.wait(LIMIT_S) == 0
        ended_s = time.monotonic() - asked_at
        assert daemon.workers() == []
        assert "Traceback" not in daemon.log_text()
        assert "never retrieved" not in daemon.log_text()
        measured(waiting_refused_s=refused_s, ended_s=ended_s)

    def test_drain_is_bounded(self, tmp_path, measured):
        """A stream that would go on for minutes is cut when the drain time is over, and not ended cleanly."""
        daemon = Daemon(tmp_path, {"models": MODELS, "limits": {"drain_s": 1}}).start()
        stream = Stream(daemon, "busy", fake={"chunks": 4000, "chunk_delay": 0.1})
        wait_until(lambda: stream.chunks > 2)
        asked_at = time.monotonic()
        assert daemon.stop() == 0
        ended_s = time.monotonic() - asked_at
        assert not stream.result().ended_cleanly
        assert daemon.workers() == []
        assert ended_s > 0.9
        measured(drain_s=1, ended_s=ended_s)

    def test_second_signal(self, tmp_path, measured):
        """A second SIGTERM cuts the drain short: kills at once, exit code 0, nothing left."""
        daemon = Daemon(tmp_path, {"models": MODELS, "limits": {"drain_s": 60}}).start()
        streams = [Stream(daemon, model, fake={"chunks": 4000, "chunk_delay": 0.1}) for model in ("busy", "stubborn")]
        wait_until(lambda: all(stream.chunks > 2 for stream in streams))
        assert stats(daemon, "busy")["active"] == 1
        daemon.signal(signal.SIGTERM)
        wait_until(lambda: daemon.get("/health").status_code == 503)
        asked_at = time.monotonic()
        daemon.signal(signal.SIGTERM)
        assert daemon.process.wait(LIMIT_S) == 0
        ended_s = time.monotonic() - asked_at
        assert not any(stream.result().ended_cleanly for stream in streams)
        assert all("complete: llmux is shutting down." in stream.text for stream in streams)
        assert daemon.workers() == []
        measured(ended_after_second_signal_s=ended_s)


class StuckDaemon(Daemon):
    program = ("-m", "tests.support.faulty_daemon", "stuck")


class Test35StuckAtTheEnd:
    """Whatever is stuck, SIGTERM ends the daemon within drain, grace and ten seconds, and no worker is left."""

    @pytest.mark.parametrize("place", ["state", "loop", "thread"])
    def test_in_llmux_itself(self, tmp_path, measured, place):
        """It shows where it was stuck."""
        config = {"models": {"a": fake(grace_s=1), "b": fake("--daemonize", grace_s=1)}, "limits": {"drain_s": 1}}
        daemon = StuckDaemon(tmp_path, config, {"LLMUX_TEST_STUCK": place}).start()
        assert [daemon.chat(model).status_code for model in ("a", "b")] == [200, 200]
        asked_at = time.monotonic()
        assert daemon.stop() == 1
        measured(ended_s=time.monotonic() - asked_at)
        wait_until(lambda: not daemon.workers())
        assert "Timeout (0:00:05" in daemon.log_text()

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_again(self, tmp_path, number):
        """Whoever asks twice doesn't wait for the drain either."""
        config = {"models": {"a": fake(grace_s=1)}, "limits": {"drain_s": 600}}
        daemon = StuckDaemon(tmp_path, config, {"LLMUX_TEST_STUCK": "state"}).start()
        stream = Stream(daemon, "a", fake={"chunks": 40000, "chunk_delay": 0.1})
        wait_until(lambda: stream.chunks > 2)
        daemon.signal(number)
        wait_until(lambda: daemon.get("/health").status_code == 503)
        daemon.signal(number)
        assert daemon.process.wait(LIMIT_S) == 1
        wait_until(lambda: not daemon.workers())
        assert not stream.result().ended_cleanly

    def test_in_the_driver_of_a_gpu(self, tmp_path, gpu, measured):
        """A reading that never ends keeps nobody."""
        config = {"devices": "auto", "models": {"a": fake(vram_mib=2000, env=gpu.takes(2000), grace_s=1)}}
        with running(tmp_path, config, env=gpu.env) as daemon:
            assert daemon.chat("a").status_code == 200
            gpu.write(hang={"nvmlDeviceGetMemoryInfo": 600})
            wait_until(lambda: daemon.events("memory.stale"))
            asked_at = time.monotonic()
            assert daemon.stop() == 0
            measured(ended_s=time.monotonic() - asked_at)
            assert daemon.workers() == []

    @pytest.mark.parametrize("step", ["met", "prepared", "serving"])
    def test_with_a_successor_that_hangs(self, tmp_path, step):
        """It ends as well, and so do the workers that it was given."""
        daemon = Hanging(tmp_path, {"models": {"a": fake(grace_s=1)}}, env={"HANGS_AT": step}).start()
        try:
            assert daemon.chat("a").status_code == 200
            upgrade = threading.Thread(target=suppressed, args=(daemon,))
            upgrade.start()
            wait_until(
                lambda: any(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in daemon.successors())
            )
            daemon.stop()
            upgrade.join(LIMIT_S)
            wait_until(lambda: not daemon.successors() and not daemon.workers())
        finally:
            daemon.end()


def suppressed(daemon: Hanging) -> None:
    """An upgrade that may be cut."""
    with contextlib.suppress(httpx.HTTPError):
        daemon.post("/v1/admin/upgrade")
