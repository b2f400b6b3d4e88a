"""What llama.cpp's own clients expect of a router: paths without `/v1`, `/props`, and no loads that nobody asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from supervisor.catalog.keys import Scope, new_key
from tests.support import raw
from tests.support.daemon import Daemon, fake, wait_until

ENDPOINTS = [
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/audio/transcriptions",
    "/echo",
]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """A daemon with a key that may load models, of which two at a time."""
    folder = tmp_path_factory.mktemp("router")
    secret, entry = new_key("user", [Scope.INFERENCE, Scope.ADMIN])
    (folder / "keys.yaml").write_text(str([entry]).replace("'", '"'))
    config = {
        "models": {
            "chat": fake(endpoints=[*ENDPOINTS, "GET /props"]),
            "bare": fake(endpoints=["/chat/completions"]),
            "resting": fake(),
        },
        "virtual_models": {"seeded": {"model": "chat", "force": {"seed": 7}}},
        "limits": {"max_loaded": {"llm": 2}},
        "server": {"api_keys": str(folder / "keys.yaml")},
    }
    daemon = Daemon(folder, config)
    try:
        yield daemon.start(), {"authorization": f"Bearer {secret}"}
    finally:
        daemon.stop()


def statuses(keyed) -> dict[str, str]:
    daemon, key = keyed
    return {entry["id"]: entry["status"]["value"] for entry in daemon.get("/models", headers=key).json()["data"]}


def order(keyed, what: str, model: str) -> None:
    """Load or unload, and wait until it has happened, as llama.cpp's tests do."""
    daemon, key = keyed
    assert daemon.post(f"/models/{what}", json={"model": model}, headers=key).json() == {"success": True}
    wait_until(lambda: statuses(keyed)[model] == f"{what}ed", what=f"{model} is {what}ed")


class TestPathsWithoutPrefix:
    """A client whose base URL lacks `/v1` is served all the same."""

    @pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions"])
    @pytest.mark.parametrize("name", ["chat", "seeded"])
    def test_the_worker_gets_the_same(self, keyed, path, name):
        daemon, key = keyed
        told = daemon.post(path, json={"model": name, "messages": HELLO}, headers=key)
        assert told.status_code == 200
        assert (told.json()["received"].get("seed") == 7) is (name == "seeded")

    def test_streams(self, keyed):
        daemon, key = keyed
        body = {"model": "chat", "messages": HELLO, "stream": True}
        assert "data: [DONE]" in daemon.post("/chat/completions", json=body, headers=key).text

    @pytest.mark.parametrize("path", ["/embeddings", "/responses", "/rerank", "/v2/rerank", "/audio/transcriptions"])
    def test_others(self, keyed, path):
        """The fake worker has not all of them: it is enough that the request reaches it at the prefixed path."""
        daemon, key = keyed
        told = daemon.post(path, json={"model": "chat", "input": "x"}, headers=key)
        assert "There is nothing at" not in told.text, "a path of ours"
        assert "x-queue-wait-ms" in told.headers, "a worker answered"

    def test_only_known_paths_have_another_name(self, keyed):
        daemon, key = keyed
        for path in ("/v1/echo", "/v1/v1/chat/completions", "/v2/chat/completions", "/messages", "/admin/models"):
            assert daemon.post(path, json={"model": "chat"}, headers=key).status_code == 404, path

    def test_a_worker_may_have_the_short_path_itself(self, keyed):
        daemon, key = keyed
        told = daemon.post("/chat/completions", json={"model": "bare", "messages": HELLO}, headers=key)
        assert "x-queue-wait-ms" in told.headers
        told = daemon.post("/v1/chat/completions", json={"model": "bare", "messages": HELLO}, headers=key)
        assert told.json()["error"]["code"] == "endpoint_not_supported"

    @pytest.mark.parametrize(
        "line",
        [
            "POST /chat/completions",
            "POST /embeddings",
            "POST /v2/rerank",
            "GET /props",
            "GET /models",
            "GET /v1/models",
        ],
    )
    def test_needs_the_key_as_well(self, keyed, line):
        told = raw.request(keyed[0], f"{line} HTTP/1.1", "Host: 127.0.0.1", "Content-Length: 2", body=b"{}")
        assert told.status == 401

    @pytest.mark.parametrize("path", ["/health", "/v1/health", "/v1/audio/voices", "/audio/voices", "/audio/models"])
    def test_what_is_open_to_all(self, keyed, path):
        assert keyed[0].get(path).status_code == 200

    def test_a_prefix_that_stands_there_twice(self, keyed):
        told = keyed[0].post("/v1/v1/messages", json={"model": "chat"}, headers=keyed[1])
        assert told.status_code == 404
        assert "leave it out of its base URL" in told.json()["error"]["message"]

    def test_other_methods(self, keyed):
        told = keyed[0].get("/chat/completions", headers=keyed[1])
        assert (told.status_code, told.headers["allow"]) == (405, "POST")


class TestProps:
    """`GET /props` tells that this is a router; of a model it is its worker's."""

    def test_of_the_router(self, keyed):
        daemon, key = keyed
        told = daemon.get("/props", headers=key).json()
        assert (told["role"], told["max_instances"], told["models_autoload"]) == ("router", 2, True)
        assert told["build_info"].startswith("llmux ")
        assert told["default_generation_settings"] == {"params": {}, "n_ctx": 0}

    def test_of_a_model(self, keyed):
        daemon, key = keyed
        told = daemon.get("/props", params={"model": "chat"}, headers=key)
        assert "x-queue-wait-ms" in told.headers, "its worker answered"
        told = daemon.get("/props", params={"model": "bare"}, headers=key)
        assert (told.status_code, told.json()["error"]["code"]) == (400, "endpoint_not_supported")
        assert daemon.get("/props", params={"model": "nobody"}, headers=key).status_code == 404


class TestAutoload:
    """`?autoload=false` asks only what is loaded."""

    def test_a_model_that_is_not(self, keyed):
        daemon, key = keyed
        order(keyed, "unload", "resting")
        with daemon.client(headers=key) as client:
            body = {"model": "resting", "messages": HELLO}
            told = client.post("/chat/completions?autoload=false", json=body)
            assert (told.status_code, told.json()["error"]["code"]) == (400, "model_not_loaded")
            assert statuses(keyed)["resting"] == "unloaded"
            client.post("/chat/completions?autoload=true", json=body)
            assert statuses(keyed)["resting"] == "loaded"
            assert "x-queue-wait-ms" in client.post("/chat/completions?autoload=0", json=body).headers


class TestRouter:
    """What llama.cpp's own tests of its router ask for."""

    def test_no_more_are_loaded_than_may_be(self, keyed):
        for model in ("seeded", "bare", "resting"):
            order(keyed, "unload", model)
        for model in ("seeded", "bare", "resting"):
            order(keyed, "load", model)
        found = statuses(keyed)
        assert sorted((found["seeded"], found["bare"], found["resting"])) == ["loaded", "loaded", "unloaded"]
        assert found["resting"] == "loaded", "the last one"

    def test_a_request_right_after_an_unload_loads_it_again(self, keyed):
        daemon, key = keyed
        order(keyed, "load", "seeded")
        assert daemon.post("/models/unload", json={"model": "seeded"}, headers=key).json() == {"success": True}
        told = daemon.post("/chat/completions", json={"model": "seeded", "messages": HELLO}, headers=key)
        assert told.status_code == 200, told.text
        wait_until(lambda: statuses(keyed)["seeded"] == "loaded", what="it is loaded again")

    def test_requests_for_more_models_than_fit_are_all_served(self, keyed):
        daemon, key = keyed
        asked = [("/chat/completions", name) for name in ("seeded", "bare", "resting") for _ in range(3)]

        def ask(one: tuple[str, str]) -> bool:
            path, name = one
            path = path if name == "bare" else f"/v1{path}"
            told = daemon.post(path, json={"model": name, "messages": HELLO}, headers=key)
            return told.status_code != 503 and "x-queue-wait-ms" in told.headers

        with ThreadPoolExecutor(len(asked)) as pool:
            assert all(pool.map(ask, asked))
