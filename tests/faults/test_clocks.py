"""The wall clock jumps, and the event loop stands still."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import httpx

from tests.installation.test_service import Systemd
from tests.support.clients import Call, starts
from tests.support.daemon import Daemon, fake, wait_until
from tests.support.held import held


class Troubled(Daemon):
    program = ("-m", "tests.support.faulty_daemon", "troubled")


class Test30WallClock:
    """All deadlines and pauses are measured by the monotonic clock: a wall clock that is set starts, stops and ends nothing."""

    def test_jumps(self, tmp_path, measured):
        """What is loaded stays, what waits goes on waiting, and what is in backoff isn't started sooner."""
        gate = tmp_path / "gate"
        models = {
            "idle": fake(keep_alive_s=1800),
            "slow": held(gate, startup_timeout_s=1800),
            "dud": fake("--exit-code", "3"),
        }
        limits = {
            "queue_wait_s": 1800,
            "readiness_interval_s": 0.1,
            "backoff_first_s": 1200,
            "backoff_max_s": 1200,
            "loads_per_device": 3,
        }
        daemon = Troubled(tmp_path, {"models": models, "limits": limits})
        try:
            daemon.start()
            assert daemon.chat("idle").status_code == 200
            worker = daemon.model("idle")["worker"]
            waiting = Call(daemon, "slow")
            dud = Call(daemon, "dud")
            wait_until(lambda: daemon.model("dud")["state"] == "backoff")
            wait_until(lambda: daemon.model("slow")["state"] == "starting")

            probes = lambda: Path(worker["log"]).read_text().count("GET /health")
            for jump in ("an-hour-later", "an-hour-earlier", "an-hour-earlier"):
                daemon.get(f"/trouble/{jump}")
                seen = probes()
                wait_until(lambda seen=seen: probes() >= seen + 8, what="it goes on, and looks at all its timers")
                assert daemon.model("idle")["worker"]["pid"] == worker["pid"]
                assert daemon.model("idle")["state"] == "ready"
                assert daemon.model("dud")["state"] == "backoff"
                assert (daemon.model("slow")["queued"], daemon.model("dud")["queued"]) == (1, 1)
                assert [starts(daemon, model) for model in models] == [1, 1, 1]
            gate.touch()
            assert waiting.result().status == 200
            assert dud.is_alive()
            measured(jumps=3, starts_after_them=0)
        finally:
            gate.touch()
            assert daemon.stop() == 0
        dud.result()


class Test30BlockedLoop:
    """systemd's watchdog is fed from the event loop itself: when that stands still, systemd hears nothing and acts."""

    def test_the_watchdog_starves(self, tmp_path, measured):
        systemd, blocked = Systemd(tmp_path), tmp_path / "blocked"
        env = {
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "1000000",
            "LLMUX_TEST_BLOCKED": str(blocked),
        }
        daemon = Troubled(tmp_path, {"models": {"a": fake()}}, env)
        try:
            daemon.start()
            systemd.expect("WATCHDOG=1")
            blocked.touch()
            asking = threading.Thread(target=daemon.get, args=("/trouble/block",), daemon=True)
            asking.start()
            wait_until(lambda: not answers(daemon), what="its loop stands still")
            systemd.drain()
            assert systemd.silent_for(1.5), "its threads run, and feed nobody"
            freed_at = time.monotonic()
            blocked.unlink()
            fed_s = systemd.expect("WATCHDOG=1") - freed_at
            asking.join(60)
            measured(watchdog_s=1.0, silent_for_s=1.5, fed_again_s=fed_s)
        finally:
            blocked.unlink(missing_ok=True)
            systemd.socket.close()
            daemon.signal(signal.SIGTERM)
            assert daemon.process.wait(60) == 0


def answers(daemon: Daemon) -> bool:
    try:
        return httpx.get(f"{daemon.url}/health", trust_env=False, verify=False, timeout=1).status_code == 200
    except httpx.TransportError:
        return False
