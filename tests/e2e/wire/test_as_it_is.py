"""What a client sends reaches the worker, and what the worker says reaches the client, as without a daemon between them."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.wire.conftest import CHAT, OWN, exchange
from tests.support.wire import SSE_HEAD, Conn, answers, chunk, ok

MESSAGE = {"model": "m", "messages": [{"role": "user", "content": "Grüße, 世界 \\ud83d"}]}
PLAIN = json.dumps(MESSAGE).encode()
STREAM = json.dumps({**MESSAGE, "stream": True}).encode()
WHOLE = b'{"id":"1","object":"chat.completion","choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":"hi"}}]}'
FINISH = (
    b'data: {"id":"1","object":"chat.completion.chunk","choices":[{"index":0,"finish_reason":"stop","delta":{}}]}\n\n'
)
DONE = b"data: [DONE]\n\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
JSON = b"Content-Type: application/json"


def words(count: int) -> list[bytes]:
    return [
        b'data: {"id":"1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n'
        % number
        for number in range(count)
    ]


ANSWERS = {
    "a length": [ok(WHOLE, JSON)],
    "a length, byte by byte": [bytes([byte]) for byte in ok(WHOLE, JSON)],
    "nothing": [ok(b"", JSON)],
    "chunks": [CHUNKED, chunk(WHOLE[:9]), chunk(WHOLE[9:]), b"0\r\n\r\n"],
    "chunks in one piece": [CHUNKED + b"".join(chunk(bytes([byte])) for byte in WHOLE) + b"0\r\n\r\n"],
    "chunks with extensions": [CHUNKED, b"%x;a=b;c\r\n%s\r\n" % (len(WHOLE), WHOLE), b"0;last\r\n\r\n"],
    "chunks with trailers": [CHUNKED, chunk(WHOLE), b"0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n"],
    "until it closes": [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n", WHOLE, None],
    "HTTP/1.0": [b"HTTP/1.0 200 Fine\r\nContent-Type: application/json\r\n\r\n", WHOLE, None],
    "HTTP/1.0 with a length": [ok(WHOLE, JSON).replace(b"HTTP/1.1", b"HTTP/1.0", 1), None],
    "it closes after it": [ok(WHOLE, JSON, b"Connection: close"), None],
    "interim answers": [b"HTTP/1.1 102 Processing\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n", ok(WHOLE, JSON)],
    "an unasked 100": [b"HTTP/1.1 100 Continue\r\n\r\n" + ok(WHOLE, JSON)],
    "no content": [b"HTTP/1.1 204 No Content\r\nX-Own: 1\r\n\r\n"],
    "not modified": [b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\nContent-Length: 99\r\n\r\n'],
    "created": [ok(WHOLE, JSON, b"Location: /x").replace(b"200 OK", b"201 Created", 1)],
    "odd headers": [
        ok(WHOLE, JSON, b"Set-Cookie: a=1", b"Set-Cookie: b=2", b"x-lower: 1", b"X-UPPER:2", b"X-Empty:", b"X-Space:   a  b  ",
           b"X-Latin: \xe9\xff", b"X-Long: " + b"l" * 4000)
    ],
    "another type": [ok(bytes(range(256)) * 100, b"Content-Type: application/x-anything")],
    "no type": [ok(WHOLE)],
    "a megabyte": [ok(b"m" * (1 << 20), b"Content-Type: text/plain")],
}  # fmt: skip
STREAMS = {
    "events": [SSE_HEAD, *map(chunk, [*words(3), FINISH, DONE]), b"0\r\n\r\n"],
    "in one chunk": [SSE_HEAD + chunk(b"".join([*words(3), FINISH, DONE])) + b"0\r\n\r\n"],
    "cut anywhere": [SSE_HEAD, *(chunk(bytes([byte])) for byte in b"".join([*words(2), FINISH, DONE])), b"0\r\n\r\n"],
    "comments and other fields": [
        SSE_HEAD, *map(chunk, [b": ping\n\n", b"event: x\nid: 7\nretry: 5\n" + words(1)[0], FINISH, DONE]), b"0\r\n\r\n"
    ],
    "carriage returns": [SSE_HEAD, *(chunk(each.replace(b"\n", b"\r\n")) for each in [*words(2), FINISH, DONE]), b"0\r\n\r\n"],
    "without chunks": [SSE_HEAD.replace(b"Transfer-Encoding: chunked\r\n", b""), *words(2), FINISH, DONE, None],
    "a large event": [
        SSE_HEAD, chunk(words(1)[0].replace(b'"0"', b'"%s"' % (b"x" * 500_000))), chunk(FINISH), chunk(DONE), b"0\r\n\r\n"
    ],
}  # fmt: skip
KEPT = re.compile(r"(?i)connection|keep-alive|transfer-encoding|trailer|content-length|date|server")
"""Fields of one connection, and those that each server has of its own."""


def goes_on(seen: tuple[bytes, bytes]) -> bool:
    return b"connection: close" not in seen[0].lower()


def saying(pieces):
    """Reads a request and sends the pieces, and so on, until its peer wants no more; None closes."""

    async def script(conn: Conn) -> None:
        wanted = True
        while wanted:
            script.seen.append(await conn.request())
            wanted = goes_on(script.seen[-1])
            for piece in pieces:
                if piece is None:
                    return
                await conn.send(piece)

    script.seen = []
    return script


def request(body: bytes, *fields: bytes, path: str = CHAT, close: bool = True) -> bytes:
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"Host: localhost", b"Content-Type: application/json", *fields]
    lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, *([b"Connection: close"] if close else []), b"", b""]) + body


def same(direct: bytes, through: bytes, *methods: str) -> None:
    """Statuses, bodies, ends and the worker's own fields are those of the worker."""
    wanted, found = answers(direct, *methods), answers(through, *methods)
    assert len(found) == len(wanted) == len(methods)
    for one, other in zip(wanted, found, strict=True):
        assert (other.status, other.whole, other.body) == (one.status, one.whole, one.body)
        for name, value in one.headers:
            if not KEPT.fullmatch(name):
                assert (name.lower(), value) in [(known.lower(), there) for known, there in other.headers]


class TestAnswers:
    @pytest.mark.parametrize("name", ANSWERS)
    async def test_whole(self, site, name):
        async with site.both(saying(ANSWERS[name])) as (direct, daemon, *_):
            ask = request(PLAIN)
            same(await exchange(direct, ask), await exchange(daemon, ask), "POST")

    @pytest.mark.parametrize("name", STREAMS)
    async def test_streams(self, site, name):
        async with site.both(saying(STREAMS[name])) as (direct, daemon, *_):
            ask = request(STREAM)
            same(await exchange(direct, ask), await exchange(daemon, ask), "POST")


HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n" % CHAT.encode()
REQUESTS = {
    "at once": ([request(PLAIN)], 0.0),
    "head and body apart": ([request(PLAIN)[: -len(PLAIN)], PLAIN], 0.02),
    "byte by byte": ([bytes([byte]) for byte in request(PLAIN)], 0.0),
    "chunks": ([HEAD, b"Transfer-Encoding: chunked\r\n\r\n", chunk(PLAIN[:7]), chunk(PLAIN[7:]), b"0\r\n\r\n"], 0.01),
    "chunks at once": (
        [
            HEAD
            + b"Transfer-Encoding: chunked\r\n\r\n"
            + b"".join(chunk(bytes([byte])) for byte in PLAIN)
            + b"0\r\n\r\n"
        ],
        0.0,
    ),
    "chunks with trailers": (
        [HEAD, b"Transfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n", chunk(PLAIN), b"0\r\nX-Sum: 1\r\n\r\n"],
        0.0,
    ),
    "it waits to be asked": ([request(PLAIN, b"Expect: 100-continue")], 0.0),
    "many fields": ([request(PLAIN, *(b"X-Own-%d: %d" % (number, number) for number in range(60)))], 0.0),
    "an odd name of the length": ([request(PLAIN).replace(b"Content-Length", b"cONTENT-lENGTH")], 0.0),
    "the largest body": ([request(b'{"model":"m","messages":[],"text":"%s"}' % (b"x" * ((1 << 20) - 39)))], 0.0),
    "white space": ([request(b"\r\n \t" + PLAIN + b"\n ")], 0.0),
}
CHANGED = re.compile(r"(?i)host|connection|transfer-encoding|trailer|content-length|expect|x-request-id")
"""Fields that a client writes for the daemon, and that the daemon writes for the worker."""


def parts(seen: tuple[bytes, bytes]) -> tuple[str, list[tuple[str, str]], bytes]:
    line, *fields = seen[0].decode("latin-1").strip().split("\r\n")
    named = [(name.lower(), value.strip()) for name, _, value in (field.partition(":") for field in fields)]
    return line, [field for field in named if not CHANGED.fullmatch(field[0])], seen[1]


class TestRequests:
    @pytest.mark.parametrize("half_closed", [False, True], ids=["", "half closed"])
    @pytest.mark.parametrize("name", REQUESTS)
    async def test_reach_the_worker(self, site, name, half_closed):
        script = saying([ok(WHOLE, JSON)])
        pieces, pause_s = REQUESTS[name]
        async with site.both(script) as (direct, daemon, *_):
            through = await exchange(daemon, *pieces, pause_s=pause_s, half_closed=half_closed)
            same(await exchange(direct, *pieces, pause_s=pause_s, half_closed=half_closed), through, "POST")
        found, wanted = map(parts, script.seen)
        assert found == wanted

    async def test_a_body_one_byte_too_large(self, site):
        script = saying([ok(WHOLE, JSON)])
        body = b'{"model":"m","messages":[],"text":"%s"}' % (b"x" * ((1 << 20) - 36))
        async with site.scripted(script):
            for ask in (request(body), HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(body) + b"0\r\n\r\n"):
                (answer,) = answers(await exchange(site.port, ask), "POST")
                assert (answer.status, answer.whole) == (413, True)
        assert script.seen == []

    async def test_one_that_only_looks(self, site):
        script = saying([ok(WHOLE, JSON)])
        ask = f"GET {OWN}?model=m&a=%20b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        async with site.both(script) as (direct, daemon, *_):
            through = await exchange(daemon, ask)
            same(await exchange(direct, ask), through, "GET")
        found, wanted = map(parts, script.seen)
        assert found == wanted

    @pytest.mark.parametrize("path", ["/health", "/v1/models", f"{OWN}?model=m", "/nothing"])
    async def test_the_head_alone(self, site, path):
        """It is what GET would bring, or a refusal; never a body, and the connection goes on."""
        ask = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        end = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        head, after = answers(await exchange(site.port, ask + end), "HEAD", "GET")
        assert (after.status, after.whole) == (200, True)
        (whole,) = answers(
            await exchange(
                site.port, ask.replace(b"HEAD", b"GET", 1).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            ),
            "GET",
        )
        assert head.status in (whole.status, 405)


REFUSED = {
    "no such model": request(PLAIN.replace(b'"m"', b'"nobody"'), close=False),
    "no JSON": request(b"{", close=False),
    "no path": request(PLAIN, path="/v1/nothing", close=False),
    "another method": b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a worker's refusal": request(PLAIN.replace(b"user", b"refused"), close=False),
    "a worker's failure": request(PLAIN.replace(b"user", b"failed"), close=False),
    "a worker that is gone": request(PLAIN.replace(b"user", b"gone"), close=False),
}


class TestConnections:
    """A connection serves one request after the other, whatever became of those before."""

    @pytest.mark.parametrize("kinds", [("whole",) * 5, ("stream",) * 3, ("whole", "stream", "whole", "stream")])
    async def test_pipelined(self, site, kinds):
        """All are sent before the first answer; the answers come in order."""
        bodies = [
            json.dumps({"model": "m", "messages": [], "stream": kind == "stream", "n": 1, "seed": number}).encode()
            for number, kind in enumerate(kinds)
        ]

        async def script(conn: Conn) -> None:
            wanted = True
            while wanted:
                seen = await conn.request()
                wanted, said = goes_on(seen), json.loads(seen[1])
                if said["stream"]:
                    events = [words(said["seed"] + 1)[-1], FINISH, DONE]
                    await conn.send(SSE_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n")
                else:
                    await conn.send(ok(WHOLE.replace(b"hi", b"answer %d" % said["seed"]), JSON))

        ask = b"".join(request(body, close=body is bodies[-1]) for body in bodies)
        async with site.both(script) as (direct, daemon, *_):
            same(await exchange(direct, ask), await exchange(daemon, ask), *["POST"] * len(kinds))

    @pytest.mark.parametrize("name", REFUSED)
    async def test_goes_on_after(self, site, name):
        async def script(conn: Conn) -> None:
            while True:
                _, body = await conn.request()
                if b"gone" in body:
                    return
                failed = {b"refused": b"400 Bad Request", b"failed": b"500 Internal Server Error"}
                status = next((status for word, status in failed.items() if word in body), b"200 OK")
                await conn.send(
                    ok(WHOLE if status == b"200 OK" else b'{"error":"no"}', JSON).replace(b"200 OK", status, 1)
                )

        async with site.scripted(script):
            found = answers(await exchange(site.port, REFUSED[name] + request(PLAIN)), "POST", "POST")
        assert [found[0].status >= 400, found[0].whole] == [True, True]
        assert (found[1].status, found[1].body) == (200, WHOLE)
