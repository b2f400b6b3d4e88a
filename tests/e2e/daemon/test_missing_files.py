"""What a model needs of this machine and doesn't find there is that model's trouble; the others don't notice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import tiny
from tests.support.daemon import REPOSITORY, Daemon, fake, gguf, running, wait_until
from tests.support.limits import LIMIT_S


def check(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "supervisor.cli", "config", "check", "--config", str(daemon.config_path), *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith("LLMUX_")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, cwd=REPOSITORY, env=env, check=False
    )


def write(daemon: Daemon) -> None:
    """The daemon's configuration, as editors replace it."""
    fresh = daemon.config_path.with_suffix(".new")
    fresh.write_text(yaml.safe_dump(daemon.config, sort_keys=False))
    fresh.replace(daemon.config_path)


def mount(path: Path) -> None:
    """What a late mount brings: the file, whole at once."""
    path.parent.mkdir(exist_ok=True)
    shutil.copy(tiny.model(name="tiny-chat"), path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def trouble(daemon: Daemon, name: str = "nas") -> dict[str, Any]:
    answer = daemon.chat(name, max_tokens=1)
    assert answer.status_code == 503, answer.text
    return answer.json()["error"]


class TestLateMount:
    """A daemon serves without a model's file, and has that model when the file comes."""

    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "nas" / "tiny.gguf"

    @pytest.fixture
    def daemon(self, tmp_path, path):
        with running(tmp_path, {"models": {"nas": gguf(path), "other": fake()}}) as daemon:
            yield daemon

    def test_the_others_are_served_and_it_comes_back_by_itself(self, daemon, path):
        assert daemon.chat("other").status_code == 200
        error = trouble(daemon)
        assert error["code"] == "model_failed"
        assert f"nas can't run here: path: {path}: there is no such file" in error["message"]
        view = daemon.model("nas")
        assert (view["state"], str(path) in view["reason"]) == ("failed", True)
        load = daemon.post("/v1/admin/models/nas/load")
        assert (load.status_code, str(path) in load.text) == (503, True)
        mount(path)
        daemon.wait_state("nas", "stopped")
        answer = daemon.chat("nas", max_tokens=1)
        assert answer.status_code == 200, answer.text
        assert daemon.model("nas")["memory"]["estimate"]["source"] == "computed"

    def test_an_operators_load_looks_at_once(self, daemon, path):
        assert daemon.model("nas")["state"] == "failed"
        mount(path)
        load = daemon.post("/v1/admin/models/nas/load")
        assert load.status_code == 200, load.text

    def test_config_check_tells_it_from_mistakes(self, daemon, path):
        told = check(daemon)
        assert told.returncode == 1, told.stderr
        assert f"models.nas.path: {path}: there is no such file" in told.stdout
        assert "all other models are served" in told.stdout
        daemon.config_path.write_text(daemon.config_path.read_text().replace("n_ctx: 2048", "n_ctx: 2048k"))
        told = check(daemon)
        assert told.returncode == 2
        assert "no such file" not in told.stderr

    def test_a_reload_with_an_unrelated_change_is_done(self, daemon, path):
        daemon.config["models"]["third"] = fake()
        write(daemon)
        answer = daemon.post("/v1/admin/reload")
        assert answer.status_code == 200, answer.text
        assert answer.json()["added"] == ["third"]
        assert any(f"nas can't run here: path: {path}" in told for told in answer.json()["warnings"])
        assert daemon.chat("third").status_code == 200


class TestFilesThatGo:
    """A loaded model doesn't notice that its file is away; unloaded, it waits for the file."""

    def test_a_reload_leaves_its_worker_alone(self, tmp_path):
        path = tmp_path / "nas" / "tiny.gguf"
        mount(path)
        with running(tmp_path, {"models": {"nas": gguf(path), "other": fake()}}) as daemon:
            assert daemon.chat("nas", max_tokens=1).status_code == 200
            pid = daemon.model("nas")["worker"]["pid"]
            path.unlink()
            daemon.config["models"]["third"] = fake()
            write(daemon)
            assert daemon.post("/v1/admin/reload").json()["stops"] == []
            answer = daemon.chat("nas", max_tokens=1)
            assert answer.status_code == 200, answer.text
            assert daemon.model("nas")["worker"]["pid"] == pid
            assert daemon.post("/v1/admin/models/nas/unload").status_code == 200
            assert str(path) in trouble(daemon)["message"]
            mount(path)
            daemon.wait_state("nas", "stopped")
            assert daemon.chat("nas", max_tokens=1).status_code == 200

    def test_one_that_is_missed_only_when_it_is_loaded(self, tmp_path):
        path = tmp_path / "nas" / "tiny.gguf"
        mount(path)
        with running(tmp_path, {"models": {"nas": gguf(path), "other": fake()}}) as daemon:
            path.unlink()
            assert str(path) in trouble(daemon)["message"]
            wait_until(lambda: daemon.model("nas")["reason"].startswith("can't run here"))
            mount(path)
            daemon.wait_state("nas", "ready")  # somebody wanted it when it was missed
            assert daemon.chat("nas", max_tokens=1).status_code == 200


class TestOtherThings:
    """Programs and folders that are missing, and what must not be read, are no different."""

    def test_a_program_and_a_folder(self, tmp_path):
        models = {
            "no-program": {"cmd": [str(tmp_path / "server"), "${port}"], "vram_mib": 10},
            "no-folder": fake(cwd=str(tmp_path / "gone")),
            "other": fake(),
        }
        with running(tmp_path, {"models": models}) as daemon:
            assert str(tmp_path / "server") in trouble(daemon, "no-program")["message"]
            assert str(tmp_path / "gone") in trouble(daemon, "no-folder")["message"]
            assert daemon.chat("other").status_code == 200
            (tmp_path / "gone").mkdir()
            daemon.wait_state("no-folder", "stopped")
            assert daemon.chat("no-folder").status_code == 200

    def test_what_would_never_end_is_not_read(self, tmp_path):
        os.mkfifo(tmp_path / "pipe.gguf")
        models = {"pipe": gguf(tmp_path / "pipe.gguf"), "kernel": gguf(Path("/proc/kmsg")), "other": fake()}
        with running(tmp_path, {"models": models}) as daemon:
            assert "it is not a regular file" in trouble(daemon, "pipe")["message"]
            assert "/proc/kmsg" in trouble(daemon, "kernel")["message"]
            assert daemon.chat("other").status_code == 200
