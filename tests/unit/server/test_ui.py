"""The dashboard's files: which are served, under which names, with which headers. What they do is tested in a browser."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from starlette.applications import Starlette

from supervisor.server.ui import CONTENT_TYPES, FOLDER, HEADERS, routes
from tests.support.application import ask, get
from tests.support.cases import cases
from tests.support.wire import front

FILES = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*") if path.is_file()}
NOT_THERE = [
    b"none.js",
    b"js",
    b"js/",
    b".",
    b"../app.py",
    b"../ui.py",
    b"%2e%2e/app.py",
    b"..%2fapp.py",
    b"..%5capp.py",
    b"../ui/index.html",
    b"js/../index.html",
    b"js/..%2findex.html",
    b"./index.html",
    b"%2e/index.html",
    b"/",
    b"/index.html",
    b"%2findex.html",
    b"js//main.js",
    b"index.html/",
    b"index.html%00",
    b"%00",
    b"index.html%00.txt",
    b"index.html%20",
    b"index.HTML",
    b"/etc/hostname",
    b"%2fetc%2fhostname",
    b"index.html%ff",
    b"a" * 300 + b".js",
    b"a/" * 5000 + b"a.js",
]


class TestPage:
    """What is installed is all there, and nothing else."""

    @cases("name", FILES)
    async def test_every_file_is_served_as_it_is(self, served, name):
        status, headers, body = await ask(served.port, get(b"/ui/" + name.encode()))
        assert (status, body) == (200, FILES[name].read_bytes())
        assert headers["content-type"] == CONTENT_TYPES[Path(name).suffix]
        assert headers["content-length"] == str(len(body))
        assert headers.items() >= HEADERS.items()
        assert headers["x-request-id"]

    def test_text_says_how_it_is_encoded(self):
        assert all("charset=utf-8" in kind for kind in CONTENT_TYPES.values() if kind.startswith("text/"))

    async def test_the_folder_is_its_page(self, served):
        _, headers, body = await ask(served.port, get(b"/ui/?model=plain"))
        assert body == FILES["index.html"].read_bytes()
        assert headers["content-type"] == "text/html; charset=utf-8"

    @pytest.mark.parametrize("path", [b"/", b"/ui"])
    async def test_other_addresses_lead_there(self, served, path):
        status, headers, _ = await ask(served.port, get(path, b"Accept: text/html,*/*;q=0.8"))
        assert (status, headers["location"]) == (307, "ui/")

    @cases("path", NOT_THERE)
    async def test_nothing_else_is_there(self, served, path):
        status, headers, body = await ask(served.port, get(b"/ui/" + path))
        assert status == 404
        assert json.loads(body)["error"]["code"] == "not_found"
        assert headers.items() >= HEADERS.items()

    @pytest.mark.parametrize("name", [b"", b"index.html", b"none.js"])
    async def test_is_only_read(self, served, name):
        for method in (b"POST", b"PUT", b"DELETE", b"OPTIONS"):
            status, headers, body = await ask(served.port, get(b"/ui/" + name, b"Content-Length: 0", method=method))
            assert (status, headers["allow"]) == (405, "GET, HEAD")
            assert json.loads(body)["error"]["code"] == "method_not_allowed"
            assert headers.items() >= HEADERS.items()

    async def test_a_head_tells_what_a_get_would(self, served):
        path = b"/ui/js/main.js"
        _, whole, _ = await ask(served.port, get(path))
        status, headers, body = await ask(served.port, get(path, method=b"HEAD"))
        assert (status, body) == (200, b"")
        assert {name: headers[name] for name in ("etag", "content-length", "content-type")}.items() <= whole.items()


class TestPolicy:
    """The page runs its own files and nothing else."""

    def test_lets_nothing_foreign_in(self):
        policy = HEADERS["content-security-policy"]
        assert {"default-src 'self'", "frame-ancestors 'none'", "object-src 'none'"} <= set(policy.split("; "))
        assert "unsafe" not in policy
        assert HEADERS["x-content-type-options"] == "nosniff"

    def test_page_has_no_inline_code_or_style(self):
        page = FILES["index.html"].read_text()
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)

    def test_all_that_a_script_imports_is_there(self):
        for name, path in FILES.items():
            if name.endswith(".js") and not name.startswith("vendor/"):
                for imported in re.findall(r'from "(\.[^"]+)"', path.read_text()):
                    target = Path("/", name).parent.joinpath(imported).resolve().relative_to("/").as_posix()
                    assert target in FILES, f"{name} imports {imported}"

    def test_licences_of_others_are_beside_their_code(self):
        named = FILES["vendor/README.txt"].read_text()
        for name in (name for name in FILES if name.startswith("vendor/")):
            assert name == "vendor/README.txt" or name.removeprefix("vendor/") in named


class TestUnchanged:
    """A browser that has a file asks each time, and gets it again only when it changed."""

    @pytest.mark.parametrize("condition", ["{}", "W/{}", '"other", {}', '"other",W/{}, "another"', "*", " * "])
    async def test_is_not_sent_again(self, served, condition):
        path = b"/ui/js/main.js"
        _, first, _ = await ask(served.port, get(path))
        condition = condition.format(first["etag"])
        for method in (b"GET", b"HEAD"):
            status, headers, body = await ask(
                served.port, get(path, b"If-None-Match: " + condition.encode(), method=method)
            )
            assert (status, headers["etag"], body) == (304, first["etag"], b"")
            assert headers.items() >= HEADERS.items()
            assert "x-request-id" in headers

    @pytest.mark.parametrize("condition", ['"other"', "x{}", "{}x", "other", ""])
    async def test_another_one_is_sent(self, served, condition):
        path = b"/ui/js/main.js"
        _, first, whole = await ask(served.port, get(path))
        condition = condition.format(first["etag"]).encode()
        status, _, body = await ask(served.port, get(path, b"If-None-Match: " + condition))
        assert (status, body) == (200, whole)

    async def test_dates_and_ranges_mean_nothing(self, served):
        fields = (b"If-Modified-Since: Fri, 31 Dec 2100 00:00:00 GMT", b"Range: bytes=0-3", b"If-Range: nonsense")
        status, headers, body = await ask(served.port, get(b"/ui/", *fields))
        assert (status, body) == (200, FILES["index.html"].read_bytes())
        assert "last-modified" not in headers

    async def test_a_condition_makes_nothing_of_what_is_not_there(self, served):
        assert (await ask(served.port, get(b"/ui/none.js", b"If-None-Match: *")))[0] == 404

    async def test_content_decides_not_its_date_and_size(self, tmp_path):
        page = tmp_path / "index.html"
        async with front(Starlette(routes=routes(tmp_path))) as running:
            tags = []
            for text in ("<p>one", "<p>two", "<p>one"):
                page.write_text(text)
                os.utime(page, (1, 1))
                _, headers, body = await ask(running.port, get(b"/ui/"))
                assert body == text.encode()
                tags.append(headers["etag"])
        assert tags[0] == tags[2] != tags[1]


class TestFolder:
    """Files of known types inside the folder, whatever else lies there."""

    @pytest.fixture
    async def port(self, tmp_path):
        (tmp_path / "secret.txt").write_text("secret")
        (tmp_path / "beside").mkdir()
        (tmp_path / "beside" / "secret.txt").write_text("secret")
        folder = tmp_path / "folder"
        (folder / "inner.js").mkdir(parents=True)
        for name in (
            "index.html",
            "real.txt",
            "notes.md",
            "module.py",
            "module.js.map",
            "bare",
            ".txt",
            "inner.js/a.js",
        ):
            (folder / name).write_text(name)
        (folder / "out.txt").symlink_to(tmp_path / "secret.txt")
        (folder / "up").symlink_to(tmp_path)
        (folder / "beside").symlink_to("../beside")
        (folder / "source.txt").symlink_to("module.py")
        (folder / "nowhere.txt").symlink_to("none.txt")
        async with front(Starlette(routes=routes(folder))) as running:
            yield running.port

    @pytest.mark.parametrize("name", ["index.html", "real.txt", "inner.js/a.js"])
    async def test_is_served(self, port, name):
        status, _, body = await ask(port, get(b"/ui/" + name.encode()))
        assert (status, body) == (200, name.encode())

    @cases(
        "name",
        [
            *("notes.md", "module.py", "module.js.map", "bare", ".txt", "inner.js"),
            *("out.txt", "up/secret.txt", "beside/secret.txt", "source.txt", "nowhere.txt"),
            *("../secret.txt", "%2e%2e/secret.txt", "..%2fsecret.txt", "../folder/real.txt"),
        ],
    )
    async def test_is_not(self, port, name):
        status, headers, body = await ask(port, get(b"/ui/" + name.encode()))
        assert (status, b"secret" in body) == (404, False)
        assert headers.items() >= HEADERS.items()
