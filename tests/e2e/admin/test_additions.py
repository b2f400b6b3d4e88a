"""Models added and taken out through the API: from a hub, from a path; cancelled, refused, killed in the middle."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support import tiny
from tests.support.daemon import Daemon, fake, gguf, running, wait_until
from tests.support.fake_hub import Hub, Repo

CONFIG = "/v1/admin/config"
ADDITIONS = f"{CONFIG}/additions"
SMALL, LARGE = "tiny-chat-Q4_K_M.gguf", "tiny-chat-Q8_0.gguf"
REPO = "acme/Tiny-Chat-GGUF"
HELD = f"{REPO}:Q8_0"


@pytest.fixture(scope="module")
def hub():
    model = tiny.model(name="tiny-chat").read_bytes()
    with Hub() as hub:
        files = {SMALL: model, LARGE: model + bytes(1 << 20)}
        hub.repos[REPO] = Repo(files, large=frozenset(files))
        yield hub


def running_with(hub: Hub, folder: Path) -> contextlib.AbstractContextManager[Daemon]:
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf")}
    config = {"models": {"worker": fake()}, "server": {"models_dir": str(folder / "models")}}
    return running(folder, config, env=variables)


@pytest.fixture
def daemon(tmp_path, hub):
    with running_with(hub, tmp_path) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def untouched(tmp_path_factory, hub):
    """For tests that leave everything as it is."""
    with running_with(hub, tmp_path_factory.mktemp("untouched")) as daemon:
        yield daemon


@contextlib.contextmanager
def half_way(hub: Hub) -> Iterator[None]:
    """The larger file stops half way for as long as the block lasts."""
    hub.hold[LARGE], hub.half_way[LARGE] = threading.Event(), threading.Event()
    try:
        yield
    finally:
        hub.hold.pop(LARGE).set()


def look(daemon: Daemon, what: str) -> dict:
    answer = daemon.post(f"{ADDITIONS}/look", json={"what": what})
    assert answer.status_code == 200, answer.text
    return answer.json()


def begun(daemon: Daemon, what: str, name: str | None = None) -> str:
    answer = daemon.post(ADDITIONS, json={"what": what, "name": name})
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def state(daemon: Daemon, number: str) -> dict:
    return daemon.get(f"{ADDITIONS}/{number}").json()


def ended(daemon: Daemon, number: str) -> dict:
    return wait_until(
        lambda: (found := state(daemon, number))["state"] not in {"queued", "running"} and found, what="it has ended"
    )


def models(daemon: Daemon) -> dict:
    return yaml.safe_load(daemon.config_path.read_text())["models"]


def change(daemon: Daemon, **edit: object):
    with daemon.client() as client:
        return client.put(CONFIG, json=edit, headers={"if-match": "*"})


class TestAdd:
    """Nothing is entered before everything has come."""

    def test_from_a_hub_to_an_answer_and_away_again(self, daemon, tmp_path):
        found = look(daemon, REPO)
        assert (found["names"], found["is_new"], found["problems"]) == (["tiny-chat"], True, [])
        assert {one["quantisation"]: (one["fits"], one["taken"]) for one in found["variants"]} == {
            "Q8_0": (True, False),
            "Q4_K_M": (True, True),
        }
        chosen = next(one for one in found["variants"] if not one["taken"])
        over = ended(daemon, begun(daemon, chosen["reference"], "my/chat"))
        assert (over["state"], over["names"], over["done_bytes"]) == ("done", ["my/chat"], over["total_bytes"]), over
        assert daemon.chat("my/chat").json()["choices"][0]["message"]["content"] == tiny.ANSWER
        assert look(daemon, chosen["reference"])["is_new"] is False
        file = tmp_path / "models" / REPO / LARGE
        assert file.exists()
        checked = daemon.post(f"{CONFIG}/check", json={"model": "my/chat", "remove": True}).json()
        assert checked["files"] == {"folder": str(file.parent), "names": [LARGE], "bytes": file.stat().st_size}
        assert change(daemon, model="my/chat", remove=True, files=True).status_code == 200
        assert list(models(daemon)) == ["worker"]
        assert daemon.get("/v1/admin/models/my/chat").status_code == 404
        assert not file.exists()

    def test_from_a_path(self, daemon, tmp_path):
        path = tmp_path / "weights" / "Tiny-Q4_0.gguf"
        path.parent.mkdir()
        os.link(gguf()["path"], path)
        assert look(daemon, str(path.parent))["variants"] == []
        over = ended(daemon, begun(daemon, str(path), "mine"))
        assert (over["state"], over["names"], models(daemon)["mine"]["path"]) == ("done", ["mine"], str(path)), over
        assert change(daemon, model="mine", remove=True, files=True).status_code == 200
        assert path.exists()  # it isn't llmux's

    def test_is_cancelled(self, daemon, hub, tmp_path):
        with half_way(hub):
            number = begun(daemon, HELD)
            wait_until(lambda: state(daemon, number)["done_bytes"] > 0, what="the first bytes are there")
            assert daemon.get(ADDITIONS).json()["data"][0]["id"] == number == begun(daemon, HELD)
            with daemon.client() as client:
                assert client.delete(f"{ADDITIONS}/{number}").json()["state"] == "cancelled"
            wait_until(lambda: not commands(daemon), what="its command has ended")
        assert list(models(daemon)) == ["worker"]
        assert ended(daemon, begun(daemon, HELD))["state"] == "done"

    def test_ends_with_the_daemon(self, daemon, hub):
        before = daemon.config_path.read_text()
        with half_way(hub):
            number = begun(daemon, HELD)
            wait_until(lambda: state(daemon, number)["done_bytes"] > 0, what="the first bytes are there")
            daemon.kill()
            wait_until(lambda: not commands(daemon), what="its command has ended")
        assert daemon.config_path.read_text() == before
        daemon.start()
        assert daemon.get(ADDITIONS).json()["data"] == []

    @pytest.mark.parametrize(
        ("what", "said"),
        [
            ("acme/none-GGUF", "acme/none-GGUF"),
            ("nothing-like-this", "There is no model"),
            ("/nowhere/at/all", "no such file or folder"),
            ("/dev/null", "is no GGUF file"),
            ("--help", "There is no model"),
            ("http://169.254.169.254/latest", "is no page of the hub"),
            ("./x.gguf", "a path begins with / or ~"),
            ("a\nb", "characters that can be printed"),
            ("x" * 501, "1 to 500 characters"),
            ("", "1 to 500 characters"),
            ("../../etc/passwd", "a path begins with / or ~"),
        ],
    )
    def test_what_is_not_there(self, untouched, what, said):
        refused = untouched.post(f"{ADDITIONS}/look", json={"what": what})
        assert (refused.status_code, said in refused.json()["error"]["message"]) == (400, True), refused.text

    @pytest.mark.parametrize("name", ["worker", "-x y", "a\nb", "x" * 201, "../x y"])
    def test_a_name_that_can_not_be(self, untouched, name):
        answer = untouched.post(ADDITIONS, json={"what": REPO, "name": name})
        if answer.status_code == 202:
            over = ended(untouched, answer.json()["id"])
            assert (over["state"], "already" in over["error"]) == ("failed", True), over
        else:
            assert (answer.status_code, "is not a name" in answer.json()["error"]["message"]) == (400, True)
        assert list(models(untouched)) == ["worker"]


class TestRemove:
    """What else refers to it, and what isn't there to take out."""

    def test_names_go_with_it_and_others_keep_it(self, daemon):
        text = (
            daemon.config_path.read_text()
            + "virtual_models:\n  plain: {model: worker}\n  other: {model: worker, force: {seed: 1}}\n"
        )
        assert change(daemon, text=text).status_code == 200
        refused = change(daemon, model="worker", remove=True)
        assert (refused.status_code, "virtual_models.other" in refused.json()["error"]["message"]) == (400, True)
        assert change(daemon, text=text.replace("  other: {model: worker, force: {seed: 1}}\n", "")).status_code == 200
        assert change(daemon, model="worker", remove=True).status_code == 200
        assert yaml.safe_load(daemon.config_path.read_text())["virtual_models"] == {}

    def test_one_of_a_folder(self, daemon, tmp_path):
        os.link(gguf()["path"], tmp_path / "Tiny-Q4_0.gguf")
        assert change(daemon, text=f"models_from: [{tmp_path}]\n{daemon.config_path.read_text()}").status_code == 200
        name = next(one["name"] for one in daemon.get("/v1/admin/models").json()["data"] if one["name"] != "worker")
        refused = change(daemon, model=name, remove=True)
        assert (refused.status_code, "models_from" in refused.json()["error"]["message"]) == (400, True)


class TestReadOnly:
    """The lines to copy come instead."""

    def test_of_a_switch(self, daemon):
        daemon.config_path.write_text(daemon.config_path.read_text().replace("server:", "server:\n  edit: none"))
        daemon.post("/v1/admin/reload").raise_for_status()
        refused = daemon.post(ADDITIONS, json={"what": REPO}).json()["error"]
        assert (refused["code"], refused["detail"][:2]) == ("configuration_read_only", ["models:", "  tiny-chat:"])
        assert "server.edit is none" in refused["message"]


def commands(daemon: Daemon) -> list[str]:
    """The `llmux add` commands of this daemon that run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_text().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if "add" in words and str(daemon.config_path) in words:
            found.append(entry.name)
    return found
