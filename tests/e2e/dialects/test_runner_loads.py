"""What a runner's client can say about a load: how long the context is to be, and that files which are missing come first."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.support import fake_servers, tiny
from tests.support.daemon import Daemon, fake, wait_until
from tests.support.fake_hub import Hub, Repo
from tests.support.limits import LIMIT_S


def over(daemon: Daemon, task: str) -> dict[str, object] | None:
    told = daemon.get(f"/v1/models/load/{task}")
    assert told.status_code == 200, told.text
    return told.json() if told.json()["status"] in {"completed", "failed"} else None


def load(daemon: Daemon, **fields: object) -> dict[str, object]:
    told = daemon.post("/v1/models/load", json=fields)
    assert told.status_code in (200, 202), told.text
    return wait_until(lambda: over(daemon, told.json()["taskId"]), what="it is loaded")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("context")
    llama = {
        "runtime": "llama_server",
        "binary": str(fake_servers.llama_server(folder)),
        "path": str(tiny.model()),
        "n_ctx": 2048,
        "parallel": 2,
        "kv_unified": False,
        "vram_mib": 100,
    }
    sized = {key: value for key, value in llama.items() if key != "vram_mib"}
    daemon = Daemon(folder, {"models": {"chat": llama, "load/odd": fake(), "fixed": fake(), "sized": sized}})
    try:
        yield daemon.start()
    finally:
        daemon.stop()


class TestContext:
    """`maxContextLength` becomes an override of the next worker, which ends with an unload."""

    def context(self, daemon: Daemon) -> int:
        found = next(one for one in daemon.get("/v1/models").json()["data"] if one["id"] == "chat")
        return found["context_length"]

    def test_is_changed_until_an_unload(self, daemon):
        assert load(daemon, modelId="chat")["status"] == "completed"
        assert self.context(daemon) == 1024, "of two slots"
        pid = daemon.model("chat")["worker"]["pid"]
        assert load(daemon, modelId="chat", maxContextLength=512)["status"] == "completed"
        assert daemon.model("chat")["worker"]["pid"] != pid, "by a new worker"
        assert daemon.model("chat")["overrides"] == {"n_ctx": 1024}
        assert self.context(daemon) == 512
        told = daemon.post("/v1/models/load", json={"modelId": "chat", "maxContextLength": 512})
        assert (told.status_code, told.json()["status"]) == (200, "completed"), "it has that already"
        daemon.post("/v1/models/unload", json={"modelId": "chat"})
        assert self.context(daemon) == 1024

    def test_beyond_what_can_be(self, daemon):
        told = daemon.post("/v1/models/load", json={"modelId": "chat", "maxContextLength": 1 << 40})
        assert (told.status_code, told.json()["error"]["param"]) == (400, "maxContextLength")
        assert self.context(daemon) == 1024

    def test_within_the_memory_that_it_may_take(self, daemon):
        need_mib = daemon.model("sized")["memory"]["need"]["host"]["mib"]
        asked = {"modelId": "sized", "gpuMemoryBudgetMB": need_mib, "maxContextLength": 8192}
        told = daemon.post("/v1/models/load", json=asked)
        assert (told.status_code, told.json()["error"]["code"]) == (400, "not_configured_so")
        assert "gpuMemoryBudgetMB" in told.json()["error"]["message"]
        assert daemon.model("sized")["memory"]["need"]["host"]["mib"] == need_mib
        assert load(daemon, modelId="sized", gpuMemoryBudgetMB=need_mib)["status"] == "completed"

    @pytest.mark.parametrize("longest", [0, -1, True, 1.5, "4096"])
    def test_no_context_at_all(self, daemon, longest):
        told = daemon.post("/v1/models/load", json={"modelId": "chat", "maxContextLength": longest})
        assert (told.status_code, told.json()["error"]["param"]) == (400, "maxContextLength")

    def test_where_the_runtime_has_none(self, daemon):
        told = daemon.post("/v1/models/load", json={"modelId": "fixed", "maxContextLength": 4096})
        assert (told.status_code, told.json()["error"]["code"]) == (400, "not_configured_so")

    def test_a_model_whose_name_begins_with_load(self, daemon):
        assert daemon.get("/v1/models/load/odd").json()["id"] == "load/odd"
        ended = load(daemon, modelId="load/odd")
        assert (ended["status"], ended["modelId"]) == ("completed", "load/odd")


@pytest.fixture
def hub():
    with Hub() as hub:
        weights = tiny.model(size_mib=4).read_bytes()
        hub.repos["acme/tiny"] = Repo({"tiny.gguf": weights}, large=frozenset({"tiny.gguf"}))
        yield hub


@pytest.fixture
def start(tmp_path, hub):
    """Starts a daemon with one model whose file isn't there."""
    daemons = []

    def started(**server: object) -> Daemon:
        model = {
            "runtime": "llama_server",
            "binary": str(fake_servers.llama_server(tmp_path)),
            "source": {"repo": "acme/tiny", "files": ["tiny.gguf"]},
            "n_ctx": 2048,
        }
        server = {"models_dir": str(tmp_path / "models"), "allow_pull": True, **server}
        daemon = Daemon(
            tmp_path,
            {"models": {"chat": model, "other": fake()}, "server": server},
            env={"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"},
        )
        daemons.append(daemon)
        return daemon.start()

    yield started
    for daemon in daemons:
        daemon.stop()


def pulling(daemon: Daemon) -> list[int]:
    """The processes that fetch files for it."""
    assert daemon.process is not None
    children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"--watched" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class TestPull:
    """Where `allow_pull` is on, missing files come before the load, within its task."""

    def test_then_it_is_loaded(self, start, tmp_path):
        daemon = start()
        assert not (tmp_path / "models/acme").exists()
        # The budget is below what is guessed of a model without files.
        asked = {"modelId": "acme/tiny", "maxContextLength": 512, "gpuMemoryBudgetMB": 500}
        told = daemon.post("/v1/models/load", json=asked)
        assert told.status_code == 202, told.text
        assert told.json()["taskId"].startswith("pull-")
        ended = wait_until(lambda: over(daemon, told.json()["taskId"]), what="it is there, and loaded")
        assert (ended["status"], ended["modelId"], ended["progress"]) == ("completed", "chat", 1.0), ended
        assert ended["loadTimeMs"] > 0
        assert (tmp_path / "models/acme/tiny/tiny.gguf").exists()
        assert daemon.model("chat")["memory"]["estimate"]["source"] == "computed", "it was read anew"
        assert daemon.model("chat")["overrides"] == {"n_ctx": 512}
        assert daemon.chat("chat").status_code == 200
        again = daemon.post("/v1/models/load", json={"modelId": "chat"})
        assert (again.status_code, again.json()["status"]) == (200, "completed")

    def test_shows_how_far_it_is_and_can_be_ended(self, start, hub, tmp_path):
        hub.hold["tiny.gguf"], hub.half_way["tiny.gguf"] = threading.Event(), threading.Event()
        try:
            daemon = start()
            told = daemon.post("/v1/models/load", json={"modelId": "chat"}).json()
            again = daemon.post("/v1/models/load", json={"modelId": "chat"}).json()
            assert again["taskId"] == told["taskId"], "one pull is under way"

            def half_way() -> dict[str, object] | None:
                found = daemon.get(f"/v1/models/load/{told['taskId']}").json()
                return found if 0.3 < found["progress"] < 0.9 else None

            found = wait_until(half_way, what="half of it has come")
            assert found["status"] == "loading"
            assert 0 < found["bytesDone"] < found["bytesTotal"]
            models = daemon.get("/v1/capabilities").json()["models"]
            assert ([each["id"] for each in models["loading"]], models["available"]) == (["chat"], ["other"])
            daemon.post("/v1/models/unload", json={"modelId": "chat"})
            ended = wait_until(lambda: over(daemon, told["taskId"]))
            assert (ended["status"], ended["error"]) == ("failed", "it was cancelled")
        finally:
            hub.hold["tiny.gguf"].set()

    def test_that_fails_says_why(self, start, hub):
        del hub.repos["acme/tiny"]
        ended = load(start(), modelId="chat")
        assert ended["status"] == "failed"
        assert "there is no such repository" in ended["error"]

    def test_ends_with_the_daemon(self, start, hub):
        hub.hold["tiny.gguf"], hub.half_way["tiny.gguf"] = threading.Event(), threading.Event()
        try:
            daemon = start()
            daemon.post("/v1/models/load", json={"modelId": "chat"})
            assert hub.half_way["tiny.gguf"].wait(LIMIT_S)
            pulls = pulling(daemon)
            assert pulls
            daemon.kill()
            wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pulls), what="it has ended")
        finally:
            hub.hold["tiny.gguf"].set()

    @pytest.mark.parametrize("end", ["kill", "stop"])
    def test_is_known_after_a_restart(self, start, hub, end):
        """Its task says that it was cut, and the next pull has another number; so has one that came, and was loaded."""
        hub.hold["tiny.gguf"], hub.half_way["tiny.gguf"] = threading.Event(), threading.Event()
        try:
            daemon = start()
            cut = daemon.post("/v1/models/load", json={"modelId": "chat"}).json()["taskId"]
            assert hub.half_way["tiny.gguf"].wait(LIMIT_S)
            with daemon.client() as client:  # answered once it is on disk, and all that was kept before it as well
                client.put("/api/v1/config", json={"allowCloudFallback": True}).raise_for_status()
            getattr(daemon, end)()
        finally:
            hub.hold["tiny.gguf"].set()
        daemon.start()
        told = over(daemon, cut)
        assert (told["status"], told["modelId"]) == ("failed", "chat")
        assert told["error"].startswith("llmux ended")
        assert [*daemon.get("/v1/capabilities").json()["models"]["loading"]] == []
        done = load(daemon, modelId="chat")
        assert (done["status"], int(done["taskId"][5:]) > int(cut[5:])) == ("completed", True)
        daemon.stop()
        daemon.start()
        again = over(daemon, done["taskId"])
        assert (again["status"], again["loadTimeMs"]) == ("completed", done["loadTimeMs"])

    def test_a_request_that_isnt_a_load_fetches_nothing(self, start, hub):
        daemon = start()
        assert daemon.chat("chat").status_code == 503
        assert not hub.sent

    def test_needs_to_be_allowed(self, start):
        daemon = start(allow_pull=False)
        ended = load(daemon, modelId="chat")
        assert (ended["status"], "llmux pull chat" in ended["error"]) == ("failed", True), ended

    def test_needs_the_admin_scope(self, start, hub, tmp_path):
        (tmp_path / "keys.yaml").write_text("- {name: user, key: sk-0123456789abcdef}\n")
        (tmp_path / "keys.yaml").chmod(0o600)
        daemon = start(api_keys=str(tmp_path / "keys.yaml"))
        headers = {"authorization": "Bearer sk-0123456789abcdef"}
        told = daemon.post("/v1/models/load", json={"modelId": "chat"}, headers=headers)
        assert told.status_code == 403
        assert not hub.sent


class TestOllamasPull:
    """`POST /api/pull` fetches the same way, and tells how far it is as Ollama does."""

    def test_it_tells_how_far_it_is_then_a_request_loads_it(self, start, hub, tmp_path):
        hub.hold["tiny.gguf"], hub.half_way["tiny.gguf"] = threading.Event(), threading.Event()
        try:
            daemon = start()
            with daemon.client() as client, client.stream("POST", "/api/pull", json={"name": "chat:latest"}) as told:
                lines = map(json.loads, told.iter_lines())
                assert next(lines) == {"status": "pulling manifest"}
                half = next(line for line in lines if line.get("completed"))
                assert (half["status"], half["digest"]) == ("pulling chat", "chat")
                assert half["completed"] < half["total"]
                hub.hold["tiny.gguf"].set()
                assert [*lines][-1] == {"status": "success"}
        finally:
            hub.hold["tiny.gguf"].set()
        assert (tmp_path / "models/acme/tiny/tiny.gguf").exists()
        assert daemon.chat("chat").status_code == 200
        assert daemon.post("/api/pull", json={"model": "chat", "stream": False}).json() == {"status": "success"}

    def test_that_fails_says_why(self, start, hub):
        del hub.repos["acme/tiny"]
        daemon = start()
        for stream in (True, False):
            told = daemon.post("/api/pull", json={"model": "chat", "stream": stream})
            assert told.status_code == (200 if stream else 503)
            assert "there is no such repository" in json.loads(told.text.splitlines()[-1])["error"]

    def test_of_a_model_that_is_not_configured(self, start, hub):
        told = start().post("/api/pull", json={"model": "llama3.2"})
        assert (told.status_code, "llmux add" in told.json()["error"], bool(hub.sent)) == (501, True, False)
