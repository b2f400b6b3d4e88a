"""llmux under a real systemd: a user manager of its own, where this machine lets a test have one (root, cgroup 2)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.clients import Call, Stream
from tests.support.daemon import Daemon, fake, wait_until
from tests.support.held import held
from tests.support.limits import LIMIT_S
from tests.support.shell import environment, llmux

MANAGER = "/usr/lib/systemd/systemd"
# A user manager wants a machine that systemd booted, and a control group that it may divide.
SCRIPT = """
mount -t tmpfs none /run && mkdir -p /run/systemd/system && mount -t cgroup2 none /sys/fs/cgroup || exit 9
group=/sys/fs/cgroup/llmux-test-$$
mkdir $group || exit 9
(echo $BASHPID > $group/cgroup.procs && exec "$0" --user --log-target=console) &
manager=$!
trap "kill -TERM $manager" TERM
while kill -0 $manager 2>/dev/null; do wait $manager; done
for turn in $(seq 50); do find $group -depth -type d -exec rmdir {} + 2>/dev/null; [ -d $group ] || break; sleep 0.1; done
"""


class Manager:
    """systemd for one user, in a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        runtime = home / "runtime"
        runtime.mkdir(mode=0o700)
        self.env = environment(home, XDG_RUNTIME_DIR=str(runtime), DBUS_SESSION_BUS_ADDRESS="")
        self.log = (home / "systemd.log").open("wb")
        command = ["unshare", "--mount", "--propagation", "private", "bash", "-c", SCRIPT, MANAGER]
        env = {name: self.env[name] for name in ("PATH", "HOME", "XDG_RUNTIME_DIR")}
        self.process = subprocess.Popen(command, env=env, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL)

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        inside = ["nsenter", "--mount", "--target", str(self.process.pid), *words]
        return subprocess.run(inside, env=self.env, capture_output=True, text=True, timeout=LIMIT_S)

    def systemctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self("systemctl", "--user", *words)

    def llmux(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Where systemd is seen, if the command asks for it."""
        if words[0] == "service":
            return self(str(Path(sys.executable).with_name("llmux")), *words)
        return llmux(*words, env=self.env, timeout=LIMIT_S)

    def done(self, *words: str) -> str:
        """What a command that must succeed says."""
        done = self.llmux(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def show(self, name: str) -> str:
        return self.systemctl("show", "llmux.service", f"--property={name}", "--value").stdout.strip()

    def answers(self) -> bool:
        return self.process.poll() is not None or self.systemctl("show-environment").returncode == 0

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LIMIT_S)
        self.process.kill()
        self.log.close()


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    if os.geteuid() != 0 or not (Path(MANAGER).is_file() and shutil.which("unshare")):
        pytest.skip("a user manager of systemd for a test needs root and systemd")
    manager = Manager(tmp_path_factory.mktemp("home"))
    try:
        wait_until(manager.answers)
        if manager.process.poll() is not None:
            pytest.skip("systemd doesn't run here")
        yield manager
    finally:
        manager.close()


@pytest.fixture
def site(manager, gate):
    """A configuration, the port of its service, and the command that looks after it; nothing is installed afterwards."""
    folder = manager.home / ".config" / "llmux"
    folder.mkdir(parents=True, exist_ok=True)
    site = Daemon(folder, {"models": {"slow": held(gate), "quick": fake("--log-env")}, "limits": {"keepalive_s": 0.2}})
    site.config_path.write_text(yaml.safe_dump(site.config))
    (folder / "environment").write_text("HF_HOME=/a folder/for models\nSOME_TOKEN=secret\n")
    manager.env["LLMUX_URL"] = site.url
    yield site
    gate.touch()
    site.config_path.write_text(yaml.safe_dump(site.config))
    manager.llmux("service", "uninstall")
    (folder / "api_keys.yaml").unlink(missing_ok=True)


@pytest.fixture
def gate(tmp_path):
    return tmp_path / "gate"


class TestService:
    """The service as systemd runs it."""

    def test_variables_of_its_daemon_and_workers_and_mistakes_told_by_reload_and_start(self, manager, site):
        manager.done("service", "install")
        assert manager.show("ActiveState") == "active"
        environ = Path(f"/proc/{manager.show('MainPID')}/environ").read_text().split("\0")
        assert {"HF_HOME=/a folder/for models", "SOME_TOKEN=secret"} <= set(environ)
        assert site.chat("quick").status_code == 200
        worker = manager.done("logs", "quick")
        assert "/a folder/for models" in worker
        assert "SOME_TOKEN" not in worker, "a worker gets what is meant for it"
        manager.done("keys", "add", "me")
        assert manager.systemctl("reload", "llmux").returncode == 0, "it needs no key"
        assert site.get("/v1/models").status_code == 401
        assert "quick" in manager.done("ps"), "nor does who is on this machine"
        site.config_path.write_text("modelz: 3\n")
        assert manager.systemctl("reload", "llmux").returncode == 1
        assert "the last reload was refused: " in manager.show("StatusText")
        assert "modelz: unknown section" in manager.show("StatusText")
        assert manager.show("ActiveState") == "active"
        assert "quick" in manager.done("ps")
        assert manager.systemctl("restart", "llmux").returncode == 1
        assert [manager.show(name) for name in ("ActiveState", "ExecMainStatus", "NRestarts")] == ["failed", "2", "0"]

    def test_a_socket_for_one_that_runs_and_a_restart_with_requests_that_wait(self, manager, site, gate):
        manager.done("service", "install")
        told = manager.done("service", "install", "--socket", f"127.0.0.1:{site.port}")
        assert "so that systemd can listen instead of it" in told
        assert site.get("/health").status_code == 200
        first = manager.show("MainPID")
        plain, stream = Call(site, "slow"), Stream(site, "slow")
        wait_until(lambda: site.get("/health").json()["queued"] == 2 and stream.text)
        assert manager.systemctl("restart", "llmux").returncode == 0
        assert manager.show("MainPID") not in {first, "0"}
        assert (plain.result().status, plain.response.headers["retry-after"]) == (503, "5")
        assert '"code":"shutting_down"' in stream.result().text
        gate.touch()
        assert site.chat("slow").status_code == 200
