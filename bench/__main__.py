"""Compare direct, nginx, Go's reverse proxy, the data path alone and llmux in one run, and print ratios to Go's.

Proxies are pinned to one core, stub and load generator to another; targets take turns within each round, and a ratio is
the median of the rounds' ratios. CPU comes from the kernel's own count for the proxy's processes: wall time on a shared
machine says little, and where others use the machine, the table says so.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import uvloop

from bench import report
from bench.load import LIMITED_KEY, Burst, begin_at_once, hang_up, listen, post, repeat, request_bytes
from bench.report import Samples, others_share
from bench.targets import (
    GO,
    GO_MISSING,
    LLMUX,
    NGINX,
    NGINX_MISSING,
    Target,
    start_go,
    start_llmux,
    start_nginx,
    start_path_only,
    start_stub,
    temporary_folder,
)

STREAM_INTERVAL_MS = 20
BIG = 10 * 1000 * 1000
BIG_POSTS = 5
LEAVES = 20
IDLE_STREAMS = 200
QUIET = 0.05  # the share of the processors that other programs may use

HELLO = [{"role": "user", "content": "Say hello."}]
CHAT = {"model": "stub", "messages": HELLO, "stream": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
PLAIN = post(CHAT)
JOURNEYS = {
    "with tools": post({**CHAT, "tools": [TOOL]}),
    "with content parts": post({**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}]}),
    "with a limit": post(CHAT, key=LIMITED_KEY),
    "by a virtual name": post({**CHAT, "model": "named"}),
    "with a default": post({**CHAT, "model": "tuned"}),
    "of Anthropic's API, passed on": post({**CHAT, "max_tokens": 9}, "/v1/messages"),
    "of Anthropic's API, translated": post({**CHAT, "model": "chats", "max_tokens": 9}, "/v1/messages"),
    "of Ollama's API, translated": post({**CHAT, "model": "chats"}, "/api/chat"),
    "for a response, passed on": post({"model": "stub", "input": "Say hello.", "store": False}, "/v1/responses"),
    "for a response, passed on and kept": post({"model": "stub", "input": "Say hello."}, "/v1/responses"),
    "for a response, translated and kept": post({"model": "chats", "input": "Say hello."}, "/v1/responses"),
}
"""The costs of other kinds of requests in llmux, compared with a plain request."""


def quantile(values: list[int], share: float) -> float:
    """The value below which `share` of the values lie; 0 for none."""
    return float(sorted(values)[int(share * (len(values) - 1))]) if values else 0.0


async def small(target: Target, connections: int, seconds: float, request: bytes | None = None) -> tuple[float, Burst]:
    """CPU µs per request, and the burst."""
    before = target.cpu_ns()
    burst = await repeat(target.port, connections, seconds, request=request)
    return (target.cpu_ns() - before) / 1e3 / burst.count, burst


async def chunks(target: Target, streams: int, seconds: float) -> tuple[float, float]:
    """CPU µs per event, and the median delay of an event in µs."""
    clients = await listen(target.port, streams, STREAM_INTERVAL_MS)
    for client in clients:
        client.delays_ns.clear()
    before = target.cpu_ns()
    await asyncio.sleep(seconds)
    spent = target.cpu_ns() - before
    delays = [delay for client in clients for delay in client.delays_ns]
    await hang_up(clients)
    return spent / 1e3 / len(delays), quantile(delays, 0.5) / 1e3


async def first_chunk_ms(target: Target, streams: int) -> float:
    """The median time to the first chunk, of streams that begin at once."""
    clients = await begin_at_once(target.port, streams)
    await hang_up(clients)
    return quantile([client.first_ns for client in clients], 0.5) / 1e6


async def big_bodies(target: Target) -> tuple[float, float, float]:
    """10 MB bodies beside small requests: longest wait of the small ones in ms, extra peak memory in MiB, CPU ms per body."""
    payload = request_bytes(padding=BIG)
    target.reset_peak()
    memory_before = target.memory_kib()
    cpu_before = target.cpu_ns()
    waits = []
    for _ in range(BIG_POSTS):
        posting = asyncio.create_task(repeat(target.port, 1, 0.0, request=payload))
        beside: list[int] = []
        while not posting.done():
            beside += (await repeat(target.port, 1, 0.005)).latencies_ns
        await posting
        waits.append(max(beside))
    extra_mib = (target.memory_kib("VmHWM") - memory_before) / 1024
    return quantile(waits, 0.5) / 1e6, extra_mib, (target.cpu_ns() - cpu_before) / 1e6 / BIG_POSTS


async def disconnects(target: Target, reports: socket.socket, *, silent: bool) -> list[float]:
    """ms from the client's close until the worker's connection closes."""
    loop = asyncio.get_running_loop()
    waits = []
    for _ in range(LEAVES):
        if silent:
            _, writer = await asyncio.open_connection("127.0.0.1", target.port)
            writer.write(request_bytes("silent"))
            async with asyncio.timeout(5):
                await loop.sock_recv(reports, 64)  # wait until the worker has the request
            began = time.monotonic_ns()
            writer.close()
        else:
            (client,) = await listen(target.port, 1, STREAM_INTERVAL_MS)
            began = time.monotonic_ns()
            client.transport.abort()
        async with asyncio.timeout(5):
            waits.append((int(await loop.sock_recv(reports, 64)) - began) / 1e6)
    return waits


async def per_stream_kib(target: Target) -> float:
    """Memory of one open stream."""
    before = target.memory_kib()
    clients = await listen(target.port, IDLE_STREAMS, 500)
    grown = target.memory_kib() - before
    await hang_up(clients)
    return grown / IDLE_STREAMS


def drain(reports: socket.socket) -> None:
    """Discard stale reports."""
    while True:
        try:
            reports.recv(64)
        except BlockingIOError:
            return


async def measure(targets: list[Target], rounds: int, seconds: float, reports: socket.socket) -> Samples:
    """First all measures that the targets take in turn, then memory, because its measures change the targets."""
    samples: Samples = defaultdict(lambda: defaultdict(list))
    for target in targets:
        samples["RSS idle, MiB"][target.name].append(target.memory_kib() / 1024)
        samples["cold start to /health, CPU s"][target.name].append(target.cold_cpu_s)
        samples["cold start to a chat, CPU s"][target.name].append(target.first_chat_cpu_s)
        await repeat(target.port, 64, 0.3)
    for _ in range(rounds):
        for connections in (1, 16, 64):
            for target in targets:
                cpu, burst = await small(target, connections, seconds)
                samples[f"request c{connections}, CPU µs"][target.name].append(cpu)
                samples[f"request c{connections}, per s"][target.name].append(burst.count / burst.seconds)
                samples[f"request c{connections}, p50 µs"][target.name].append(quantile(burst.latencies_ns, 0.5) / 1e3)
                samples[f"request c{connections}, p99 µs"][target.name].append(quantile(burst.latencies_ns, 0.99) / 1e3)
        for streams in (1, 32, 128):
            for target in targets:
                cpu, delay = await chunks(target, streams, seconds)
                samples[f"chunk x{streams}, CPU µs"][target.name].append(cpu)
                samples[f"chunk x{streams}, p50 µs"][target.name].append(delay)
        for target in targets:
            samples["first chunk of 128 at once, ms"][target.name].append(await first_chunk_ms(target, 128))
            await asyncio.sleep(0.2)
        for target in targets:
            if target.name == LLMUX:
                for name, request in JOURNEYS.items():
                    base, _ = await small(
                        target, 64, seconds, PLAIN
                    )  # measured anew each time: a processor's speed varies
                    cpu, _ = await small(target, 64, seconds, request)
                    samples[f"request {name}, CPU µs"][LLMUX].append(cpu)
                    samples[f"request {name} ÷ plain"][LLMUX].append(cpu / base)
    await asyncio.sleep(0.3)
    for target in targets:
        samples["open stream, KiB"][target.name].append(await per_stream_kib(target))
        await asyncio.sleep(0.3)
        for silent in (False, True):
            drain(reports)
            name = "silent" if silent else "streaming"
            found = await disconnects(target, reports, silent=silent)
            samples[f"client leaves ({name}), max ms"][target.name].append(max(found))
        wait, extra, cpu = await big_bodies(target)
        samples["10 MB body, others wait ms"][target.name].append(wait)
        samples["10 MB body, extra MiB"][target.name].append(extra)
        samples["10 MB body, CPU ms"][target.name].append(cpu)
    return samples


async def run(rounds: int, seconds: float, wanted: list[str]) -> Samples:
    """Start everything, measure, stop everything."""
    cores = sorted(os.sched_getaffinity(0))
    proxy_core, own_core = cores[0], cores[-1]
    if proxy_core == own_core:
        print("Only one core: the numbers mix proxy and load.")
    os.sched_setaffinity(0, {own_core})
    with ExitStack() as stack:
        reports = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        reports.bind(("127.0.0.1", 0))
        reports.setblocking(False)
        report_port = reports.getsockname()[1]
        targets: list[Target] = []

        async def started(target: Target) -> Target:
            stack.callback(target.stop)
            await target.ready()
            targets.append(target)
            return target

        stub = await started(start_stub(own_core, report_port))
        starters: dict[str, Callable[[Path], Target]] = {}
        if NGINX:
            starters["nginx"] = lambda folder: start_nginx(proxy_core, stub.port, folder)
        else:
            print(NGINX_MISSING)
        if GO:
            starters["Go"] = lambda folder: start_go(proxy_core, stub.port, folder)
        else:
            print(GO_MISSING)
        starters["path only"] = lambda _: start_path_only(proxy_core, stub.port)
        if find_spec("supervisor.cli.main"):
            starters[LLMUX] = lambda folder: start_llmux(proxy_core, own_core, report_port, folder)
        for name, start in starters.items():
            if not wanted or name in wanted:
                await started(start(Path(stack.enter_context(temporary_folder()))))
        return await measure(targets, rounds, seconds, reports)


def main() -> None:
    """`python -m bench [--rounds N] [--seconds S] [--only NAME …]`."""
    flags = argparse.ArgumentParser(prog="bench", description=__doc__)
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--seconds", type=float, default=0.7, help="of each measurement")
    flags.add_argument("--only", nargs="*", default=[], help="targets beside direct: nginx, Go, 'path only', llmux")
    flags.add_argument("--write", action="store_true", help="into docs/performance.md")
    given = flags.parse_args()
    before = others_share()
    samples = uvloop.run(run(given.rounds, given.seconds, given.only))
    print(report.plain(samples))
    busy = max(before, others_share())
    if busy > QUIET:
        print(f"\nOther programs used {busy:.0%} of the processors before or after: repeat it on a quiet machine.")
    if given.write:
        report.write(samples, given.rounds, busy)


if __name__ == "__main__":
    main()
