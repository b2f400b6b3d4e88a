"""The daemon is killed with -9, alone or with its shims: nothing survives it, and the next start is clean and quick."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.support.clients import Call
from tests.support.counts import times
from tests.support.daemon import Daemon, fake, wait_until

SEED = int(os.environ.get("LLMUX_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
TREES = {
    "plain": fake("--fork", "2", grace_s=0.2),
    "detached": fake("--daemonize", "2", "--ignore-term", grace_s=0.2),
    "both": fake("--daemonize", "--fork", "--ignore-term", "--take-mib", "20", grace_s=0.2),
}

ORPHANS = 6  # forks and double forks: only leaders die with their shims


@pytest.fixture
def daemon(tmp_path):
    daemon = Daemon(tmp_path, {"models": TREES})
    yield daemon
    if daemon.process is not None:
        daemon.stop()
        wait_until(lambda: not daemon.workers(), 5, "no worker is left")


def shims(daemon: Daemon) -> list[int]:
    views = daemon.get("/v1/admin/models").json()["data"]
    return [view["worker"]["shim_pid"] for view in views if view["worker"]]


def processor_s(pid: int) -> float:
    """What a process has taken so far."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load_all(daemon: Daemon) -> None:
    for name in TREES:
        assert daemon.post(f"/v1/admin/models/{name}/load").status_code == 200


class Test01DaemonKilled:
    """kill -9 of the daemon at any moment takes every process of its trees with it."""

    def test_killed_at_random_points(self, daemon, measured):
        """kill -9 of the daemon while it loads and serves trees with setsid double forks: no live orphans soon after."""
        chance = random.Random(SEED)
        gone, back = [], []
        for _ in range(times(2, 200)):
            daemon.by_exec = False
            daemon.start()
            for name in TREES:
                Call(daemon, name)  # the answer is not waited for
            time.sleep(chance.uniform(0.0, 0.8))
            daemon.kill()
            killed_at = time.monotonic()
            wait_until(lambda: not daemon.workers(), what=f"no orphans (LLMUX_SEED={SEED})")
            gone.append(time.monotonic() - killed_at)
            daemon.by_exec = True  # what a start takes is measured
            daemon.start()
            back.append(time.monotonic() - killed_at - gone[-1])
            daemon.kill()
            wait_until(lambda: not daemon.workers(), what="no orphans")
        assert max(gone) < 15
        assert max(back) < 30
        measured(seed=SEED, kills=2 * len(gone), orphans_gone_max_s=max(gone), start_to_admin_max_s=max(back))

    def test_serves_again(self, tmp_path, measured):
        """From kill -9 of a daemon with ten loaded models until the next one answers; and what that takes of a processor."""
        daemon = Daemon(tmp_path, {"models": {f"m{number}": fake("--fork") for number in range(10)}})
        took, processor = [], []
        try:
            daemon.start()
            daemon.by_exec = True  # what a start takes is measured
            for _ in range(times(2, 20)):
                for name in daemon.config["models"]:
                    daemon.post(f"/v1/admin/models/{name}/load").raise_for_status()
                killed_at = time.monotonic()
                daemon.kill()
                daemon.start()
                took.append(time.monotonic() - killed_at)
                assert daemon.process is not None
                processor.append(processor_s(daemon.process.pid))
        finally:
            daemon.stop()
        wait_until(lambda: not daemon.workers())
        assert max(took) < 60
        measured(models=10, killed_to_serving_max_s=max(took), start_processor_max_s=max(processor))


class Test02DaemonAndShimsKilled:
    """What survives a kill -9 of daemon and shims is dead before the next daemon takes its port."""

    def test_killed_with_its_shims(self, daemon, measured):
        """kill -9 of daemon and shims leaves orphans; the next start has killed them all before it takes its port."""
        reaping, serving = [], []
        for _ in range(times(2, 40)):
            daemon.by_exec = False
            daemon.start()
            load_all(daemon)
            before = set(daemon.workers())
            shim_pids = shims(daemon)
            for pid in shim_pids:
                os.kill(pid, signal.SIGSTOP)  # else a shim is quicker than we are
            daemon.kill()
            for pid in shim_pids:
                os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()
            wait_until(lambda: len(before & set(daemon.workers())) == ORPHANS, what="only what has no parent is left")
            orphans = before & set(daemon.workers())

            daemon.by_exec = True  # what a start takes is measured
            daemon.start(wait=False)
            left_when_bound = None
            while left_when_bound is None:
                with contextlib.suppress(httpx.TransportError):
                    daemon.get("/health")
                    left_when_bound = orphans & set(daemon.workers())
                assert time.monotonic() < killed_at + 60
            serving.append(time.monotonic() - killed_at)
            assert left_when_bound == set()
            reaped = [event for event in daemon.events("orphan.reaped") if event["pid"] in orphans]
            assert {event["pid"] for event in reaped} == orphans
            assert all(event["gone"] for event in reaped)
            load_all(daemon)
            daemon.stop()
            daemon.log_path.unlink()
            reaping.append(len(orphans))
        measured(rounds=len(serving), orphans_reaped=sum(reaping), killed_to_serving_max_s=max(serving))
