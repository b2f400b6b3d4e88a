"""What a runner's clients say about caches of prompts, against scripted workers of llama.cpp and vLLM."""

from __future__ import annotations

import pytest

from tests.support import fake_servers, hf_folder, tiny
from tests.support.daemon import Daemon, fake, wait_until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches")
    llama = {
        "runtime": "llama_server",
        "binary": str(fake_servers.llama_server(folder)),
        "path": str(tiny.model()),
        "n_ctx": 2048,
        "vram_mib": 100,
    }
    vllm = {
        "runtime": "vllm_serve",
        "binary": str(fake_servers.vllm(folder)),
        "path": str(hf_folder.write(folder / "model")),
        "grace_s": 0.5,
    }
    config = {
        "models": {
            "slots": {**llama, "extra_args": ["--slot-save-path", str(folder)]},
            "llama": llama,
            "vllm": vllm,
            "other": fake(),
        },
        "devices": [{"kind": "host", "budget_mib": 20000, "margin_mib": 0}],
        "virtual_models": {"uncached": {"model": "llama", "force": {"cache_prompt": False}}},
    }
    daemon = Daemon(folder, config)
    try:
        yield daemon.start()
    finally:
        daemon.stop()


def chat(daemon: Daemon, model: str, headers: dict[str, str] | None = None, **fields: object):
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], **fields}
    told = daemon.post("/v1/chat/completions", json=body, headers=headers or {})
    assert told.status_code == 200, told.text
    return told


def salt(daemon: Daemon, headers: dict[str, str] | None = None, **fields: object) -> str | None:
    return chat(daemon, "vllm", headers, **fields).json()["received"].get("cache_salt")


def flush(daemon: Daemon, **fields: object) -> dict[str, object]:
    told = daemon.post("/v1/cache/flush", json=fields)
    assert told.status_code == 200, told.text
    return told.json()


def of(told: dict[str, object], model: str) -> dict[str, object]:
    return next(each for each in told["models"] if each["modelId"] == model)


class TestMode:
    """`X-Cache-Mode` becomes the worker's own control."""

    @pytest.mark.parametrize(("mode", "field"), [("none", False), ("prefix", True), ("auto", None)])
    def test_of_llama(self, daemon, mode, field):
        told = chat(daemon, "llama", {"X-Cache-Mode": mode})
        assert told.json()["received"].get("cache_prompt") is field
        assert "x-llmux-ignored" not in told.headers

    def test_without_the_header_nothing_is_added(self, daemon):
        told = chat(daemon, "llama")
        assert "cache_prompt" not in told.json()["received"]
        assert "x-cache-hit" not in told.headers

    def test_the_configuration_counts_more(self, daemon):
        told = chat(daemon, "uncached", {"X-Cache-Mode": "prefix"})
        assert told.json()["received"]["cache_prompt"] is False
        assert (told.json()["model"], told.headers["x-cache-hit"]) == ("uncached", "true"), "held, and still renamed"

    def test_none_of_vllm_is_a_salt_of_its_own(self, daemon):
        first, second = (salt(daemon, {"X-Cache-Mode": "none"}) for _ in range(2))
        assert first
        assert first != second

    def test_where_it_cannot_be_said(self, daemon):
        told = chat(daemon, "other", {"X-Cache-Mode": "none", "X-Cache-Tag": "a"})
        assert told.headers["x-llmux-ignored"] == "X-Cache-Mode, X-Cache-Tag"
        assert "x-cache-hit" not in told.headers

    @pytest.mark.parametrize(
        ("header", "value", "code"),
        [
            ("X-Cache-Mode", "all", "invalid_cache_mode"),
            ("X-Cache-Tag", "a" * 65, "invalid_cache_tag"),
        ],
    )
    def test_refused(self, daemon, header, value, code):
        body = {"model": "llama", "messages": [{"role": "user", "content": "hello"}]}
        told = daemon.post("/v1/chat/completions", json=body, headers={header: value})
        assert (told.status_code, told.json()["error"]["code"]) == (400, code)


class TestTag:
    """`X-Cache-Tag` is a salt of the tenant's for vLLM; llama.cpp has none."""

    def test_same_tag_same_salt(self, daemon):
        tagged = {"X-Cache-Tag": "session-1"}
        assert salt(daemon, tagged) == salt(daemon, tagged)
        assert salt(daemon, tagged) != salt(daemon, {"X-Cache-Tag": "session-2"})
        assert salt(daemon, tagged) != salt(daemon, {**tagged, "X-Tenant-ID": "x"})
        assert salt(daemon) is None

    def test_the_clients_own_salt_still_separates(self, daemon):
        tagged = {"X-Cache-Tag": "session-1"}
        assert salt(daemon, tagged, cache_salt="a") != salt(daemon, tagged, cache_salt="b")
        assert salt(daemon, cache_salt="a") == "a"

    def test_llama_ignores_it(self, daemon):
        assert chat(daemon, "llama", {"X-Cache-Tag": "a"}).headers["x-llmux-ignored"] == "X-Cache-Tag"


class TestAnswerHeaders:
    """What a whole answer says of its cache stands in the head."""

    def test_of_llama(self, daemon):
        told = chat(daemon, "llama", {"X-Cache-Mode": "auto"})
        assert (told.headers["x-cache-hit"], told.headers["x-cache-tokens-reused"]) == ("true", str(fake_servers.KEPT))
        assert told.headers["x-gpu-time-ms"] == "30"
        assert "x-queue-wait-ms" in told.headers
        assert told.headers.get_list("x-cache-hit") == ["true"]

    @pytest.mark.parametrize("header", [{"X-Tenant-ID": "community-x"}, {"X-Priority": "high"}])
    def test_for_a_runners_client_that_says_nothing_of_caches(self, daemon, header):
        told = chat(daemon, "llama", header)
        assert (told.headers["x-cache-hit"], told.headers["x-gpu-time-ms"]) == ("true", "30")
        assert "cache_prompt" not in told.json()["received"]

    def test_mode_none_reuses_nothing(self, daemon):
        told = chat(daemon, "llama", {"X-Cache-Mode": "none"}, stream=True)
        assert (told.headers["x-cache-hit"], told.headers["x-cache-tokens-reused"]) == ("false", "0")

    def test_a_worker_that_says_nothing(self, daemon):
        assert "x-cache-hit" not in chat(daemon, "vllm", {"X-Cache-Mode": "prefix"}).headers


class TestAlwaysTold:
    """With `health: runner` every answer has the four headers, whatever the request says."""

    NAMES = ("x-cache-hit", "x-cache-tokens-reused", "x-gpu-time-ms")

    @pytest.fixture(scope="module")
    @staticmethod
    def runner(daemon, tmp_path_factory):
        models = {**daemon.config["models"], "slow": fake("--start-delay", "2")}
        config = {"models": models, "server": {"health": "runner"}, "limits": {"keepalive_s": 0.5}}
        runner = Daemon(tmp_path_factory.mktemp("told"), {**config, "devices": daemon.config["devices"]})
        try:
            yield runner.start()
        finally:
            runner.stop()

    def told(self, answer) -> tuple[str, ...]:
        assert "x-queue-wait-ms" in answer.headers
        return tuple(answer.headers[name] for name in self.NAMES)

    def test_what_the_worker_says(self, runner):
        assert self.told(chat(runner, "llama")) == ("true", str(fake_servers.KEPT), "30")

    @pytest.mark.parametrize("model", ["vllm", "other"])
    def test_what_it_does_not_say(self, runner, model):
        assert self.told(chat(runner, model)) == ("false", "0", "0")

    def test_a_stream(self, runner):
        assert self.told(chat(runner, "llama", stream=True)) == ("false", "0", "0")

    def test_a_stream_that_begins_before_its_model_is_loaded(self, runner):
        answer = chat(runner, "slow", stream=True)
        assert self.told(answer) == ("false", "0", "0")
        assert int(answer.headers["x-queue-wait-ms"]) >= 500

    def test_nothing_is_added_to_the_request(self, runner):
        told = chat(runner, "llama")
        assert "cache_prompt" not in told.json()["received"]
        assert "x-llmux-ignored" not in told.headers


class TestFlush:
    """`POST /v1/cache/flush` says by model what was done."""

    def test_slots_are_erased(self, daemon):
        chat(daemon, "slots")
        pid = daemon.model("slots")["worker"]["pid"]
        told = flush(daemon, scope="model", modelId="slots", verifiedOpToken="e30")
        assert told["flushed"] is True
        assert told["entriesRemoved"] == fake_servers.SLOTS * fake_servers.KEPT
        assert told["memoryFreedMB"] == 0
        assert of(told, "slots")["done"] == "slots_erased"
        assert daemon.model("slots")["worker"]["pid"] == pid

    def test_else_the_worker_is_restarted(self, daemon):
        chat(daemon, "llama")
        pid = daemon.model("llama")["worker"]["pid"]
        told = flush(daemon, scope="model", modelId="llama")
        assert (of(told, "llama")["done"], told["entriesRemoved"]) == ("worker_restarted", None)
        wait_until(lambda: daemon.model("llama")["state"] == "ready")
        assert daemon.model("llama")["worker"]["pid"] != pid

    def test_a_tenants_salt_changes(self, daemon):
        mine = {"X-Tenant-ID": "x"}
        chat(daemon, "llama")
        before = salt(daemon, mine)
        told = flush(daemon, scope="tenant", tenantId="x")
        assert (of(told, "vllm")["done"], of(told, "llama")["done"]) == ("salt_rotated", "not_separable")
        assert told["flushed"] is False, "llama.cpp may have some of it"
        first = salt(daemon, mine)
        assert first != before
        assert first == salt(daemon, mine)
        assert salt(daemon, {"X-Tenant-ID": "y"}) is None
        flush(daemon, scope="tenant", tenantId="x")
        assert salt(daemon, mine) not in {first, before, None}

    def test_a_tags_salt_changes(self, daemon):
        tagged = {"X-Cache-Tag": "session-9"}
        before = salt(daemon, tagged)
        flush(daemon, scope="tag", tag="session-9", modelId="vllm")
        assert salt(daemon, tagged) not in {before, None}

    def test_holds_for_messages_too(self, daemon):
        """vLLM's own /v1/messages takes a salt as well."""

        def said(headers: dict[str, str] | None = None) -> str | None:
            body = {"model": "vllm", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
            told = daemon.post("/v1/messages", json=body, headers=headers or {})
            assert told.status_code == 200, told.text
            assert "x-llmux-ignored" not in told.headers
            return told.json()["received"].get("cache_salt")

        tagged = {"X-Cache-Tag": "session-m"}
        before = said(tagged)
        flush(daemon, scope="tag", tag="session-m")
        assert said(tagged) not in {before, None}

    def test_all(self, daemon):
        for model in ("vllm", "slots"):
            chat(daemon, model)
        daemon.post("/v1/models/unload", json={"modelId": "llama"})
        told = flush(daemon, scope="all")
        assert of(told, "llama")["done"] == "nothing_to_flush"
        assert of(told, "slots")["done"] == "slots_erased"
        assert salt(daemon) is not None

    def test_a_program_that_llmux_does_not_know(self, daemon):
        chat(daemon, "other")
        told = flush(daemon, scope="model", modelId="other")
        assert (told["flushed"], of(told, "other")["done"]) == (False, "unknown")

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({}, "scope"),
            ({"scope": "everything"}, "scope"),
            ({"scope": "model"}, "modelId"),
            ({"scope": "tenant"}, "tenantId"),
            ({"scope": "tag"}, "tag"),
            ({"scope": "tag", "tag": "a" * 65}, "tag"),
            ({"scope": "all", "tag": "a"}, "tag"),
            ({"scope": "all", "modelId": "llama"}, "modelId"),
            ({"scope": "model", "modelId": "llama", "tenantId": "x"}, "tenantId"),
        ],
    )
    def test_refused(self, daemon, fields, param):
        told = daemon.post("/v1/cache/flush", json=fields)
        assert (told.status_code, told.json()["error"]["param"]) == (400, param)


class TestCapabilities:
    """How large the workers' caches are, and how full."""

    def test_caches(self, daemon):
        chat(daemon, "vllm")

        def found() -> dict[str, object] | None:
            told = daemon.get("/v1/capabilities").json()["resources"]
            return told if told["kvCacheUtilization"] is not None else None

        told = wait_until(found, what="vLLM's share is told")
        assert told["kvCacheUtilization"] == 0.25


class TestMetrics:
    """The names that a runner's clients look for."""

    def test_names(self, daemon):
        chat(daemon, "llama", {"X-Tenant-ID": "x"})

        def found() -> str | None:
            text = daemon.get("/metrics").text
            return text if 'vllm_cache_hit_rate{model="llama"}' in text else None

        text = wait_until(found, what="the request is counted")
        assert 'vllm_requests_total{model="llama",status="success",tenant="' in text
        assert "\nvllm_queue_depth 0.0\n" in text
        assert 'vllm_queue_wait_seconds_count{model="llama"}' in text
        for part in ("weights", "kv_cache", "other"):
            assert f'vllm_model_memory_bytes{{model="llama",part="{part}"}}' in text
        assert "# TYPE vllm_gpu_memory_used gauge" in text
        assert 'vllm_inference_duration_seconds_bucket{le="0.5",model="llama"}' in text
        assert 'vllm_inference_duration_seconds_count{model="llama"}' in text
