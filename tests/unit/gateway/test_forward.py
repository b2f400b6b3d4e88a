"""Forwarding end to end over real sockets: what passes, what never does, and how things end when they break. About 5 s."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import pytest

from supervisor.dialects.openai import OPENAI
from supervisor.errors import LlmuxError
from supervisor.gateway.attempt import Outcome
from supervisor.gateway.disconnect import ResponseOverError
from supervisor.gateway.head import RequestHead
from supervisor.gateway.upstream_error import error_answer
from supervisor.server import hang_ups
from supervisor.server.protocol import GuardedProtocol
from tests.support.cases import cases
from tests.support.garbage import no_cycles_of
from tests.support.wire import PATIENCE_S, SSE_HEAD, Conn, answering, chunk, ok, post, proxied, talk, until

EVENT = b'data: {"choices":[]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":7}}\n\ndata: [DONE]\n\n'


def split(answer: bytes) -> tuple[int, dict[bytes, list[bytes]], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    fields: dict[bytes, list[bytes]] = {}
    for line in lines:
        name, _, value = line.partition(b": ")
        fields.setdefault(name, []).append(value)
    return int(status.split()[1]), fields, body


def error_of(body: bytes) -> dict[str, str | None]:
    error = json.loads(body)["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return error


class TestHeaders:
    """End-to-end fields pass, connection fields and credentials don't."""

    async def test_request(self):
        seen = []

        async def script(conn: Conn) -> None:
            seen.append(await conn.request())
            await conn.send(ok(b"{}"))

        sent = post(
            b"{}",
            b"Authorization: Bearer client-secret",
            b"X-API-Key: client-secret",
            b"Cookie: client-secret",
            b"Expect: 100-continue",
            b"X-Request-Id: forged",
            b"Accept-Encoding: gzip",
            b"X-Twice: 1",
            b"X-Twice: 2",
            b"TE: trailers",
            b"X-Hop: 1",
            b"Connection: close, X-Hop",
            path=b"/v1/x%20y?q=1",
            close=False,
        )
        async with proxied(script, auth="Bearer worker-key") as (front, _):
            await talk(front.port, sent)
        head, body = seen[0]
        lines = head.split(b"\r\n")
        assert lines[0] == b"POST /v1/x%20y?q=1 HTTP/1.1"
        assert set(lines[1:]) - {b""} == {
            lines[1],
            b"authorization: Bearer worker-key",
            b"x-twice: 1",
            b"x-twice: 2",
            b"x-request-id: req-1",
            b"content-length: 2",
        }
        assert lines[1].startswith(b"host: 127.0.0.1:")
        assert body == b"{}"

    async def test_response(self):
        wire = ok(
            b"{}",
            b"Server: worker",
            b"Date: never",
            b"Access-Control-Allow-Origin: *",
            b"X-Request-Id: worker",
            b"X-Hop: 1",
            b"Connection: X-Hop",
            b"Set-Cookie: a",
            b"Set-Cookie: b",
        )
        async with proxied(answering(wire)) as (front, _):
            status, fields, body = split(await talk(front.port, post()))
        assert (status, body) == (200, b"{}")
        assert fields[b"set-cookie"] == [b"a", b"b"]
        assert fields[b"x-request-id"] == [b"req-1"]
        assert fields.get(b"server", []) in ([], [b"uvicorn"])
        assert not {b"access-control-allow-origin", b"x-hop"} & set(fields)

    async def test_what_the_worker_says_had_no_effect_is_told_once_in_plain_characters(self):
        wire = ok(b"{}", b"X-Llmux-Ignored: , brand_new,user,  brand_new, \xff<b>")
        async with proxied(answering(wire)) as (front, _):
            _, fields, _ = split(await talk(front.port, post()))
        assert fields[b"x-llmux-ignored"] == [b"brand_new, user, ??b?"]
        assert front.outcomes[0].ignored == ("brand_new", "user", "brand_new", "\xff<b>")

    async def test_event_stream(self):
        async with proxied(answering(SSE_HEAD + chunk(EVENT) + chunk(USAGE) + b"0\r\n\r\n")) as (front, _):
            _, fields, body = split(await talk(front.port, post()))
            assert fields[b"x-accel-buffering"] == [b"no"]
            assert fields[b"cache-control"] == [b"no-cache"]
            assert body.endswith(b"\r\n0\r\n\r\n")
            outcome = front.outcomes[0]
            assert outcome.usage() == (11, 7, None)
            assert outcome.bytes_sent == len(EVENT + USAGE)
            assert outcome.first_byte_s is not None

    async def test_head(self):
        async with proxied(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")) as (front, _):
            request = b"HEAD / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
            status, fields, body = split(await talk(front.port, request))
            assert (status, fields[b"content-length"], body) == (200, [b"5"], b"")

    @pytest.mark.parametrize("status", [204, 304])
    @pytest.mark.parametrize("method", [b"GET", b"HEAD"])
    async def test_what_has_no_body_has_no_length(self, status, method, caplog):
        wire = b'HTTP/1.1 %d None\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n{"error":"x"}' % status
        async with proxied(answering(wire)) as (front, _):
            request = method + b" / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
            told, fields, body = split(await talk(front.port, request))
            assert (told, fields.get(b"content-length"), body) == (status, None, b"")
            assert front.outcomes[0].error is None
        assert "application_failed" not in caplog.text


class TestBodies:
    """Bytes arrive as they were sent, whatever their size."""

    @pytest.mark.parametrize("size", [0, 1, 65_536, 3_000_000])
    async def test_echo(self, size):
        async def script(conn: Conn) -> None:
            while True:
                _, body = await conn.request()
                await conn.send(ok(body))

        data = bytes(range(256)) * (size // 256) + bytes(size % 256)
        async with proxied(script) as (front, behind):
            for _ in range(2):
                assert split(await talk(front.port, post(data)))[2] == data
            assert behind.accepted == 1

    async def test_loop_is_not_blocked_by_a_large_body(self):
        """10 MB pass while the loop's longest turn stays short: in its own time, others may have the processor meanwhile."""
        longest = []

        async def script(conn: Conn) -> None:
            while True:
                head = await conn.reader.readuntil(b"\r\n\r\n")
                left = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                while left:
                    left -= len(await conn.reader.read(65_536))
                await conn.send(ok(b"{}"))

        loop = asyncio.get_running_loop()
        beats: list[float] = []

        def beat() -> None:
            beats.append(time.thread_time())
            loop.call_soon(beat)

        async with proxied(script) as (front, _):
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
                writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\nConnection: close\r\n\r\n")
                beats.clear()
                beat()
                for _ in range(100):
                    writer.write(bytes(100_000))
                    await writer.drain()
                assert (await reader.read(-1)).startswith(b"HTTP/1.1 200")
                longest.append(max(after - before for before, after in itertools.pairwise(beats)))
                writer.close()
        assert min(longest) < 0.03


class TestBroken:
    """A broken answer never looks like a whole one (faults 10, 15, 16).

    A stream whose last event says so ends properly: aiohttp and others report a cut connection instead of the event.
    """

    @pytest.mark.parametrize("sent", [EVENT, b'data: {"cho'], ids=["between events", "inside an event"])
    async def test_stream(self, sent):
        async with proxied(answering(SSE_HEAD + chunk(sent), times=1)) as (front, _):
            answer = await talk(front.port, post())
            assert answer.endswith(b"\n\n\r\n0\r\n\r\n")
            assert b"[DONE]" not in answer
            assert answer.count(b'data: {"error":') == 1
            line = answer[answer.index(b'data: {"error":') + 6 :].split(b"\n\n")[0]
            assert error_of(line)["code"] == "upstream_broken"
            assert sent is EVENT or b"\n\ndata: {" in answer, "the rest of an event does not swallow it"
            assert front.outcomes[0].error == "upstream_broken"

    @cases("sent", [b'{"a":1}\n', b'{"a":', b""], ids=["between lines", "inside a line", "at once"])
    @cases("length", [b"", b"Content-Length: 100\r\n"], ids=["chunked", "length"])
    async def test_lines(self, sent, length):
        """Whatever its worker said of its length: a line comes on top."""
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson; charset=utf-8\r\n"
        wire = length + b"\r\n" + sent if length else b"Transfer-Encoding: chunked\r\n\r\n" + (sent and chunk(sent))
        async with proxied(answering(head + wire, times=1)) as (front, _):
            answer = await talk(front.port, post())
            assert answer.endswith(b"\r\n0\r\n\r\n")
            line = answer[answer.index(b'{"error":') :].split(b"\n")[0]
            assert error_of(line)["code"] == "upstream_broken"
            assert b"data:" not in answer
            assert sent != b'{"a":' or b'\n{"error":' in answer, "half a line does not swallow it"
            assert front.outcomes[0].error == "upstream_broken"

    @pytest.mark.parametrize(
        "head",
        [
            b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
            SSE_HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n4\r\nhalf\r\n",
        ],
        ids=["length", "chunked", "compressed stream"],
    )
    async def test_json(self, head):
        async with proxied(answering(head, times=1)) as (front, _):
            status, fields, body = split(await talk(front.port, post()))
            assert status == 200
            assert b"half" in body
            assert fields.get(b"content-length") == [b"100"] or not body.endswith(b"0\r\n\r\n")

    @pytest.mark.parametrize("wire", [b"", b"SSH-2.0\r\n", b"HTTP/1.1 500 Oops\r\nContent-Length: 9\r\n\r\nhalf"])
    async def test_before_anything_was_sent(self, wire):
        async with proxied(answering(wire, times=1)) as (front, behind):
            status, _, body = split(await talk(front.port, post()))
            assert status == 502
            assert error_of(body)["type"] == "server_error"
            assert behind.accepted == 1

    async def test_first_byte_deadline(self):
        async def script(conn: Conn) -> None:
            await conn.request()
            await conn.closed()

        async with proxied(script, first_byte_s=0.1) as (front, behind):
            status, _, body = split(await talk(front.port, post()))
            assert (status, error_of(body)["code"]) == (504, "upstream_timeout")
            await until(lambda: behind.active == 0)

    async def test_the_connection_goes_on(self):
        """A stream that ended with an error leaves its client's connection as any other answer does."""
        async with proxied(answering(SSE_HEAD + chunk(EVENT), times=1)) as (front, behind):
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
            for _ in range(2):
                writer.write(post(close=False))
                async with asyncio.timeout(PATIENCE_S):
                    answer = await reader.readuntil(b"\r\n0\r\n\r\n")
                assert b"upstream_broken" in answer
            assert behind.accepted == 2
            writer.close()


class TestErrorAnswers:
    """Every error answer has OpenAI's shape; what has it already is not touched."""

    @cases(
        ("status", "kind", "body", "expected"),
        [
            (500, b"text/plain", b"it broke\n", ("it broke", "server_error", "upstream_error")),
            (400, b"application/json", b'{"error":"bad n"}', ("bad n", "invalid_request_error", "invalid_request")),
            (422, b"application/json", b'{"detail":"no"}', ("no", "invalid_request_error", "invalid_request")),
            (
                422,
                b"application/json",
                b'{"detail":[{"loc":["body","n"],"msg":"too big"},{"msg":"y"}]}',
                ("body.n: too big; y", "invalid_request_error", "invalid_request"),
            ),
            (
                404,
                b"text/html",
                b"<html>no</html>",
                ("The worker answered with status 404.", "invalid_request_error", "not_found"),
            ),
            (503, b"", b"", ("The worker answered with status 503.", "server_error", "upstream_error")),
            (
                400,
                b"application/json",
                b'{"detail":"This model\'s maximum context length is 8 tokens. However, you requested 9."}',
                (
                    "This model's maximum context length is 8 tokens. However, you requested 9.",
                    "invalid_request_error",
                    "context_length_exceeded",
                ),
            ),
            (429, b"", b'{"message":"slow"}', ("slow", "rate_limit_error", "rate_limit_exceeded")),
        ],
    )
    async def test_normalised(self, status, kind, body, expected):
        wire = b"HTTP/1.1 %d X\r\nContent-Type: %s\r\nX-Kept: 1\r\nContent-Length: %d\r\n\r\n%s" % (
            status,
            kind,
            len(body),
            body,
        )
        async with proxied(answering(wire)) as (front, _):
            found, fields, data = split(await talk(front.port, post()))
            error = error_of(data)
            assert (found, fields[b"content-type"], fields[b"x-kept"]) == (status, [b"application/json"], [b"1"])
            assert (error["message"], error["type"], error["code"]) == expected

    async def test_untouched(self):
        body = b'{ "error": {"message":"Loading model","type":"unavailable_error","param":null,"code":"loading"} }'
        wire = b"HTTP/1.1 503 X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        async with proxied(answering(wire)) as (front, _):
            status, _, data = split(await talk(front.port, post()))
            assert (status, data) == (503, body)

    async def test_completed(self):
        body = b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error","n_ctx":8},"more":1}'
        wire = b"HTTP/1.1 400 X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        async with proxied(answering(wire)) as (front, _):
            status, _, data = split(await talk(front.port, post()))
            error = {
                "message": "too long",
                "type": "exceed_context_size_error",
                "param": None,
                "code": "invalid_request",
            }
            assert (status, json.loads(data)) == (400, {"error": error | {"n_ctx": 8}, "more": 1})


class TestTooLong:
    """A prompt that is too long has OpenAI's code, by which clients know to shorten it."""

    @pytest.mark.parametrize(
        "error",
        [
            {
                "code": 400,
                "message": "request (54019 tokens) exceeds the available context size (2048 tokens), try increasing it",
                "type": "exceed_context_size_error",
            },
            {
                "code": 500,
                "message": "input (54000 tokens) is too large to process. increase the physical batch size (current: 512)",
                "type": "server_error",
            },
            {
                "code": 400,
                "message": "The decoder prompt (length 90) is longer than the maximum model length of 80.",
                "type": "BadRequestError",
                "param": None,
            },
        ],
        ids=["llama.cpp", "llama.cpp's embeddings", "vLLM"],
    )
    def test_code(self, error):
        body = json.dumps({"error": error}).encode()
        told = json.loads(error_answer(error["code"], b"application/json", body, OPENAI))["error"]
        assert told == {"param": None, **error, "code": "context_length_exceeded"}

    def test_a_worker_that_says_so_itself(self):
        body = b'{"error":{"message":"maximum context length","type":"t","param":null,"code":"its_own"}}'
        assert error_answer(400, b"application/json", body, OPENAI) is body


class TestLeaving:
    """The worker learns at once that the client left (fault 24)."""

    @pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "silent"])
    @pytest.mark.parametrize("size", [2, 200_000])
    async def test_upstream_closes(self, streaming, size):
        asked, noticed = [], []

        async def script(conn: Conn) -> None:
            asked.append(await conn.request())
            if streaming:
                await conn.send(SSE_HEAD + chunk(EVENT))
            await conn.closed()
            noticed.append(time.monotonic())

        async with proxied(script) as (front, behind):
            waits = []
            for turn in range(1, 4):
                reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
                writer.write(post(bytes(size)))
                if streaming:
                    await reader.readuntil(b"data: ")
                await until(lambda: len(asked) == turn)
                left = time.monotonic()
                writer.close()
                await until(lambda: behind.active == 0)
                waits.append(noticed[-1] - left)
            await until(lambda: len(front.errors) == 3)
            assert {type(error).__name__ for error in front.errors} == {"ClientDisconnectedError"}
            assert min(waits) < 0.2, "not at the next look at idle connections"
            if streaming:
                assert front.outcomes[0].bytes_sent == len(EVENT), "what was sent is known although it was cut off"

    async def test_declared_spec_version_is_the_one_we_rely_on(self):
        """Below 2.4 a `send` after the client left is silent: only the cancellation ends the request."""
        async with proxied(answering(ok(b"{}"))) as (front, _):
            await talk(front.port, post())
            assert front.scopes[0]["asgi"]["spec_version"] == "2.3"

    @pytest.mark.parametrize("version", [b"1.1", b"1.0"])
    @pytest.mark.parametrize("wire", [b"", SSE_HEAD, SSE_HEAD + chunk(EVENT)], ids=["silent", "head", "streaming"])
    async def test_half_closed_client_gets_its_answer(self, wire, version):
        """As `nc -N`: it has sent its request and reads on. Only in HTTP/1.0 it can't be told from one that left."""
        go = asyncio.Event()

        async def script(conn: Conn) -> None:
            await conn.request()
            await conn.send(wire)
            await go.wait()
            await conn.send((b"" if wire else SSE_HEAD) + chunk(b"data: last\n\n") + b"0\r\n\r\n")
            await conn.closed()

        async with proxied(script) as (front, behind):
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(post().replace(b"1.1", version))
            await until(lambda: behind.active == 1)
            if wire:
                await reader.readuntil(b"\r\n\r\n")
            writer.write_eof()
            if version == b"1.0" and wire == b"":
                assert await reader.read(-1) == b""
                go.set()
            else:
                if not wire:
                    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                elif wire != SSE_HEAD:
                    assert EVENT in await reader.readuntil(b"\n\n")
                go.set()
                answer = await reader.read(-1)
                assert answer.endswith(b"data: last\n\n" + (b"\r\n0\r\n\r\n" if version == b"1.1" else b""))
            writer.close()

    @pytest.mark.parametrize("wire", [b"", SSE_HEAD, SSE_HEAD + chunk(EVENT)], ids=["silent", "head", "streaming"])
    async def test_half_closed_client_that_leaves_later(self, wire, monkeypatch):
        monkeypatch.setattr(hang_ups, "PROBE_EVERY_S", 0.1)

        async def script(conn: Conn) -> None:
            await conn.request()
            await conn.send(wire)
            await conn.closed()

        async with proxied(script) as (front, behind):
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(post())
            await until(lambda: behind.active == 1)
            if wire:
                await reader.readuntil(b"\r\n\r\n")
            writer.write_eof()
            (connection,) = front.state.connections
            await until(lambda: connection._half_closed is not None)
            assert behind.active == 1
            writer.close()
            await until(lambda: behind.active == 0)
            assert type(front.errors[0]).__name__ == "ClientDisconnectedError"


class TestSlowReader:
    """A client that doesn't read costs a bounded amount and holds nobody else up (fault 27)."""

    async def test_bounded(self):
        async def script(conn: Conn) -> None:
            await conn.request()
            await conn.send(SSE_HEAD)
            block = chunk(b"x" * 65_000)
            while True:
                await conn.send(block)

        async with proxied(script) as (front, behind):
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1024)
            writer.write(post())
            await reader.readuntil(b"\r\n\r\n")
            last = -1
            while front.outcomes[0].bytes_sent != last:
                last = front.outcomes[0].bytes_sent
                await asyncio.sleep(0.1)
            (connection,) = front.state.connections
            assert connection.transport.get_write_buffer_size() < 700_000
            writer.close()
            await until(lambda: behind.active == 0)

    async def test_is_cut_off_in_the_end(self, monkeypatch):
        monkeypatch.setattr(GuardedProtocol, "read_window_s", 0.2)

        async def script(conn: Conn) -> None:
            await conn.request()
            await conn.send(SSE_HEAD)
            block = chunk(b"x" * 65_000)
            while True:
                await conn.send(block)

        async with proxied(script) as (front, behind):
            _, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1024)
            writer.write(post())
            await until(lambda: behind.active == 1)
            await until(lambda: behind.active == 0)
            writer.close()


class TestMemory:
    """The end of a failed request frees it at once: no error is in a reference cycle."""

    @pytest.mark.parametrize(
        ("wire", "options"),
        [
            (b"", {}),
            (b"nonsense\r\n\r\n", {}),
            (SSE_HEAD + chunk(EVENT), {}),
            (ok(b"hi").replace(b": 2", b": 9"), {}),
            (None, {"first_byte_s": 0.1}),
        ],
        ids=["no answer", "no HTTP", "stream broke off", "answer broke off", "silent"],
    )
    async def test_worker_failed(self, wire, options):
        async def script(conn: Conn) -> None:
            await conn.request()
            if wire is None:
                await conn.closed()
            else:
                await conn.send(wire)

        with no_cycles_of(LlmuxError, ResponseOverError):
            async with proxied(script, **options) as (front, _):
                await talk(front.port, post(b"x" * 100_000))

    @pytest.mark.parametrize("wire", [b"", SSE_HEAD + chunk(EVENT)], ids=["silent", "streaming"])
    async def test_client_left(self, wire):
        async def script(conn: Conn) -> None:
            await conn.request()
            await conn.send(wire)
            await conn.closed()

        with no_cycles_of(LlmuxError, ResponseOverError):
            async with proxied(script) as (front, behind):
                _, writer = await asyncio.open_connection("127.0.0.1", front.port)
                writer.write(post(b"x" * 100_000))
                await until(lambda: behind.active == 1)
                writer.close()
                await until(lambda: behind.active == 0 and not front.state.tasks)


class TestOutcome:
    """Token counts are read from the end of what passed."""

    @cases(
        ("pieces", "expected"),
        [
            ([b'{"usage":{"prompt_tokens":3,"completion_tokens": 4}}'], (3, 4, None)),
            ([b'{"usage":{"input_tokens":3,"output_tokens":4,"cache_read_input_tokens":2}}'], (3, 4, 2)),
            ([b"x" * 100_000 + b'"usage":{"prompt_to', b'kens":3,"completion_tokens":4}}'], (3, 4, None)),
            ([b'{"content":"\\"prompt_tokens\\":9"}'], (None, None, None)),
            ([b'"timings":{"cache_n":2,"prompt_n":1,"predicted_n":4}}'], (3, 4, 2)),
            ([], (None, None, None)),
        ],
    )
    def test_tokens(self, pieces, expected):
        outcome = Outcome()
        for piece in pieces:
            outcome.keep(piece)
        assert outcome.usage() == expected


class TestCredentials:
    """No key of a client leaves llmux, whatever header its dialect has for it."""

    @pytest.mark.parametrize("name", [b"authorization", b"x-api-key", b"cookie", b"x-toy-key"])
    def test_go_to_no_worker(self, name):
        head = RequestHead([(name, b"secret"), (b"accept", b"*/*")])
        assert head.worker_headers(frozenset({b"x-toy-key"})) == [(b"accept", b"*/*")]

    def test_also_where_other_headers_are_named_in_connection(self):
        headers = [(b"x-toy-key", b"secret"), (b"connection", b"x-hop"), (b"x-hop", b"1")]
        assert RequestHead(headers).worker_headers(frozenset({b"x-toy-key"})) == []
