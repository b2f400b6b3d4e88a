"""A changed configuration, end to end: what is different takes effect, everything else doesn't notice."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from typing import Any

import pytest
import yaml

from supervisor.catalog.keys import new_key
from tests.support import shell
from tests.support.clients import Stream
from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.held import frozen
from tests.support.limits import LIMIT_S

SLOW = {"fake": {"chunks": 60, "chunk_delay": 0.1}}


@pytest.fixture
def daemon(tmp_path):
    models = {"kept": fake(), "changed": fake(), "gone": fake()}
    config = {"models": models, "virtual_models": {"alias": {"model": "kept", "description": "before"}}}
    with running(tmp_path, config) as daemon:
        yield daemon


def write(daemon: Daemon, **sections: Any) -> None:
    """Merge into the daemon's configuration and replace its file, as editors do; None takes an entry away."""
    for name, entries in sections.items():
        section = daemon.config.setdefault(name, {})
        section.update(entries)
        daemon.config[name] = {key: value for key, value in section.items() if value is not None}
    fresh = daemon.config_path.with_name("llmux.yaml.new")
    fresh.write_text(yaml.safe_dump(daemon.config, sort_keys=False))
    fresh.replace(daemon.config_path)


def reload(daemon: Daemon) -> dict[str, Any]:
    answer = daemon.post("/v1/admin/reload")
    assert answer.status_code == 200, answer.text
    return answer.json()


def llmux(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return shell.llmux(*words, env=os.environ | env, timeout=LIMIT_S)


def pid(daemon: Daemon, model: str) -> int | None:
    worker = daemon.model(model)["worker"]
    return worker["pid"] if worker else None


NOTHING = {
    "added": [],
    "removed": [],
    "changed": [],
    "restarted": [],
    "stops": [],
    "unchanged": 4,
    "settings": [],
    "needs_restart": [],
    "warnings": [],
}


class TestDifference:
    """Only what is different about the file is acted upon."""

    def test_streams_survive_and_only_the_changed_model_restarts(self, daemon):
        before, streams = {}, {}
        with contextlib.ExitStack() as paused:
            for name in ("kept", "changed", "gone"):
                assert daemon.chat(name).status_code == 200
                before[name] = pid(daemon, name)
                streams[name] = Stream(daemon, name, **SLOW)
                wait_until(lambda stream=streams[name]: stream.chunks > 2)
                paused.enter_context(frozen(before[name]))
            write(daemon, models={"changed": fake("--status", "201"), "gone": None, "fresh": fake()})
            assert reload(daemon) == NOTHING | {
                "added": ["fresh"],
                "removed": ["gone"],
                "changed": ["changed"],
                "restarted": ["changed"],
                "stops": [
                    {"model": name, "state": "ready", "in_flight": 1, "queued": 0, "pinned": False, "drain_s": 30}
                    for name in ("changed", "gone")
                ],
                "unchanged": 2,
            }
            assert all(stream.is_alive() for stream in streams.values())
            assert pid(daemon, "changed") == before["changed"], "its worker ends after its stream"
            assert daemon.chat("gone").status_code == 404
            assert daemon.chat("fresh").status_code == 200
        assert daemon.chat("changed").status_code == 201, "who asks now waits for the worker that comes"
        for stream in streams.values():
            stream.join()
        assert [(s.ended_cleanly, s.chunks) for s in streams.values()] == [(True, 60)] * 3
        assert pid(daemon, "kept") == before["kept"]
        assert pid(daemon, "changed") not in {None, before["changed"]}
        listed = [entry["id"] for entry in daemon.get("/v1/models").json()["data"]]
        assert listed == ["alias", "changed", "fresh"]
        wait_until(lambda: "gone" not in daemon.get("/health").json()["models_loaded"])

    def test_the_same_again_does_nothing(self, daemon):
        assert daemon.chat("kept").status_code == 200
        worker = pid(daemon, "kept")
        assert reload(daemon) == NOTHING
        assert pid(daemon, "kept") == worker

    def test_what_a_running_worker_need_not_know(self, daemon):
        """A priority, an alias, limits: in effect at once, without another worker."""
        assert daemon.chat("kept").status_code == 200
        worker = pid(daemon, "kept")
        write(
            daemon,
            models={"kept": fake(priority=700)},
            virtual_models={"alias": {"model": "kept", "description": "after"}, "second": {"model": "kept"}},
            limits={"queue_total": 7, "body_mib": 1},
        )
        assert reload(daemon) == NOTHING | {
            "added": ["second"],
            "changed": ["kept", "alias"],
            "unchanged": 2,
            "settings": ["limits.queue_total", "limits.body_mib"],
        }
        view = daemon.model("kept")
        assert (view["priority"], view["worker"]["pid"]) == (700, worker)
        assert daemon.get("/v1/models/alias").json()["description"] == "after"
        assert daemon.chat("second").status_code == 200
        assert daemon.chat("kept", text="x" * 1_100_000).status_code == 413

    def test_what_only_a_start_can_change(self, daemon):
        """Told, again and again, and left as it is; the rest of the file takes effect."""
        write(daemon, server={"worker_port_last": daemon.port + 38}, models={"gone": None})
        daemon.config["devices"] = [{"kind": "host", "budget_mib": 3000, "margin_mib": 0}]
        write(daemon)
        changes = {"needs_restart": ["server.worker_port_last", "devices"], "unchanged": 3}
        assert reload(daemon) == NOTHING | changes | {"removed": ["gone"]}
        assert reload(daemon) == NOTHING | changes
        assert daemon.get("/v1/admin/gpu-memory").json()["devices"][0]["total_mib"] == 4000

    def test_preloads_what_is_new(self, daemon):
        write(daemon, models={"fresh": fake(preload=True)})
        reload(daemon)
        daemon.wait_state("fresh", "ready")

    def test_settings_of_operators_stay_where_nothing_changed(self, daemon):
        for name in ("kept", "changed"):
            answer = daemon.post(f"/v1/admin/models/{name}/load", json={"overrides": {"vram_mib": 150}})
            assert answer.status_code == 200
        worker = pid(daemon, "kept")
        write(daemon, models={"changed": fake("--chunks", "3")})
        reload(daemon)
        assert (daemon.model("kept")["overrides"], daemon.model("changed")["overrides"]) == ({"vram_mib": 150}, {})
        assert pid(daemon, "kept") == worker


class TestMistakes:
    """A file with mistakes changes nothing, and all of them are told."""

    def test_everything_is_told_and_nothing_changes(self, daemon):
        assert daemon.chat("kept").status_code == 200
        worker = pid(daemon, "kept")
        write(daemon, models={"kept": fake(priority=-1), "other": fake(pin="yes"), "gone": None})
        answer = daemon.post("/v1/admin/reload")
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "invalid_configuration"
        assert [problem.partition(": ")[2] for problem in error["detail"]] == [
            "expected at least 0, got -1",
            'expected true or false, got "yes"; write true',
        ]
        assert (pid(daemon, "kept"), daemon.model("kept")["priority"]) == (worker, 100)
        assert daemon.chat("gone").status_code == 200
        assert daemon.chat("other").status_code == 404
        assert len(daemon.events("reload.refused")[-1]["problems"]) == 2

    def test_the_command_lists_them(self, daemon):
        write(daemon, models={"kept": fake(priority=-1), "other": fake(pin="yes")})
        told = llmux("reload", "--url", daemon.url)
        assert told.returncode == 2
        assert told.stdout == ""
        assert "models.kept.priority: expected at least 0, got -1\n" in told.stderr
        assert "models.other.pin: expected true or false" in told.stderr

    def test_a_file_that_is_gone(self, daemon):
        daemon.config_path.unlink()
        assert daemon.post("/v1/admin/reload").status_code == 400
        assert daemon.chat("kept").status_code == 200

    def test_models_that_fit_nowhere(self, daemon):
        write(daemon, models={"huge": fake(vram_mib=5000)})
        (warning,) = daemon.post("/v1/admin/reload").json()["warnings"]
        assert warning.startswith("huge: takes 5000 MiB")
        (logged,) = daemon.events("model.memory")
        assert f"huge: {logged['reason']}" == warning
        answer = daemon.chat("huge")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "insufficient_memory")


class TestCauses:
    """SIGHUP, the command and the watch do what the API does."""

    def test_sighup(self, daemon):
        write(daemon, models={"fresh": fake()})
        daemon.signal(signal.SIGHUP)
        wait_until(lambda: daemon.events("reload.finished"))
        assert daemon.chat("fresh").status_code == 200
        write(daemon, models={"fresh": fake(pin="no")})
        daemon.signal(signal.SIGHUP)
        wait_until(lambda: daemon.events("reload.refused"))
        assert daemon.chat("fresh").status_code == 200

    def test_many_at_once(self, daemon):
        """One after another; the last one sees the last file."""
        for number in range(5):
            write(daemon, models={f"fresh-{number}": fake()})
            daemon.signal(signal.SIGHUP)
        assert reload(daemon)["unchanged"] == 9
        assert daemon.chat("fresh-4").status_code == 200

    def test_command(self, daemon):
        write(daemon, models={"fresh": fake(), "gone": None}, limits={"queue_total": 9})
        told = llmux("reload", "--url", daemon.url)
        assert (told.returncode, told.stderr) == (0, "")
        assert "added" in told.stdout
        assert "fresh" in told.stdout
        assert "limits.queue_total" in told.stdout
        assert llmux("reload", "--url", daemon.url, "--json").stdout.startswith("{")

    def test_watch(self, tmp_path):
        with running(tmp_path, {"models": {"one": fake()}, "server": {"watch": True}}) as daemon:
            write(daemon, models={"two": fake()})
            wait_until(lambda: daemon.chat("two").status_code == 200)
            (tmp_path / "local.yaml").write_text("limits: {queue_total: 3}\n")
            wait_until(lambda: len(daemon.events("reload.finished")) == 2)
            assert daemon.events("reload.finished")[1]["settings"] == ["limits.queue_total"]
            with daemon.config_path.open("a") as file:
                file.write("modles: {}\n")
            wait_until(lambda: daemon.events("reload.refused"))
            assert daemon.chat("two").status_code == 200


class TestKeys:
    """The file of keys is read again, too."""

    def test_keys_come_and_go(self, daemon, tmp_path):
        assert daemon.get("/v1/models").status_code == 200
        secret, entry = new_key("me", scopes=["inference", "admin"])
        path = tmp_path / "api_keys.yaml"
        path.write_text(yaml.safe_dump([entry]))
        path.chmod(0o600)
        assert reload(daemon)["settings"] == ["server.api_keys"]
        assert daemon.get("/v1/models").status_code == 401
        mine = {"authorization": f"Bearer {secret}"}
        assert daemon.get("/v1/models", headers=mine).status_code == 200
        path.write_text("- name: me\n  key: short\n")
        answer = daemon.post("/v1/admin/reload", headers=mine)
        assert answer.status_code == 400
        assert daemon.get("/v1/models", headers=mine).status_code == 200
        path.unlink()
        assert daemon.post("/v1/admin/reload", headers=mine, params={"force": True}).status_code == 200
        assert daemon.get("/v1/models").status_code == 200

    def test_the_last_key_of_an_open_address_stays(self, tmp_path):
        secret, entry = new_key("me", scopes=["inference", "admin"])
        path = tmp_path / "api_keys.yaml"
        path.write_text(yaml.safe_dump([entry]))
        with running(tmp_path, {"models": {"one": fake()}, "server": {"host": "0.0.0.0"}}) as daemon:
            path.unlink()
            mine = {"authorization": f"Bearer {secret}"}
            answer = daemon.post("/v1/admin/reload", headers=mine)
            assert answer.status_code == 400
            assert "there are no API keys" in answer.json()["error"]["detail"][0]
            assert daemon.get("/v1/models").status_code == 401


class TestSystemd:
    """A reload is told from its beginning to its end."""

    def test_notifications(self, tmp_path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(str(tmp_path / "notify"))
            systemd.settimeout(LIMIT_S)
            env = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
            with running(tmp_path, {"models": {"one": fake()}}, env=env) as daemon:
                assert systemd.recv(1000) == b"READY=1\nSTATUS=serving 1 models"
                write(daemon, models={"two": fake()})
                reload(daemon)
                assert systemd.recv(1000).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
                assert systemd.recv(1000) == b"READY=1\nSTATUS=serving 2 models"
                write(daemon, models={"two": fake(pin=3)})
                assert daemon.post("/v1/admin/reload").status_code == 400
                assert systemd.recv(1000).startswith(b"RELOADING=1\n")
                told = systemd.recv(1000)
                assert told.startswith(b"READY=1\nSTATUS=serving 2 models; the last reload was refused: ")
