"""What is fetched for a prompt, from whom, and how much: against a server and a resolver that try everything."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import tracemalloc
import weakref
from contextlib import contextmanager

import h11
import pytest

from runtimes.base import Endpoint, TextReferences
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.catalog.sections.sections import MediaConfig
from supervisor.errors import InvalidRequestError, UnavailableError
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.media.media import Reference
from supervisor.gateway.media.media_loading import MediaLoader
from supervisor.host.store.request_buffer import BodyBudget
from tests.support.fake_http import serving
from tests.support.fake_remote import Authority
from tests.support.limits import LIMIT_S
from tests.support.media_server import MP4, PNG, PUBLIC, WAV, MediaServer, Page, ScriptedSource

HOST = "pictures.example"
URL = f"https://{HOST}/a.png"
PRIVATE = ("127.0.0.1", "::ffff:127.0.0.1", "169.254.169.254", "10.0.0.1", "fd00::1", "64:ff9b::7f00:1", "0.0.0.0")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def server(authority):
    with serving(MediaServer(authority.context(HOST, "other.example", "127.0.0.1"))) as found:
        yield found
        found.ending.set()


@pytest.fixture
def source(authority, server):
    return ScriptedSource(authority.file, server.port, pictures_example=[[PUBLIC]] * 20, other_example=[[PUBLIC]] * 20)


def loader(source, *, bodies=None, **keys):
    keys = {"hosts": (HOST,), "timeout_s": 60.0, **keys}
    return MediaLoader(MediaConfig(**keys), bodies or BodyBudget(), source)


async def load(loader, *urls):
    loading = loader.loading()
    try:
        places = [{"url": url} for url in urls]
        wanted = [
            loading.wanted(Reference("messages", place, "url", "url", place["url"]), place["url"], number)
            for number, place in enumerate(places)
        ]
        contents = await loading.load(wanted)
        return [(contents[one.source].type, base64.b64decode(contents[one.source].base64)) for one in wanted]
    finally:
        loading.buffer.release()
        assert loader.bodies.used == 0


@contextmanager
def refused(code, *words):
    with pytest.raises(InvalidRequestError) as told:
        yield
    assert (told.value.code, told.value.param) == (code, "url")
    for word in words:
        assert word in told.value.message
    for secret in (*PRIVATE, "secret"):
        assert secret not in told.value.message


class TestInTexts:
    """Where a runtime takes texts for references, what they refer to comes into the text."""

    @pytest.mark.parametrize("beside", [0, 300_000])
    async def test_in_its_place(self, source, beside):
        own = f"![](data:image/png;base64,{'iVBO' * 100})"
        text = f"{'a' * 100}![]({URL}) and {own} and ![]({URL})?"
        fields = {
            "model": "m",
            "user": "u" * beside,
            "inputs": text,
            "messages": [{"content": [{"text": f"![]({URL})"}]}],
        }
        body = await JsonBody.open(json.dumps(fields).encode())
        loading = loader(source).loading()
        wanted = await body.check("m", None, Endpoint("/echo"), loading, TextReferences("![](", ")"))
        await body.load(wanted, loading)
        loading.buffer.release()
        said = json.loads(bytes(await body.rewritten(Rewrite(), Endpoint("/echo"))))
        there = f"![](data:image/png;base64,{base64.b64encode(PNG).decode()})"
        assert said == {
            **fields,
            "inputs": text.replace(f"![]({URL})", there),
            "messages": [{"content": [{"text": there}]}],
        }


class TestFetching:
    """One GET, to the address that was checked, which learns nothing about the client."""

    async def test_a_picture(self, source, server):
        assert await load(loader(source), URL) == [("image/png", PNG)]
        assert source.resolved == [HOST]
        assert source.connected == [[PUBLIC]]
        (seen,) = server.seen
        assert (seen.method, seen.path, seen.headers["host"]) == ("GET", "/a.png", HOST)
        assert set(seen.headers) == {"host", "user-agent", "accept", "accept-encoding", "connection"}
        assert seen.headers["accept-encoding"] == "identity"

    async def test_the_path_as_it_came(self, source, server):
        server.pages["/a%2Fb/../%7e?x=1&y=%20"] = Page()
        assert await load(loader(source), f"https://{HOST}/a%2Fb/../%7e?x=1&y=%20") == [("image/png", PNG)]

    async def test_several_at_once(self, source, server):
        server.pages |= {"/w": Page(WAV, "audio/x-wav"), "/v": Page(MP4, "video/mp4")}
        urls = (URL, f"https://{HOST}/w", URL, f"https://{HOST}/v")
        kinds = [kind for kind, _ in await load(loader(source, at_once=1), *urls)]
        assert kinds == ["image/png", "audio/wav", "image/png", "video/mp4"]
        assert sorted(server.paths()) == ["/a.png", "/v", "/w"]

    async def test_once_for_all_who_are_asked_in_turn(self, source, server):
        loading = loader(source).loading()
        wanted = [loading.wanted(Reference("f", {}, "url", "url", URL), URL, 0)]
        assert await loading.load(wanted) is await loading.load(wanted)
        assert len(server.seen) == 1
        server.pages = {}
        wanted = [loading.wanted(Reference("f", {}, "url", "url", URL), f"{URL}?b", 0)]
        for _ in range(2):
            with refused("media_unreachable", "404"):
                await loading.load(wanted)
        assert len(server.seen) == 2
        loading.buffer.release()

    async def test_no_proxy_of_the_environment(self, source, monkeypatch):
        for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        assert await load(loader(source), URL) == [("image/png", PNG)]

    async def test_an_address_that_is_listed_itself_may_be_private(self, source, server):
        assert await load(loader(source, hosts=("127.0.0.1",)), "https://127.0.0.1/a.png") == [("image/png", PNG)]
        assert (source.resolved, source.connected) == ([], [["127.0.0.1"]])


class TestNames:
    """A name leads to public addresses, looked up once, and proves itself."""

    @pytest.mark.parametrize("address", PRIVATE)
    async def test_private(self, source, server, address):
        for answer in ([address], [PUBLIC, address], [address, PUBLIC]):
            source.names[HOST] = [answer]
            with refused("remote_media_refused", "not public"):
                await load(loader(source), URL)
        assert (source.connected, server.seen) == ([], [])

    async def test_rebinding(self, source, server):
        source.names[HOST] = [[PUBLIC], ["127.0.0.1"]]
        assert await load(loader(source), URL) == [("image/png", PNG)]
        assert (source.resolved, source.connected) == ([HOST], [[PUBLIC]])
        with refused("remote_media_refused"):
            await load(loader(source), URL)

    async def test_rebinding_by_a_redirect(self, source, server):
        server.pages["/a.png"] = Page(status=302, headers={"Location": "/b.png"})
        source.names[HOST] = [[PUBLIC], ["127.0.0.1"]]
        with refused("remote_media_refused", "not public"):
            await load(loader(source), URL)
        assert server.paths() == ["/a.png"]

    async def test_unknown(self, source):
        source.names.clear()
        with refused("media_unreachable", HOST, "not known"):
            await load(loader(source), URL)

    async def test_without_an_address(self, source):
        source.names[HOST] = [[]]
        with refused("media_unreachable"):
            await load(loader(source), URL)

    async def test_another_certificate(self, source, server):
        source.names["third.example"] = [[PUBLIC]]
        with refused("media_unreachable", "does not prove who it is"):
            await load(loader(source, hosts=("*.example",)), "https://third.example/a.png")
        assert server.seen == []

    async def test_an_unknown_authority(self, server):
        source = ScriptedSource(None, server.port, pictures_example=[[PUBLIC]])
        with refused("media_unreachable", "does not prove who it is"):
            await load(loader(source), URL)

    async def test_an_authority_that_is_no_certificate(self, server, tmp_path):
        source = ScriptedSource(tmp_path / "missing", server.port, pictures_example=[[PUBLIC]])
        with refused("media_unreachable", "server.media.ca_file"):
            await load(loader(source), URL)


class TestAddresses:
    """Only what is listed is asked for, however it is written."""

    @pytest.mark.parametrize(
        "url",
        [
            "https://other.example/a.png",
            f"https://{HOST}:8443/a.png",
            f"https://{HOST}.evil.example/",
            f"https://x.{HOST}/",
            f"https://user@{HOST}/",
            f"https://{HOST}@127.0.0.1/",
            f"https://127.0.0.1/#@{HOST}/",
            f"https://127.0.0.1\\@{HOST}/",
            "https://127.0.0.1/",
            "https://2130706433/",
            "https://0x7f.1/",
            "https://0177.0.0.1/",
            "https://[::1]/",
            "https://[::ffff:127.0.0.1]/",
            f"http://{HOST}/a.png",
            f"ht\ttps://{HOST}/a.png",
            f" https://{HOST}/a.png",
            f"ftp://{HOST}/a.png",
            "file:///etc/passwd",
            "/etc/passwd",
            f"//{HOST}/a.png",
        ],
    )
    async def test_refused(self, source, server, url):
        with pytest.raises(InvalidRequestError) as told:
            await load(loader(source), url)
        assert told.value.code == "remote_media_refused"
        assert (source.resolved, server.seen) == ([], [])

    async def test_nothing_is_fetched_where_one_is_refused(self, source, server):
        with refused("remote_media_refused"):
            await load(loader(source), URL, "https://other.example/b.png")
        assert server.seen == []

    @pytest.mark.parametrize(
        "url", [f"https://{HOST.upper()}/a.png", f"https://{HOST}./a.png", f"https://{HOST}:443/a.png"]
    )
    async def test_the_same_name(self, source, server, url):
        assert await load(loader(source), url) == [("image/png", PNG)]
        assert server.seen[0].headers["host"] == HOST


class TestRedirects:
    """Each is an address of its own."""

    async def test_followed(self, source, server):
        server.pages["/1"] = Page(status=301, headers={"Location": "https://other.example/2"})
        server.pages["/2"] = Page(status=307, headers={"Location": "a.png"})
        hosts = (HOST, "other.example")
        assert await load(loader(source, hosts=hosts), f"https://{HOST}/1") == [("image/png", PNG)]
        assert source.resolved == [HOST, "other.example", "other.example"]
        assert [seen.headers["host"] for seen in server.seen] == [HOST, "other.example", "other.example"]
        assert not any("cookie" in seen.headers for seen in server.seen)

    @pytest.mark.parametrize(
        "location",
        [
            "https://other.example/a.png",
            "https://127.0.0.1/",
            "https://169.254.169.254/latest",
            "https://[::ffff:127.0.0.1]/",
            "https://2130706433/",
            f"http://{HOST}/a.png",
            f"https://{HOST}:8443/",
            f"https://user@{HOST}/",
            "//127.0.0.1/a.png",
            "file:///etc/passwd",
            "data:image/png;base64,AAAA",
            "https://[",
        ],
    )
    async def test_elsewhere(self, source, server, location):
        server.pages["/a.png"] = Page(status=302, headers={"Location": location})
        with refused("remote_media_refused", "redirected"):
            await load(loader(source), URL)
        assert len(server.seen) == 1

    async def test_for_ever(self, source, server):
        server.pages["/a.png"] = Page(status=302, headers={"Location": "/a.png"})
        with refused("media_unreachable", "3 redirects"):
            await load(loader(source), URL)
        assert len(server.seen) == 4


class TestContent:
    """What comes must be a medium, whole, and no larger than allowed."""

    @pytest.mark.parametrize(
        "page",
        [
            Page(PNG, "text/html"),
            Page(PNG, "application/octet-stream"),
            Page(PNG, None),
            Page(PNG, "audio/wav"),
            Page(b"<!doctype html>" * 10, "image/png"),
            Page(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
            Page(b"", "image/png"),
            Page(PNG, headers={"Content-Encoding": "gzip"}),
        ],
    )
    async def test_no_medium(self, source, server, page):
        server.pages["/a.png"] = page
        with refused("media_type_unsupported"):
            await load(loader(source), URL)

    @pytest.mark.parametrize("status", [204, 206, 304, 401, 404, 500, 302])
    async def test_no_answer(self, source, server, status):
        server.pages["/a.png"] = Page(b"", None, status)
        with refused("media_unreachable", f"HTTP {status}"):
            await load(loader(source), URL)

    async def test_too_large_by_its_own_account(self, source, server):
        server.pages["/a.png"] = Page(headers={"Content-Length": str(5 << 20)}, dripping=True)
        with refused("media_too_large", "1 MiB", "server.media.size_mib"):
            await load(loader(source, size_mib=1), URL)

    async def test_without_an_end(self, source, server):
        server.pages["/a.png"] = Page(PNG * 100, endless=True)
        with refused("media_too_large"):
            await load(loader(source, size_mib=1), URL)

    async def test_all_of_a_request_together(self, source, server):
        server.pages |= {name: Page(PNG + bytes(600_000)) for name in ("/1", "/2")}
        assert len(await load(loader(source, size_mib=1), f"https://{HOST}/1")) == 1
        with refused("media_too_large"):
            await load(loader(source, size_mib=1), f"https://{HOST}/1", f"https://{HOST}/2")

    async def test_one_that_stands_there_twice_counts_twice(self, source, server):
        server.pages["/1"] = Page(PNG + bytes(600_000))
        with refused("media_too_large"):
            await load(loader(source, size_mib=1), f"https://{HOST}/1", f"https://{HOST}/1#again")

    async def test_more_than_there_may_be(self, source, server):
        with refused("media_too_large", "more than 2", "server.media.per_request"):
            await load(loader(source, per_request=2), *(f"{URL}?{number}" for number in range(3)))
        assert server.seen == []

    async def test_more_than_the_budget_of_all_bodies(self, source, server):
        server.pages["/1"] = Page(PNG + bytes(600_000))
        bodies = BodyBudget()
        bodies.limit = 300_000
        with pytest.raises(UnavailableError):
            await load(loader(source, bodies=bodies), f"https://{HOST}/1")

    async def test_broken_off(self, source, server):
        server.pages["/a.png"] = Page(PNG * 100, short=True)
        with refused("media_unreachable", "broke off"):
            await load(loader(source), URL)

    async def test_informational_answers(self, source, server):
        server.pages["/a.png"] = Page(before=b"HTTP/1.1 103 Early Hints\r\nLink: </b>\r\n\r\n" * 100)
        assert await load(loader(source), URL) == [("image/png", PNG)]

    @pytest.mark.parametrize(
        "page",
        [
            Page(before=b"HTTP/1.1 100\r\n\r\n" * 1000, before_again=True),
            Page(before=b"HTTP/1.1 200\r\n" + b"a:\r\n" * 10_000),
            Page(before=b"HTTP/1.1 100\r\n\r\n" * 5000),
        ],
    )
    async def test_a_head_that_is_too_long(self, source, server, page):
        server.pages["/a.png"] = page
        with refused("media_unreachable", "does not answer as it should"):
            await load(loader(source), URL)

    async def test_others_have_their_turns_before_there_is_a_head(self, source, server, monkeypatch):
        turns = []  # bytes that are read in one of them

        async def others():
            while True:
                turns.append(0)
                await asyncio.sleep(0)

        server.pages["/a.png"] = Page(before=b"HTTP/1.1 100\r\n\r\n" * 500)
        receive = h11.Connection.receive_data

        def count(connection, data):
            turns[-1] += len(data)
            receive(connection, data)

        monkeypatch.setattr(h11.Connection, "receive_data", count)
        beside = asyncio.create_task(others())
        assert await load(loader(source), URL) == [("image/png", PNG)]
        beside.cancel()
        assert max(turns) <= 2048

    async def test_slow(self, source, server):
        server.pages["/a.png"] = Page(dripping=True)
        with pytest.raises(InvalidRequestError, match=r"server\.media\.timeout_s") as told:
            await load(loader(source, timeout_s=0.2), URL)
        assert told.value.code == "media_unreachable"

    async def test_slow_names(self, source):
        async def addresses(host, port):
            await asyncio.Event().wait()

        source.addresses = addresses
        with pytest.raises(InvalidRequestError, match=r"server\.media\.timeout_s"):
            await load(loader(source, timeout_s=0.05), URL)

    @pytest.mark.parametrize("at_once", [2, 4, 16])
    async def test_the_slow_addresses_of_one_request_leave_places_to_others(self, source, server, at_once):
        server.pages |= {f"/{number}": Page(dripping=True) for number in range(16)}
        common = loader(source, at_once=at_once, timeout_s=600.0)
        slow = asyncio.create_task(load(common, *(f"https://{HOST}/{number}" for number in range(16))))
        async with asyncio.timeout(LIMIT_S):
            while not server.seen:
                await asyncio.sleep(0.01)
            assert await load(common, URL) == [("image/png", PNG)]
        slow.cancel()
        await asyncio.wait({slow})
        assert common.places._value == at_once

    async def test_a_place_is_free_again(self, source, server):
        server.pages["/slow"] = Page(dripping=True)
        common = loader(source, at_once=1, timeout_s=0.3)
        for _ in range(2):
            with pytest.raises(InvalidRequestError):
                await load(common, f"https://{HOST}/slow")
        assert common.places._value == 1


class Place(dict):
    """What a reference stands in; a dict can't be referred to weakly, this can."""


async def told(loading, wanted):
    """Was there an error? As whoever serves the request, who tells it."""
    try:
        await loading.load(wanted)
    except InvalidRequestError:
        return True
    return False


class TestLettingGo:
    """With the last reference, whatever came of it: no collection is needed."""

    @pytest.mark.parametrize("end", ["loaded", "refused", "timed out", "left"])
    async def test_nothing_is_in_a_cycle(self, source, server, end):
        server.pages["/slow"] = Page(dripping=True)
        urls = {"loaded": (URL, URL), "refused": (URL, f"{URL}?no", f"{URL}?nor")}.get(
            end, (URL, f"https://{HOST}/slow")
        )
        loading = loader(source, timeout_s=0.3 if end == "timed out" else 60.0).loading()
        places = [Place(url=url) for url in urls]
        gone = [weakref.ref(place) for place in places]
        gc.disable()
        try:
            wanted = [
                loading.wanted(Reference("messages", place, "url", "url", place["url"]), place["url"], number)
                for number, place in enumerate(places)
            ]
            del places
            doing = asyncio.create_task(told(loading, wanted))
            if end == "left":
                while "/slow" not in server.paths():
                    await asyncio.sleep(0.01)
                doing.cancel()
            await asyncio.wait([doing])
            assert doing.cancelled() if end == "left" else doing.result() == (end != "loaded")
            del doing, wanted, loading
            async with asyncio.timeout(LIMIT_S):
                while any(place() is not None for place in gone):  # a load that was cancelled takes a turn or two
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


class TestFiles:
    """Below the folder, as `host.media.media` reads them."""

    async def test_a_file(self, source, tmp_path):
        (tmp_path / "a b.png").write_bytes(PNG)
        assert await load(loader(source, folder=tmp_path), f"file://{tmp_path}/a%20b.png") == [("image/png", PNG)]

    async def test_outside(self, source, tmp_path):
        folder = tmp_path / "in"
        folder.mkdir()
        (tmp_path / "out.png").write_bytes(PNG)
        (folder / "link.png").symlink_to(tmp_path / "out.png")
        for name in ("../out.png", "%2e%2e/out.png", "..%2Fout.png", "link.png", "../missing.png", "../in"):
            with refused("remote_media_refused", "server.media.folder"):
                await load(loader(source, folder=folder), f"file://{folder}/{name}")
        for path in ("/etc/passwd", "/proc/self/environ", "/dev/zero"):
            with refused("remote_media_refused", "server.media.folder"):
                await load(loader(source, folder=folder), f"file://{path}")

    @pytest.mark.parametrize(
        "address", ["file:///a%00", "file://host/a", "file:a", "file:///a?b", f"file:///{'a' * 5000}"]
    )
    async def test_what_is_no_path(self, source, tmp_path, address):
        with refused("remote_media_refused"):
            await load(loader(source, folder=tmp_path), address)

    async def test_what_is_not_there(self, source, tmp_path):
        with refused("media_unreachable"):
            await load(loader(source, folder=tmp_path), f"file://{tmp_path}/missing.png")

    async def test_no_medium(self, source, tmp_path):
        (tmp_path / "a.png").write_text("secret")
        with refused("media_type_unsupported"):
            await load(loader(source, folder=tmp_path), f"file://{tmp_path}/a.png")

    async def test_too_large(self, source, tmp_path):
        (tmp_path / "a.png").write_bytes(PNG + bytes(2 << 20))
        with refused("media_too_large"):
            await load(loader(source, folder=tmp_path, size_mib=1), f"file://{tmp_path}/a.png")

    @pytest.mark.parametrize(("size_mib", "budget_mib"), [(32, 1024), (1024, 32)])
    async def test_nothing_is_read_before_its_size_is_taken(self, source, tmp_path, size_mib, budget_mib):
        with (tmp_path / "a.png").open("wb") as file:
            file.write(PNG)
            file.truncate(64 << 20)
        bodies = BodyBudget()
        bodies.limit = budget_mib << 20
        tracemalloc.start()
        try:
            with pytest.raises((InvalidRequestError, UnavailableError)):
                await load(
                    loader(source, folder=tmp_path, size_mib=size_mib, bodies=bodies), f"file://{tmp_path}/a.png"
                )
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()

    async def test_one_that_stands_there_twice_counts_twice(self, source, tmp_path):
        (tmp_path / "a.png").write_bytes(PNG + bytes(600_000))
        url = f"file://{tmp_path}/a.png"
        assert len(await load(loader(source, folder=tmp_path, size_mib=1), url)) == 1
        with refused("media_too_large"):
            await load(loader(source, folder=tmp_path, size_mib=1), url, url)

    async def test_https_is_another_matter(self, source, tmp_path):
        with refused("remote_media_refused"):
            await load(loader(source, folder=tmp_path, hosts=()), URL)
