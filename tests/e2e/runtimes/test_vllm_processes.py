"""vLLM's family of processes under a daemon: an engine core in a session of its own, which never outlives its server."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.support import daemon as daemons
from tests.support import fake_servers, hf_folder
from tests.support.daemon import wait_until

GONE_S = 20.0


def model(folder, **keys):
    binary = fake_servers.vllm(folder / "vllm")
    path = hf_folder.write(folder / "model")
    return {"runtime": "vllm_serve", "path": str(path), "binary": str(binary), "grace_s": 0.5, **keys}


@pytest.fixture
def daemon(tmp_path):
    models = {"qwen": model(tmp_path)}
    with daemons.running(tmp_path, {"models": models, "limits": {"backoff_first_s": 60}}) as daemon:
        yield daemon


def family(daemon) -> dict[str, int]:
    """The worker's processes by what they are."""
    assert daemon.post("/v1/admin/models/qwen/load", params={"wait": "true"}).status_code == 200
    worker = daemon.wait_state("qwen", "ready")["worker"]
    server = psutil.Process(worker["pid"])
    (engine,) = server.children()
    (executor,) = wait_until(engine.children, what="the engine has started its executor")
    return {"shim": worker["shim_pid"], "server": server.pid, "engine": engine.pid, "executor": executor.pid}


def alive(pids) -> list[int]:
    return [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class TestFamily:
    """Whatever ends, however it ends: all of it ends, and the daemon knows."""

    def test_its_engine_has_a_session_of_its_own(self, daemon):
        pids = family(daemon)
        assert os.getsid(pids["engine"]) == pids["engine"] != os.getsid(pids["server"])

    @pytest.mark.parametrize("victim", ["server", "shim", "engine"])
    def test_killed_in_the_middle_of_an_answer(self, daemon, victim):
        pids = family(daemon)
        body = {"model": "qwen", "messages": [], "stream": True, "fake": {"chunks": 1000, "chunk_delay": 0.05}}
        with daemon.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(pids[victim], signal.SIGKILL)
            if victim == "engine":  # the server of a real vLLM notices and ends itself; this one answers on
                os.kill(pids["server"], signal.SIGTERM)
            assert '"upstream_broken"' in list(lines)[-2]
        wait_until(lambda: not alive(pids.values()), GONE_S, "all of them are gone")
        wait_until(lambda: not daemon.workers(), GONE_S, "none is left that carries the daemon's mark")
        daemon.wait_state("qwen", "backoff")

    def test_the_daemon_is_killed(self, daemon):
        pids = family(daemon)
        daemon.kill()
        wait_until(lambda: not alive(pids.values()), GONE_S, "all of them are gone")

    def test_unloaded(self, daemon):
        pids = family(daemon)
        assert daemon.post("/v1/admin/models/qwen/unload").status_code == 200
        wait_until(lambda: not alive(pids.values()), GONE_S, "all of them are gone")
        daemon.wait_state("qwen", "stopped")


class TestThroughTheDaemon:
    """A request takes the way that a user's takes."""

    def test_the_name_is_translated_and_the_key_added(self, daemon):
        answer = daemon.chat("qwen", text="hi")
        assert answer.status_code == 200
        assert (answer.json()["model"], answer.json()["received"]["model"]) == ("qwen", "model")

    def test_a_model_without_eyes_gets_no_pictures(self, daemon):
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        body = {"model": "qwen", "messages": [{"role": "user", "content": [picture]}]}
        answer = daemon.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "modality_unsupported")
        assert daemon.model("qwen")["state"] == "stopped"

    def test_what_it_doesnt_serve_is_not_there(self, daemon):
        answer = daemon.post("/v1/embeddings", json={"model": "qwen", "input": "hi"})
        assert answer.status_code == 404
        assert "no configured model serves it" in answer.json()["error"]["message"]

    def test_ready_only_once_the_list_of_models_answers(self, daemon):
        family(daemon)
        log = (daemon.state_dir / "logs" / "qwen.log").read_text() if (daemon.state_dir / "logs").is_dir() else ""
        asked = [line.split()[2] for line in log.splitlines() if line.startswith("request: ") and "GET" in line]
        assert "/v1/models" in asked
        assert asked.index("/health") < asked.index("/v1/models")

    def test_its_metrics_are_passed_on(self, daemon):
        family(daemon)
        text = wait_until(
            lambda: _with(daemon.get("/metrics").text, "vllm:num_requests_running"), what="vLLM's metrics"
        )
        assert 'model="qwen"' in text

    def test_its_footprint_is_computed(self, daemon):
        footprint = daemon.model("qwen")["memory"]["estimate"]
        assert footprint["source"] == "computed"
        assert "KV cache" in footprint["detail"]


def _with(text: str, name: str) -> str | None:
    return next((line for line in text.splitlines() if line.startswith(name)), None)
