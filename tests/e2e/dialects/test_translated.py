"""A dialect that no worker speaks, defined in one place: requests, answers, streams, errors, keys and keep-alives."""

from __future__ import annotations

import json

import pytest

from tests.support.daemon import Daemon, fake, wait_until
from tests.support.fake_worker import WORDS

KEY = "sk-secret-of-mine-0123456789"
ADMIN = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    (folder / "keys.yaml").write_text(f"- {{name: me, key: {KEY}, scopes: [inference, metrics, admin]}}\n")
    config = {
        "models": {
            "fake": fake(endpoints=["/v1/chat/completions"]),
            "slow": fake("--start-delay=1", endpoints=["/v1/chat/completions"]),
            "endless": fake("--chunks=100000", "--chunk-delay=0.05", endpoints=["/v1/chat/completions"]),
            "broken": fake("--status=500", endpoints=["/v1/chat/completions"]),
        },
        "virtual_models": {"polite": {"model": "fake", "force": {"seed": 7}}},
        "limits": {"keepalive_s": 0.1},
        "server": {"api_keys": str(folder / "keys.yaml")},
    }
    daemon = Daemon(folder, config)
    daemon.program = ("-m", "tests.support.toy_dialect")
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


def say(site, key=KEY, **fields):
    return site.post("/toy/say", json=fields, headers={"x-toy-key": key})


class TestTranslated:
    """Whatever the client speaks, the worker gets and gives what it knows."""

    @pytest.mark.parametrize("name", ["fake", "polite"])
    def test_an_answer(self, site, name):
        told = say(site, model=name, say="hello")
        assert (200, "text/plain", "".join(WORDS) + "\n") == (told.status_code, told.headers["content-type"], told.text)

    def test_a_stream(self, site):
        told = say(site, model="fake", say="hello", live=True)
        assert told.headers["content-type"] == "application/x-ndjson"
        assert [json.loads(line) for line in told.text.splitlines()] == [{"said": word} for word in [*WORDS, "bye"]]

    def test_a_stream_that_breaks_off_ends_with_its_error(self, site):
        """An operator unloads the model: the last line says so, and the answer is complete in HTTP."""
        body = {"model": "endless", "say": "hello", "live": True}
        headers = {"x-toy-key": KEY}
        with site.client() as client, client.stream("POST", "/toy/say", json=body, headers=headers) as told:
            pieces = told.iter_text()
            text = next(pieces)
            while '"said"' not in text:
                text += next(pieces)
            site.post("/v1/admin/models/endless/unload?force=true", headers=ADMIN)
            text += "".join(pieces)
        *_, before, last = text.splitlines()
        assert '"said"' in before
        assert last == ('"sorry: 503 The model was stopped before the answer was complete: unloaded by an operator."')

    def test_keepalives_are_its_own(self, site):
        told = say(site, model="slow", say="hello", live=True)
        assert told.text.startswith('{"wait": true}\n')
        assert told.text.endswith('{"said": "bye"}\n')

    def test_errors_are_its_own(self, site):
        assert say(site, model="nobody", say="hello").text.startswith('"sorry: 404 There is no model')
        assert say(site, model="broken", say="hello").text.startswith('"sorry: 500 ')
        assert say(site, "wrong", model="fake", say="hello").text.startswith('"sorry: 401 ')

    def test_its_key_opens_nothing_else(self, site):
        told = site.post("/v1/chat/completions", json={"model": "fake"}, headers={"x-toy-key": "x"})
        assert (told.status_code, next(iter(told.json()))) == (401, "error")

    def test_other_paths_are_untouched(self, site):
        headers = {"authorization": f"Bearer {KEY}"}
        body = {"model": "fake", "messages": []}
        assert body == site.post("/v1/chat/completions", json=body, headers=headers).json()["received"]

    def test_private_fields_are_heard(self, site):
        """Who asks how urgently is known, though its request becomes another one."""
        name = say(site, model="fake", say="hello", x_priority="low").headers["x-request-id"]
        known = wait_until(lambda: (a := site.get(f"/v1/admin/requests/{name}", headers=ADMIN)).is_success and a.json())
        assert (known["priority"], known["tenant"]) == (80, "me")
        refused = say(site, model="fake", say="hello", x_priority="urgent")
        assert refused.text.startswith('"sorry: 400 `X-Priority` or `x_priority` is no priority')

    def test_another_method(self, site):
        told = site.get("/toy/say", headers={"x-toy-key": KEY})
        assert (told.status_code, told.headers["allow"]) == (405, "POST")

    def test_tokens_are_counted_by_the_workers_answer(self, site):
        say(site, model="fake", say="hello")
        metrics = site.get("/metrics", headers={"authorization": f"Bearer {KEY}"}).text
        assert 'llmux_completion_tokens_total{model="fake"}' in metrics
