"""What operators do between two requests of one connection, and in the middle of one; and many clients at once, who do anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.e2e.wire.conftest import CHAT, Site, exchange
from tests.e2e.wire.test_as_it_is import DONE, FINISH, JSON, PLAIN, STREAM, WHOLE, request, words
from tests.support.counts import times
from tests.support.daemon import running
from tests.support.upgraded import Upgraded
from tests.support.wire import PATIENCE_S, SSE_HEAD, Answer, Conn, Script, answers, chunk, handed, handing, ok

KEYS = {name: f"sk-llmux-wire-{name}-0123456789" for name in ("boss", "guest")}
EVENTS = [*words(3), FINISH, DONE]


def keys_text(*names: str) -> str:
    return "".join(f"- {{name: {name}, key: {KEYS[name]}, scopes: [inference, admin]}}\n" for name in names)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory) -> Site:
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys.yaml").write_text(keys_text(*KEYS))
    models = {name: handing(folder / "worker.socket", endpoints=[CHAT]) for name in ("m", "other")}
    config = {"models": models, "server": {"api_keys": str(folder / "keys.yaml")}, "limits": {"keepalive_s": 60}}
    with running(folder, config) as daemon:
        yield Site(daemon, folder / "worker.socket", KEYS["boss"])


def reload(site: Site, **section: object) -> None:
    """With another configuration each time."""
    config = site.daemon.config
    config["models"]["m"]["drain_s"] = config["models"]["m"].get("drain_s", 5) + 1
    site.daemon.config_path.write_text(json.dumps(config | section))
    site.admin("POST", "reload")


def follow(path: str) -> Callable[[Site], ExitStack]:
    """Somebody reads these events from now on."""

    def act(site: Site) -> ExitStack:
        stack = ExitStack()
        client = stack.enter_context(site.daemon.client(headers={"authorization": f"Bearer {KEYS['boss']}"}))
        next(stack.enter_context(client.stream("GET", path)).iter_lines())
        return stack

    return act


def override(site: Site, model: str) -> None:
    """Another size each time, which counts from the next load on; of one that replaces the worker see tests/e2e/admin/test_models.py."""
    before = site.model(model)["overrides"].get("vram_mib", 10)
    site.admin("POST", f"models/{model}/load", json={"overrides": {"vram_mib": before + 1}})


def done_with(open_still: object) -> None:
    if isinstance(open_still, ExitStack):
        open_still.close()


def add_key(site: Site) -> None:
    (site.daemon.folder / "keys.yaml").write_text(keys_text(*KEYS) + "\n")
    reload(site)


ACTS = {
    "reload": reload,
    "limits": lambda site: reload(site, clients={"guest": {"concurrency": 2}}),
    "no limits": lambda site: reload(site, clients={}),
    "another model loads": lambda site: site.admin("POST", "models/other/load"),
    "override": lambda site: override(site, "m"),
    "override of another model": lambda site: override(site, "other"),
    "another model goes": lambda site: site.admin("POST", "models/other/unload"),
    "pinned": lambda site: site.admin("POST", "models/m/pin", json={"pin": True}),
    "not pinned": lambda site: site.admin("POST", "models/m/pin", json={"pin": False}),
    "events": follow("/v1/admin/events"),
    "recording": follow("/v1/admin/recording"),
    "no fallback to remote models": lambda site: site.call("PUT", "/api/v1/config", json={"allowCloudFallback": False}),
    "flush": lambda site: site.call("POST", "/v1/cache/flush", json={"scope": "all"}),
    "every view": lambda site: [site.admin("GET", view) for view in ("models", "requests", "usage", "history", "info")],
    "keys": add_key,
}


def of_guest(body: bytes) -> bytes:
    return request(body, b"Authorization: Bearer %s" % KEYS["guest"].encode(), close=False)


async def next_answer(reader: asyncio.StreamReader) -> Answer:
    """The next one on this connection."""
    data = b""
    while not ((found := parsed(data, 1)) and found[0].whole):
        data += (came := await reader.read(65536))
        assert came, "the connection was closed"
    return found[0]


async def answered(conn: Conn) -> None:
    while True:
        _, body = await conn.request()
        if json.loads(body).get("stream"):
            await conn.send(SSE_HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n")
        else:
            await conn.send(ok(WHOLE, JSON))


def in_two(events: list[bytes], half: asyncio.Event, go: asyncio.Event) -> Script:
    """Answers whole requests at once, and streams up to their second event; the rest once it may `go` on."""

    async def script(conn: Conn) -> None:
        while True:
            _, body = await conn.request()
            if not json.loads(body).get("stream"):
                await conn.send(ok(WHOLE, JSON))
                continue
            await conn.send(SSE_HEAD + b"".join(map(chunk, events[:2])))
            half.set()
            await go.wait()
            await conn.send(b"".join(map(chunk, events[2:])) + b"0\r\n\r\n")

    return script


@pytest.mark.parametrize("act", ACTS)
async def test_between_two_requests(keyed, act):
    async with keyed.scripted(answered), asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
        for body in (PLAIN, STREAM):
            writer.write(of_guest(body))
            before = await next_answer(reader)
            open_still = await asyncio.to_thread(ACTS[act], keyed)
            writer.write(of_guest(body))
            after = await next_answer(reader)
            assert (after.status, after.body) == (before.status, before.body)
            done_with(open_still)
        writer.close()


@pytest.mark.parametrize("act", ACTS)
async def test_in_the_middle_of_one(keyed, act):
    half, go = asyncio.Event(), asyncio.Event()
    async with keyed.scripted(in_two(EVENTS, half, go)), asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
        writer.write(of_guest(STREAM))
        await half.wait()
        open_still = await asyncio.to_thread(ACTS[act], keyed)
        go.set()
        answer = await next_answer(reader)
        assert (answer.status, answer.body) == (200, b"".join(EVENTS))
        writer.close()
        done_with(open_still)


async def test_a_key_that_goes(keyed):
    """What it began ends as it would have, and the next request of its connection is refused."""
    half, go = asyncio.Event(), asyncio.Event()
    async with keyed.scripted(in_two(EVENTS, half, go)), asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
        writer.write(of_guest(STREAM))
        await half.wait()
        keys = keyed.daemon.folder / "keys.yaml"
        keys.write_text(keys_text("boss"))
        await asyncio.to_thread(reload, keyed)
        go.set()
        assert (await next_answer(reader)).body == b"".join(EVENTS)
        writer.write(of_guest(PLAIN))
        assert (await next_answer(reader)).status == 401
        keys.write_text(keys_text(*KEYS))
        await asyncio.to_thread(reload, keyed)
        writer.close()


async def test_a_pause(keyed):
    """Of the same client: only what comes after it is refused, on the same connection."""
    async with keyed.scripted(answered), asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
        for pause_s, status in ((0, 200), (60, 429), (0, 200)):
            writer.write(of_guest(PLAIN))
            assert (await next_answer(reader)).status == 200
            await asyncio.to_thread(keyed.admin, "PUT", "clients/guest", json={"cooldown_s": pause_s})
            writer.write(of_guest(STREAM))
            assert (await next_answer(reader)).status == status
            await asyncio.to_thread(keyed.admin, "PUT", "clients/guest", json={"cooldown_s": 0})
        writer.close()


async def test_an_upgrade(tmp_path):
    """What runs ends as it would have, its connection goes on, and so does the worker."""
    half, go = asyncio.Event(), asyncio.Event()
    socket = tmp_path / "worker.socket"
    daemon = Upgraded(tmp_path, {"models": {"m": handing(socket, endpoints=[CHAT])}})
    daemon.start()
    try:
        async with handed(socket, in_two(EVENTS, half, go)), asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
            writer.write(request(STREAM, close=False))
            await half.wait()
            worker = await asyncio.to_thread(daemon.model, "m")
            await asyncio.to_thread(daemon.upgrade)
            go.set()
            assert (await next_answer(reader)).body == b"".join(EVENTS)
            writer.write(request(PLAIN, close=False))
            assert (await next_answer(reader)).body == WHOLE
            writer.close()
            (answer,) = answers(await exchange(daemon.port, request(PLAIN)), "POST")
            assert (answer.status, answer.body) == (200, WHOLE)
            after = await asyncio.to_thread(daemon.model, "m")
            assert after["worker"]["pid"] == worker["worker"]["pid"]
    finally:
        await asyncio.to_thread(daemon.end)


class TestManyAtOnce:
    """Clients on their own connections, from a seed: whole, streamed, one after the other, before the answer to the last one, or
    leaving in the middle. Each answer is the one to its own request.
    """

    @pytest.mark.parametrize("seed", range(times(2, 40)))
    async def test_each_gets_its_own(self, site, seed):
        async def script(conn: Conn) -> None:
            drawn = random.Random()
            while True:
                asked = json.loads((await conn.request())[1])
                word = b"answer %d" % asked["seed"]
                if asked["stream"]:
                    said = [words(1)[0].replace(b'"0"', b'"%s"' % word), FINISH, DONE]
                    await conn.send(SSE_HEAD)
                    for each in said:
                        await asyncio.sleep(drawn.random() / 100)
                        await conn.send(chunk(each))
                    await conn.send(b"0\r\n\r\n")
                else:
                    await asyncio.sleep(drawn.random() / 100)
                    await conn.send(ok(WHOLE.replace(b"hi", word), JSON))

        async with site.scripted(script), asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as clients:
            for number in range(12):
                clients.create_task(self.client(site.port, random.Random(f"{seed} {number}"), number * 1000))

    async def client(self, port: int, drawn: random.Random, first: int) -> None:
        reader = writer = None
        for number in range(first, first + 20):
            if writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            asked = [(number * 10 + part, drawn.random() < 0.5) for part in range(drawn.choice([1, 1, 3]))]
            leaves = drawn.random() < 0.15
            for name, streams in asked:
                body = json.dumps({"model": "m", "messages": [], "seed": name, "stream": streams}).encode()
                ask = request(body, close=False)
                cut = drawn.randrange(len(ask))
                writer.write(ask[:cut])
                await asyncio.sleep(drawn.random() / 200)
                writer.write(ask[cut:])
            if leaves:
                await reader.read(drawn.choice([1, 300, 600]))
                writer.close()
                writer = None
                continue
            data = b""
            while len(found := parsed(data, len(asked))) < len(asked) or not found[-1].whole:
                data += (came := await reader.read(65536))
                assert came
            for answer, (name, streams) in zip(found, asked, strict=True):
                assert (answer.status, b'answer %d"' % name in answer.body) == (200, True)
                assert (b"[DONE]" in answer.body) == streams
        if writer is not None:
            writer.close()


def parsed(data: bytes, count: int) -> list[Answer]:
    """Those that are there so far."""
    with contextlib.suppress(AssertionError):
        return answers(data, *["POST"] * count)
    return []
