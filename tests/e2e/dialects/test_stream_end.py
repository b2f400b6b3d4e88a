"""A worker that stops without saying that its answer is complete never looks complete, whatever API its client speaks."""

from __future__ import annotations

import json

import pytest

from tests.support.daemon import fake, running, wait_until

TALK = [{"role": "user", "content": "hi"}]
ASKED = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/messages": {"messages": TALK, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
    "/api/chat": {"messages": TALK},
    "/api/generate": {"prompt": "hi"},
}
ERROR = {"error": {"message": "xgrammar failed", "type": "server_error", "code": 500}}
FULL = {"error": {"message": "Context size has been exceeded.", "type": "server_error", "code": 500}}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    ends = {
        "whole": {},
        "early": {"end_after": 2},
        "failing": {"deltas": [{"content": "a"}, ERROR]},
        "full": {"deltas": [{"content": "a"}, FULL]},
    }
    config = {
        "models": {"m": fake(endpoints=["/v1/chat/completions"])},
        "virtual_models": {name: {"model": "m", "force": {"fake": how}} for name, how in ends.items()},
    }
    with running(tmp_path_factory.mktemp("ends"), config) as daemon:
        yield daemon


def stream(site, path, model):
    """The answer's last piece of data, and all of it."""
    told = site.post(path, json={"model": model, "stream": True, **ASKED[path]})
    assert told.status_code == 200
    lines = [line.removeprefix("data: ") for line in told.text.splitlines() if line.startswith(("data: ", "{"))]
    return lines[-1], told


@pytest.mark.parametrize("path", ASKED)
class TestEnd:
    """The last thing that a client reads is the error, in its API's own shape."""

    def test_a_whole_answer(self, site, path):
        last, told = stream(site, path, "whole")
        assert "error" not in told.text.replace('"error":null', "")
        assert last == "[DONE]" if path == "/v1/chat/completions" else json.loads(last)

    @pytest.mark.parametrize(
        ("model", "said"),
        [
            ("early", "without saying that it is complete"),
            ("failing", "xgrammar failed"),
            ("full", "filled the context that they share"),
        ],
    )
    def test_one_that_is_not(self, site, path, model, said):
        last, told = stream(site, path, model)
        found = json.loads(last)
        assert said in last
        assert "[DONE]" not in told.text
        if path.startswith("/api"):
            assert isinstance(found["error"], str)
        elif path == "/v1/responses":
            assert found["type"] in {"error", "response.failed"}
        elif path == "/v1/messages":
            assert (found["type"], set(found["error"]) >= {"type", "message"}) == ("error", True)
        else:
            assert set(found["error"]) >= {"message", "type", "code"}

    def test_it_counts_as_failed(self, site, path):
        _, told = stream(site, path, "early")
        mine = told.headers["x-request-id"]

        def ended():
            return [each for each in site.get("/v1/admin/requests/ended").json()["data"] if each["request_id"] == mine]

        (found,) = wait_until(ended)
        assert found["error"] == "upstream_error", found
        counted = [row for row in site.get("/metrics").text.splitlines() if row.startswith("llmux_requests_total{")]
        rows = {row.split("status=")[1].split("}")[0]: row.split()[-1] for row in counted if 'model="early"' in row}
        assert (rows['"200"'], float(rows['"502"']) > 0) == ("0.0", True)


def test_a_response_that_broke_off_is_not_kept(site):
    _, told = stream(site, "/v1/responses", "early")
    begun = next(json.loads(line[6:]) for line in told.text.splitlines() if line.startswith("data: "))
    assert site.get(f"/v1/responses/{begun['response']['id']}").status_code == 404
