"""Sets of pinned and default models, with one switch."""

from __future__ import annotations

import pytest
import yaml

from tests.support.daemon import Daemon, fake, running

PATH = "/v1/admin/sets"


@pytest.fixture
def daemon(tmp_path):
    config = {
        "models": {"coder": fake(), "small": fake(pin=True), "embedder": fake(type="embedding")},
        "virtual_models": {"code": {"model": "coder"}},
        "sets": {
            "coding": {"default_model": "code", "pin": ["code"]},
            "documents": {"description": "By day", "pin": ["embedder", "small"]},
            "nothing": {},
        },
        "limits": {"default_after_s": 0.5, "min_residency_s": 0},
    }
    with running(tmp_path, config) as daemon:
        yield daemon


def switch(daemon: Daemon, active: object):
    with daemon.client() as client:
        return client.put(PATH, json={"active": active})


def pinned(daemon: Daemon) -> set[str]:
    return {one["name"] for one in daemon.get("/v1/admin/models").json()["data"] if one["pin"]}


def active(daemon: Daemon) -> list[str]:
    return [one["name"] for one in daemon.get(PATH).json()["data"] if one["active"]]


class TestSwitch:
    """Exactly the set's models are pinned, and its own come back."""

    def test_pins_are_those_of_the_set(self, daemon):
        assert (pinned(daemon), active(daemon)) == ({"small"}, [])
        for name, models in [
            ("coding", {"coder"}),
            ("documents", {"embedder", "small"}),
            ("nothing", set()),
            (None, {"small"}),
        ]:
            assert switch(daemon, name).status_code == 200
            assert (pinned(daemon), active(daemon)) == (models, [name] if name else [])

    def test_pins_by_hand_end_with_it(self, daemon):
        daemon.post("/v1/admin/models/embedder/pin", json={"pin": True}).raise_for_status()
        daemon.post("/v1/admin/models/coder/pin", json={"pin": False}).raise_for_status()
        assert switch(daemon, "coding").status_code == 200
        assert pinned(daemon) == {"coder"}
        assert switch(daemon, None).status_code == 200
        assert pinned(daemon) == {"small"}

    def test_no_worker_ends_and_its_model_comes_back(self, daemon):
        daemon.post("/v1/admin/models/small/load").raise_for_status()
        pid = daemon.model("small")["worker"]["pid"]
        assert switch(daemon, "coding").status_code == 200
        daemon.wait_state("coder", "ready")
        assert daemon.model("small")["worker"]["pid"] == pid
        assert switch(daemon, None).status_code == 200
        assert [daemon.model(name)["state"] for name in ("coder", "small")] == ["ready", "ready"]

    def test_is_kept(self, daemon):
        assert switch(daemon, "documents").status_code == 200
        daemon.kill()
        daemon.start()
        assert (pinned(daemon), active(daemon)) == ({"embedder", "small"}, ["documents"])
        daemon.post("/v1/admin/reload").raise_for_status()
        assert active(daemon) == ["documents"]

    def test_one_that_is_taken_out_leaves_all_as_configured(self, daemon):
        assert switch(daemon, "coding").status_code == 200
        config = yaml.safe_load(daemon.config_path.read_text())
        del config["sets"]["coding"]
        daemon.config_path.write_text(yaml.safe_dump(config))
        daemon.post("/v1/admin/reload").raise_for_status()
        assert (pinned(daemon), active(daemon)) == ({"small"}, [])

    def test_a_file_with_mistakes(self, daemon):
        daemon.config_path.write_text(daemon.config_path.read_text() + "nonsense: 1\n")
        refused = switch(daemon, "coding")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_configuration")
        assert (pinned(daemon), active(daemon)) == ({"small"}, [])
        daemon.kill()
        daemon.config_path.write_text(daemon.config_path.read_text().replace("nonsense: 1\n", ""))
        daemon.start()
        assert active(daemon) == []

    @pytest.mark.parametrize("name", ["codign", "", "configured", 5, ["coding"]])
    def test_what_is_no_set(self, daemon, name):
        assert switch(daemon, name).status_code in {400, 404}
        assert active(daemon) == []


class TestMistakes:
    """They are found where they stand."""

    @pytest.mark.parametrize(
        ("entry", "problem"),
        [
            ({"pin": ["codr"]}, 'sets.x.pin[0]: no model "codr"; did you mean'),
            ({"default_model": "codr"}, 'sets.x.default_model: no model "codr"'),
            ({"pins": ["coder"]}, 'sets.x.pins: unknown key; did you mean "pin"?'),
            ({"pin": "coder"}, 'sets.x.pin: expected a list, got "coder"'),
        ],
    )
    def test_one(self, daemon, entry, problem):
        config = yaml.safe_load(daemon.config_path.read_text())
        daemon.config_path.write_text(yaml.safe_dump({**config, "sets": {"x": entry}}))
        assert problem in daemon.post("/v1/admin/reload").json()["error"]["message"]

    def test_a_name_that_stands_for_none(self, daemon):
        config = yaml.safe_load(daemon.config_path.read_text())
        daemon.config_path.write_text(yaml.safe_dump({**config, "sets": {"configured": {}}}))
        assert "not a name for a set" in daemon.post("/v1/admin/reload").json()["error"]["message"]
