"""Every refusal, on every path, has one shape that clients can show and a person can act on."""

from __future__ import annotations

import json

import pytest

from tests.support import raw
from tests.support.daemon import fake, running

HOST = "Host: 127.0.0.1"
CHAT = "/v1/chat/completions"


def error_of(answer) -> dict[str, object]:
    assert answer.headers["content-type"] == "application/json"
    assert list(answer.json()) == ["error"]
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["message"]
    return error


class TestPaths:
    """What isn't there says so; what takes another method says which."""

    @pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/chat", "/v1/models/", "/health/", "/v1/admin/nope"])
    def test_404(self, site, path):
        told = site.get(path)
        assert told.status_code == 404
        assert error_of(told)["type"] == "invalid_request_error"

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            ("GET", CHAT, "POST"),
            ("DELETE", CHAT, "POST"),
            ("POST", "/props", "GET, HEAD"),
            ("POST", "/v1/models", "GET, HEAD"),
            ("GET", "/v1/admin/models/chat/unload", None),
            ("PUT", "/v1/admin/gpu-memory", "GET, HEAD"),
            ("GET", "/v1/admin/reload", "POST"),
            ("POST", "/v1/admin/requests/1", "DELETE, GET, HEAD"),
            ("POST", "/v1/admin/events", "GET, HEAD"),
            ("DELETE", "/ui/", "GET, HEAD"),
            ("POST", "/ui/index.html", "GET, HEAD"),
            ("PATCH", "/", "GET, HEAD"),
            ("PUT", "/models", "GET, HEAD"),
            ("OPTIONS", "/health", "GET, HEAD"),
            ("OPTIONS", CHAT, "POST"),
            ("HEAD", CHAT, "POST"),
        ],
    )
    def test_405(self, site, method, path, allowed):
        with site.client() as client:
            told = client.request(method, path)
        if allowed is None:  # a GET never unloads: it asks for a model of that name
            assert told.status_code == 404
            return
        assert told.status_code == 405
        assert method == "HEAD" or error_of(told)["code"] == "method_not_allowed"
        assert set(allowed.split(", ")) == set(told.headers["allow"].split(", "))

    def test_a_path_that_no_model_serves(self, site):
        told = site.post("/v1/images/generations", json={"model": "chat"})
        assert told.status_code == 404
        assert "no configured model serves it" in error_of(told)["message"]


class TestBodies:
    """A body that can't be served is refused with what is wrong with it."""

    @pytest.mark.parametrize(
        ("body", "code", "param", "says"),
        [
            (b"", "invalid_request", None, "empty"),
            (b"  \n", "invalid_request", None, "empty"),
            (b"{", "invalid_json", None, "not valid JSON"),
            (b"\xff\xfe", "invalid_json", None, "not valid JSON"),
            (b"null", "invalid_request", None, "JSON object"),
            (b"[1]", "invalid_request", None, "JSON object"),
            (b"{}", "missing_model", "model", "missing"),
            (b'{"model": 5}', "invalid_request", "model", "string"),
            (b'{"model": null}', "missing_model", "model", "missing"),
            (b'{"model": "chat", "stream": "yes"}', "invalid_request", "stream", "true or false"),
            (b'{"model": "chat", "model": "fake"}', "duplicate_key", None, "twice"),
            (b'{"model": "chat", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", "invalid_request", None, "deep"),
            (b'{"model": ' + b"[" * 50_000, "invalid_request", None, "deep"),
        ],
    )
    def test_400(self, site, body, code, param, says):
        told = site.post(CHAT, content=body)
        assert told.status_code == 400, told.text
        error = error_of(told)
        assert ("invalid_request_error", code, param) == (error["type"], error["code"], error["param"])
        assert says in error["message"]

    def test_a_form_in_place_of_json(self, site):
        """The kind that has no files; curl calls JSON so as well, which is taken."""
        told = site.post(CHAT, data={"model": "chat", "prompt": "a cat"})
        assert (told.status_code, error_of(told)["code"]) == (400, "invalid_form")
        assert "multipart/form-data" in error_of(told)["message"]
        kind = {"content-type": "application/x-www-form-urlencoded"}
        assert site.post("/echo", content=b'{"model": "plain"}', headers=kind).status_code == 200

    def test_duplicate_keys_where_a_body_is_rewritten(self, site):
        told = site.post(CHAT, content=b'{"model": "quick", "messages": [], "seed": 1, "seed": 2}')
        assert error_of(told)["code"] == "duplicate_key"

    def test_announced_too_large(self, site):
        told = site.post("/echo", content=b"x" * 3_000_000)
        assert told.status_code == 413
        assert "limits.body_mib" in error_of(told)["message"]

    def test_too_large_without_saying_so(self, site):
        told = site.post("/echo", content=(b"x" * 100_000 for _ in range(50)))
        assert told.status_code == 413
        assert error_of(told)["code"] == "request_too_large"

    def test_just_not_too_large(self, site):
        body = json.dumps({"model": "plain", "pad": "x" * (2 * 1024 * 1024 - 40)}).encode()
        assert body == site.post("/echo", content=body).content

    def test_headers_too_large(self, site):
        told = site.get("/health", headers={"x-pad": "x" * 17_000})
        assert told.status_code == 431
        assert "16384 bytes (limits.header_kib)" in error_of(told)["message"]
        assert site.get("/health", headers={"x-pad": "x" * 15_000}).status_code == 200

    def test_an_error_of_the_worker_keeps_its_status_and_words(self, site):
        told = site.chat("plain", fake={"status": 429})
        assert told.status_code == 429
        error = error_of(told)
        assert (error["message"], error["type"]) == ("as told", "server_error")

    def test_llama_cpps_errors_are_completed(self, site):
        told = site.post(CHAT, json={"model": "chat", "messages": [{"role": "user", "content": 3}]})
        assert told.status_code in {400, 500}
        error = error_of(told)
        assert isinstance(error["code"], str)
        assert error["param"] is None

    def test_what_llama_cpp_adds_is_kept(self, site):
        told = site.chat("chat", text="word " * 4000)
        assert told.status_code == 400
        error = error_of(told)
        assert error["type"] == "exceed_context_size_error"
        assert error["n_ctx"] < error["n_prompt_tokens"]


class TestHeaders:
    """Every answer can be found in the log, and tells how long it took."""

    @pytest.mark.parametrize("path", ["/health", "/v1/models", "/nope", "/v1/admin/models", "/props?model=chat", CHAT])
    def test_id_and_time(self, site, path):
        told = site.get(path)
        assert told.headers["x-request-id"].startswith("req_")
        assert told.headers["openai-processing-ms"].isdecimal()

    def test_the_clients_own_id(self, site):
        body = {"model": "plain"}
        answer = site.post("/echo", json=body, headers={"x-request-id": "mine-1.2:3"})
        assert answer.headers["x-request-id"] == "mine-1.2:3"
        assert ["x-request-id", "mine-1.2:3"] in json.loads(answer.headers["x-echo-headers"])
        assert site.get("/nope", headers={"x-request-id": "mine-404"}).headers["x-request-id"] == "mine-404"

    @pytest.mark.parametrize("unwanted", ["", "x" * 129, "a b", 'a"b', "a\tb"])
    def test_a_harmful_id_is_replaced(self, site, unwanted):
        told = raw.request(site, "GET /health HTTP/1.1", HOST, f"x-request-id: {unwanted}")
        assert told.header("x-request-id").startswith("req_")

    def test_time_includes_the_worker(self, site):
        answer = site.chat("plain", fake={"delay": 0.2})
        assert 200 <= int(answer.headers["openai-processing-ms"]) < 20_000
        streamed = site.chat("plain", stream=True, fake={"delay": 0.2})
        assert 200 <= int(streamed.headers["openai-processing-ms"]) < 20_000

    def test_streams_are_not_to_be_buffered(self, site):
        answer = site.chat("quick", stream=True)
        assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
        assert (answer.headers["x-accel-buffering"], answer.headers["cache-control"]) == ("no", "no-cache")
        assert answer.text.endswith("data: [DONE]\n\n")

    def test_refusals_of_the_server_itself(self, site):
        told = raw.request(site, "GET /health HTTP/1.1", HOST, "Host: other")
        assert told.closed
        assert told.header("x-request-id").startswith("req_")
        assert {"message", "type", "param", "code"} == json.loads(told.body)["error"].keys()


class TestUnavailable:
    """What can't be served now says when to come again."""

    def test_a_model_that_does_not_start(self, site):
        told = site.chat("broken")
        assert told.status_code == 503
        error = error_of(told)
        assert error["type"] == "server_error"
        assert "exited with code 1" in error["message"]
        assert "llmux logs broken" in error["message"], "where its last words are"
        assert "weights.bin" not in told.text

    def test_a_full_queue(self, tmp_path):
        config = {
            "models": {"slow": fake("--start-delay", "60")},
            "limits": {"queue_per_model": 1, "queue_total": 1},
        }
        with running(tmp_path, config) as daemon, raw.pending(daemon, CHAT, {"model": "slow"}):
            daemon.wait_state("slow", "starting")
            told = daemon.chat("slow")
            assert told.status_code == 503
            assert error_of(told)["code"] == "queue_full"
            assert 1 <= int(told.headers["retry-after"]) <= 120
            assert "x-should-retry" not in told.headers
