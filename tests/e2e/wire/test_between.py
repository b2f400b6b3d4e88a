"""What operators do between two requests of one connection, and in the middle of one; and many clients at once, who do anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading

import pytest

from tests.e2e.wire.conftest import CHAT, Site, exchange
from tests.e2e.wire.test_as_it_is import DONE, FINISH, JSON, PLAIN, STREAM, WHOLE, goes_on, request, words
from tests.support.counts import times
from tests.support.daemon import Daemon, running, wait_until
from tests.support.wire import PATIENCE_S, SSE_HEAD, Answer, Conn, answers, chunk, handing, ok

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


def subscribe(site: Site) -> None:
    with site.daemon.client(headers={"authorization": f"Bearer {KEYS['boss']}"}) as client:
        with client.stream("GET", "/v1/admin/events") as events:
            next(events.iter_lines())


def add_key(site: Site) -> None:
    (site.daemon.folder / "keys.yaml").write_text(keys_text(*KEYS) + "\n")
    reload(site)


ACTS = {
    "reload": reload,
    "limits": lambda site: reload(site, clients={"guest": {"concurrency": 2}}),
    "no limits": lambda site: reload(site, clients={}),
    "another model loads": lambda site: site.admin("POST", "models/other/load"),
    "another model goes": lambda site: site.admin("POST", "models/other/unload"),
    "pinned": lambda site: site.admin("POST", "models/m/pin", json={"pinned": True}),
    "not pinned": lambda site: site.admin("POST", "models/m/pin", json={"pinned": False}),
    "somebody else pauses": lambda site: site.admin("PUT", "clients/somebody", json={"cooldown_s": 60}),
    "events": subscribe,
    "every view": lambda site: [site.admin("GET", view) for view in ("models", "requests", "usage", "history", "info")],
    "keys": add_key,
}


def of_guest(body: bytes) -> bytes:
    return request(body, b"Authorization: Bearer %s" % KEYS["guest"].encode(), close=False)


async def next_answer(reader: asyncio.StreamReader, data: bytes = b"") -> Answer:
    """The next one on this connection."""
    while True:
        with contextlib.suppress(AssertionError):
            found = answers(data, "POST")
            if found and found[0].whole:
                return found[0]
        came = await reader.read(65536)
        assert came, "the connection was closed"
        data += came


async def plain(conn: Conn) -> None:
    while True:
        _, body = await conn.request()
        if json.loads(body).get("stream"):
            await conn.send(SSE_HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n")
        else:
            await conn.send(ok(WHOLE, JSON))


@pytest.mark.parametrize("act", ACTS)
async def test_between_two_requests(keyed, act):
    async with keyed.scripted(plain), asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
        for body in (PLAIN, STREAM):
            writer.write(of_guest(body))
            before = await next_answer(reader)
            await asyncio.to_thread(ACTS[act], keyed)
            writer.write(of_guest(body))
            after = await next_answer(reader)
            assert (after.status, after.body) == (before.status, before.body)
        writer.close()


@pytest.mark.parametrize("act", ACTS)
async def test_in_the_middle_of_one(keyed, act):
    half, go = asyncio.Event(), asyncio.Event()

    async def script(conn: Conn) -> None:
        while True:
            await conn.request()
            await conn.send(SSE_HEAD + chunk(EVENTS[0]))
            half.set()
            await go.wait()
            await conn.send(b"".join(map(chunk, EVENTS[1:])) + b"0\r\n\r\n")

    async with keyed.scripted(script), asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
        writer.write(of_guest(STREAM))
        await half.wait()
        await asyncio.to_thread(ACTS[act], keyed)
        go.set()
        answer = await next_answer(reader)
        assert (answer.status, answer.body) == (200, b"".join(EVENTS))
        writer.close()
