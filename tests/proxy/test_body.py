"""Reading bodies within limits, the model in a form, keepalive comments. About 1 s."""

from __future__ import annotations

import asyncio

import pytest

from supervisor.dialects.openai import OPENAI
from supervisor.errors import InvalidRequestError, TooLargeError, UnavailableError
from supervisor.proxy.body import read_body
from supervisor.proxy.disconnect import EXTENSION, CancelOnDisconnect, ClientDisconnectedError, Disconnect
from supervisor.proxy.form import read_form
from supervisor.proxy.keepalive import Keepalive

FORM = b'--X\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
FILE = b'--X\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n%s\r\n'
TYPE = b'multipart/form-data; boundary="X"'


def receiving(*pieces: bytes):
    """An ASGI receive that brings these pieces, then a disconnect."""
    messages = [
        {"type": "http.request", "body": piece, "more_body": n + 1 < len(pieces)} for n, piece in enumerate(pieces)
    ]
    left = iter([*messages, {"type": "http.disconnect"}])

    async def receive():
        return next(left)

    return receive


def connection() -> tuple[Disconnect, asyncio.Task]:
    """A client's connection that the current task serves."""
    disconnect = Disconnect(lambda: None)
    task = disconnect.task = asyncio.current_task()
    assert task is not None
    return disconnect, task


def scope_of(disconnect: Disconnect):
    return {"extensions": {EXTENSION: disconnect}}


class TestReadBody:
    """Whole, and never more than allowed."""

    async def test_whole(self):
        assert await read_body({"headers": []}, receiving(b""), 10) == b""
        assert await read_body({"headers": []}, receiving(b"ab"), 2) == b"ab"
        assert await read_body({"headers": []}, receiving(b"ab", b"", b"c"), 3) == b"abc"

    async def test_limit(self):
        with pytest.raises(TooLargeError):
            await read_body({"headers": [(b"content-length", b"11")]}, receiving(), 10)
        for pieces in ((b"abc",), (b"ab", b"c"), (b"ab", b"c", b"d")):
            with pytest.raises(TooLargeError):
                await read_body({"headers": []}, receiving(*pieces), 2)

    async def test_client_gone(self):
        with pytest.raises(ClientDisconnectedError):
            await read_body({"headers": []}, receiving(), 10)


class TestForms:
    """One short field is found wherever it stands; nothing else is decoded."""

    @pytest.mark.parametrize("audio", [b"\0\xff\r\n--Y", bytes(3_000_000), b"\r\n--X-" * 300_000])
    @pytest.mark.parametrize("first", [True, False])
    async def test_found(self, audio, first):
        parts = [FORM % (b"model", b"whisper"), FILE % audio, FORM % (b"language", b"de")]
        body = b"".join(parts if first else parts[::-1]) + b"--X--\r\n"
        assert (await read_form(body, TYPE)).name == "whisper"
        assert (await read_form(bytearray(body), TYPE)).name == "whisper"

    async def test_absent(self):
        assert (await read_form(FILE % b"model" + b"--X--\r\n", TYPE)).name is None

    @pytest.mark.parametrize(
        ("body", "content_type"),
        [
            (b"", b"multipart/form-data"),
            (b"no form at all", TYPE),
            (FORM % (b"x", b"1") * 100 + b"--X--\r\n", TYPE),
            (FORM % (b"model", b"a") * 2 + b"--X--\r\n", TYPE),
            (FORM % (b"model", b"a" * 1000) + b"--X--\r\n", TYPE),
            (FORM % (b"model", b"\xff") + b"--X--\r\n", TYPE),
            (b"--X\r\n" + b"A: b\r\n" * 1000 + b"\r\n\r\n--X--\r\n", TYPE),
            (b"", b"multipart/form-data; boundary=" + b"b" * 1000),
        ],
        ids=["no boundary", "no form", "many parts", "twice", "long", "not utf-8", "many headers", "long boundary"],
    )
    async def test_refused(self, body, content_type):
        with pytest.raises(InvalidRequestError):
            await read_form(body, content_type)

    @pytest.mark.parametrize(
        "audio", [b"", b"--X--", b"\0\xff\r\n--Y\r\n--X-", bytes(3_000_000), b"\r\n--X-" * 300_000]
    )
    @pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
    async def test_changed(self, audio, order):
        parts = [FORM % (b"model", b"asr"), FILE % audio, FORM % (b"language", b"de"), FORM % (b"tags[]", b"a")]
        end = b"--X--\r\nepilogue"
        body = b"".join(parts[i] for i in order) + end
        form = await read_form(body, TYPE)
        assert {"model", "file", "language", "tags[]"} == form.names
        new = {"model": ("whisper",), "tags[]": (), "n": ("1", "2")}
        kept = b"".join(parts[i] for i in order if i in (1, 2))
        added = FORM % (b"model", b"whisper") + FORM % (b"n", b"1") + FORM % (b"n", b"2")
        assert added + kept + end == form._changed(new)
        again = await read_form(form._changed(new), TYPE)
        assert ("whisper", form.names - {"tags[]"} | {"n"}) == (again.name, again.names)
        assert form._changed({}) is body

    async def test_a_form_that_breaks_off_stays_one(self):
        body = FORM % (b"model", b"asr") + FILE % b"abc"
        form = await read_form(body, TYPE)
        assert form._changed({"model": ()}) == FILE % b"abc"


class TestKeepalive:
    """Comments only when the wait is long, and never two heads."""

    async def test_short_wait_sends_nothing(self):
        sent = []

        async def send(message):
            sent.append(message)

        async with Keepalive(send, [], OPENAI, interval_s=5) as keepalive:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not keepalive.started
        assert not sent

    async def test_long_wait_and_failure(self):
        sent = []
        enough = asyncio.Event()

        async def send(message):
            sent.append(message)
            if len(sent) == 4:
                enough.set()

        async with Keepalive(send, [(b"x-request-id", b"r")], OPENAI, interval_s=0.02) as keepalive:
            await enough.wait()
        assert keepalive.started
        count = len(sent)
        await asyncio.sleep(0.06)
        assert len(sent) == count, "silent again after the block"
        assert sent[0]["status"] == 200
        assert (b"x-request-id", b"r") in sent[0]["headers"]
        assert {message["body"] for message in sent[1:]} == {b": keepalive\n\n"}
        await keepalive.fail(UnavailableError("no memory"))
        assert sent[-1]["body"].startswith(b'data: {"error":{"message":"no memory"')
        assert sent[-1]["more_body"] is False

    async def test_blocked_head_is_not_counted_as_sent(self):
        async def send(message):
            await asyncio.Event().wait()

        async with Keepalive(send, [], OPENAI, interval_s=0.01) as keepalive:
            await asyncio.sleep(0.05)
        assert not keepalive.started


class TestUntilGone:
    """Only what the client's leaving cancelled becomes ClientDisconnectedError."""

    async def test_cancels_what_is_awaited(self):
        disconnect, task = connection()
        asyncio.get_running_loop().call_soon(disconnect.happened)
        with pytest.raises(ClientDisconnectedError), CancelOnDisconnect(scope_of(disconnect)):
            await asyncio.Event().wait()
        assert task.cancelling() == 0

    async def test_one_that_left_before_is_gone_at_once(self):
        disconnect, _ = connection()
        disconnect.happened()
        with pytest.raises(ClientDisconnectedError), CancelOnDisconnect(scope_of(disconnect)):
            pytest.fail("entered")

    async def test_foreign_cancellation_stays_one(self):
        async def body():
            disconnect, _ = connection()
            with CancelOnDisconnect(scope_of(disconnect)):
                await asyncio.Event().wait()

        task = asyncio.create_task(body())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_errors_pass(self):
        disconnect, _ = connection()
        with pytest.raises(KeyError), CancelOnDisconnect(scope_of(disconnect)):
            raise KeyError
