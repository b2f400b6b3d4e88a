"""No body holds the loop, whatever it consists of: all other requests would wait.

The CPU time of the loop's thread between two turns is measured, which a busy machine changes less than the time of day. On a
machine that is slower, or whose neighbours make it slower, it may be more: by as much as decoding and copying take longer there.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import time
from types import SimpleNamespace

import msgspec
import pytest
from starlette.applications import Starlette

from runtimes.base import Endpoint
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.cli.serving.own_process import THRESHOLDS
from supervisor.dialects.responses.operations import GROUP
from supervisor.dialects.responses.stored_conversation import conversation_of
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body import condensed_json, form, json_body
from supervisor.gateway.body.form import read_form
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.disconnect import EXTENSION, Disconnect
from supervisor.gateway.filters.filters import filtered
from supervisor.gateway.filters.stored_conversation import ConversationStore
from supervisor.host.store.request_buffer import BodyBudget, Gathered
from supervisor.host.store.response_store import PIECE, EventLog, Part, ResponseStore, StoredResponse
from tests.support.counts import times

MIB = 1024 * 1024
SIZE = times(12, 31) * MIB
MOST_S = 0.02
USUAL = b"[%b{}]" % (b'{"role":"user","content":"hello"},' * 20_000)
DECODE_S = 0.0025  # to decode that, on the machine that MOST_S was set on
COPY_S = 0.024  # to put 40 MiB together there, in memory that is new
TRIES = 10  # a page fault, a collection or a neighbour may take its part of one
CHAT = Endpoint("/v1/chat/completions")
REWRITE = Rewrite.compile(
    upstream_model="n",
    strip=["user"],
    defaults={"seed": 1},
    force={"temperature": 0},
    thinking={"chat_template_kwargs": {"enable_thinking": False}},
    system_prompt_prefix="Be brief.",
)


@pytest.fixture(autouse=True, scope="module")
def collector():
    """As the daemon sets it: only what is new is collected."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


async def turns_of(work, clock) -> list[float]:
    """The CPU seconds, by this clock, that `work` took in each turn of the loop."""
    taken, is_done = [], False

    async def look() -> None:
        before = clock()
        while not is_done:
            await asyncio.sleep(0)
            now = clock()
            taken.append(now - before)
            before = now

    looking = asyncio.create_task(look())
    await asyncio.sleep(0)
    try:
        await work()
    finally:
        is_done = True
        await looking
    return taken


async def assert_quick(work, clock=time.thread_time, most_s=MOST_S) -> None:
    """What takes long does so each time that it is tried: of equally many turns, each counts as the quickest one in its place."""
    told = [best := await turns_of(work, clock)]
    bound_s = most_s if max(best) <= most_s else most_s * slower()
    while max(best) > bound_s and len(told) < TRIES:
        told.append(await turns_of(work, clock))
        same = [each for each in told if len(each) == len(told[-1])]
        best = min([*map(min, *same)] if len(same) > 1 else told[-1], best, key=max)
    assert max(best) <= bound_s or max(best) <= most_s * slower(), [max(each) for each in told]


def slower() -> float:
    """How much slower this machine is just now."""
    pieces = [bytes(MIB)] * 40

    def median_s(work) -> float:
        taken = []
        for _ in range(TRIES):
            before = time.thread_time()
            work()
            taken.append(time.thread_time() - before)
        return statistics.median(taken)

    return max(
        1.0, median_s(lambda: msgspec.json.decode(USUAL)) / DECODE_S, median_s(lambda: b"".join(pieces)) / COPY_S
    )


def filled(unit: bytes, last: bytes = b"1", first: bytes = b"", count: int | None = None) -> bytes:
    """A chat whose messages are `unit` as often as possible, or `count` times."""
    head, tail = b'{"model":"m","messages":[' + first, last + b"]}"
    return head + unit * ((SIZE - len(head) - len(tail)) // len(unit) if count is None else count) + tail


def said(text: bytes) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":"' + text * (SIZE // len(text)) + b'"}]}'


def objects(key: bytes, value: bytes, count: int) -> bytes:
    return b'{"model":"m","x":{' + b",".join(b'"%d%b":%b' % (number, key, value) for number in range(count)) + b"}}"


REFUSED = {
    "nulls": lambda: filled(b"null,"),
    "objects": lambda: filled(b"{},", b"{}"),
    "lists": lambda: filled(b"[],"),
    "empty strings": lambda: filled(b'"",'),
    "short strings": lambda: filled(b'"%b",' % (b"a" * 127)),
    "strings just cut": lambda: filled(b'"%b",' % (b"a" * 140)),
    "a deep list": lambda: filled(b"["),
    "a long number": lambda: filled(b"1"),
    "long numbers": lambda: filled(b"1" * 4000 + b",null,"),
    "numbers among nulls": lambda: filled(b"1" * 95 + b",null,"),
    "runs of numbers": lambda: filled(b"1234567890," * 7 + b"null,"),
    "letters": lambda: b"a" * SIZE,
    "zeros": lambda: bytes(SIZE),
    "commas": lambda: b"," * SIZE,
    "blanks only": lambda: b" " * SIZE,
    "no end": lambda: b'{"model":"m","messages":"' + b"a" * SIZE,
    "half escapes": lambda: b'{"model":"m","messages":"' + b"\\" * SIZE,
}
TAKEN = {
    "numbers": lambda: filled(b"1,"),
    "numbers after a null": lambda: filled(b"1,", first=b"null,"),
    "numbers and blanks": lambda: filled(b" " * 200_000 + b"1,"),
    "blanks": lambda: filled(b" "),
    "blanks before": lambda: b" " * SIZE + b'{"model":"m"}',
    "a string": lambda: said(b"a"),
    "a text": lambda: said(b"a: b, "),
    "a text of escapes": lambda: said(b"\\n"),
    "a text of quotes": lambda: said(b'\\"'),
    "a text of backslashes": lambda: said(b"\\\\"),
    "a text of unicode escapes": lambda: said(b"\\ud83d\\ude42"),
    "a text of two-byte characters": lambda: said("é".encode()),
    "a long key": lambda: b'{"model":"m","%b":1}' % (b"a" * SIZE),
    "a long key of escapes": lambda: b'{"model":"m", "%b":1}' % (b"\\n" * (SIZE // 2)),
    "990 long fields": lambda: (
        b'{"model":"m",%b}' % b", ".join(b'"k%d": "%b"' % (number, b"a:\\n" * 8000) for number in range(990))
    ),
    "messages": lambda: filled(b'{"role":"user","content":"%b"},' % (b"hello: world\\n" * 150), b"{}", count=10_000),
    "parts": lambda: filled(b'{"role":"user","content":[{"type":"text","text":"a: b"}]},', b"{}", count=6_000),
    "as many objects as may be": lambda: filled(b'{"a":1},', count=33_000),
    "as many keys as may be": lambda: objects(b"", b"1", 49_000),
    "as many media keys as may be": lambda: objects(b"_url", b'"aaaa"', 33_000),
    "as many strings as may be": lambda: filled(b'"%b",' % (b"a" * 126), count=33_000),
    "as many strings of escapes as may be": lambda: filled(b'"%b",' % (b"\\n" * 63), count=9_900),
    "objects just not outlined": lambda: filled(b"{},", b"{}", count=21_800),
    "texts": lambda: json.dumps({"model": "m", "input": ["some text: words, " * 500] * 2048}).encode(),
    "token ids": lambda: json.dumps({"model": "m", "prompt": list(range(100_000))}).encode(),
    "lists of token ids": lambda: json.dumps({"model": "m", "input": [list(range(1000, 1150))] * 2048}).encode(),
}


async def opened(body) -> bytes:
    """What a worker would get, by the whole way of a body."""
    found = await JsonBody.open(body)
    await found.check("m", frozenset({"text"}), Endpoint("/echo"))
    return bytes(await found.rewritten(Rewrite.compile(upstream_model="n"), CHAT))


async def gone_through(body) -> None:
    found = await JsonBody.open(body)
    await found.check("m", frozenset({"text"}), Endpoint("/echo"))
    await found.rewritten(REWRITE, CHAT)


class TestJson:
    """Up to the limit of 32 MiB; what is legitimate passes."""

    @pytest.mark.parametrize("shape", REFUSED)
    async def test_refused(self, shape):
        body = bytearray(REFUSED[shape]())

        async def work() -> None:
            with pytest.raises(InvalidRequestError):
                await gone_through(body)

        await assert_quick(work)

    @pytest.mark.parametrize("shape", TAKEN)
    async def test_taken(self, shape):
        body = bytearray(TAKEN[shape]())
        await assert_quick(lambda: gone_through(body))

    @pytest.mark.parametrize("shape", ["texts", "token ids", "lists of token ids", "a text of quotes", "messages"])
    async def test_nothing_is_lost(self, shape):
        body = TAKEN[shape]()
        assert json.loads(await opened(body)) == {**json.loads(body), "model": "n"}

    @pytest.mark.parametrize("content", [b'"x":[' + b"{}," * 50_001 + b"{}]", b'"x":[' + b'"",' * 50_001 + b"0]"])
    async def test_the_error_names_the_limit(self, content):
        with pytest.raises(InvalidRequestError, match=f"{condensed_json.MOST_VALUES:,} values") as told:
            await JsonBody.open(b'{"model":"m",' + content + b"}")
        assert told.value.code == "too_many_values"

    async def test_so_does_the_one_for_fields(self):
        with pytest.raises(InvalidRequestError, match="1000 fields") as told:
            await JsonBody.open(b"{%b}" % b",".join(b'"%d":1' % number for number in range(1001)))
        assert told.value.code == "too_many_values"


PART = b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
DASHES = b"-" * 68 + b"a"
FORMS = {
    "zeros": (b"X", b"file", b"\0"),
    "line ends": (b"X", b"file", b"\r\n"),
    "carriage returns": (b"X", b"file", b"\r"),
    "almost delimiters": (b"Xa", b"file", b"\r\n--X"),
    "half an end": (b"X", b"file", b"\r\n--X-"),
    "dashes": (DASHES, b"file", b"-"),
    "lines of dashes": (DASHES, b"file", b"\r\n" + b"-" * 69),
    "a long text": (b"X", b"prompt", b"a: b"),
    "plain base64": (b"X", b"image", b"iVBO"),
}


class TestForms:
    """The same for a form with a file."""

    @pytest.mark.parametrize("shape", FORMS)
    async def test_taken(self, shape):
        boundary, name, unit = FORMS[shape]
        disposition = b'; filename="a"' if name == b"file" else b""
        body = PART % (boundary, b"model", b"", b"m")
        body += PART % (boundary, name, disposition, b"\r\n" + unit * (SIZE // len(unit)))
        body = bytearray(body + b"--" + boundary + b"--\r\n")

        async def work() -> None:
            found = await read_form(body, b"multipart/form-data; boundary=" + boundary)
            await found.check("m", None, Endpoint("/echo"))
            await found.rewritten(REWRITE, Endpoint("/v1/audio/transcriptions"))

        await assert_quick(work)

    @pytest.mark.parametrize("parameters", [b";" * 4000, b';a="' * 1000, b';a="\\"' * 600])
    async def test_headers_of_parameters(self, parameters):
        body = PART % (b"X", b"a", parameters, b"1") * 60

        async def work() -> None:
            with pytest.raises(InvalidRequestError, match="too many parameters"):
                await read_form(body, b"multipart/form-data; boundary=X")

        await assert_quick(work)

    async def test_a_long_type(self):
        async def work() -> None:
            with pytest.raises(InvalidRequestError, match="longer than 1024"):
                await read_form(b"--X--", b"multipart/form-data" + b";" * 60_000)

        await assert_quick(work)


def test_slices():
    """What is handled in one turn, which the times follow from."""
    assert condensed_json._SLICE <= 128 * 1024
    assert form.SLICE <= 32 * 1024
    assert condensed_json.MOST_VALUES <= 100_000
    assert json_body.SMALL <= 64 * 1024
    assert json_body._LARGE_BYTES <= 256 * 1024


TEXT = b'"%b"' % (b"a" * SIZE)
CONVERSATIONS = {
    "a text": lambda: TEXT,
    "a message of quotes": lambda: b'[{"role":"user","content":"%b"}]' % (b'\\"' * (SIZE // 2)),
    "10 000 messages": lambda: b"[%b]" % b",".join([b'{"role":"user","content":"%b"}' % (b"Hello! " * 400)] * 10_000),
}
PATH = "/v1/responses/resp_1/input_items"
EXTENSION_FIELDS = b'[{"type":"message","role":"assistant","content":[{"type":"output_text","text":%b}]}]'


def answer(text: bytes) -> bytes:
    return b'{"object":"response","id":"resp_1","status":"completed","output":%b}' % (EXTENSION_FIELDS % text)


class Site:
    """What answers for responses that are kept, and what is kept there: one in the background, with its events."""

    def __init__(self, folder, items: bytes = b'"Hi"', text: bytes = b'"Hi"') -> None:
        self.store = ResponseStore()
        self.store.configure(most_bytes=64 * SIZE, most=99, keep_s=600)
        self.store.open(folder)
        inference = SimpleNamespace(on_end={}, generating=lambda name: None, is_paused=False)
        self.app = Starlette(routes=GROUP.routes(SimpleNamespace(responses=self.store, inference=inference)))
        self.kept = StoredResponse(
            None, Part(answer(text)), Part(items), "completed", is_background=True, is_streamed=True
        )

    async def __aenter__(self):
        self.store.logs["resp_1"] = EventLog([b"data: 1\n\n", b"data: %b\n\n" % TEXT])
        await self.store.keep("resp_1", self.kept)
        self.store.logs.clear()
        return self

    async def __aexit__(self, *_):
        await self.store.close()

    async def get(self, path: str, query: bytes = b"") -> list[bytes]:
        """The pieces of an answer."""
        pieces: list[bytes] = []

        async def send(message) -> None:
            assert message.get("status", 200) == 200
            pieces.append(message.get("body", b""))

        disconnect = Disconnect(lambda: None)
        disconnect.task = asyncio.current_task()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "method": "GET",
            "path": path,
            "query_string": query,
            "headers": [],
            "state": {},
            "extensions": {EXTENSION: disconnect},
        }
        await self.app(scope, asyncio.Event().wait, send)
        return pieces


class Pieces:
    """A worker's answer that comes in these."""

    status, headers = 200, [(b"content-type", b"application/json")]

    def __init__(self, pieces):
        self._left = [*reversed(pieces)]

    @property
    def drained(self):
        return not self._left

    async def next_chunk(self):
        await asyncio.sleep(0)
        return self._left.pop()


class TestKept:
    """A response that is kept, with a long conversation or a long answer: whoever reads it or goes on from it holds nobody up.

    What threads compute counts as well: the loop waits for whoever holds the interpreter.
    """

    @pytest.mark.parametrize("shape", CONVERSATIONS)
    @pytest.mark.parametrize("count", [1, 8])
    async def test_its_items_are_read(self, tmp_path, shape, count):
        items = CONVERSATIONS[shape]()
        async with Site(tmp_path, items) as site:

            async def work() -> None:
                told = await asyncio.gather(*(site.get(PATH) for _ in range(count)))
                assert all(max(map(len, pieces)) <= 2 * PIECE for pieces in told)
                texts = [item["content"][0]["text"] for item in json.loads(b"".join(told[0]))["data"]]
                assert texts[-1] == (own if isinstance(own := json.loads(items), str) else own[-1]["content"])

            await work()
            # Between two looks each of them has its turn.
            most_s = MOST_S if count == 1 else 3 * MOST_S
            await assert_quick(
                lambda: asyncio.gather(*(site.get(PATH) for _ in range(count))), time.process_time, most_s
            )

    @pytest.mark.parametrize("query", [b"", b"stream=true&starting_after=0"])
    async def test_it_is_read(self, tmp_path, query):
        async with Site(tmp_path, text=TEXT) as site:
            pieces = await site.get("/v1/responses/resp_1", query)
            assert max(map(len, pieces)) <= PIECE
            assert b"".join(pieces) == (b"data: %b\n\n" % TEXT if query else answer(TEXT))
            await assert_quick(lambda: site.get("/v1/responses/resp_1", query), time.process_time)

    @pytest.mark.parametrize("shape", CONVERSATIONS)
    async def test_it_is_gone_on_from(self, tmp_path, shape):
        items = CONVERSATIONS[shape]()
        async with Site(tmp_path, items, TEXT) as site:
            memory = ConversationStore(site.store, BodyBudget(), None, True)

            async def work() -> None:
                body = await JsonBody.open(b'{"model":"m","input":"Hi","previous_response_id":"resp_1"}')
                body, turn = await conversation_of(body, memory, is_counted=False)
                await body.rewritten(REWRITE, Endpoint("/v1/responses"))
                turn.release()

            # All of it becomes one body of 40 MiB, which moves in memory once as it grows.
            await assert_quick(work, time.process_time, 2 * MOST_S)

    async def test_it_is_kept(self, tmp_path):
        body = b'{"model":"m","store":true,"input":%b}' % TEXT
        answers = [
            (f"resp_a{number}", answer(TEXT).replace(b"resp_1", b"resp_a%d" % number)) for number in range(TRIES)
        ]
        async with Site(tmp_path) as site:
            memory = ConversationStore(site.store, BodyBudget(), None, True)

            async def work() -> None:
                _, turn = await conversation_of(await JsonBody.open(body), memory, is_counted=False)
                name, told = answers.pop()
                pieces = [told[at : at + PIECE] for at in range(0, len(told), PIECE)]
                passed = await filtered(Pieces(pieces), [turn], Gathered())
                sizes = []
                while not passed.drained:
                    sizes.append(len(await passed.next_chunk()))
                turn.release()
                assert max(sizes) <= PIECE
                assert (await site.store.find(name, None)).items.size == len(TEXT)

            await assert_quick(work)  # without the thread that writes, which holds nobody up while it does
