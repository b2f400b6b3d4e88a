"""`llmux`, with an application in whose way things go wrong that only a mistake in llmux or in a library could cause."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import warnings
from pathlib import Path

import structlog
import uvicorn

from supervisor.cli.main import main


class Trouble(Exception):
    def __init__(self, where: str) -> None:
        super().__init__(f'in {where}\n{{"event": "forged"}}\r\x1b[2J\ud800')


class Clock:
    """The wall clock, as somebody sets it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._real, self._real_ns = time.time, time.time_ns

    def time(self) -> float:
        return self._real() + self.ahead_s

    def time_ns(self) -> int:
        return self._real_ns() + int(self.ahead_s * 1e9)


class Unending:
    def __del__(self) -> None:
        raise Trouble("an end")

    def __repr__(self) -> str:
        raise Trouble("a name")


def fail(where: str) -> None:
    raise Trouble(where)


async def fail_later() -> None:
    raise Trouble("a task")


def cause(path: str) -> None:
    match path:
        case "/task":
            asyncio.get_running_loop().create_task(fail_later())
        case "/callback":
            asyncio.get_running_loop().call_soon(fail, "a callback")
        case "/coroutine":
            fail_later()  # never awaited
        case "/warning":
            warnings.warn("not\nlike this", UserWarning, stacklevel=1)
        case "/thread":
            threading.Thread(target=fail, args=("a thread",), name="a\nthread").start()
        case "/end":
            Unending()
        case "/block":
            while Path(os.environ["LLMUX_TEST_BLOCKED"]).exists():
                time.sleep(0.05)
        case "/an-hour-later":
            clock.ahead_s += 3600.0
        case "/an-hour-earlier":
            clock.ahead_s -= 3600.0
        case "/application":
            fail("an application")


class Config(uvicorn.Config):
    def __init__(self, app, **settings) -> None:
        async def troubled(scope, receive, send) -> None:
            if scope["path"] == "/trouble/eternity":
                structlog.get_logger().info("forever begins")
                await asyncio.Event().wait()
            elif scope["path"].startswith("/trouble"):
                cause(scope["path"].removeprefix("/trouble"))
            else:
                await app(scope, receive, send)

        super().__init__(troubled, **settings)


uvicorn.Config = Config
clock = Clock()
time.time, time.time_ns = clock.time, clock.time_ns
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what it says to people is no log
main()
