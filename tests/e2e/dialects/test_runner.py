"""The API of a model runner against a running daemon: capabilities, loads as tasks, unloads, health."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from supervisor.catalog.keys import Scope, new_key
from tests.support.clients import Gpu
from tests.support.daemon import Daemon, fake, running, wait_until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runner")
    config = {
        "models": {
            "one": fake("--take-mib", "60", source={"repo": "org/One"}),
            "two": fake(source={"repo": "org/Twins"}),
            "three": fake(source={"repo": "org/Twins"}),
            "slow": fake("--start-delay", "600"),
            "broken": fake("--exit-code", "3", "--log-text", "no such option"),
        },
        "virtual_models": {"public": {"model": "two"}},
        "server": {"runner_id": "llm-1", "runner_type": "scripted", "health": "runner"},
        "limits": {"crash_limit": 1},
    }
    daemon = Daemon(folder, config)
    try:
        yield daemon.start()
    finally:
        daemon.stop()


def load(daemon: Daemon, name: str, **fields: object) -> dict[str, object]:
    """Load it, and ask until that has ended; the task's last answer."""
    told = daemon.post("/v1/models/load", json={"modelId": name, **fields})
    assert told.status_code in (200, 202), told.text
    return wait_until(lambda: over(daemon, told.json()["taskId"]), what=f"{name} is loaded")


def over(daemon: Daemon, task: str) -> dict[str, object] | None:
    told = daemon.get(f"/v1/models/load/{task}").json()
    return told if told["status"] in {"completed", "failed"} else None


class TestCapabilities:
    """`GET /v1/capabilities` has every field of a runner's descriptor."""

    def test_shape(self, daemon):
        told = wait_until(lambda: (told := daemon.get("/v1/capabilities")).status_code == 200 and told)
        assert told.headers["cache-control"] == "private, max-age=5"
        found = told.json()
        assert (found["runnerType"], found["runnerId"], found["health"]) == ("scripted", "llm-1", "healthy")
        assert found["models"].keys() == {"loaded", "loading", "available"}
        assert found["resources"].keys() == {
            *("gpuIds", "gpuMemoryTotalMB", "gpuMemoryUsedMB", "gpuMemoryFreeMB"),
            *("gpuUtilization", "kvCacheSizeMB", "kvCacheUtilization"),
        }
        assert found["resources"]["gpuIds"] == []
        assert found["resources"]["gpuUtilization"] is None, "there is no GPU"
        assert found["queue"].keys() == {"depth", "maxDepth", "avgWaitMs", "p95WaitMs"}
        assert found["capabilities"] == {
            "streaming": True,
            "prefixCaching": None,
            "multiTenant": True,
            "visionInput": False,
            "audioInput": False,
            "functionCalling": None,
        }

    def test_a_loaded_model_is_listed_after_a_while(self, daemon):
        load(daemon, "two")

        def listed() -> dict[str, object] | None:
            models = daemon.get("/v1/capabilities").json()["models"]
            assert not {each["id"] for each in models["loaded"]} & {*models["available"]}
            return next((each for each in models["loaded"] if each["id"] == "two"), None)

        found = wait_until(listed, what="it is listed as loaded")
        assert found.keys() == {"id", "quantization", "contextLength", "loadedAt", "gpuMemoryMB"}
        assert found["loadedAt"] > 1_700_000_000


class TestHubId:
    """Inference takes what a model is called on the hub."""

    def test_of_one_model(self, daemon):
        told = daemon.chat("org/One")
        assert (told.status_code, told.json()["model"]) == (200, "org/One")
        assert daemon.get("/v1/models/org/One").json()["id"] == "org/One"

    def test_of_several(self, daemon):
        told = daemon.chat("org/Twins")
        error = told.json()["error"]
        assert (told.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"].endswith("Several come from there: two, three. Name one of them.")


class TestLoad:
    """`POST /v1/models/load` begins a task; `GET /v1/models/load/{task}` tells its end."""

    def test_is_a_task(self, daemon):
        daemon.post("/v1/models/unload", json={"modelId": "one"})
        told = daemon.post("/v1/models/load", json={"modelId": "org/One", "verifiedOpToken": "e30"})
        assert told.status_code == 202
        assert told.headers["x-llmux-ignored"] == "verifiedOpToken"
        begun = told.json()
        assert begun["taskId"].startswith("load-")
        assert begun["status"] in {"queued", "loading"}
        assert {"progress", "eta"} <= begun.keys()
        ended = wait_until(lambda: over(daemon, begun["taskId"]))
        assert (ended["status"], ended["modelId"], ended["progress"]) == ("completed", "one", 1.0)
        assert ended["loadTimeMs"] > 0
        assert "gpuMemoryUsedMB" in ended

    def test_of_a_loaded_model_is_completed_at_once(self, daemon):
        load(daemon, "public")
        told = daemon.post("/v1/models/load", json={"modelId": "public"})
        assert (told.status_code, told.json()["status"]) == (200, "completed")

    def test_that_fails_says_why(self, daemon):
        ended = load(daemon, "broken")
        assert ended["status"] == "failed"
        assert ended["error"]

    def test_evicts_the_named_model_first(self, daemon):
        load(daemon, "one")
        assert load(daemon, "two", evictModel="one")["status"] == "completed"
        daemon.wait_state("one", "stopped")

    def test_is_under_way(self, daemon):
        told = daemon.post("/v1/models/load", json={"modelId": "slow"}).json()
        wait_until(lambda: daemon.get(f"/v1/models/load/{told['taskId']}").json()["status"] == "loading")
        wait_until(
            lambda: [each["id"] for each in daemon.get("/v1/capabilities").json()["models"]["loading"]] == ["slow"]
        )
        daemon.post("/v1/models/unload", json={"modelId": "slow"})
        assert over(daemon, told["taskId"])["status"] == "failed", "it was cancelled"

    @pytest.mark.parametrize(
        ("field", "value"),
        [("quantization", "awq-4bit"), ("maxContextLength", 4096), ("gpuMemoryBudgetMB", 50)],
    )
    def test_nothing_is_configured_by_a_request(self, daemon, field, value):
        told = daemon.post("/v1/models/load", json={"modelId": "one", field: value})
        assert told.status_code == 400
        assert told.json()["error"]["code"] == "not_configured_so"
        assert told.json()["error"]["param"] == field

    def test_a_budget_that_suffices(self, daemon):
        assert load(daemon, "one", gpuMemoryBudgetMB=4000)["status"] == "completed"

    @pytest.mark.parametrize("path", ["/v1/models/load", "/v1/models/unload"])
    def test_unknown_models(self, daemon, path):
        told = daemon.post(path, json={"modelId": "nobody"})
        assert (told.status_code, told.json()["error"]["code"]) == (404, "model_not_found")
        assert [*told.json()["error"]][:2] == ["code", "message"]
        assert "type" not in told.json()["error"]

    def test_a_body_that_is_too_large(self, daemon):
        """However large inference's may be."""
        told = daemon.post("/v1/models/load", json={"modelId": "one", "more": "x" * 65_536})
        assert told.status_code == 413
        assert told.json()["error"]["message"] == "The request body is larger than 65536 bytes."

    @pytest.mark.parametrize("task", ["load-0", "pull-0", "model-none", "abc123", "task-1", "a/b"])
    def test_unknown_task(self, daemon, task):
        told = daemon.get(f"/v1/models/load/{task}")
        message = f"There is no load task {task!r}."
        assert (told.status_code, told.json()) == (404, {"error": {"code": "task_not_found", "message": message}})

    def test_no_model_is_evicted_for_itself(self, daemon):
        told = daemon.post("/v1/models/load", json={"modelId": "public", "evictModel": "two"})
        assert (told.status_code, told.json()["error"]["param"]) == (400, "evictModel")


class TestUnload:
    """`POST /v1/models/unload` returns when the memory is back, and says how much that is."""

    def test_frees_memory(self, daemon):
        load(daemon, "one")
        told = daemon.post("/v1/models/unload", json={"modelId": "one"}).json()
        assert (told["modelId"], told["kvCacheFlushed"]) == ("one", True)
        assert told["gpuMemoryFreedMB"] >= 60, "as it takes"
        assert daemon.model("one")["state"] == "stopped"

    def test_of_an_unloaded_model_frees_nothing(self, daemon):
        daemon.post("/v1/models/unload", json={"modelId": "one"})
        told = daemon.post("/v1/models/unload", json={"modelId": "one"}).json()
        assert told == {"modelId": "one", "gpuMemoryFreedMB": 0, "kvCacheFlushed": False}


class TestHealth:
    """`health: runner` answers as a runner does."""

    def test_healthy(self, daemon):
        told = daemon.get("/health")
        assert told.status_code == 200
        found = told.json()
        assert found["status"] == "healthy"
        assert found.keys() == {"status", "uptime", "modelsLoaded", "queueDepth"}

    def test_all_models_failed(self, tmp_path):
        daemon = Daemon(
            tmp_path,
            {
                "models": {"broken": fake("--exit-code", "3")},
                "limits": {"crash_limit": 1},
                "server": {"health": "runner"},
            },
        ).start()
        try:
            load(daemon, "broken")
            told = wait_until(lambda: (found := daemon.get("/health")).status_code == 503 and found)
            assert (told.json()["status"], told.json()["reason"]) == ("unhealthy", "all_models_failed")
            assert daemon.get("/livez").json() == {"status": "ok"}
        finally:
            daemon.stop()

    @pytest.fixture
    def started(self, tmp_path):
        daemons = []

        def start(models: dict[str, object], **limits: object) -> Daemon:
            server = {"health": "runner"}
            daemons.append(Daemon(tmp_path, {"models": models, "limits": limits, "server": server}))
            return daemons[-1].start()

        yield start
        for daemon in daemons:
            daemon.stop()

    def test_a_queue_that_is_full(self, started):
        daemon = started({"slow": fake("--start-delay", "600"), "other": fake()}, queue_total=1, queue_wait_s=60)
        with daemon.client() as client, ThreadPoolExecutor() as threads:
            body = {"model": "slow", "messages": [{"role": "user", "content": "Hello"}]}
            waiting = threads.submit(client.post, "/v1/chat/completions", json=body)
            told = wait_until(lambda: (found := daemon.get("/health")).status_code == 503 and found)
            assert (told.json()["reason"], told.json()["queueDepth"]) == ("queue_full", 1)
            assert daemon.get("/livez").status_code == 200, "a busy runner lives"
            refused = daemon.chat("slow")
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert (refused.json()["error"]["code"], refused.json()["error"]["queueDepth"]) == ("queue_full", 1)
            assert "avgWaitMs" in refused.json()["error"]
            daemon.post("/v1/models/unload", json={"modelId": "slow"})
            assert waiting.result().status_code == 503
        wait_until(lambda: daemon.get("/health").status_code == 200, what="it is healthy again")

    def test_a_device_out_of_memory(self, started):
        words = ("--exit-code", "1", "--log-text", "torch.OutOfMemoryError: CUDA out of memory.")
        daemon = started({"large": fake(*words), "other": fake()}, crash_limit=1)
        load(daemon, "large")
        told = wait_until(lambda: (found := daemon.get("/health")).status_code == 503 and found)
        assert told.json()["reason"] == "gpu_oom"
        assert daemon.get("/v1/health").status_code == 503
        assert daemon.get("/livez").status_code == 200


class TestSwitches:
    """What the variables of other runners' containers switch."""

    def test_of_a_whole_container(self, tmp_path):
        env = {
            "ENABLE_MULTI_TENANT": "false",
            "ENABLE_METRICS": "false",
            "MAX_QUEUE_DEPTH": "16",
            "QUEUE_TIMEOUT_MS": "30000",
            "DEFAULT_RATE_LIMIT": "2req/min",
            "LOG_LEVEL": "DEBUG",
            "LOG_FORMAT": "json",
            "HF_HOME": "/models/cache",
            "CUDA_VISIBLE_DEVICES": "0",
            "VLLM_MAX_MODEL_LEN": "32768",
            "VLLM_GPU_MEMORY_UTILIZATION": "0.9",
            "VLLM_ENABLE_PREFIX_CACHING": "true",
        }
        daemon = Daemon(tmp_path, {"models": {"one": fake()}}, env=env).start()
        try:
            told = wait_until(lambda: (told := daemon.get("/v1/capabilities")).status_code == 200 and told)
            found = told.json()
            assert (found["capabilities"]["multiTenant"], found["queue"]["maxDepth"]) == (False, 16)
            assert found["resources"]["gpuIds"] == [], "the file's devices count more"
            assert daemon.get("/metrics").status_code == 404
            tenants = ({"x-tenant-id": name} for name in "abc")
            body = {"model": "one", "messages": [{"role": "user", "content": "Hello"}]}
            statuses = [daemon.post("/v1/chat/completions", json=body, headers=each).status_code for each in tenants]
            assert statuses == [200, 200, 429], "they are one client"
        finally:
            daemon.stop()


class TestKeys:
    """Changes need the admin scope."""

    def test_scopes(self, tmp_path):
        secret, entry = new_key("user", [Scope.INFERENCE])
        (tmp_path / "keys.yaml").write_text(str([entry]).replace("'", '"'))
        server = {"api_keys": str(tmp_path / "keys.yaml")}
        daemon = Daemon(tmp_path, {"models": {"one": fake()}, "server": server}).start()
        key = {"authorization": f"Bearer {secret}"}
        try:
            assert daemon.get("/livez").status_code == 200
            assert daemon.get("/v1/capabilities").status_code == 401
            wait_until(lambda: daemon.get("/v1/capabilities", headers=key).status_code == 200, what="it has started")
            for path in ("/v1/models/load", "/v1/models/unload", "/v1/cache/flush"):
                told = daemon.post(path, json={"modelId": "one"}, headers=key)
                assert (told.status_code, told.json()["error"]["code"]) == (403, "insufficient_scope"), path
            assert daemon.get("/v1/models/load/load-1", headers=key).status_code == 403
        finally:
            daemon.stop()


class TestGpus:
    """What the driver says of them."""

    def test_how_busy_they_are(self, tmp_path):
        gpu = Gpu(tmp_path, count=2)
        gpu.write(gpu={"busy": 50}, first={"busy": 84})
        with running(tmp_path, {"devices": "auto", "models": {"one": fake()}}, env=gpu.env) as daemon:
            told = wait_until(lambda: daemon.get("/v1/capabilities").json().get("resources"))
            assert (told["gpuIds"], told["gpuUtilization"], told["gpuMemoryTotalMB"]) == ([0, 1], 0.67, 32768)
            assert 'vllm_gpu_memory_used{gpu="1"} 0.0' in daemon.get("/metrics").text
