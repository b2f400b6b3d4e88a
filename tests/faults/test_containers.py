"""A worker in a container: its process is only the engine's client, and whatever ends that must end the container, too."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.test_takeover import Upgraded
from tests.support import fake_docker
from tests.support.daemon import Daemon, wait_until

AS_LLAMA_SWAP_HAS_IT = "docker run --rm --init -p ${port}:8080 --name boxed example/llama.cpp:server --name boxed"


@dataclass
class Engine:
    """The engine's daemon. It does not belong to llmux, and knows what it was asked for."""

    env: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes]

    def asked(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def containers(self) -> list[int]:
        """Their processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        found = {pid for file in (children, *threads) if file.exists() for pid in file.read_text().split()}
        return [
            int(pid) for pid in found if "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
        ]


@pytest.fixture
def engine(tmp_path) -> Iterator[Engine]:
    folder = Path(tempfile.mkdtemp(prefix="llmux-engine-"))  # a socket's path is short
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {fake_docker.__file__} "$@"\n')
    program.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "DOCKER_HOST": f"unix://{folder}/s"}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", fake_docker.__file__, "serve", str(folder / "s"), str(tmp_path / "asked")]
    )
    try:
        wait_until(lambda: (folder / "s").exists(), what="the engine listens")
        yield Engine(env, tmp_path / "asked", process)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
        shutil.rmtree(folder)


@pytest.fixture
def daemon(tmp_path, engine) -> Iterator[Upgraded]:
    models = {
        "boxed": {"cmd": AS_LLAMA_SWAP_HAS_IT, "stop_cmd": "docker stop boxed", "vram_mib": 100},
        "stubborn": {"cmd": "docker run --rm -p ${port}:80 image --ignore-term", "vram_mib": 100, "grace_s": 0.2},
    }
    limits = {"backoff_first_s": 0.1, "backoff_jitter": 0.0}
    daemon = Upgraded(tmp_path, {"models": models, "limits": limits}, env=engine.env)
    daemon.start()
    yield daemon
    daemon.end()


def loaded(daemon: Daemon, engine: Engine, name: str = "boxed") -> dict[str, int]:
    """Its processes, once it has answered."""
    assert daemon.chat(name).status_code == 200
    assert len(engine.containers()) == 1
    facts = daemon.model(name)["worker"]
    return {key: facts[key] for key in ("pid", "shim_pid")}


def gone(daemon: Daemon, engine: Engine) -> None:
    wait_until(lambda: engine.containers() == [], what="the container has ended")
    wait_until(lambda: list((daemon.state_dir / "logs").glob("*.remains")) == [], what="nothing is left to do")


class TestContainer:
    """It is started, probed, asked and ended like any other worker."""

    def test_a_whole_life(self, daemon, engine):
        loaded(daemon, engine)
        assert engine.asked()[-1] == (
            f"run --rm --init -p 127.0.0.1:{daemon.model('boxed')['worker']['port']}:8080 --name boxed "
            "example/llama.cpp:server --name boxed"
        )
        assert daemon.post("/v1/admin/models/boxed/unload").status_code == 200
        gone(daemon, engine)
        assert engine.asked()[-2:] == ["stop boxed", "rm --force boxed"]

        loaded(daemon, engine, "stubborn")
        port = daemon.model("stubborn")["worker"]["port"]
        assert f"--name llmux-stubborn-{port}" in engine.asked()[-1]
        assert daemon.post("/v1/admin/models/stubborn/unload").status_code == 200  # its client is killed at last
        gone(daemon, engine)

        os.kill(loaded(daemon, engine)["pid"], signal.SIGKILL)
        gone(daemon, engine)
        os.kill(loaded(daemon, engine)["shim_pid"], signal.SIGKILL)
        gone(daemon, engine)
        loaded(daemon, engine)
        assert daemon.stop() == 0
        gone(daemon, engine)


class TestKilledDaemon:
    """Killing llmux ends its containers as well."""

    def test_by_its_shim(self, daemon, engine):
        loaded(daemon, engine)
        daemon.kill()
        gone(daemon, engine)
        assert engine.asked()[-1] == "rm --force boxed"

    def test_after_it_was_handed_over(self, daemon, engine):
        worker = loaded(daemon, engine)
        serving = daemon.upgrade()
        assert loaded(daemon, engine) == worker
        os.kill(serving, signal.SIGKILL)
        gone(daemon, engine)

    def test_by_its_successor(self, daemon, engine):
        """Where the shims were killed, too."""
        shim = loaded(daemon, engine)["shim_pid"]
        os.kill(shim, signal.SIGSTOP)
        daemon.kill()
        os.kill(shim, signal.SIGKILL)
        assert len(engine.containers()) == 1
        daemon.start()
        assert engine.containers() == []
        loaded(daemon, engine)
