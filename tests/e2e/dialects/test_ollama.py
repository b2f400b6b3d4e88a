"""Ollama's clients against a running daemon: names, lists, streams, loads and unloads, errors, and what is refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from supervisor.catalog.keys import Scope, new_key
from tests.support.daemon import Daemon, fake, wait_until
from tests.support.fake_worker import WORDS

HELLO = [{"role": "user", "content": "hello"}]
ENDPOINTS = ["/v1/chat/completions"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ollama")
    user, user_entry = new_key("user", [Scope.INFERENCE])
    admin, admin_entry = new_key("admin", [Scope.INFERENCE, Scope.ADMIN])
    (folder / "keys.yaml").write_text(str([user_entry, admin_entry]).replace("'", '"'))
    config = {
        "models": {
            "fake": fake(endpoints=ENDPOINTS),
            "slow": fake("--start-delay=1", endpoints=ENDPOINTS),
            "endless": fake("--chunks=100000", "--chunk-delay=0.05", endpoints=ENDPOINTS),
            "resting": fake(endpoints=ENDPOINTS, modalities=["text", "image"]),
            "vectors": fake(endpoints=["/v1/embeddings"], type="embedding"),
            "speaker": fake(endpoints=["/v1/audio/speech"], type="tts"),
            "broken": fake("--status=500", endpoints=ENDPOINTS, modalities=["text"]),
            "brief": fake(endpoints=ENDPOINTS, keep_alive_s=60),
        },
        "virtual_models": {"polite": {"model": "fake", "force": {"seed": 7}}, "small:1b": {"model": "fake"}},
        "limits": {"keepalive_s": 0.1},
        "server": {"api_keys": str(folder / "keys.yaml")},
    }
    daemon = Daemon(folder, config)
    daemon.user, daemon.admin = ({"authorization": f"Bearer {key}"} for key in (user, admin))
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


def ask(site, path, key=None, **fields):
    return site.post(f"/api/{path}", json=fields, headers=key or site.user)


def read(told):
    assert told.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in told.text.splitlines()]


def loaded(site):
    rows = site.get("/api/ps", headers=site.user).json()["models"]
    return {row["name"].removesuffix(":latest") for row in rows}


class TestInference:
    """Chats, prompts and embeddings, of workers that only know OpenAI's paths."""

    @pytest.mark.parametrize("name", ["polite", "polite:latest"])
    def test_a_chat(self, site, name):
        told = ask(site, "chat", model=name, messages=HELLO, stream=False, options={"num_ctx": 1})
        assert told.status_code == 200
        assert (told.json()["message"]["content"], told.json()["model"]) == ("".join(WORDS), name)
        assert (told.json()["done"], told.json()["eval_count"]) == (True, len(WORDS))
        assert told.headers["x-llmux-ignored"] == "options.num_ctx"

    @pytest.mark.parametrize(("path", "fields"), [("chat", {"messages": HELLO}), ("generate", {"prompt": "hello"})])
    def test_a_stream_is_what_comes_unasked(self, site, path, fields):
        *texts, last = read(ask(site, path, model="polite", **fields))
        told = [line["message"]["content"] if path == "chat" else line["response"] for line in texts]
        assert "".join(told) == "".join(WORDS)
        assert (last["done"], last["done_reason"]) == (True, "stop")

    def test_a_listed_name_on_openais_paths(self, site):
        body = {"model": "polite:latest", "messages": HELLO}
        assert site.post("/v1/chat/completions", json=body, headers=site.user).status_code == 200

    def test_embeddings(self, site):
        assert ask(site, "embed", model="vectors:latest", input="x").json()["embeddings"] == [[0.6, 0.8]]
        assert ask(site, "embed", model="vectors", input=["x"], dimensions=1).json()["embeddings"] == [[1.0]]
        assert ask(site, "embeddings", model="vectors", prompt="x").json() == {"embedding": [0.6, 0.8]}

    def test_a_stream_that_breaks_off_ends_with_its_error(self, site):
        body = {"model": "endless", "messages": HELLO}
        with site.client() as client, client.stream("POST", "/api/chat", json=body, headers=site.user) as told:
            pieces = told.iter_text()
            text = next(pieces)
            while "Hello" not in text:
                text += next(pieces)
            site.post("/v1/admin/models/endless/unload?force=true", headers=site.admin)
            text += "".join(pieces)
        *lines, last = [json.loads(line) for line in text.splitlines()]
        assert not any(line["done"] for line in lines)
        assert last == {"error": "The model was stopped before the answer was complete: unloaded by an operator."}

    def test_lines_keep_the_connection_alive_while_the_model_loads(self, site):
        first, *_, last = read(ask(site, "chat", model="slow", messages=HELLO))
        assert (first["model"], first["message"]["content"], first["response"], first["done"]) == ("", "", "", False)
        assert last["done"]

    def test_a_picture_for_a_model_that_sees_none(self, site):
        message = {"role": "user", "content": "what?", "images": ["iVBORw0KGgo="]}
        assert ask(site, "chat", model="resting", messages=[message], stream=False).status_code == 200
        refused = ask(site, "chat", model="broken", messages=[message], stream=False)
        said = "Could not process image: broken takes text, no images. Models that see: resting."
        assert (refused.status_code, refused.json()) == (400, {"error": said})


class TestLife:
    """A model is loaded by an empty request, stays as long as a request says, and is unloaded by operators."""

    def test_load_and_unload(self, site):
        assert [line["done_reason"] for line in read(ask(site, "generate", model="resting")) if line["done"]] == [
            "load"
        ]
        assert "resting" in loaded(site)
        refused = ask(site, "generate", model="resting", keep_alive=0)
        assert (refused.status_code, "admin" in refused.json()["error"]) == (403, True)
        told = ask(site, "generate", site.admin, model="resting:latest", keep_alive=0, stream=False)
        assert (told.status_code, told.json()["done_reason"], told.json()["model"]) == (200, "unload", "resting:latest")
        wait_until(lambda: "resting" not in loaded(site), what="it is unloaded")
        assert ask(site, "chat", site.admin, model="nobody", keep_alive=0).status_code == 404

    def test_keep_alive(self, site):
        assert ask(site, "chat", model="brief", messages=HELLO, stream=False, keep_alive="10m").status_code == 200
        (row,) = [
            row for row in site.get("/api/ps", headers=site.user).json()["models"] if row["name"] == "brief:latest"
        ]
        left = datetime.fromisoformat(row["expires_at"]) - datetime.now(UTC)
        assert 120 < left.total_seconds() <= 600
        assert row["size"] > 0 == row["size_vram"]

    def test_an_embedding_model_is_unloaded_too(self, site):
        ask(site, "embed", model="vectors", input="x")
        assert read(ask(site, "chat", site.admin, model="vectors", keep_alive=0))[-1]["done_reason"] == "unload"
        wait_until(lambda: "vectors" not in loaded(site), what="it is unloaded")


class TestModels:
    """Lists and descriptions."""

    def test_tags(self, site):
        rows = {row["name"]: row for row in site.get("/api/tags", headers=site.user).json()["models"]}
        names = {"polite", "slow", "endless", "resting", "vectors", "broken", "brief"}
        assert rows.keys() == {f"{name}:latest" for name in names} | {"small:1b"}
        assert len({row["digest"] for row in rows.values()}) == len(rows)
        assert rows["polite:latest"]["model"] == "polite:latest"

    @pytest.mark.parametrize(
        ("name", "can"),
        [("polite:latest", ["completion"]), ("vectors", ["embedding"]), ("resting", ["completion", "vision"])],
    )
    def test_show(self, site, name, can):
        for field in ("model", "name"):
            told = ask(site, "show", **{field: name})
            assert (told.status_code, told.json()["capabilities"]) == (200, can)

    def test_version(self, site):
        assert site.get("/api/version", headers=site.user).json()["version"].count(".") == 2

    def test_the_root(self, site):
        told = site.get("/")
        assert (told.status_code, told.text) == (200, "Ollama is running")
        with site.client() as client:
            assert client.head("/").status_code == 200
        assert site.get("/", headers={"accept": "text/html,*/*"}).status_code == 307


class TestErrors:
    """One text, as `error`."""

    @pytest.mark.parametrize(
        ("path", "fields", "status"),
        [
            ("chat", {"model": "nobody", "messages": HELLO}, 404),
            ("chat", {"model": "polite:7b", "messages": HELLO}, 404),
            ("show", {"model": "nobody"}, 404),
            ("generate", {"model": "polite", "prompt": "x", "suffix": "y"}, 400),
            ("chat", {"model": "broken", "messages": HELLO, "stream": False}, 500),
            ("chat", {"model": "vectors", "messages": HELLO}, 400),
        ],
    )
    def test_shape(self, site, path, fields, status):
        told = ask(site, path, **fields)
        assert (told.status_code, [type(value) for value in told.json().values()]) == (status, [str])
        assert list(told.json()) == ["error"]

    @pytest.mark.parametrize("path", ["create", "copy", "push", "blobs/sha256:0"])
    def test_what_is_refused(self, site, path):
        told = ask(site, path, site.admin, model="polite")
        assert (told.status_code, f"/api/{path}" in told.json()["error"]) == (501, True)
        assert ask(site, path, model="polite").status_code == 403

    def test_pulls(self, site):
        """What is there needs none, so clients that always pull first go on."""
        assert read(ask(site, "pull", site.admin, model="polite:latest")) == [{"status": "success"}]
        told = ask(site, "pull", site.admin, model="llama3.2", stream=False)
        assert (told.status_code, "llmux add" in told.json()["error"]) == (501, True)

    def test_removal(self, site):
        with site.client() as client:
            told = client.request("DELETE", "/api/delete", json={"model": "polite"}, headers=site.admin)
        assert (told.status_code, "llmux remove" in told.json()["error"]) == (501, True)

    def test_without_a_key(self, site):
        told = site.post("/api/chat", json={"model": "polite", "messages": HELLO})
        assert (told.status_code, list(told.json())) == (401, ["error"])
