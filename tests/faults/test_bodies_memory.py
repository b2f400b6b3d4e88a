"""A request's body is let go with its request, whatever becomes of it: what the daemon takes is the same before and after."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from supervisor.cli.own_process import TRIM_S
from tests.support.clients import times
from tests.support.daemon import Daemon, fake, wait_until
from tests.support.held import held
from tests.support.limits import LIMIT_S

MIB = 1024 * 1024
BODY = 5 * MIB
FAILURES = times(30, 200)
AT_ONCE = 10
GROWTH_MIB = 10.0
CHAT = "/v1/chat/completions"


def rss_mib(daemon: Daemon) -> float:
    assert daemon.process is not None
    for line in Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the daemon ended")


def chat(model: str, *, size: int = BODY, end: str = "", **fields: object) -> bytes:
    """A chat of `size` bytes; `end` follows its JSON."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "x" * size}], **fields}) + end
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


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


@contextlib.contextmanager
def hasty(folder: Path, config: dict[str, object]) -> Iterator[Daemon]:
    daemon = Daemon(folder, config)
    daemon.program = ("-m", "tests.support.hasty_daemon")
    try:
        yield daemon.start()
    finally:
        daemon.stop()
        wait_until(lambda: not daemon.workers(), what="no worker is left")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bodies")
    models = {
        "plain": fake(),
        "cold": held(folder / "never", target_inflight=1),
        "full": held(folder / "never"),
        "broken": fake("--exit-code", "1"),
        "stopped": fake(),
    }
    limits = {"crash_limit": 1, "queue_per_model": AT_ONCE, "readiness_interval_s": 600}
    limits |= {"loads_per_device": 8, "liveness_interval_s": 600, "body_mib": 8}
    with hasty(folder, {"models": models, "limits": limits}) as daemon:
        for name in ("plain", "stopped"):
            daemon.post(f"/v1/admin/models/{name}/load").raise_for_status()
        yield daemon


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    """A daemon that waits for a worker's answer for one second."""
    with hasty(
        tmp_path_factory.mktemp("impatient"), {"models": {"plain": fake()}, "limits": {"first_byte_s": 1}}
    ) as one:
        one.post("/v1/admin/models/plain/load").raise_for_status()
        yield one


# Each kind of failure: does it `count` times, at once.


async def _left(daemon: Daemon, count: int, data: bytes, when: Callable[[], object]) -> None:
    """Send it, and leave once `when()` is true."""
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
    await until(lambda: not requests(daemon))


async def left_queued(daemon: Daemon, count: int) -> None:
    await _left(daemon, count, chat("cold"), lambda: len(requests(daemon, state="queued")) == count)


async def left_sending(daemon: Daemon, count: int) -> None:
    """The worker reads nothing."""
    pid = daemon.model("stopped")["worker"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        await _left(daemon, count, chat("stopped"), lambda: len(requests(daemon, state="running")) == count)
    finally:
        os.kill(pid, signal.SIGCONT)


async def left_answered(daemon: Daemon, count: int) -> None:
    data = chat("plain", stream=True, fake={"chunk_delay": 600})
    await _left(daemon, count, data, lambda: sum(item["bytes"] > 0 for item in requests(daemon)) == count)


async def left_unfinished(daemon: Daemon, count: int) -> None:
    """Half of the body came."""
    async with asyncio.TaskGroup() as group:

        async def one() -> None:
            async with client(daemon) as sending:
                await sending.send(chat("plain")[: BODY // 2])

        for _ in range(count):
            group.create_task(one())


async def _refused(daemon: Daemon, count: int, data: bytes, status: int) -> None:
    async def one() -> int:
        async with client(daemon) as asking:
            await asking.send(data)
            return await asking.status()

    assert set(await asyncio.gather(*(one() for _ in range(count)))) == {status}


async def queue_full(daemon: Daemon, count: int) -> None:
    async with asyncio.TaskGroup() as group:
        leave = asyncio.Event()

        async def waits() -> None:
            async with client(daemon) as waiting:
                await waiting.send(chat("full", size=1))
                await leave.wait()

        for _ in range(AT_ONCE):
            group.create_task(waits())
        await until(lambda: len(requests(daemon, model="full", state="queued")) == AT_ONCE)
        await _refused(daemon, count, chat("full"), 503)
        leave.set()
    await until(lambda: not requests(daemon))


async def model_failed(daemon: Daemon, count: int) -> None:
    await _refused(daemon, count, chat("broken"), 503)


async def bad_gateway(daemon: Daemon, count: int) -> None:
    await _refused(daemon, count, chat("plain", fake={"hang_up": True}), 502)


async def gateway_timeout(daemon: Daemon, count: int) -> None:
    await _refused(daemon, count, chat("plain", fake={"hang": True}), 504)


def _cancel(daemon: Daemon, number: object) -> httpx.Response:
    return httpx.delete(f"{daemon.url}/v1/admin/requests/{number}", trust_env=False, timeout=LIMIT_S)


async def cancelled(daemon: Daemon, count: int) -> None:
    refused = asyncio.create_task(_refused(daemon, count, chat("cold"), 410))
    await until(lambda: len(requests(daemon, state="queued")) == count)
    for item in await asyncio.to_thread(requests, daemon):
        reply = await asyncio.to_thread(_cancel, daemon, item["id"])
        reply.raise_for_status()
    await refused


async def too_large(daemon: Daemon, count: int) -> None:
    """Sent in chunks: what came before the limit was kept."""
    piece = b"%x\r\n%b\r\n" % (9 * MIB, bytes(9 * MIB))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    await _refused(daemon, count, head + piece, 413)


async def not_json(daemon: Daemon, count: int) -> None:
    await _refused(daemon, count, chat("plain", end="}"), 400)


async def unknown_model(daemon: Daemon, count: int) -> None:
    await _refused(daemon, count, chat("nobody"), 404)


KINDS: dict[str, Callable[[Daemon, int], Awaitable[None]]] = {
    kind.__name__: kind
    for kind in (
        left_queued,
        left_sending,
        left_answered,
        left_unfinished,
        queue_full,
        model_failed,
        bad_gateway,
        gateway_timeout,
        cancelled,
        too_large,
        not_json,
        unknown_model,
    )
}


async def settled_mib(daemon: Daemon) -> float:
    """Its memory, once it has given back what it doesn't use."""
    await asyncio.sleep(TRIM_S / 10 + 1)
    return rss_mib(daemon)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
async def test_bodies_of_failed_requests_are_let_go(request, kind, measured):
    """After many failures of each kind, with bodies of 5 MiB, the daemon takes no more than before."""
    fail = KINDS[kind]
    daemon = request.getfixturevalue("impatient" if fail is gateway_timeout else "daemon")
    for _ in range(2):  # what is allocated once is allocated now
        await fail(daemon, AT_ONCE)
    before = await settled_mib(daemon)
    for _ in range(FAILURES // AT_ONCE):
        await fail(daemon, AT_ONCE)
    try:
        await until(lambda: rss_mib(daemon) - before < GROWTH_MIB)  # the last clients' ends take a moment
    finally:
        measured(before_mib=before, after_mib=rss_mib(daemon))
