"""A dialect that no worker speaks, defined in one place: requests, answers, streams, errors, keys and keep-alives."""

from __future__ import annotations

import pytest

from tests.support.daemon import Daemon, fake
from tests.support.fake_worker import WORDS

KEY = "sk-secret-of-mine-0123456789"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    (folder / "keys.yaml").write_text(f"- {{name: me, key: {KEY}, scopes: [inference, metrics]}}\n")
    config = {
        "models": {
            "fake": fake(endpoints=["/v1/chat/completions"]),
            "slow": fake("--start-delay=1", endpoints=["/v1/chat/completions"]),
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
        told = say(site, to=name, say="hello")
        assert (200, "text/plain", "".join(WORDS) + "\n") == (told.status_code, told.headers["content-type"], told.text)

    def test_a_stream(self, site):
        told = say(site, to="fake", say="hello", live=True)
        assert told.headers["content-type"] == "application/x-toy"
        assert told.text == "".join(f"data: {word}\n\n" for word in [*WORDS, "bye"])

    def test_keepalives_are_its_own(self, site):
        told = say(site, to="slow", say="hello", live=True)
        assert told.text.startswith(": toy\n\n")
        assert told.text.endswith("data: bye\n\n")

    def test_errors_are_its_own(self, site):
        assert say(site, to="nobody", say="hello").text.startswith('"sorry: 404 There is no model')
        assert say(site, to="broken", say="hello").text.startswith('"sorry: 500 ')
        assert say(site, "wrong", to="fake", say="hello").text.startswith('"sorry: 401 ')

    def test_its_key_opens_nothing_else(self, site):
        told = site.post("/v1/chat/completions", json={"model": "fake"}, headers={"x-toy-key": "x"})
        assert (told.status_code, next(iter(told.json()))) == (401, "error")

    def test_other_paths_are_untouched(self, site):
        headers = {"authorization": f"Bearer {KEY}"}
        body = {"model": "fake", "messages": []}
        assert body == site.post("/v1/chat/completions", json=body, headers=headers).json()["received"]

    def test_another_method(self, site):
        told = site.get("/toy/say", headers={"x-toy-key": KEY})
        assert (told.status_code, told.headers["allow"]) == (405, "POST")

    def test_tokens_are_counted_by_the_workers_answer(self, site):
        say(site, to="fake", say="hello")
        metrics = site.get("/metrics", headers={"authorization": f"Bearer {KEY}"}).text
        assert 'llmux_completion_tokens_total{model="fake"}' in metrics
