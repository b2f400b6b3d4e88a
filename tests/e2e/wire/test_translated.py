"""Ways on which the daemon changes what passes: a worker or a client that goes, cuts of any kind, and what operators do meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass

import pytest

from tests.e2e.wire.conftest import Site, exchange
from tests.e2e.wire.test_as_it_is import DONE, FINISH, JSON, WHOLE, request, words
from tests.e2e.wire.test_between import ACTS, KEYS, done_with, in_two, keyed, next_answer  # noqa: F401  # a fixture
from tests.e2e.wire.test_phases import BROKEN, broken, broken_streams, goes_on
from tests.support.wire import PATIENCE_S, SSE_HEAD, Conn, answers, chunk, ok

EVENTS = [*words(3), FINISH, DONE]


@dataclass(frozen=True)
class Way:
    """How a client asks, and how it is told: `text` is the second word of a stream."""

    path: str
    prompt: str
    body: dict[str, object]
    text: bytes
    done: bytes
    error: bytes
    called: str = ""  # what its names of models begin with

    def asks(
        self, *fields: bytes, stream: bool, close: bool = True, text: str = "Hi", model: str = "m", **more: object
    ) -> bytes:
        said = text if self.prompt == "input" else [{"role": "user", "content": text}]
        body = {"model": self.called + model, "stream": stream, self.prompt: said, **self.body, **more}
        return request(json.dumps(body).encode(), *fields, path=self.path, close=close)


WAYS = {
    "Anthropic": Way(
        "/v1/messages",
        "messages",
        {"max_tokens": 9},
        b'"text":"1"',
        b"event: message_stop",
        b"event: error",
    ),
    "Ollama": Way("/api/chat", "messages", {}, b'"content":"1"', b'"done":true', b'{"error":'),
    "responses": Way("/v1/responses", "input", {}, b'"delta":"1"', b"event: response.completed", b"event: error"),
}
OWN = re.compile(rb'"(?:id|item_id|created_at|completed_at|[a-z_]+_duration|[a-z_]+_ms)": ?(?:"[^"]*"|[0-9.]+)')
"""What differs in two equal answers."""


def plain(answer: bytes) -> bytes:
    return OWN.sub(b"", answer)


def saying(*pieces: bytes):
    async def script(conn: Conn) -> None:
        while True:
            await conn.request()
            for piece in pieces:
                await conn.send(piece)

    return script


@pytest.mark.parametrize("name", WAYS)
class TestCuts:
    """It is told in the same way, wherever its worker's bytes were cut."""

    async def told(self, site: Site, name: str, *pieces: bytes, stream: bool) -> bytes:
        async with site.scripted(saying(*pieces)):
            (answer,) = answers(await exchange(site.port, WAYS[name].asks(stream=stream)), "POST")
        assert (answer.status, answer.whole) == (200, True)
        return plain(answer.body)

    async def test_of_a_stream(self, site, name):
        whole = await self.told(site, name, SSE_HEAD + chunk(b"".join(EVENTS)) + b"0\r\n\r\n", stream=True)
        assert (WAYS[name].text in whole, WAYS[name].done in whole) == (True, True)
        cut = [chunk(bytes([byte])) for byte in b"".join(EVENTS)]
        assert await self.told(site, name, SSE_HEAD, *cut, b"0\r\n\r\n", stream=True) == whole

    async def test_of_the_whole(self, site, name):
        whole = await self.told(site, name, ok(WHOLE, JSON), stream=False)
        assert b'"hi"' in whole
        cut = [bytes([byte]) for byte in ok(WHOLE, JSON)]
        assert await self.told(site, name, *cut, stream=False) == whole


@pytest.mark.parametrize("name", WAYS)
class TestTheWorkerGoes:
    """It is told in the words of the client's API, and never looks like an end."""

    @pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
    @pytest.mark.parametrize("phase", BROKEN)
    async def test_whole(self, site, name, phase, resets):
        pieces, reads = BROKEN[phase]
        async with site.scripted(broken(pieces, reads=reads, resets=resets)):
            (answer,) = answers(await exchange(site.port, WAYS[name].asks(stream=False)), "POST")
        assert answer.status in {502, 503}
        assert (answer.whole, b'"error":' in answer.body) == (True, True)
        await goes_on(site)

    async def test_streams(self, site, name):
        way = WAYS[name]
        async for case, answer in broken_streams(site, lambda text: way.asks(stream=True, text=text)):
            assert way.done not in answer.body, case
            if answer.status == 200:
                assert answer.body.count(way.error) == 1, case
            else:
                assert answer.status in {502, 503}, case


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", WAYS)
async def test_an_act_in_the_middle(keyed, name, act):  # noqa: F811
    half, go = asyncio.Event(), asyncio.Event()
    fields = b"Authorization: Bearer %s" % KEYS["guest"].encode()
    async with keyed.scripted(in_two(EVENTS, half, go)), asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
        for _ in range(2):
            writer.write(WAYS[name].asks(fields, stream=True, close=False))
            await half.wait()
            if not go.is_set():
                open_still = await asyncio.to_thread(ACTS[act], keyed)
            go.set()
            answer = await next_answer(reader)
            assert (answer.status, WAYS[name].text in answer.body) == (200, True)
            assert answer.body.count(WAYS[name].done) == 1
            assert WAYS[name].error not in answer.body
        writer.close()
    done_with(open_still)
