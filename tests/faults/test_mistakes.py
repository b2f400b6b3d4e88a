"""llmux makes a mistake over one model, and the others never notice."""

from __future__ import annotations

import signal

import pytest

from tests.support.clients import Call, Stream, code
from tests.support.daemon import Daemon, fake, wait_until
from tests.support.limits import LIMIT_S


class CursedDaemon(Daemon):
    program = ("-m", "tests.support.faulty_daemon", "cursed")


class Test34AnEventWhoseHandlingRaises:
    """Its model has failed and says so; the others are served, and the daemon ends when it is told to."""

    @pytest.mark.parametrize(("name", "number"), [("cursed", signal.SIGTERM), ("hexed", signal.SIGINT)])
    def test_others_are_served(self, tmp_path, name, number):
        """At each load, or with its worker running; at any step of it, see tests/unit/core/test_recovery.py."""
        models = {"cursed": fake(grace_s=1), "hexed": fake(grace_s=1), "a": fake(grace_s=1), "b": fake(grace_s=1)}
        daemon = CursedDaemon(tmp_path, {"models": models, "limits": {"loads_per_device": 4}}).start()
        try:
            assert daemon.chat("a").status_code == 200
            stream = Stream(daemon, "a", fake={"chunks": 40, "chunk_delay": 0.05})
            wait_until(lambda: stream.chunks > 2)
            calls = [Call(daemon, name) for _ in range(3)]
            assert {(call.result().status, code(call.response)) for call in calls} == {(503, "model_failed")}
            assert "llmux made a mistake over it (AssertionError)" in calls[0].response.text
            view = daemon.wait_state(name, "failed")
            assert view["worker"] is None
            assert daemon.chat("b").status_code == 200
            assert stream.result().ended_cleanly
            assert [decision["kind"] for decision in daemon.decisions(name)][-1] == "failed"
            loading = daemon.post(f"/v1/admin/models/{name}/load")
            assert (loading.status_code, code(loading)) == (503, "load_failed")
            daemon.wait_state(name, "failed")
            assert "event.mishandled" in daemon.log_text()
            daemon.signal(number)
            assert daemon.process.wait(LIMIT_S) == 0
            assert daemon.workers() == []
        finally:
            daemon.stop()
