"""What llmux promises of every exchange, whether its answer passes as it is or is changed on its way, whole or as a stream.

A row of the table is one test. What becomes of an answer whose worker goes stands in test_phases.py and test_translated.py,
what several filters make of one in test_filter_order.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import json
import os
import random
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.wire.conftest import CHAT, GATE, SOCKET, Site, configuration, exchange
from tests.e2e.wire.test_as_it_is import DONE, FINISH, JSON, WHOLE, words
from tests.e2e.wire.test_translated import WAYS, Way
from tests.support.upgraded import Upgraded
from tests.support.wire import PATIENCE_S, SSE_HEAD, Answer, Conn, answers, chunk, ok

AS_IT_IS = Way(CHAT, "messages", {}, b'"content":"1"', DONE, b'data: {"error":{')
ALL_WAYS = {"as it is": AS_IT_IS, "renamed": replace(AS_IT_IS, called="called-"), **WAYS}
LARGE = random.Random(2).randbytes(1 << 20).hex()  # a body that goes to disk while it waits

streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
ways = pytest.mark.parametrize("way", ALL_WAYS.values(), ids=ALL_WAYS)
some_ways = pytest.mark.parametrize("way", [*ALL_WAYS.values()][:3], ids=[*ALL_WAYS][:3])


def named(answer: bytes, model: str) -> bytes:
    """Each of the JSON objects in it names this model."""
    return answer.replace(b'{"id":"1"', b'{"model":"%s","id":"1"' % model.encode())


def told(body: bytes) -> list[bytes]:
    """A worker's answer to this request, in pieces."""
    asked = json.loads(body)
    model = asked["model"].removeprefix("called-")
    if not asked.get("stream"):
        return [ok(named(WHOLE, model), JSON)]
    events = [chunk(named(event, model)) for event in (*words(3), FINISH, DONE)]
    return [SSE_HEAD, *events, b"0\r\n\r\n"]


def check(answer: Answer, way: Way, *, stream: bool) -> None:
    """It is all of what `told` says, in the way of its client."""
    assert (answer.status, answer.whole) == (200, True), answer
    if stream:
        assert (answer.body.count(way.text), answer.body.count(way.done)) == (1, 1)
    else:
        assert b'"hi"' in answer.body
    assert way.error not in answer.body
    assert (b'"model":"called-' in answer.body) == bool(way.called)


async def when(condition: Callable[[], object]) -> None:
    """Until it is true: it may ask the daemon."""
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.01)


def requests(site: Site) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = site.admin("GET", "requests")["data"]
    return found


def kept_bytes(site: Site) -> dict[str, float]:
    """What is kept of requests' bodies, by where."""
    lines = site.daemon.get("/metrics").text.splitlines()
    found = (
        line.removeprefix('llmux_body_bytes{where="').split('"} ') for line in lines if "llmux_body_bytes{" in line
    )
    return {where: float(size) for where, size in found}


def is_quiet(site: Site) -> bool:
    """No request is in flight or waits, nobody has anything reserved, and no body is kept."""
    views = site.admin("GET", "models")["data"]
    return (
        not requests(site)
        and not any(view["in_flight"] or view["queued"] for view in views)
        and not any(view["memory"]["lease_mib"] for view in views if view["state"] == "stopped")
        and kept_bytes(site) == {"memory": 0, "disk": 0}
    )


# ------------------------------------------------------------------------------------------------------ the client leaves

LEFT_AT = [
    "its body arrives",
    "it waits in the queue",
    "its model loads",
    "the first byte",
    "the middle",
    "the last piece",
]
EXTENSION_FIELDS = {
    ("the first byte", False): [],
    ("the first byte", True): [],
    ("the middle", False): [ok(WHOLE, JSON)[:-9]],
    ("the middle", True): [SSE_HEAD, *map(chunk, words(3))],
    ("the last piece", False): [ok(WHOLE, JSON)[:-1]],
    ("the last piece", True): [SSE_HEAD, *map(chunk, [*words(3), FINISH, DONE])],
}


@ways
@streams
@pytest.mark.parametrize("at", LEFT_AT)
async def test_the_client_leaves(site: Site, at: str, stream: bool, way: Way) -> None:
    """Its worker's connection is closed where it has one, nothing of it is left, and others go on."""
    reached, closed, go = (asyncio.Event() for _ in range(3))
    seen: list[bytes] = []

    async def script(conn: Conn) -> None:
        while True:
            _, body = await conn.request()
            seen.append(body)
            if b"who leaves" in body:
                for piece in EXTENSION_FIELDS[at, stream]:
                    await conn.send(piece)
                reached.set()
                await conn.closed()
                closed.set()
                return
            if b"who is first" in body:
                await go.wait()
            for piece in told(body):
                await conn.send(piece)

    model = {"it waits in the queue": "one", "its model loads": "gated"}.get(at, "m")
    leaver = "who leaves" + 100_000 * "."  # so much is counted
    gate = site.daemon.folder / GATE
    async with site.scripted(script), asyncio.timeout(PATIENCE_S):
        for resets in (False, True):
            for event in (reached, closed, go):
                event.clear()
            ask = partial(way.asks, stream=stream, model=model)
            before = len(seen)
            first = None
            if model == "one":
                first = asyncio.create_task(exchange(site.port, ask(text="who is first")))
                await when(lambda: len(seen) == before + 1)
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
            if at == "its body arrives":
                writer.write(ask(b"Expect: 100-continue", text=leaver, close=False)[:-9])
                await reader.readuntil(b"100 Continue\r\n\r\n")
            else:
                writer.write(ask(text=leaver, close=False))
            if model == "one":
                await when(lambda: site.model("one")["queued"] == 1)
            elif model == "gated":
                await when(lambda: site.model("gated")["state"] == "starting")
            elif at != "its body arrives":
                await reached.wait()
                if stream and EXTENSION_FIELDS[at, stream]:
                    await reader.readuntil(way.text)
            if resets:
                writer.transport.abort()
            writer.close()
            if reached.is_set():
                await closed.wait()
            if first is not None:
                await when(lambda: site.model("one")["queued"] == 0)
                go.set()
                check(answers(await first, "POST")[0], way, stream=stream)
            await when(lambda: is_quiet(site))
            assert reached.is_set() == any(b"who leaves" in body for body in seen[before:])
            gate.touch()
            (answer,) = answers(await exchange(site.port, ask(text="who is next")), "POST")
            check(answer, way, stream=stream)
            gate.unlink()
            if model == "gated":
                await asyncio.to_thread(site.admin, "POST", "models/gated/unload", params={"force": "true"})


# -------------------------------------------------------------------------------------------------------- who has to wait


class Uncollected(Upgraded):
    """What a request holds must go with its last reference. See tests/support/faulty_daemon.py."""

    program = ("-m", "tests.support.faulty_daemon", "uncollected")
    by_exec = True

    def files(self) -> list[str]:
        """The bodies that it, its predecessors and its successor have on disk."""
        assert self.process is not None
        found = []
        for pid in {self.process.pid, *self.successors()}:
            with contextlib.suppress(OSError):
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        found.append(str(descriptor.readlink()))
        return [path for path in found if path.startswith(str(self.state_dir)) and path.endswith(" (deleted)")]


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Streams that wait get a keep-alive soon."""
    folder = tmp_path_factory.mktemp("waited")
    config = configuration(folder, keepalive_s=0.2)
    config["limits"] |= {"crash_limit": 1000, "backoff_max_s": 0.1}
    daemon = Uncollected(folder, config, {"GARBAGE_REPORTS": str(folder)})
    try:
        daemon.start()
        yield Site(daemon, folder / SOCKET)
    finally:
        daemon.end()


class Busy:
    """A script whose worker answers the first request once it may `go` on, and the others, which wait for that, by `script`."""

    def __init__(self, script: Callable[[Conn, bytes], Awaitable[bool]]) -> None:
        self.go = asyncio.Event()
        self._taken = asyncio.Event()
        self._script = script
        self._first: asyncio.Task[bytes]

    async def __call__(self, conn: Conn) -> None:
        while True:
            _, body = await conn.request()
            if b"who is first" in body:
                self._taken.set()
                await self.go.wait()
                await conn.send(ok(WHOLE, JSON, b"Connection: close"))
                return
            if not await self._script(conn, body):
                return

    async def begin(self, site: Site) -> None:
        ask = AS_IT_IS.asks(stream=False, model="one", text="who is first")
        self._first = asyncio.create_task(exchange(site.port, ask))
        await self._taken.wait()

    async def end(self) -> None:
        """The first one has its answer."""
        self.go.set()
        assert answers(await self._first, "POST")[0].status == 200


async def nothing_else(site: Site, busy: Busy) -> None:
    await busy.end()


def is_refused_at(port: int) -> bool:
    with socket.socket() as trying:
        return trying.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


async def another_worker(site: Site, busy: Busy) -> None:
    """The worker takes no connection any more when the request gets to it, and has ended soon."""
    worker = (await asyncio.to_thread(site.model, "one"))["worker"]
    os.kill(worker["pid"], signal.SIGUSR1)
    await when(partial(is_refused_at, worker["port"]))
    await busy.end()
    await when(lambda: [each["state"] for each in requests(site)] == ["running"])
    os.kill(worker["pid"], signal.SIGKILL)


async def successor(site: Site, busy: Busy) -> None:
    assert isinstance(site.daemon, Upgraded)
    await asyncio.to_thread(site.daemon.upgrade)
    await busy.end()


REACHED_BY = {
    "its worker": nothing_else,
    "another worker": another_worker,
    "a ladder": nothing_else,
    "a successor": successor,
}
TOO_LONG = b'{"error":{"message":"the prompt is too long for me","code":"context_length_exceeded"}}'


@some_ways
@streams
@pytest.mark.parametrize("by", REACHED_BY)
async def test_a_body_on_disk(waited: Site, by: str, stream: bool, way: Way) -> None:
    """It reaches whoever answers as a whole, and is let go of once, with no help of a collector."""
    daemon = waited.daemon
    assert isinstance(daemon, Uncollected)
    got: list[str] = []
    kept: list[float] = []
    refused = 1 if by == "a ladder" else 0

    async def script(conn: Conn, body: bytes) -> bool:
        got.append(json.loads(body)["messages"][0]["content"])
        kept.append(sum((await asyncio.to_thread(kept_bytes, waited)).values()))
        refusal = ok(TOO_LONG, JSON).replace(b"200 OK", b"400 Bad Request", 1)
        for piece in [refusal] if len(got) <= refused else told(body):
            await conn.send(piece)
        return True

    busy = Busy(script)
    model, names = ("falls", replace(way, called=f"task:{way.called}")) if refused else ("one", way)
    async with waited.scripted(busy), asyncio.timeout(PATIENCE_S):
        await busy.begin(waited)
        asked = asyncio.create_task(exchange(waited.port, names.asks(stream=stream, model=model, text=LARGE)))
        size = len(LARGE) + 1000
        in_memory = refused * size  # as it came: a task's next candidate may need it
        await when(lambda: kept_bytes(waited)["disk"] > len(LARGE) and kept_bytes(waited)["memory"] <= in_memory)
        assert daemon.files()
        await REACHED_BY[by](waited, busy)
        (answer,) = answers(await asked, "POST")
        assert (answer.status, answer.whole, way.error in answer.body) == (200, True, False), answer
        assert (way.done if stream else b'"hi"') in answer.body
        assert got == [LARGE] * (1 + refused)
        assert max(kept) <= 2 * size, "as it came, and as it is sent"
        await when(lambda: is_quiet(waited))
        await when(lambda: not daemon.files())


async def refuses(conn: Conn, body: bytes) -> bool:
    await conn.send(ok(b'{"error":"no such voice"}', JSON).replace(b"200 OK", b"404 Not Found", 1))
    return True


async def is_cut(conn: Conn, body: bytes) -> bool:
    return False


async def is_cut_later(conn: Conn, body: bytes) -> bool:
    said = b"".join(told(body))
    await conn.send(said[: len(said) // 2])
    return False


@ways
@streams
@pytest.mark.parametrize(
    ("after", "fails"),
    [(nothing_else, refuses), (nothing_else, is_cut), (nothing_else, is_cut_later), (successor, refuses)],
    ids=["refused", "cut before its answer", "cut in its answer", "refused after a successor took over"],
)
async def test_a_failure_after_a_wait(
    waited: Site,
    after: Callable[[Site, Busy], Awaitable[None]],
    fails: Callable[[Conn, bytes], Awaitable[bool]],
    stream: bool,
    way: Way,
) -> None:
    """A stream has begun with keep-alives: its one head is sent, and the failure is told within it, once."""
    busy = Busy(fails)
    keepalive = b'"done":false}\n' if way is WAYS["Ollama"] else b": keepalive\n\n"
    async with waited.scripted(busy), asyncio.timeout(PATIENCE_S):
        await busy.begin(waited)
        reader, writer = await asyncio.open_connection("127.0.0.1", waited.port)
        writer.write(way.asks(stream=stream, model="one"))
        await when(lambda: waited.model("one")["queued"] == 1)
        data = await reader.readuntil(keepalive) if stream else b""
        await after(waited, busy)
        data += await reader.read(-1)
        writer.close()
        await when(lambda: is_quiet(waited))
    (answer,) = answers(data, "POST")
    if stream:
        assert (answer.status, answer.whole, answer.body.count(way.error)) == (200, True, 1), answer
        assert answer.body.startswith(keepalive) or way is WAYS["Ollama"]
        assert (way.done in answer.body, b"HTTP/1.1" in answer.body) == (False, False)
    else:
        assert answer.status == (404 if fails is refuses else 502) or not answer.whole
    assert (b"no such voice" in answer.body) == (fails is refuses)


# --------------------------------------------------------------------------------------------------- what is no usual answer


async def answered(site: Site, way: Way, said: bytes, *, stream: bool) -> Answer:
    """What the client gets of a worker that says this."""
    seen = []

    async def script(conn: Conn) -> None:
        while True:
            seen.append(await conn.request())
            await conn.send(said)

    async with site.scripted(script):
        (answer,) = answers(await exchange(site.port, way.asks(stream=stream)), "POST")
    assert len(seen) == 1
    return answer


@ways
@streams
@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_an_answer_without_a_body(site: Site, status: bytes, stream: bool, way: Way) -> None:
    """It passes, or is no answer where another is to be made of it. Of HEAD see test_as_it_is.py."""
    said = b"HTTP/1.1 %s\r\nX-Own: 1\r\nContent-Length: 9\r\n\r\n" % status
    answer = await answered(site, way, said, stream=stream)
    if way in WAYS.values():
        assert (answer.status, answer.whole) == (502, True)
        assert message_of(way, answer)
    else:
        assert (answer.status, answer.body, answer.header("content-length")) == (int(status[:3]), b"", [])
        assert answer.header("x-own") == ["1"]


def message_of(way: Way, answer: Answer) -> str:
    """Of an error in the form of its client's API."""
    document = json.loads(answer.body)
    if way is WAYS["Ollama"]:
        message = document.pop("error")
        assert document.keys() <= {"code", "param", "type"}
    elif way is WAYS["Anthropic"]:
        assert document["type"] == "error"
        message = document["error"]["message"]
        assert document["error"]["type"].endswith("_error")
    else:
        message = document["error"]["message"]
        assert document["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(message, str)
    return message


REFUSALS = {
    "words": (b"text/plain", b"no such voice"),
    "a text": (b"application/json", b'{"error":"no such voice"}'),
    "a list": (b"application/json", b'{"detail":[{"loc":["voice"],"msg":"no such voice"}]}'),
    "OpenAI's": (
        b"application/json",
        b'{"error":{"message":"no such voice","type":"t_error","param":null,"code":"c"}}',
    ),
}


@ways
@streams
@pytest.mark.parametrize("form", REFUSALS)
async def test_a_refusal(site: Site, form: str, stream: bool, way: Way) -> None:
    """It has the worker's status and words, in the form of the client's API."""
    kind, body = REFUSALS[form]
    said = ok(body, b"Content-Type: " + kind).replace(b"200 OK", b"404 Not Found", 1)
    answer = await answered(site, way, said, stream=stream)
    assert (answer.status, answer.whole, answer.header("content-type")) == (404, True, ["application/json"])
    assert message_of(way, answer).endswith("no such voice")


@ways
@streams
async def test_a_compressed_refusal(site: Site, stream: bool, way: Way) -> None:
    """It passes as it is."""
    body = gzip.compress(b'{"error":"no such voice"}')
    said = ok(body, JSON, b"Content-Encoding: gzip").replace(b"200 OK", b"404 Not Found", 1)
    answer = await answered(site, way, said, stream=stream)
    assert (answer.status, answer.body, answer.header("content-encoding")) == (404, body, ["gzip"])


FULL = ok(b'{"error":{"message":"full","type":"server_error","param":null,"code":"queue_full"}}', JSON).replace(
    b"200 OK", b"503 Service Unavailable", 1
)
"""In words of ours, which a worker may say as well."""


@ways
@streams
@pytest.mark.parametrize("model", ["m", "falls"], ids=["a model", "a task"])
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 20", SSE_HEAD + chunk(words(1)[0]), ok(WHOLE, JSON)[:-9], FULL])
async def test_is_sent_once(site: Site, said: bytes, model: str, stream: bool, way: Way) -> None:
    """What a worker has read goes to no other, whether it has said anything or not."""
    seen = []

    async def script(conn: Conn) -> None:
        seen.append((await conn.request())[1])
        await conn.send(said)

    way = replace(way, called="task:" + way.called) if model == "falls" else way
    async with site.scripted(script):
        (answer,) = answers(await exchange(site.port, way.asks(stream=stream, model=model)), "POST")
        await when(lambda: is_quiet(site))
    assert (len(seen), way.done in answer.body) == (1, False)
    assert answer.status != 200 or way.error in answer.body or not answer.whole
