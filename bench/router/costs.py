"""The costs of both programs beside their workers: memory, CPU, and the waits for a load and a swap. Two of three models fit."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Final

from bench.report import Samples
from bench.router.server import COMMANDS, MODELS, SLOTS, Answer, Server, running

STREAMED: Final = 300
EACH: Final = 50


def _checked_good(answer: Answer) -> Answer:
    assert answer.kind == "good", answer
    return answer


async def once(server: Server, samples: Samples) -> None:
    """The measures of a freshly started server."""
    samples["CPU of a start, s"][server.name].append(server.cpu_ns() / 1e9)
    samples["memory at rest, MiB"][server.name].append(server.own_mib())
    samples["first event of a model that isn't loaded, s"][server.name].append(
        _checked_good(await server.ask(MODELS[0])).first_s
    )
    _checked_good(await server.ask(MODELS[1]))
    samples["memory with two models, MiB"][server.name].append(server.own_mib())


async def _warm_latencies(server: Server, connections: int) -> list[float]:
    """Seconds of each request. A failed request is repeated, as by OpenAI's own clients: see `races.kept`."""

    async def repeat() -> list[float]:
        seconds = []
        for _ in range(EACH):
            began = time.monotonic()
            while (await server.ask_plainly(MODELS[0])).kind != "good":
                pass
            seconds.append(time.monotonic() - began)
        return seconds

    return list(chain(*await asyncio.gather(*(repeat() for _ in range(connections)))))


async def in_turn(server: Server, samples: Samples) -> None:
    """Warm requests, streams, and a swap."""
    _checked_good(await server.ask(MODELS[0]))
    for connections in (1, SLOTS):
        before = server.cpu_ns()
        seconds = await _warm_latencies(server, connections)
        spent = (server.cpu_ns() - before) / 1e3 / (EACH * connections)
        name = f"a warm request of one token, {connections} at a time"
        samples[f"CPU of {name}, µs"][server.name].append(spent)
        samples[f"time of {name}, ms"][server.name].append(statistics.median(seconds) * 1e3)
    before = server.cpu_ns()
    streams = await asyncio.gather(*(server.ask(MODELS[0], STREAMED) for _ in range(SLOTS)))
    events = sum(_checked_good(stream).events for stream in streams)
    samples[f"CPU of a streamed event, {SLOTS} streams, µs"][server.name].append(
        (server.cpu_ns() - before) / 1e3 / events
    )
    absent = min(set(MODELS) - set(server.workers().values()))
    samples["first event of a model that another makes room for, s"][server.name].append(
        _checked_good(await server.ask(absent)).first_s
    )


async def measured(program: Path, folder: Path, rounds: int) -> Samples:
    """Start both programs in each round, and let them take turns."""
    samples: Samples = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        servers = [running(name, program, folder, 2) for name in COMMANDS]
        async with servers[0] as router, servers[1] as llmux:
            for measure in (once, in_turn):
                for server in (router, llmux):
                    await measure(server, samples)
    return samples
