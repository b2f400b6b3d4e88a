"""Races that users of llama.cpp's router and of LM Studio have reported, as requests to either server.

Each function sends requests to a freshly started server without loaded models, and returns the answers. A good answer is one
that a user may expect: complete and by the requested model, or an error where nothing else is possible.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from bench.router.server import BROKEN, MODELS, POLL_S, Answer, Kind, Server

A, B, C = MODELS
LONG: Final = 200
"""Tokens of an answer that takes a second or more."""
OUTLIVED_S: Final = 10.0


async def started_stream(server: Server, model: str) -> asyncio.Task[Answer]:
    """The task of a long streamed answer, once its first event has come."""
    begun = asyncio.Event()
    stream = asyncio.create_task(server.ask(model, LONG, begun))
    waiting = asyncio.create_task(begun.wait())
    await asyncio.wait((stream, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return stream


def expected(answer: Answer, kind: Kind) -> Answer:
    """A good answer, if `answer` is of this kind; else a wrong one."""
    return Answer("good" if answer.kind == kind else "wrong", answer.seconds)


async def two_cold(server: Server) -> list[Answer]:
    first = asyncio.create_task(server.ask(A))
    await asyncio.sleep(0.1)
    return [await server.ask(B), await first]


async def back_again(server: Server) -> list[Answer]:
    answers = []
    for delay in (0.002, 0.005, 0.01, 0.02, 0.03):
        answers.append(await server.ask(A))
        other = asyncio.create_task(server.ask(B))
        await asyncio.sleep(delay)
        answers += [await server.ask(A), await other]
    return answers


async def two_for_one(server: Server) -> list[Answer]:
    return [await server.ask(A), *await asyncio.gather(server.ask(B), server.ask(C))]


async def busy(server: Server) -> list[Answer]:
    stream = await started_stream(server, A)
    return [await server.ask(B), await stream]


async def burst(server: Server) -> list[Answer]:
    return await asyncio.gather(*(server.ask(A) for _ in range(8)))


async def storm(server: Server) -> list[Answer]:
    chance = random.Random(0)
    tasks = []
    for _ in range(60):
        tasks.append(asyncio.create_task(server.ask(chance.choice(MODELS))))
        await asyncio.sleep(chance.expovariate(20))
    return await asyncio.gather(*tasks)


async def kept(server: Server) -> list[Answer]:
    return [await server.ask(A), *[await server.ask_plainly(A) for _ in range(100)]]


async def unloaded(server: Server) -> list[Answer]:
    stream = await started_stream(server, A)
    await server.unload(A)
    return [await server.ask(A), await stream]


async def leaves(server: Server) -> list[Answer]:
    with suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await server.ask(A)
    return [await server.ask(B), await server.ask(A)]


async def broken(server: Server) -> list[Answer]:
    return [expected(await server.ask(BROKEN), "error"), await server.ask(A)]


async def worker_killed(server: Server) -> list[Answer]:
    stream = await started_stream(server, A)
    _signal_workers(server, signal.SIGKILL)
    return [expected(await stream, "error"), await server.ask(A)]


async def worker_stuck(server: Server) -> list[Answer]:
    first = await server.ask(A)
    _signal_workers(server, signal.SIGSTOP)
    return [first, await server.ask(B)]


async def server_killed(server: Server) -> list[Answer]:
    stream = await started_stream(server, A)
    return [await _kill_server(server), expected(await stream, "error")]


async def server_killed_beside_stuck(server: Server) -> list[Answer]:
    first = await server.ask(A)
    _signal_workers(server, signal.SIGSTOP)
    return [first, await _kill_server(server)]


def _signal_workers(server: Server, number: signal.Signals) -> None:
    for pid in server.workers():
        os.kill(pid, number)


async def _kill_server(server: Server) -> Answer:
    """Kill the server; a good answer, if no worker outlives it by `OUTLIVED_S`."""
    server.root.kill()
    server.root.wait()
    ended_s = await server.until_ended(OUTLIVED_S)
    return Answer("left", OUTLIVED_S) if ended_s is None else Answer("good", ended_s)


@dataclass(frozen=True, slots=True)
class Race:
    """`limit` models fit; at most `most` workers may run at once."""

    what: str
    run: Callable[[Server], Awaitable[list[Answer]]]
    limit: int = 1
    most: int = 1
    source: str = ""


_LLAMA: Final = "https://github.com/ggml-org/llama.cpp/issues/"
_LM_STUDIO: Final = "https://github.com/lmstudio-ai/lmstudio-bug-tracker/issues/"

RACES: Final = (
    Race("a second model is asked for while the first loads", two_cold, source=f"{_LLAMA}28698"),
    Race("a model is asked for while it makes room", back_again, source=f"{_LLAMA}28698"),
    Race("two at once want the room of a third", two_for_one, source=f"{_LLAMA}28443"),
    Race("another model is asked for while one answers", busy, source=f"{_LM_STUDIO}1796"),
    Race("eight requests at once for one that isn't loaded", burst, 2, 1, f"{_LM_STUDIO}1751"),
    Race("60 requests at random for three models", storm, 2, 2, f"{_LLAMA}21678"),
    Race("100 requests one after another, connections kept", kept),
    Race("an unload while it answers", unloaded),
    Race("the client leaves while its model loads", leaves),
    Race("a model's file is cut", broken, source=f"{_LLAMA}27351"),
    Race("a worker is killed while it answers", worker_killed),
    Race("a worker hangs and must make room", worker_stuck),
    Race("the server is killed while a worker answers", server_killed),
    Race("the server is killed, a worker hangs", server_killed_beside_stuck),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a race. At most `most` workers ran at once."""

    answers: tuple[Answer, ...]
    most: int

    @property
    def longest_s(self) -> float:
        return max(answer.seconds for answer in self.answers)


async def ran(race: Race, server: Server) -> Outcome:
    """Run the race, and count the workers each 5 ms."""
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(server.workers()))
            await asyncio.sleep(POLL_S)

    watching = asyncio.create_task(watch())
    try:
        answers = await race.run(server)
    finally:
        watching.cancel()
    return Outcome(tuple(answers), most)
