"""What operators see of a remote model, and what they can do with it, through a real daemon."""

from __future__ import annotations

import json
import os
import threading

from tests.e2e.remote.conftest import VARIABLE, remote
from tests.support import shell
from tests.support.daemon import fake, wait_until
from tests.support.fake_http import serving
from tests.support.fake_remote import KEY, MODEL, Reply, StandIn
from tests.support.limits import LIMIT_S

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def llmux(daemon, *words: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LLMUX_")}
    done = shell.llmux(*words, env=clean | {"LLMUX_URL": daemon.url}, timeout=LIMIT_S)
    return done.stdout + done.stderr


class TestViews:
    """It is there beside the others, ready, without memory or process."""

    def test_ready_from_the_start(self, served):
        view = served.wait_state("far", "ready")
        assert (view["device"], view["answering"], view["reason"]) == ("remote", True, "runs elsewhere")
        assert view["remote"]
        assert view["memory"]["lease_mib"] is None
        assert view["memory"]["estimate"] == {"mib": 0, "source": "explicit", "detail": "others run it"}
        assert view["worker"]["pid"] is None
        assert view["worker"]["address"] == view["definition"]["base_url"]
        assert view["worker"]["upstream_model"] == MODEL
        assert view["definition"]["api_key_env"] == VARIABLE
        assert view["load_constraints"] == {}
        assert "POST /v1/chat/completions" in view["capabilities"]["endpoints"]

    def test_commands(self, served):
        served.wait_state("far", "ready")
        line = next(line for line in llmux(served, "ps").splitlines() if line.startswith("far"))
        assert line.split()[1:3] == ["ready", "remote"]
        assert "openai_remote" in llmux(served, "ps", "--wide")
        assert "ready" in llmux(served, "why", "far")

    def test_listed_and_counted(self, served):
        served.wait_state("far", "ready")
        assert served.chat("far", allow_remote=True).status_code == 200
        listed = {model["id"]: model for model in served.get("/v1/models").json()["data"]}
        assert (listed["far"]["runtime"], listed["far"]["status"]) == ("openai_remote", {"value": "loaded"})
        counted = 'llmux_requests_total{model="far",status="200"} 1.0'
        metrics = wait_until(lambda: text if counted in (text := served.get("/metrics").text) else None)
        assert 'llmux_model_state{model="far",state="ready"} 1.0' in metrics
        assert 'llmux_worker_lease_bytes{device="host",model="far"}' not in metrics

    def test_memory(self, served):
        models = {model["name"]: model for model in served.get("/v1/admin/gpu-memory").json()["models"]}
        assert models["far"]["need"]["host"]["mib"] == 0


class TestSecrets:
    """The key goes to the remote and nowhere else."""

    def test_nowhere_to_be_seen(self, served, secure, tmp_path):
        secure.replies += [Reply(401), Reply(500, KEY.encode())]
        for _ in range(3):
            answer = served.chat("far", allow_remote=True)
            assert KEY not in answer.text
        shown = [
            served.get(path).text
            for path in (
                "/v1/admin/models",
                "/v1/admin/decisions",
                "/v1/admin/requests",
                "/v1/models",
                "/metrics",
                "/v1/admin/models/far",
            )
        ]
        shown += [llmux(served, "config", "show", str(served.config_path)), llmux(served, "why", "far")]
        shown += [served.log_text()]
        assert secure.inference()[2].headers["authorization"] == f"Bearer {KEY}"
        assert all(shown)
        assert [text for text in shown if KEY in text] == []
        assert any(f"api_key_env: {VARIABLE}" in text for text in shown)

    def test_not_in_the_environment_of_workers(self, served):
        assert served.chat("near").status_code == 200
        pid = served.model("near")["worker"]["pid"]
        with open(f"/proc/{pid}/environ") as environ:
            assert KEY not in environ.read()

    def test_a_missing_variable_is_told_by_name(self, start, secure):
        daemon = start({"far": remote(secure, api_key_env="NO_SUCH_KEY"), "near": fake()})
        view = daemon.wait_state("far", "failed")
        assert "NO_SUCH_KEY" in view["reason"]
        answer = daemon.chat("far", allow_remote=True)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_failed"
        assert "NO_SUCH_KEY" in answer.json()["error"]["message"]
        assert daemon.chat("near").status_code == 200


class TestMemory:
    """It takes no place of others, and others take none of its."""

    def test_not_counted_and_not_evicted(self, start, secure, authority):
        daemon = start(
            {
                "far": remote(secure, allow_remote=True, ca_file=str(authority.file), priority=0),
                "a": fake(vram_mib=3000),
                "b": fake(vram_mib=3000),
            },
            limits={"max_loaded": {"llm": 1}, "min_residency_s": 0},
        )
        daemon.wait_state("far", "ready")
        for name in ("a", "b", "far", "a"):
            assert daemon.chat(name).status_code == 200, name
            assert daemon.model("far")["state"] == "ready"
        assert daemon.model("far")["generation"] == 1
        assert daemon.model("b")["state"] == "stopped"


class TestLoadAndUnload:
    """Both answer sensibly, though nothing is loaded."""

    def test_load(self, served):
        assert served.post("/v1/admin/models/far/load").json()["state"] == "ready"

    def test_unload_and_back(self, served):
        served.wait_state("far", "ready")
        assert served.post("/v1/admin/models/far/unload").json()["state"] == "stopped"
        assert served.chat("far", allow_remote=True).status_code == 200
        assert served.model("far")["generation"] == 2

    def test_no_overrides(self, served):
        answer = served.post("/v1/admin/models/far/load", json={"overrides": {"base_url": "http://127.0.0.1:1"}})
        assert answer.status_code == 400

    def test_unload_waits_for_answers(self, served, secure):
        secure.hold.clear()
        body = {"model": "open", **CHAT, "stream": True}
        with served.client().stream("POST", "/v1/chat/completions", json=body) as response:
            pieces = response.iter_text()
            text = next(pieces)
            unloading = threading.Thread(target=served.post, args=("/v1/admin/models/open/unload",))
            unloading.start()
            served.wait_state("open", "draining")
            secure.hold.set()
            text += "".join(pieces)
        unloading.join()
        assert "[DONE]" in text
        assert served.model("open")["state"] == "stopped"

    def test_forced_cuts_answers(self, served, secure):
        secure.hold.clear()
        body = {"model": "open", **CHAT, "stream": True}
        with served.client().stream("POST", "/v1/chat/completions", json=body) as response:
            pieces = response.iter_raw()
            received = next(pieces)
            served.post("/v1/admin/models/open/unload?force=true")
            received += b"".join(pieces)
        assert b"model_unloaded" in received
        assert b"unloaded by an operator" in received
        assert b"[DONE]" not in received
        assert secure.left.wait(LIMIT_S)

    def test_reload_connects_to_another_address(self, start, plain):
        daemon = start({"far": remote(plain, allow_remote=True)})
        daemon.wait_state("far", "ready")
        with serving(StandIn()) as other:
            daemon.config["models"]["far"]["base_url"] = other.url
            daemon.config_path.write_text(json.dumps(daemon.config))
            assert daemon.post("/v1/admin/reload").status_code == 200
            wait_until(lambda: daemon.model("far")["generation"] == 2)
            assert daemon.chat("far").status_code == 200
            assert (len(plain.inference()), len(other.inference())) == (0, 1)

    def test_the_daemon_ends_at_once(self, served):
        served.wait_state("far", "ready")
        assert served.stop() == 0


class TestProbe:
    """A remote that does not answer its probe is refused at once, and taken back when it does."""

    def test_down_and_up(self, start, plain):
        daemon = start({"far": remote(plain, allow_remote=True, health="probe", probe_interval_s=0.1)})
        daemon.wait_state("far", "ready")
        plain.models_status = 500
        wait_until(lambda: not daemon.model("far")["answering"])
        view = daemon.model("far")
        assert (view["state"], "HTTP 500" in view["reason"]) == ("ready", True)
        answer = daemon.chat("far")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "remote_unavailable")
        assert answer.headers["retry-after"] == "10"
        assert daemon.post("/v1/admin/models/far/load").json()["error"]["code"] == "remote_unavailable"
        plain.models_status = 200
        wait_until(lambda: daemon.model("far")["answering"])
        assert daemon.model("far")["reason"] == "answers again"
        assert daemon.chat("far").status_code == 200
        kinds = [decision["kind"] for decision in daemon.decisions("far")]
        assert {"ready", "unready", "recovered"} <= set(kinds)

    def test_down_at_the_start(self, start, plain):
        plain.models_status = 503
        daemon = start({"far": remote(plain, allow_remote=True, health="probe", probe_interval_s=0.1)})
        daemon.wait_state("far", "ready")
        assert daemon.chat("far").json()["error"]["code"] == "remote_unavailable"
        plain.models_status = 200
        wait_until(lambda: daemon.chat("far").status_code == 200)

    def test_asks_with_the_key(self, start, plain):
        daemon = start({"far": remote(plain, health="probe")})
        daemon.wait_state("far", "ready")
        (seen,) = plain.seen
        assert (seen.method, seen.path, seen.headers["authorization"]) == ("GET", "/api/v1/models", f"Bearer {KEY}")

    def test_nothing_is_asked_without(self, start, plain):
        daemon = start({"far": remote(plain)})
        daemon.wait_state("far", "ready")
        assert plain.seen == []

    def test_a_refused_key_is_told(self, start, plain):
        plain.models_status = 401
        daemon = start({"far": remote(plain, health="probe")})
        assert VARIABLE in daemon.wait_state("far", "ready")["reason"]

    def test_answers_under_way_go_on(self, start, plain):
        daemon = start({"far": remote(plain, allow_remote=True, health="probe", probe_interval_s=0.1)})
        daemon.wait_state("far", "ready")
        plain.hold.clear()
        body = {"model": "far", **CHAT, "stream": True}
        with daemon.client().stream("POST", "/v1/chat/completions", json=body) as response:
            pieces = response.iter_text()
            text = next(pieces)
            plain.models_status = 500
            wait_until(lambda: not daemon.model("far")["answering"])
            plain.hold.set()
            text += "".join(pieces)
        assert "[DONE]" in text


class TestAdmission:
    """`target_inflight` limits what is sent there at once."""

    def test_the_rest_waits(self, start, plain):
        daemon = start({"far": remote(plain, allow_remote=True, target_inflight=1)})
        plain.hold.clear()
        body = {"model": "far", **CHAT, "stream": True}
        answers: list[str] = []
        clients = [
            threading.Thread(target=lambda: answers.append(daemon.post("/v1/chat/completions", json=body).text))
            for _ in range(3)
        ]
        for client in clients:
            client.start()
        wait_until(lambda: (daemon.model("far")["in_flight"], daemon.model("far")["queued"]) == (1, 2))
        wait_until(lambda: len(plain.inference()) == 1)
        plain.hold.set()
        for client in clients:
            client.join()
        assert [text.count("[DONE]") for text in answers] == [1, 1, 1]


class TestThinking:
    """The switch is spelt as the remote has it."""

    def test_for_all_requests_and_for_virtual_models(self, start, plain):
        daemon = start(
            {"far": remote(plain, allow_remote=True, thinking_field="thinking", thinking="disabled")},
            virtual_models={"thinker": {"model": "far", "enable_thinking": True}, "plain": {"model": "far"}},
        )
        for name in ("far", "thinker", "plain"):
            assert daemon.chat(name).status_code == 200
        assert [seen.json["thinking"]["type"] for seen in plain.inference()] == ["disabled", "enabled", "disabled"]
