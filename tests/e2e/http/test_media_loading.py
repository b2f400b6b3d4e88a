"""Addresses in prompts, where the configuration allows them: workers get the content, in each API's shape."""

from __future__ import annotations

import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from tests.e2e.remote.conftest import VARIABLE, remote
from tests.support.daemon import fake, running, wait_until
from tests.support.fake_http import serving
from tests.support.fake_remote import KEY, Authority, StandIn
from tests.support.media_server import MP4, PNG, WAV, MediaServer, Page, data_url

CHAT = "/v1/chat/completions"
INNER = PNG + bytes(100_000)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def pictures(authority):
    with serving(MediaServer(authority.context("127.0.0.1"))) as server:
        yield server
        server.ending.set()


@pytest.fixture(scope="module")
def far():
    with serving(StandIn()) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "b.png").write_bytes(PNG)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory, authority, pictures, far, folder):
    config = {
        "models": {
            "one": fake("--one-at-a-time", endpoints=[CHAT, "/v1/messages", "/echo"], target_inflight=1),
            "blind": fake(endpoints=[CHAT], modalities=["text"]),
            "failing": fake("--exit-code", "1", endpoints=[CHAT]),
            "far": remote(far, allow_remote=True, modalities=["text", "image"]),
            "guarded": remote(far),
        },
        "tasks": {"any": {"candidates": ["blind", "failing", "one"], "pin_primary": True}},
        "clients": {"limited": {"request_rate": "1/hour"}},
        "limits": {"crash_limit": 1},
        "server": {
            "media": {
                "hosts": [f"127.0.0.1:{pictures.port}"],
                "ca_file": str(authority.file),
                "folder": str(folder),
                "timeout_s": 200,
                "size_mib": 2,
            }
        },
    }
    with running(tmp_path_factory.mktemp("site"), config, env={VARIABLE: KEY}) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def begin_anew(pictures, far):
    pictures.begin_anew()
    far.begin_anew()
    pictures.pages = {"/a.png": Page(), "/w": Page(WAV, "audio/wav"), "/v": Page(MP4, "video/mp4")}


@pytest.fixture
def at(pictures):
    return lambda path: f"https://127.0.0.1:{pictures.port}{path}"


def user(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def item(*parts):
    return {"input": [{"role": "user", "content": list(parts)}]}


def image(url, **keys):
    return {"type": "image_url", "image_url": {"url": url, **keys}}


def base64_of(content, kind):
    return {"type": "base64", "media_type": kind, "data": data_url(content, kind).partition(",")[2]}


SHAPES = {
    "chat": lambda url: user({"type": "text", "text": "see"}, image(url("/a.png", "image/png", PNG), detail="low")),
    "chat, as a text": lambda url: user({"type": "image_url", "image_url": url("/a.png", "image/png", PNG)}),
    "chat, a video": lambda url: user({"type": "video_url", "video_url": {"url": url("/v", "video/mp4", MP4)}}),
    "chat, a sound": lambda url: user({"type": "audio_url", "audio_url": {"url": url("/w", "audio/wav", WAV)}}),
    "chat, frames": lambda url: user({"type": "video", "video": [url("/a.png", "image/png", PNG)] * 2}),
    "responses": lambda url: item(
        {"type": "input_image", "image_url": url("/a.png", "image/png", PNG), "detail": "auto"}
    ),
    "responses, an output": lambda url: {
        "input": [
            {
                "type": "function_call_output",
                "output": [{"type": "input_image", "image_url": url("/a.png", "image/png", PNG)}],
            }
        ]
    },
    "a field": lambda url: {"prompt": "p", "image": url("/a.png", "image/png", PNG)},
    "a list in a field": lambda url: {"prompt": "p", "images": [url("/a.png", "image/png", PNG)]},
    "two in two fields": lambda url: {
        "image": url("/a.png", "image/png", PNG),
        **user(image(url("/a.png", "image/png", PNG)), image(url("/v", "video/mp4", MP4))),
    },
}


class TestWorkers:
    """They see nothing but the content."""

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("beside", [0, 300_000])
    def test_content_in_its_place(self, site, at, shape, beside):
        fields = {"model": "one", "user": "a" * beside, "seed": 12345678901234567890, "top_p": 0.1}
        told = site.post("/echo", json=fields | SHAPES[shape](lambda path, *_: at(path)))
        assert told.status_code == 200, told.text
        assert told.json() == fields | SHAPES[shape](lambda _, kind, content: data_url(content, kind))

    def test_a_sound_as_base64(self, site, at):
        def sound(data):
            return {"model": "one", **user({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})}

        told = site.post("/echo", json=sound(at("/w")))
        assert told.json() == sound(data_url(WAV, "audio/wav").partition(",")[2])

    def test_a_source_of_messages(self, site, at):
        def block(source):
            return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}

        def prompt(source):
            result = {"type": "tool_result", "tool_use_id": "t", "content": [block(source)]}
            return {"model": "one", "max_tokens": 5, **user(block(source), result)}

        told = site.post("/echo", json=prompt({"type": "url", "url": at("/a.png")}))
        assert told.json() == prompt(base64_of(PNG, "image/png"))

    def test_a_file(self, site, folder):
        told = site.post("/echo", json={"model": "one", **user(image(f"file://{folder}/b.png"))})
        assert told.json() == {"model": "one", **user(image(data_url(PNG, "image/png")))}

    @pytest.mark.parametrize("beside", [0, 300_000])
    def test_a_long_address_with_escapes(self, site, at, pictures, beside):
        query = f"/a.png?{'s' * 300}&x=1/2"
        pictures.pages[query] = Page()
        body = json.dumps({"model": "one", "user": "a" * beside, **user(image(at(query)))})
        body = body.replace("&x=1/2", "\\u0026x=1\\/2").encode()
        told = site.post("/echo", content=body, headers={"Content-Type": "application/json"})
        assert told.json()["messages"] == user(image(data_url(PNG, "image/png")))["messages"]
        assert pictures.paths() == [query]

    def test_large_content_beside_large_content(self, site, at, pictures):
        pictures.pages["/large"] = Page(INNER)
        own = image(data_url(INNER, "image/jpeg"))
        told = site.post("/echo", json={"model": "one", **user(own, image(at("/large")), own)})
        assert told.json() == {"model": "one", **user(own, image(data_url(INNER, "image/png")), own)}

    def test_nothing_is_kept(self, site):
        assert 'llmux_body_bytes{where="memory"} 0.0' in site.get("/metrics").text


class TestTranslated:
    """Whatever a client speaks: the remote gets the content."""

    def received(self, far):
        (seen,) = far.inference()
        return seen.json["messages"][-1]["content"][-1]

    @pytest.mark.parametrize("beside", [0, 300_000])
    def test_messages(self, site, at, far, beside):
        part = {"type": "image", "source": {"type": "url", "url": at("/a.png")}}
        fields = {"model": "far", "max_tokens": 5, "system": "s" * beside}
        told = site.post("/v1/messages", json={**fields, **user(part)})
        assert told.status_code == 200, told.text
        assert self.received(far) == image(data_url(PNG, "image/png"))

    def test_llm_pool(self, site, at, far):
        fields = {"model": "far", "decoding": {"max_tokens": 3}, "instructions": "Describe."}
        told = site.post("/v1/responses", json={**fields, "input": [image(at("/a.png"), detail="auto")]})
        assert told.status_code == 200, told.text
        assert self.received(far) == image(data_url(PNG, "image/png"), detail="auto")

    def test_responses(self, site, at, far):
        told = site.post(
            "/v1/responses", json={"model": "far", **item({"type": "input_image", "image_url": at("/a.png")})}
        )
        assert told.status_code == 200, told.text
        assert data_url(PNG, "image/png") in far.inference()[0].body.decode()


class TestBeforehand:
    """Nobody is asked for the media of a request that is refused, and no worker is held for them."""

    @pytest.mark.parametrize(
        ("model", "code"),
        [("blind", "modality_unsupported"), ("unknown", "model_not_found"), ("guarded", "remote_not_allowed")],
    )
    def test_refused(self, site, at, pictures, model, code):
        told = site.post(CHAT, json={"model": model, **user(image(at("/a.png")))})
        assert told.json()["error"]["code"] == code
        assert pictures.seen == []

    def test_a_client_that_has_used_up_its_limit(self, site, at, pictures):
        headers = {"X-Tenant-ID": "limited"}
        ask = {"model": "one", **user(image(at("/a.png")))}
        assert site.post(CHAT, json=ask, headers=headers).status_code == 200
        told = site.post(CHAT, json=ask, headers=headers)
        assert (told.status_code, told.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "1 request per hour" in told.json()["error"]["message"]
        assert len(pictures.seen) == 1

    def test_a_worker_is_free_meanwhile(self, site, at, pictures):
        pictures.pages["/slow"] = Page(dripping=True)
        pictures.ending = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(site.post, CHAT, json={"model": "one", **user(image(at("/slow")))})
            wait_until(lambda: pictures.seen)
            assert site.chat("one").status_code == 200
            pictures.ending.set()
            assert waiting.result().json()["error"]["code"] == "media_unreachable"

    def test_a_budget_of_time(self, site, at, pictures):
        pictures.pages["/long"] = Page(dripping=True)
        pictures.ending = threading.Event()
        fields = {"model": "one", "x_timeout_s": 0.5, **user(image(at("/long")))}
        told = site.post(CHAT, json=fields)
        assert (told.status_code, told.json()["error"]["code"]) == (504, "budget_exceeded")
        pictures.ending.set()

    def test_a_client_that_leaves(self, site, at, pictures):
        pictures.pages["/left"] = Page(dripping=True)
        pictures.ending = threading.Event()
        client = http.client.HTTPConnection("127.0.0.1", site.port)
        client.request("POST", CHAT, json.dumps({"model": "one", **user(image(at("/left")))}))
        wait_until(lambda: pictures.seen)
        client.close()
        wait_until(lambda: [line for line in site.events("request.finished") if line["error"] == "client_gone"])
        pictures.ending.set()


class TestTasks:
    """Candidates are asked in turn, with what was loaded once."""

    def test_once(self, site, at, pictures):
        told = site.post(CHAT, json={"model": "task:any", **user(image(at("/a.png")))})
        assert told.status_code == 200, told.text
        assert told.headers["x-llmux-model"] == "one"
        assert told.json()["received"]["messages"] == user(image(data_url(PNG, "image/png")))["messages"]
        assert pictures.paths() == ["/a.png"]

    def test_one_that_is_not_there(self, site, at, pictures):
        told = site.post(CHAT, json={"model": "task:any", **user(image(at("/missing")))})
        assert (told.status_code, told.json()["error"]["code"]) == (400, "media_unreachable")
        assert "secret" not in told.text
        assert pictures.paths() == ["/missing"]


class TestReload:
    """What is allowed changes while the daemon runs."""

    def test_the_folder(self, tmp_path, folder):
        ask = {"model": "one", **user(image(f"file://{folder}/b.png"))}
        with running(tmp_path, {"models": {"one": fake(endpoints=["/echo"])}}) as daemon:
            told = daemon.post("/echo", json=ask)
            assert told.json()["error"]["code"] == "remote_media_refused"
            assert "server.media" in told.json()["error"]["message"]
            for media in ({"folder": str(folder)}, None):
                daemon.config["server"]["media"] = media
                daemon.config_path.write_text(yaml.safe_dump(daemon.config))
                assert daemon.post("/v1/admin/reload").json()["settings"] == ["server.media"]
                assert daemon.post("/echo", json=ask).status_code == (200 if media else 400)
