"""What a request held is let go with it, whatever way it went: a daemon that never collects takes the same before and after.

Nor does a collection find anything of size afterwards: no body and no answer was reachable from a cycle.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.faults.test_takeover import Upgraded
from tests.support.counts import times
from tests.support.daemon import Daemon, fake, wait_until
from tests.support.fake_http import serving
from tests.support.fake_remote import KEY, MODEL, StandIn
from tests.support.faulty_daemon import rss_mib
from tests.support.held import held
from tests.support.limits import LIMIT_S
from tests.support.media_server import PNG

MIB = 1024 * 1024
SIZE = times(5, 20) * MIB // 4  # more than 1 MiB
BODY_MIB = times(3, 8)  # at most; a SIZE in base64 is less
AT_ONCE = 7  # more of them than GROWTH_MIB
ROUNDS = times(1, 15)
GROWTH_MIB = times(6, 10)  # without a leak it is 2.5 at most
CHAT = "/v1/chat/completions"
FORMS = "/v1/audio/transcriptions"
PAINTED = "/v1/images/generations"
TEXT = "x" * SIZE
EXTENSION_FIELDS = [{"role": "user", "content": TEXT}]
PROGRAM = Path(__file__).parents[1] / "support" / "fake_cli.py"

Way = Callable[[Daemon, int], Awaitable[None]]


# ------------------------------------------------------------------------------------------------------------- the daemon


class Uncollected(Upgraded):
    """See tests.support.faulty_daemon."""

    program = ("-m", "tests.support.faulty_daemon", "uncollected")
    by_exec = True  # its memory is its own

    def __init__(self, folder: Path, config: dict[str, object], **env: str) -> None:
        super().__init__(folder, config, {"GARBAGE_REPORTS": str(folder), "THEIR_KEY": KEY, **env})

    def collected(self, pid: int | None = None) -> tuple[float, list[str]]:
        """The MiB that it takes, and what of size a collection finds."""
        if pid is None:
            assert self.process is not None
            pid = self.process.pid
        path = self.folder / f"{pid}.json"
        path.unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR2)
        wait_until(path.exists, what="it has collected")
        told = json.loads(path.read_text())
        return told["rss_mib"], told["found"]

    def idle(self) -> bool:
        """No request and no job is under way."""
        jobs = self.get("/v1/jobs").json()["data"]
        return not requests(self) and all(job["status"] not in {"queued", "running"} for job in jobs)


def configuration(folder: Path, far: StandIn, **limits: object) -> dict[str, object]:
    command = [sys.executable, "-I", "-S", str(PROGRAM), "text", str(folder), "--model", "${model}"]
    forced = {
        "fails": {"status": 500},
        "silent": {"hang": True},
        "hangs-up": {"hang_up": True},
        "breaks": {"break_after": 2},
        "stops": {"end_after": 2},
        "endless": {"goes_on_until": str(folder / "never")},
        "long": {"chunk_bytes": SIZE // 4},
        "links": {"headers": [["x-llmux-pictures", "url"]]},
    }
    remote = {"runtime": "openai_remote", "base_url": far.url, "upstream_model": MODEL, "api_key_env": "THEIR_KEY"}
    return {
        "models": {
            "plain": fake(endpoints=[CHAT]),
            "cold": held(folder / "never", target_inflight=1, endpoints=[CHAT]),
            "full": held(folder / "never"),
            "broken": fake("--exit-code", "1", endpoints=[CHAT]),
            "stopped": fake(),
            "sounds": fake(type="asr", endpoints=[FORMS]),
            "painter": fake(type="image", endpoints=[PAINTED]),
            "narrow": fake(endpoints=[CHAT], target_inflight=1),
            "two": fake(endpoints=[CHAT], replicas=2),
            "far": {**remote, "allow_remote": True},
            "program": {
                "runtime": "claude_cli",
                "command": command,
                "output": "text",
                "upstream_model": "theirs",
                "allow_remote": True,
            },
        },
        "virtual_models": {
            name: {"model": "painter" if name == "links" else "plain", "force": {"fake": keys}}
            for name, keys in forced.items()
        },
        "tasks": {
            "falls": {"candidates": ["broken", "plain"], "pin_primary": True},
            "hopeless": {"candidates": ["broken", "hangs-up"], "pin_primary": True},
            "falls-silent": {"candidates": ["broken", "silent"], "pin_primary": True},
        },
        "server": {"media": {"folder": str(folder)}},
        "limits": {
            "crash_limit": 1,
            "queue_per_model": AT_ONCE,
            "readiness_interval_s": 600,
            "keepalive_s": 0.1,
            "loads_per_device": 8,
            "liveness_interval_s": 600,
            "body_mib": BODY_MIB,
            "jobs_running": AT_ONCE,
            **limits,
        },
    }


@contextlib.contextmanager
def started(folder: Path, **limits: object) -> Iterator[Uncollected]:
    with serving(StandIn()) as far:
        (folder / "picture.png").write_bytes(PNG + bytes(SIZE // 2))
        daemon = Uncollected(folder, configuration(folder, far, **limits))
        daemon.far = far
        try:
            yield daemon.start()
        finally:
            daemon.end()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with started(tmp_path_factory.mktemp("bodies")) as daemon:
        for name in ("plain", "stopped", "sounds", "painter", "two"):
            daemon.post(f"/v1/admin/models/{name}/load").raise_for_status()
        # The first of them leave 12 MiB, once: the store's threads, and the memory that these use again.
        with ThreadPoolExecutor(1) as pool:  # a test's loop runs here
            pool.submit(asyncio.run, goes_on(daemon, AT_ONCE)).result()
        yield daemon


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    """A daemon that waits for a worker's answer for one second."""
    with started(tmp_path_factory.mktemp("impatient"), first_byte_s=1) as one:
        one.post("/v1/admin/models/plain/load").raise_for_status()
        yield one


# ------------------------------------------------------------------------------------------------------------ the clients


def post(path: str, body: object, *headers: str, end: str = "") -> bytes:
    """A request on a connection of its own; `end` follows its JSON."""
    data = body if isinstance(body, bytes) else (json.dumps(body) + end).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", f"Content-Length: {len(data)}", *headers)
    return "\r\n".join([*lines, "", ""]).encode() + data


def chat(model: str, *headers: str, end: str = "", **fields: object) -> bytes:
    return post(CHAT, {"model": model, "messages": EXTENSION_FIELDS, **fields}, *headers, end=end)


class Client:
    """One request on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):  # refused before it was read: the answer is there
            await self.writer.drain()

    async def status(self) -> int:
        return int((await self.reader.readline()).split()[1])

    async def answer(self) -> tuple[int, bytes]:
        """Its status, and all that follows."""
        status, rest = await self.status(), bytearray()
        with contextlib.suppress(ConnectionError):  # it breaks off
            while piece := await self.reader.read(MIB):
                rest += piece
        return status, bytes(rest)


@asynccontextmanager
async def client(daemon: Daemon) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port, limit=MIB)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_until, condition)


def requests(daemon: Daemon, **wanted: object) -> list[dict[str, object]]:
    """Those under way that look like this."""
    found = daemon.get("/v1/admin/requests").json()["data"]
    return [item for item in found if all(item[name] == value for name, value in wanted.items())]


async def _answered(daemon: Daemon, count: int, data: bytes, status: int = 200) -> list[bytes]:
    """Send it, and read all of the answers."""

    async def one() -> tuple[int, bytes]:
        async with client(daemon) as asking:
            await asking.send(data)
            return await asking.answer()

    told = await asyncio.gather(*(one() for _ in range(count)))
    assert {found for found, _ in told} == {status}, told[0][1][:1000]
    return [rest for _, rest in told]


async def _left(
    daemon: Daemon, count: int, data: bytes, when: Callable[[], object], then: Callable[[], object] | None = None
) -> None:
    """Send it, leave once `when()` is true, and wait until `then()` is."""
    async with asyncio.TaskGroup() as group:
        ready = asyncio.Event()

        async def one() -> None:
            async with client(daemon) as sending:
                await sending.send(data)
                await ready.wait()

        for _ in range(count):
            group.create_task(one())
        await until(when)
        ready.set()
    await until(then or (lambda: not requests(daemon)))


async def _leaves(daemon: Daemon, count: int, data: bytes, **wanted: object) -> None:
    await _left(daemon, count, data, lambda: len(requests(daemon, **wanted)) == count)


async def _leaves_an_answer(daemon: Daemon, count: int, data: bytes) -> None:
    await _left(daemon, count, data, lambda: sum(item["bytes"] > 0 for item in requests(daemon)) == count)


# --------------------------------------------------------------------------------------- chats, as far as their workers get


async def left_queued(daemon: Daemon, count: int) -> None:
    await _leaves(daemon, count, chat("cold"), state="queued")


async def left_told_of_the_load(daemon: Daemon, count: int) -> None:
    await _leaves(daemon, count, chat("cold", "X-Llmux-Load-Feedback: 1", stream=True), state="queued")


async def left_sending(daemon: Daemon, count: int) -> None:
    """The worker reads nothing."""
    pid = daemon.model("stopped")["worker"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        await _leaves(daemon, count, chat("stopped"), state="running")
    finally:
        os.kill(pid, signal.SIGCONT)


async def left_unfinished(daemon: Daemon, count: int) -> None:
    """Half of the body came."""
    async with asyncio.TaskGroup() as group:

        async def one() -> None:
            async with client(daemon) as sending:
                await sending.send(chat("plain")[: SIZE // 2])

        for _ in range(count):
            group.create_task(one())


async def queue_full(daemon: Daemon, count: int) -> None:
    async with asyncio.TaskGroup() as group:
        leave = asyncio.Event()

        async def waits() -> None:
            async with client(daemon) as waiting:
                await waiting.send(post(CHAT, {"model": "full", "messages": []}))
                await leave.wait()

        for _ in range(AT_ONCE):
            group.create_task(waits())
        await until(lambda: len(requests(daemon, model="full", state="queued")) == AT_ONCE)
        await _answered(daemon, count, chat("full"), 503)
        leave.set()
    await until(lambda: not requests(daemon))


async def gateway_timeout(daemon: Daemon, count: int) -> None:
    await _answered(daemon, count, chat("plain", fake={"hang": True}), 504)


def _cancel(daemon: Daemon, number: object) -> httpx.Response:
    return httpx.delete(f"{daemon.url}/v1/admin/requests/{number}", trust_env=False, timeout=LIMIT_S)


async def cancelled(daemon: Daemon, count: int) -> None:
    refused = asyncio.create_task(_answered(daemon, count, chat("cold"), 410))
    await until(lambda: len(requests(daemon, state="queued")) == count)
    for item in await asyncio.to_thread(requests, daemon):
        reply = await asyncio.to_thread(_cancel, daemon, item["id"])
        reply.raise_for_status()
    await refused


async def too_large(daemon: Daemon, count: int) -> None:
    """Sent in chunks: what came before the limit was kept."""
    size = (BODY_MIB + 1) * MIB
    piece = b"%x\r\n%b\r\n" % (size, bytes(size))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()

    async def one() -> int:
        async with client(daemon) as asking:
            await asking.send(head + piece)
            return await asking.status()

    assert set(await asyncio.gather(*(one() for _ in range(count)))) == {413}


def _chats(data: bytes, status: int) -> Way:
    return partial(_answered, data=data, status=status)


OF_CHATS: dict[str, Way] = {
    "left queued": left_queued,
    "left told of the load": left_told_of_the_load,
    "left sending": left_sending,
    "left unfinished": left_unfinished,
    "queue full": queue_full,
    "gateway timeout": gateway_timeout,
    "cancelled": cancelled,
    "too large": too_large,
    "model failed": _chats(chat("broken"), 503),
    "bad gateway": _chats(chat("hangs-up"), 502),
    "not json": _chats(chat("plain", end="}"), 400),
    "unknown model": _chats(chat("nobody"), 404),
    "out of time": _chats(chat("cold", "X-Timeout: 0.3"), 504),
    "out of time, told of the load": _chats(
        chat("cold", "X-Timeout: 1.5", "X-Llmux-Load-Feedback: 1", stream=True), 200
    ),
    "task that falls back": _chats(chat("task:falls"), 200),
    "task without hope": _chats(chat("task:hopeless"), 502),
    "task that is left": partial(_leaves, data=chat("task:falls-silent"), state="running"),
    "replicas": _chats(chat("two"), 200),
}

# ----------------------------------------------------------------------------------------------- APIs, however answers end

APIS: dict[str, tuple[str, dict[str, object]]] = {
    "chat": (CHAT, {"messages": EXTENSION_FIELDS}),
    "messages": ("/v1/messages", {"messages": EXTENSION_FIELDS, "max_tokens": 9}),
    "response": ("/v1/responses", {"input": TEXT, "store": False}),
    "kept response": ("/v1/responses", {"input": TEXT}),
    "llm-pool": ("/v1/responses", {"messages": EXTENSION_FIELDS}),
    "ollama": ("/api/chat", {"messages": EXTENSION_FIELDS, "stream": False}),
}
ENDS: dict[str, tuple[str, dict[str, object], Callable[..., Awaitable[object]], dict[str, object]]] = {
    "answered": ("plain", {}, _answered, {}),
    "streamed": ("long", {"stream": True}, _answered, {}),
    "failed": ("fails", {}, _answered, {"status": 500}),
    "broken off": ("breaks", {"stream": True}, _answered, {}),
    "not complete": ("stops", {"stream": True}, _answered, {}),
    "left": ("silent", {}, _leaves, {"state": "running"}),
    "left in the middle": ("endless", {"stream": True}, _leaves_an_answer, {}),
}
OF_APIS: dict[str, Way] = {
    f"{api}, {end}": partial(how, data=post(path, {"model": model, **body, **fields}), **wanted)
    for api, (path, body) in APIS.items()
    for end, (model, fields, how, wanted) in ENDS.items()
}

# ------------------------------------------------------------------------------- what isn't sent to a worker, or not as it is

BOUNDARY = "llmux-test-boundary"
FORM = f"""--{BOUNDARY}\r\nContent-Disposition: form-data; name="model"\r\n\r\n%s\r
--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n{TEXT}\r\n--{BOUNDARY}--\r\n"""


def _picture(address: str) -> list[object]:
    return [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": TEXT}],
        }
    ]


def _form(model: str) -> bytes:
    return post(FORMS, (FORM % model).encode(), f"Content-Type: multipart/form-data; boundary={BOUNDARY}")


async def picture(daemon: Daemon, count: int, *, name: str, status: int) -> None:
    body = {"model": "plain", "messages": _picture(f"file://{daemon.folder / name}")}
    await _answered(daemon, count, post(CHAT, body), status)


async def remote_left(daemon: Daemon, count: int) -> None:
    daemon.far.hold.clear()
    try:
        await _leaves_an_answer(daemon, count, chat("far", stream=True))
    finally:
        daemon.far.begin_anew()


async def remote_answered(daemon: Daemon, count: int) -> None:
    await _answered(daemon, count, chat("far"))
    daemon.far.begin_anew()


OF_OTHERS: dict[str, Way] = {
    "tokens of messages": _chats(
        post("/v1/messages/count_tokens", {"model": "plain", "messages": EXTENSION_FIELDS}), 200
    ),
    "tokens of a response": _chats(post("/v1/responses/input_tokens", {"model": "plain", "input": TEXT}), 200),
    "tokens, left": partial(
        _leaves,
        data=post("/v1/messages/count_tokens", {"model": "silent", "messages": EXTENSION_FIELDS}),
        state="running",
    ),
    "a picture of elsewhere": _chats(
        post(CHAT, {"model": "plain", "messages": _picture("http://169.254.169.254/")}), 400
    ),
    "a picture that is loaded": partial(picture, name="picture.png", status=200),
    "a picture that isn't there": partial(picture, name="nothing.png", status=400),
    "pictures": _chats(
        post(
            PAINTED,
            {"model": "links", "prompt": "x", "data": [{"b64_json": base64.b64encode(PNG * (SIZE // 300)).decode()}]},
        ),
        200,
    ),
    "a form": _chats(_form("sounds"), 200),
    "a form for nobody": _chats(_form("nobody"), 404),
    "a remote, left": remote_left,
    "a remote, answered": remote_answered,
    "a program": _chats(chat("program"), 200),
}

# ------------------------------------------------------------------------------------------- responses and jobs that are kept


def _name(answer: bytes) -> str:
    found: str = json.loads(answer.partition(b"\r\n\r\n")[2])["id"]
    return found


async def _call(daemon: Daemon, method: str, path: str, status: int = 200) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    return (await _answered(daemon, 1, head.encode(), status))[0]


async def _each(daemon: Daemon, names: list[str], method: str, path: str, status: int = 200) -> None:
    await asyncio.gather(*(_call(daemon, method, path.format(name), status) for name in names))


async def goes_on(daemon: Daemon, count: int) -> None:
    """From a response that is kept, which is read as well."""
    (first,) = await _answered(daemon, 1, post("/v1/responses", {"model": "plain", "input": TEXT}))
    name = _name(first)
    told = await _answered(
        daemon, count, post("/v1/responses", {"model": "plain", "input": "Hi", "previous_response_id": name})
    )
    await _each(daemon, [name] * count, "GET", "/v1/responses/{}/input_items")
    await _each(daemon, [name] * count, "GET", "/v1/responses/{}")
    await _each(daemon, [name, *map(_name, told)], "DELETE", "/v1/responses/{}")


async def _background(daemon: Daemon, count: int, *, model: str, then: str = "", stream: bool = False) -> None:
    body = {"model": model, "input": TEXT, "background": True, "stream": stream}
    told = await _answered(daemon, count, post("/v1/responses", body))
    if stream:  # which was told all
        return
    names = [_name(each) for each in told]
    if then:
        await until(lambda: len(requests(daemon, state="queued" if model == "cold" else "running")) == count)
        await _each(
            daemon, names, "DELETE" if then == "delete" else "POST", "/v1/responses/{}" + then.removeprefix("delete")
        )
    await until(daemon.idle)
    if then != "delete":
        await _each(daemon, names, "GET", "/v1/responses/{}")
        await _each(daemon, names, "DELETE", "/v1/responses/{}")


async def _job(daemon: Daemon, count: int, *, endpoint: str, body: dict[str, object], then: str = "") -> None:
    told = await _answered(daemon, count, post("/v1/jobs", {"endpoint": endpoint, "body": body}), 202)
    names = [_name(each) for each in told]
    if then:
        await until(lambda: len(requests(daemon, state="queued" if body["model"] == "cold" else "running")) == count)
        await _each(daemon, names, "POST", "/v1/jobs/{}/cancel")
    await until(daemon.idle)
    if body["model"] in {"plain", "sounds"}:
        await _each(daemon, names, "GET", "/v1/jobs/{}/result")
    await _each(daemon, names, "DELETE", "/v1/jobs/{}")


def _jobs(model: str, then: str = "") -> Way:
    return partial(_job, endpoint=CHAT, body={"model": model, "messages": EXTENSION_FIELDS}, then=then)


OF_KEPT: dict[str, Way] = {
    "goes on": goes_on,
    "background": partial(_background, model="plain"),
    "background, streamed": partial(_background, model="long", stream=True),
    "background, broken off": partial(_background, model="breaks", stream=True),
    "background, failed": partial(_background, model="fails"),
    "background, cancelled": partial(_background, model="silent", then="/cancel"),
    "background, cancelled while it waits": partial(_background, model="cold", then="/cancel"),
    "background, deleted": partial(_background, model="silent", then="delete"),
    "job": _jobs("plain"),
    "job, failed": _jobs("fails"),
    "job, cancelled": _jobs("silent", "/cancel"),
    "job, cancelled while it waits": _jobs("cold", "/cancel"),
    "job of a form": partial(
        _job,
        endpoint=FORMS,
        body={"model": "sounds", "file": f"data:audio/wav;base64,{base64.b64encode(bytes(SIZE)).decode()}"},
    ),
    "job that is none": _chats(
        post("/v1/jobs", {"endpoint": CHAT, "body": {"model": "nobody", "messages": EXTENSION_FIELDS}}), 404
    ),
}

WAYS = OF_CHATS | OF_APIS | OF_OTHERS | OF_KEPT


@pytest.mark.parametrize("way", WAYS)
async def test_a_request_holds_nothing_once_it_has_gone(request, way, measured):
    """With the collector off, after many that went this way."""
    daemon = request.getfixturevalue("impatient" if way == "gateway timeout" else "daemon")
    before, _ = await asyncio.to_thread(daemon.collected)
    for _ in range(ROUNDS):
        await WAYS[way](daemon, AT_ONCE)
    await until(daemon.idle)
    assert daemon.process is not None
    pid = daemon.process.pid
    try:
        await until(lambda: rss_mib(pid) - before < GROWTH_MIB)  # the last clients' ends take a moment
    finally:
        after, garbage = await asyncio.to_thread(daemon.collected)
        measured(before_mib=before, after_mib=after)
        assert garbage == []


async def test_nor_does_one_that_a_successor_answers(tmp_path):
    """Neither in the daemon that hands over, which a stream keeps, nor in the one that takes over."""
    with started(tmp_path) as daemon:
        assert daemon.process is not None
        old = daemon.process.pid
        before, _ = await asyncio.to_thread(daemon.collected)
        async with client(daemon) as stream:
            fields = {"messages": [], "stream": True, "fake": {"goes_on_until": str(tmp_path / "never")}}
            await stream.send(post(CHAT, {"model": "narrow", **fields}))
            assert await stream.status() == 200
            # Until it runs it waits, too, and the queue has room for no eighth.
            await until(lambda: requests(daemon, state="running"))

            def waiting() -> bool:
                return len(requests(daemon, state="queued")) == AT_ONCE

            def handed_over() -> bool:
                return waiting() and daemon.upgrade() != old and wait_until(waiting)

            await _left(daemon, AT_ONCE, chat("narrow"), handed_over, then=lambda: not waiting())
            await until(lambda: rss_mib(old) - before < GROWTH_MIB)
            for pid in (old, daemon.serving):
                _, garbage = await asyncio.to_thread(daemon.collected, pid)
                assert garbage == []
