"""What somebody may try who can write a prompt, where llmux loads media: against the real resolver and files of a daemon."""

from __future__ import annotations

import os
import socket

import pytest

from tests.support import fake_servers, hf_folder
from tests.support.daemon import fake, running
from tests.support.fake_http import serving
from tests.support.fake_remote import Authority
from tests.support.media_server import PNG, MediaServer, Page

ECHO = ["/echo"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def pictures(authority):
    with serving(MediaServer(authority.context("127.0.0.1", "localhost"))) as server:
        yield server
        server.ending.set()


@pytest.fixture(scope="module")
def inner(authority):
    """What only this machine can reach."""
    with serving(MediaServer(authority.context("127.0.0.1", "localhost"))) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    above = tmp_path_factory.mktemp("above")
    (above / "secret.png").write_bytes(PNG + b"secret")
    folder = above / "pictures"
    folder.mkdir()
    (folder / "a.png").write_bytes(PNG)
    (folder / "out.png").symlink_to("../secret.png")
    (folder / "up").symlink_to("..")
    (folder / "root").symlink_to("/")
    os.mkfifo(folder / "fifo.png")
    return folder


def tgi(folder):
    """On Text Generation Inference's launcher: a model that sees, and one that doesn't."""
    launcher = {"runtime": "tgi", "binary": str(fake_servers.tgi(folder)), "vram_mib": 100}
    sees = {"vision_config": {"hidden_size": 8}}
    return {
        "seer": {**launcher, "path": str(hf_folder.write(folder / "seer", sees))},
        "blind": {**launcher, "path": str(hf_folder.write(folder / "blind"))},
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory, authority, pictures, folder):
    config = {
        "models": {"plain": fake(endpoints=ECHO), **tgi(tmp_path_factory.mktemp("tgi"))},
        "server": {
            "media": {
                "hosts": [f"127.0.0.1:{pictures.port}", "localhost", f"localhost:{pictures.port}", "*"],
                "ca_file": str(authority.file),
                "folder": str(folder),
                "size_mib": 1,
                "per_request": 4,
            }
        },
    }
    with running(tmp_path_factory.mktemp("site"), config) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def begin_anew(pictures):
    pictures.begin_anew()
    pictures.pages = {"/a.png": Page()}


def ask(site, *urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return site.post("/echo", json={"model": "plain", "messages": [{"role": "user", "content": parts}]})


def code(told):
    assert told.status_code == 400, told.text
    assert "secret" not in told.text
    return told.json()["error"]["code"]


class TestAddresses:
    """A name of this machine, or another way to write its address, leads nowhere."""

    def test_what_is_allowed(self, site, pictures):
        assert ask(site, f"https://127.0.0.1:{pictures.port}/a.png").status_code == 200

    @pytest.mark.parametrize(
        "host",
        [
            *("localhost", "LOCALHOST", "localhost.", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1"),
            *("[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "0.0.0.0", "127.0.0.2"),
            *("user@127.0.0.1", "127.0.0.1:1@localhost", "127.0.0.1\\@localhost", "\u2460\u2461\u2466.0.0.1"),
            *("127\u30020\u30020\u30021", "%6c%6f%63alhost", "localhost%00.example.org", "localhost\t"),
        ],
    )
    def test_refused(self, site, pictures, host):
        assert code(ask(site, f"https://{host}:{pictures.port}/a.png")) == "remote_media_refused"
        assert pictures.seen == []

    def test_a_name_of_this_machine_on_the_usual_port(self, site):
        assert code(ask(site, f"https://{socket.gethostname()}/a.png")) in {"remote_media_refused", "media_unreachable"}
        assert code(ask(site, "https://localhost/a.png")) == "remote_media_refused"

    @pytest.mark.parametrize("scheme", ["http", "ftp", "gopher", "ws", "unix", "javascript", "blob", "https+unix"])
    def test_other_schemes(self, site, pictures, scheme):
        assert code(ask(site, f"{scheme}://127.0.0.1:{pictures.port}/a.png")) == "remote_media_refused"

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]"])
    def test_a_redirect(self, site, pictures, inner, host):
        pictures.pages["/a.png"] = Page(status=302, headers={"Location": f"https://{host}:{inner.port}/a.png"})
        assert code(ask(site, f"https://127.0.0.1:{pictures.port}/a.png")) == "remote_media_refused"
        assert inner.seen == []

    @pytest.mark.parametrize("to", ["https://169.254.169.254/", "file:///etc/passwd", "//localhost/", "https://[::1]/"])
    def test_a_redirect_elsewhere(self, site, pictures, to):
        pictures.pages["/a.png"] = Page(status=307, headers={"Location": to})
        told = ask(site, f"https://127.0.0.1:{pictures.port}/a.png")
        assert code(told) == "remote_media_refused"
        assert "169.254" not in told.text

    def test_bodies_of_refusals_are_not_shown(self, site, pictures):
        pictures.pages["/b"] = Page(b"secret of an inner service", "text/plain", 500)
        assert code(ask(site, f"https://127.0.0.1:{pictures.port}/b")) == "media_unreachable"
        pictures.pages["/b"] = Page(b"secret of an inner service", "image/png")
        assert code(ask(site, f"https://127.0.0.1:{pictures.port}/b")) == "media_type_unsupported"

    def test_much(self, site, pictures):
        url = f"https://127.0.0.1:{pictures.port}"
        pictures.pages["/b"] = Page(PNG + bytes(400_000))
        pictures.pages["/c"] = Page(PNG * 100, endless=True)
        assert ask(site, *[f"{url}/b"] * 2).status_code == 200
        assert code(ask(site, *[f"{url}/b"] * 3)) == "media_too_large"
        assert code(ask(site, f"{url}/c")) == "media_too_large"
        assert code(ask(site, *[f"{url}/a.png"] * 5)) == "media_too_large"

    def test_a_long_text_instead_of_an_address(self, site):
        for size in (5000, 300_000, 3_000_000):
            assert code(ask(site, f"https://127.0.0.1/{'a' * size}")) == "remote_media_refused"


ASKED = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/generate": lambda text: {"inputs": text},
    "/generate_stream": lambda text: {"inputs": text},
    "/tokenize": lambda text: {"inputs": text},
    "/chat_tokenize": lambda text: {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}]}
        ]
    },
}


class TestTexts:
    """Text Generation Inference takes `![](address)` in the midst of a text for a picture, where its model sees."""

    @pytest.mark.parametrize("path", ASKED)
    def test_refused(self, site, path):
        told = site.post(path, json={"model": "seer", **ASKED[path]("![](http://169.254.169.254/latest)")})
        assert code(told) == "remote_media_refused"

    def test_refused_in_apis_that_are_translated(self, site):
        text = "![](http://169.254.169.254/latest)"
        for path, fields in {
            "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": text}]},
            "/v1/responses": {"input": text, "instructions": "x"},
            "/api/generate": {"prompt": text},
        }.items():
            told = site.post(path, json={"model": "seer", **fields})
            assert (told.status_code, "is not loaded for clients" in told.text) == (400, True), told.text

    def test_what_may_be_loaded_is_loaded_by_llmux(self, site, pictures):
        text = f"What is ![](https://127.0.0.1:{pictures.port}/a.png)?"
        told = site.post("/generate", json={"model": "seer", "inputs": text})
        assert "remote_media" not in told.text
        assert pictures.paths() == ["/a.png"]

    def test_a_text_for_a_model_that_sees_nothing(self, site):
        told = site.post(
            "/v1/chat/completions",
            json={"model": "blind", "messages": [{"role": "user", "content": "![](http://169.254.169.254/latest)"}]},
        )
        assert told.status_code == 200, told.text


class TestFiles:
    """Nothing but regular files below the folder."""

    def test_what_is_allowed(self, site, folder):
        assert ask(site, f"file://{folder}/a.png").status_code == 200
        assert ask(site, f"file://{folder}/up/pictures/a.png").status_code == 200

    @pytest.mark.parametrize(
        "path",
        [
            *("out.png", "up/secret.png", "../secret.png", "%2e%2e/secret.png", "..%2fsecret.png", "up", "root", ""),
            *("root/etc/passwd", "root/proc/self/environ", "root/dev/zero", "fifo.png", "./../secret.png"),
            *("root/proc/self/cwd/secret.png", "root/proc/self/root/etc/passwd", "root/proc/self/fd/0"),
            *("a.png%00", "a.png\0", "a.png\\..\\..\\secret.png", "..\\secret.png"),
        ],
    )
    def test_refused(self, site, folder, path):
        assert code(ask(site, f"file://{folder}/{path}")) == "remote_media_refused"

    @pytest.mark.parametrize(
        "url",
        [
            *("file:///etc/passwd", "file:/etc/passwd", "file:etc/passwd", "file://127.0.0.1/etc/passwd"),
            *("/etc/passwd", "FILE:///ETC/PASSWD", "file:////etc/passwd", "file://localhost/proc/self/environ"),
        ],
    )
    def test_elsewhere(self, site, url):
        assert code(ask(site, url)) == "remote_media_refused"

    def test_what_is_missing_tells_nothing_about_the_outside(self, site, folder):
        inside, outside, there = (f"file://{folder}/{name}" for name in ("no.png", "../no.png", "../secret.png"))
        assert code(ask(site, inside)) == "media_unreachable"
        told = [ask(site, url).json()["error"] for url in (outside, there)]
        assert told[0] == told[1]


class TestForms:
    """They bring their files along: an address in a field is refused as without `server.media`."""

    def test_refused(self, site, pictures):
        fields = {"model": "plain", "image": f"https://127.0.0.1:{pictures.port}/a.png"}
        told = site.post("/echo", data=fields, files={"file": b"x"})
        assert code(told) == "remote_media_refused"
        assert pictures.seen == []
