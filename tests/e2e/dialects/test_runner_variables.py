"""A runner whose container has variables and no configuration file: what each says counts, and models lie in its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from supervisor.daemon.op_tokens import begin, with_signature
from tests.support import hf_folder, tiny
from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.limits import LIMIT_S
from tests.support.shell import environment, llmux

ADMIN, USER = "sk-admin-0123456789abcdef", "sk-user-0123456789abcdef"
SHARED = b"the key that all share, long enough"
KEYS = f"[{{name: admin, key: {ADMIN}, scopes: [inference, admin, metrics]}}, {{name: user, key: {USER}}}]"
CHAT, CACHED = "acme/Tiny/tiny-chat-Q8_0", "acme/Cached/tiny"


class Runner(Daemon):
    """`llmux serve` without `--config`, in a home without any."""

    has_file = False

    def start(self, **more):
        server = self.config["server"]
        own = {
            f"LLMUX_SERVER__{name.upper()}": str(server[name]) for name in ("host", "port", "state_dir", "runtimes_dir")
        }
        own |= {
            f"LLMUX_SERVER__WORKER_PORT_{end.upper()}": str(server[f"worker_port_{end}"]) for end in ("first", "last")
        }
        self.env = {**environment(self.folder), **own, **self.env}
        return super().start(**more)


@pytest.fixture(scope="module")
def variables(tmp_path_factory):
    """As its users set them; the rest of it lies where they say."""
    folder = tmp_path_factory.mktemp("container")
    base = folder / "models"
    snapshot = base / "cache/hub/models--acme--Cached/snapshots/0123abcd"
    for place in (base / "acme/Tiny", snapshot, snapshot.parents[1] / "refs"):
        place.mkdir(parents=True)
    shutil.copy(tiny.model(name="tiny-chat"), base / "acme/Tiny/tiny-chat-Q8_0.gguf")
    shutil.copy(tiny.model(name="tiny-chat"), snapshot / "tiny.gguf")
    (snapshot.parents[1] / "refs/main").write_text("0123abcd")
    hf_folder.write(base / "acme/Folder")
    (base / "notes").mkdir()
    (base / "notes/config.json").write_text("{}")
    (base / "broken.gguf").write_bytes(b"GGUF")
    key = folder / "model-api.key"
    key.write_bytes(SHARED)
    key.chmod(0o600)
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(base / "cache"),
        "MODEL_BASE_PATH": str(base),
        "VLLM_ENABLE_PREFIX_CACHING": "true",
        "VLLM_MAX_MODEL_LEN": "32768",
        "VLLM_GPU_MEMORY_UTILIZATION": "0.9",
        "ENABLE_MULTI_TENANT": "true",
        "DEFAULT_RATE_LIMIT": "100req/min",
        "TENANT_RATE_LIMIT_slow": "1req/min",
        "LOG_LEVEL": "info",
        "LOG_FORMAT": "json",
        "ENABLE_METRICS": "true",
        "MAX_QUEUE_DEPTH": "16",
        "QUEUE_TIMEOUT_MS": "30000",
        "VERIFIED_OP_TOKEN_KEY_PATH": str(key),
        "LLMUX_SERVER__GOVERNANCE__SIGNED_FIELDS": "seed",
        "LLMUX_SERVER__ALLOWED_HOSTS": "[safebox-model-llm]",
        "LLMUX_API_KEYS": KEYS,
    }


@pytest.fixture(scope="module")
def runner(variables, tmp_path_factory):
    runner = Runner(tmp_path_factory.mktemp("alone"), {}, env=variables)
    try:
        yield runner.start()
    finally:
        runner.stop()


def bearer(key: str = ADMIN, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


def load(runner: Daemon, name: str) -> dict[str, object]:
    made = with_signature(begin("model-load", {"modelId": name}, ["anybody"]), SHARED, None)
    told = runner.post("/v1/models/load", json={"modelId": name, "verifiedOpToken": made}, headers=bearer())
    assert told.status_code in (200, 202), told.text
    task = told.json()["taskId"]

    def over() -> dict[str, object] | None:
        view = runner.get(f"/v1/models/load/{task}", headers=bearer()).json()
        return view if view["status"] in ("completed", "failed") else None

    return wait_until(over)


class TestAlone:
    """No file, and no demo."""

    def test_health_has_the_runners_shape(self, runner):
        told = runner.get("/health")
        assert (told.status_code, told.json().keys()) == (200, {"status", "uptime", "modelsLoaded", "queueDepth"})

    def test_available_has_what_lies_in_the_folder(self, runner):
        found = wait_until(
            lambda: (told := runner.get("/v1/capabilities", headers=bearer())).status_code == 200 and told
        )
        models = found.json()["models"]
        there = {*models["available"], *(each["id"] for each in models["loaded"])}
        assert {CHAT, CACHED} <= there <= {CHAT, CACHED, "acme/Folder"}, "the folder's runtime may not be installed"
        assert found.json()["queue"]["maxDepth"] == 16

    def test_all_are_listed(self, runner):
        told = runner.get("/v1/models", headers=bearer(USER)).json()
        assert {row["id"] for row in told["data"]} == {CHAT, CACHED, "acme/Folder"}

    @pytest.mark.parametrize("name", [CHAT, CACHED])
    def test_a_load_by_a_signed_token(self, runner, name):
        ended = load(runner, name)
        assert (ended["status"], ended["modelId"]) == ("completed", name), ended

    def test_a_load_by_its_path(self, runner, variables):
        assert load(runner, f"{variables['MODEL_BASE_PATH']}/acme/Tiny/tiny-chat-Q8_0.gguf")["modelId"] == CHAT

    @pytest.mark.parametrize("name", [CHAT, "acme/Tiny", "acme/Cached"])
    def test_a_real_answer(self, runner, name):
        body = {"model": name, "messages": [{"role": "user", "content": "Hello"}]}
        told = runner.post("/v1/chat/completions", json=body, headers=bearer(USER))
        assert told.status_code == 200, told.text
        assert told.json()["choices"][0]["message"]["content"] == tiny.ANSWER
        assert {"x-cache-hit", "x-cache-tokens-reused", "x-gpu-time-ms", "x-queue-wait-ms"} <= told.headers.keys()


class TestSettings:
    """Hosts and keys come by variables, too."""

    def test_keys(self, runner):
        assert runner.get("/v1/models").status_code == 401
        assert runner.get("/v1/models", headers=bearer("sk-wrong-0123456789abcdef")).status_code == 401
        assert runner.post("/v1/models/unload", json={"modelId": CHAT}, headers=bearer(USER)).status_code == 403

    def test_hosts(self, runner):
        assert runner.get("/health", headers={"host": "safebox-model-llm:8080"}).status_code == 200
        told = runner.get("/health", headers={"host": "evil.example"})
        assert (told.status_code, told.json()["error"]["code"]) == (403, "host_not_allowed")

    def test_the_reason_of_a_refusal(self, runner):
        told = runner.post("/v1/models/unload", json={"modelId": CHAT}, headers=bearer())
        assert (told.status_code, told.json()["error"]["message"]) == (
            403,
            "The operation token was refused: there is none.",
        )

    def test_the_log_says_where_it_comes_from(self, runner):
        assert runner.events("configuration.variables")


class TestBesideAFile:
    """The same variables count where there is a file; the demo is served where nothing says what a runner is."""

    def test_health_and_keys(self, tmp_path):
        env = {"LLMUX_SERVER__HEALTH": "runner", "LLMUX_API_KEYS": KEYS}
        with running(tmp_path, {"models": {"one": fake()}}, env=env) as daemon:
            assert daemon.get("/health").json().keys() == {"status", "uptime", "modelsLoaded", "queueDepth"}
            assert [daemon.get("/v1/models", headers=each).status_code for each in ({}, bearer(USER))] == [401, 200]

    def test_a_new_file_is_a_new_model(self, tmp_path):
        base = tmp_path / "models"
        base.mkdir()
        env = {"MODEL_BASE_PATH": str(base), "LLMUX_API_KEYS": KEYS}
        daemon = Daemon(tmp_path, {"models": {"one": fake()}}, env=env)
        try:
            daemon.start()
            shutil.copy(tiny.model(name="tiny-chat"), base / "new.gguf")
            wait_until(lambda: "new" in daemon.get("/v1/models?loaded=0", headers=bearer()).text, what="it is served")
            body = {"model": "new", "messages": [{"role": "user", "content": "Hello"}]}
            assert daemon.post("/v1/chat/completions", json=body, headers=bearer(USER)).status_code == 200
        finally:
            daemon.stop()


class TestWithout:
    """What keeps it from starting."""

    def serve(self, home: Path, *words: str, **variables: str):
        env = {**environment(home, **variables), "LLMUX_SERVER__STATE_DIR": str(home / "state")}
        return llmux(*(words or ("serve",)), env=env, timeout=LIMIT_S, cwd=home)

    def test_no_folder(self, tmp_path):
        told = self.serve(tmp_path, MAX_QUEUE_DEPTH="16")
        assert told.returncode == 2
        assert "MODEL_BASE_PATH" in told.stderr
        assert "serving the demo" not in told.stderr + told.stdout

    @pytest.mark.parametrize("keys", ["sk-admin-0123456789abcdef", "[{name: a, key: short}]", "[{", "{a: b}"])
    def test_keys_that_are_none(self, tmp_path, variables, keys):
        told = self.serve(tmp_path, **{**variables, "LLMUX_API_KEYS": keys})
        assert told.returncode == 2
        assert "LLMUX_API_KEYS" in told.stderr
        assert "0123456789" not in told.stderr

    def test_a_service_would_not_get_them(self, tmp_path, variables):
        told = self.serve(tmp_path, "service", "install", **variables)
        assert told.returncode == 2
        assert "llmux is configured by variables alone here, and this needs a file" in told.stderr

    def test_they_can_be_shown(self, tmp_path, variables):
        told = self.serve(tmp_path, "config", "show", "--json", **variables)
        shown = {each["key"]: (each["value"], each["place"]) for each in json.loads(told.stdout)}
        assert shown["server.health"] == ("runner", "the variables")
        assert shown["server.model_base_path"] == (variables["MODEL_BASE_PATH"], "MODEL_BASE_PATH")
        assert shown[f"models.{CHAT}.path"][1] == shown[f"models.{CHAT}.path"][0]
        assert shown["server.allowed_hosts"][1] == "LLMUX_SERVER__ALLOWED_HOSTS"
        assert "0123456789" not in told.stdout
