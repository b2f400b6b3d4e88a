"""llmux under systemd: the units, and the protocol between the two. systemd itself is played by a socket."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml

from supervisor.catalog.keys import new_key
from supervisor.cli import doctor, service
from tests.support.activation import Activated, Systemd, listening
from tests.support.daemon import REPOSITORY, Daemon, fake, wait_until
from tests.support.limits import LIMIT_S
from tests.support.shell import environment, llmux

UNITS = REPOSITORY / "deploy" / "systemd"


class TestUnits:
    """The unit files in deploy/systemd are what the program writes, and systemd accepts them."""

    def test_are_what_install_writes(self):
        assert (UNITS / service.UNIT).read_text() == service.service_unit()
        assert (UNITS / service.SOCKET).read_text() == service.socket_unit()
        assert "\nListenStream=[::1]:9000\n" in service.socket_unit("::1", 9000)
        two = "\nListenStream=127.0.0.1:8081\nListenStream=127.0.0.1:11434\n"
        assert two in service.socket_unit("127.0.0.1", 8081, 11434)

    def test_are_accepted_by_systemd(self, tmp_path):
        if shutil.which("systemd-analyze") is None:
            pytest.skip("systemd-analyze is not installed here")
        program = tmp_path / ".local" / "bin" / "llmux"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        env = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
        units = [str(UNITS / service.UNIT), str(UNITS / service.SOCKET)]
        done = subprocess.run(["systemd-analyze", "--user", "verify", *units], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")

    def test_a_path_with_spaces_stays_one_word(self):
        unit = service.service_unit("/opt/my tools/llmux", ("--config", '/etc/a "b".yaml'))
        assert 'ExecStart="/opt/my tools/llmux" serve --config "/etc/a \\"b\\".yaml"\n' in unit


class TestInstall:
    """`llmux service install` writes the unit, says what it did, and does it only once."""

    def llmux(self, home: Path, *words: str, code: int = 0) -> str:
        nobody = {"XDG_RUNTIME_DIR": str(home), "DBUS_SESSION_BUS_ADDRESS": f"unix:path={home / 'none'}"}
        env = {**os.environ, **nobody, "HOME": str(home), "XDG_CONFIG_HOME": ""}
        done = llmux("service", *words, env=env)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def test_a_configuration_that_is_not_there(self, tmp_path):
        said = self.llmux(tmp_path, "install", "--config", "nothing.yaml", code=2)
        assert "nothing.yaml: there is no such file" in said
        assert not (tmp_path / ".config").exists()

    def test_install_status_uninstall(self, tmp_path):
        unit = tmp_path / ".config" / "systemd" / "user" / service.UNIT
        config = self.configure(tmp_path / "50% of $HOME.yaml")
        said = self.llmux(tmp_path, "install", "--config", str(config))
        assert f"wrote {unit}" in said
        assert f'--config "{tmp_path}/50%% of $$HOME.yaml"' in unit.read_text()
        program = unit.read_text().partition("ExecStart=")[2].split()[0]
        assert Path(program).is_file()
        assert unit.read_text().partition("ExecReload=")[2].startswith(f"{program} reload --pid $MAINPID\n")
        assert f"unchanged: {unit}" in self.llmux(tmp_path, "install", "--config", str(config))
        assert str(unit) in self.llmux(tmp_path, "status")
        assert f"removed {unit}" in self.llmux(tmp_path, "uninstall")
        assert not unit.exists()
        assert "not installed" in self.llmux(tmp_path, "uninstall")

    @pytest.mark.parametrize(
        ("words", "command"),
        [
            ([], f"enable --now {service.UNIT}"),
            (["--no-start"], f"enable {service.UNIT}"),
            (["--socket", "[::1]:8081"], f"enable --now {service.SOCKET}"),
        ],
    )
    def test_without_systemd_it_says_what_to_run(self, tmp_path, words, command):
        config = self.configure(tmp_path / ".config" / "llmux" / "llmux.yaml")
        assert f"systemctl --user {command}\n" in self.llmux(tmp_path, "install", *words)
        unit = tmp_path / ".config" / "systemd" / "user" / service.UNIT
        assert f"serve --config {config}\n" in unit.read_text(), "the service may look elsewhere than this shell"

    def test_without_a_configuration_there_is_nothing_to_install(self, tmp_path):
        said = self.llmux(tmp_path, "install", code=2)
        assert "no configuration found" in said
        assert "llmux config init" in said
        assert not (tmp_path / ".config").exists()

    def test_a_socket_that_others_reach_needs_keys(self, tmp_path):
        config = self.configure(tmp_path / "llmux.yaml")
        words = ("install", "--config", str(config), "--socket")
        for address in ("0.0.0.0:8081", "[::]:8081", "[::ffff:10.0.0.1]:8081"):
            assert "which others can reach, and there are no API keys" in self.llmux(tmp_path, *words, address, code=2)
        assert not (tmp_path / ".config").exists()
        (tmp_path / "api_keys.yaml").write_text(yaml.safe_dump([new_key("me")[1]]))
        self.llmux(tmp_path, *words, "0.0.0.0:8081")

    def test_a_socket_unit_has_the_extra_ports(self, tmp_path):
        config = self.configure(tmp_path / "llmux.yaml")
        config.write_text(config.read_text() + "\nserver: {ollama_port: 11434, metrics_port: 9090}\n")
        self.llmux(tmp_path, "install", "--config", str(config), "--socket", "127.0.0.1:8081")
        lines = (tmp_path / ".config" / "systemd" / "user" / service.SOCKET).read_text().splitlines()
        ports = [line.rpartition(":")[2] for line in lines if line.startswith("ListenStream=")]
        assert ports == ["8081", "11434", "9090"]

    @pytest.mark.parametrize("address", ["8081", "gpu.example.org:8081", "127.0.0.1:0", "127.0.0.1:x", "/run/llmux"])
    def test_a_socket_where_systemd_cannot_listen(self, tmp_path, address):
        assert "expected HOST:PORT with an IP address" in self.llmux(tmp_path, "install", "--socket", address, code=2)

    def test_podman_without_root_gets_an_open_unit(self, tmp_path, monkeypatch):
        """Its `newuidmap` is a set-uid program, which a sealed service can't start; doctor names what is to do."""
        for name, value in (("HOME", tmp_path), ("XDG_RUNTIME_DIR", tmp_path), ("XDG_CONFIG_HOME", "")):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        config, unit = self.configure(tmp_path / "llmux.yaml"), tmp_path / ".config/systemd/user" / service.UNIT
        said: list[str] = []
        service.install(said.append, config=config, linger=False, start=False, address=None)
        assert len(service.SEAL.findall(unit.read_text())) == 5
        config.write_text("models: {boxed: {cmd: 'podman run -p ${port}:80 image', vram_mib: 1}}\n")
        told = {check.name: check for check in doctor.examine(config)}["service"]
        assert (told.message, told.fix) == (
            f"{unit} forbids what podman needs to start boxed after a boot",
            "llmux service install",
        )
        service.install(said.append, config=config, linger=False, start=False, address=None)
        assert any("podman, which runs boxed, needs set-uid programs" in line for line in said)
        assert not service.SEAL.findall(unit.read_text())
        assert "NotifyAccess=main" in unit.read_text()

    def configure(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("models: {}\n")
        return path


def is_stopped(pid: int) -> bool:
    """By a signal, every thread of it."""
    return all(
        (task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in Path(f"/proc/{pid}/task").iterdir()
    )


@pytest.fixture
def systemd(tmp_path):
    systemd = Systemd(tmp_path)
    yield systemd
    systemd.socket.close()


class TestServe:
    """A service without a configuration doesn't start: nobody would see that it serves the demo."""

    def test_without_a_configuration(self, tmp_path):
        env = environment(tmp_path, NOTIFY_SOCKET=str(tmp_path / "none"), PYTHONPATH=str(REPOSITORY))
        done = llmux("serve", env=env, cwd=tmp_path)
        assert done.returncode == 2
        assert "no configuration found" in done.stderr
        assert "demo" not in done.stdout


class TestNotify:
    """systemd hears READY once the socket listens, WATCHDOG from the event loop, STOPPING at the end."""

    def test_ready_watchdog_stopping(self, tmp_path, systemd):
        # Ten datagrams wait for us, further ones are lost: so long this test may be away.
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
        config = {"models": {"a": fake(grace_s=40)}, "limits": {"drain_s": 400}}
        daemon = Daemon(tmp_path, config, env)
        try:
            daemon.start(wait=False)
            systemd.expect("READY=1")
            assert daemon.get("/health").status_code == 200
            first = systemd.expect("WATCHDOG=1")
            assert systemd.expect("WATCHDOG=1") - first < 15
            daemon.signal(signal.SIGSTOP)  # a loop that doesn't run feeds nobody
            wait_until(lambda: is_stopped(daemon.process.pid))
            systemd.drain()
            assert systemd.silent_for(1.5)
            daemon.signal(signal.SIGCONT)
            systemd.expect("WATCHDOG=1")
            daemon.signal(signal.SIGTERM)
            systemd.expect("EXTEND_TIMEOUT_USEC=450000000")  # drain_s, grace_s and some: more than the unit's own time
        finally:
            assert daemon.stop() == 0

    def test_workers_never_see_the_notify_socket(self, tmp_path, systemd):
        daemon = Daemon(tmp_path, {"models": {"a": fake()}}, {"NOTIFY_SOCKET": str(tmp_path / "notify")})
        try:
            daemon.start()
            assert daemon.chat("a").status_code == 200
            environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in daemon.workers()]
            assert environments
            assert not any(b"NOTIFY_SOCKET" in environment for environment in environments)
        finally:
            daemon.stop()


class TestSocketActivation:
    """A socket that systemd bound is served as it is, and held to the rule for addresses."""

    @pytest.mark.parametrize(
        ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")]
    )
    def test_serves_the_given_socket(self, tmp_path, family, address):
        with listening(address, family) as listener:
            daemon = Activated(tmp_path, {"models": {"a": fake()}}).activate(listener)
        try:
            # The kernel queues the connection until the daemon accepts it: that is what activation is for.
            assert daemon.get("/health").json()["status"] == "ok"
        finally:
            daemon.stop()

    def test_extra_ports_may_be_given_too(self, tmp_path):
        """In any order: the one that isn't an extra port's is the main one."""
        with listening("127.0.0.1") as main, listening("127.0.0.1") as extra:
            port = extra.getsockname()[1]
            config = {"models": {"a": fake()}, "server": {"ollama_port": port}}
            daemon = Activated(tmp_path, config).activate(extra, main)
            daemon.port = main.getsockname()[1]
        try:
            told = httpx.get(
                f"http://127.0.0.1:{port}/",
                trust_env=False,
                timeout=LIMIT_S,
                headers={"accept": "text/html"},
            )
            assert told.text == "Ollama is running"
            assert daemon.get("/v1/admin/models").status_code == 200
        finally:
            daemon.stop()

    @pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")])
    def test_that_others_reach_is_refused_without_keys(self, tmp_path, family, address):
        with listening(address, family) as listener:
            daemon = Activated(tmp_path, {"models": {"a": fake()}}).activate(listener)
        assert daemon.process.wait(LIMIT_S) == 2
        assert f"the address of the socket to listen on is {address}, which others can reach" in daemon.log_text()

    def test_what_llmux_cannot_serve_is_refused(self, tmp_path):
        unix, one, two = listening(str(tmp_path / "socket"), socket.AF_UNIX), *(listening("127.0.0.1") for _ in "ab")
        with unix, one, two:
            for sockets, problem in (([unix], "no listening TCP socket"), ([one, two], "systemd gave 2 sockets")):
                daemon = Activated(tmp_path, {"models": {"a": fake()}}).activate(*sockets)
                assert daemon.process.wait(LIMIT_S) == 2
                assert problem in daemon.log_text()

    def test_neither_reload_nor_upgrade_takes_its_last_key(self, tmp_path):
        secret, entry = new_key("me", scopes=["inference", "admin"])
        mine = {"authorization": f"Bearer {secret}"}
        keys = tmp_path / "api_keys.yaml"
        keys.write_text(yaml.safe_dump([entry]))
        with listening("0.0.0.0") as listener:
            daemon = Activated(tmp_path, {"models": {"a": fake()}}).activate(listener)
        try:
            assert daemon.get("/v1/models", headers=mine).status_code == 200
            keys.unlink()
            for insist in ("", "?force=true"):
                answer = daemon.post(f"/v1/admin/reload{insist}", headers=mine)
                assert answer.status_code == 400
                assert "the address that llmux listens on is 0.0.0.0" in answer.json()["error"]["detail"][0]
                assert daemon.get("/v1/models").status_code == 401
            answer = daemon.post("/v1/admin/upgrade", headers=mine)
            assert answer.status_code == 503
            assert "the address of the socket to listen on is 0.0.0.0" in str(answer.json()["error"]["detail"])
            assert daemon.get("/v1/models", headers=mine).status_code == 200
        finally:
            daemon.stop()
