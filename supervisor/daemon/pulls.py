"""Files of models that clients have fetched before a load: one `llmux pull` after the other, each in a process of its own.

The hub's client stays out of the daemon that way, and a pull ends with the daemon, whatever becomes of that: it reads its
standard input and ends when that does. What has come is kept, and the next pull goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import msgspec
import structlog

from supervisor.catalog import Configuration
from supervisor.core.types import ModelId
from supervisor.daemon import watched
from supervisor.errors import LlmuxError, UnavailableError

log = structlog.get_logger("llmux.pulls")

KEPT: Final = 100
"""So many pulls are remembered."""
MOST_WAITING: Final = 32
MOST_SHARE: Final = 0.99
"""Of a pull that isn't over."""

Then = Callable[[], Awaitable[str | None]]
"""What is done once the files are there; the number of the load that this began."""


class Amount(msgspec.Struct):
    """How much of the files is there."""

    done_bytes: int
    total_bytes: int


@dataclass(slots=True)
class Pull:
    """One pull. `load`: the number of the load that it began; None: there is none to look at."""

    id: str
    model: ModelId
    state: Literal["queued", "pulling", "done", "failed"] = "queued"
    asked_at: float = field(default_factory=time.monotonic)
    began_at: float | None = None
    took_s: float | None = None
    done_bytes: int = 0
    first_bytes: int | None = None  # that were there before
    total_bytes: int | None = None
    error: str = ""
    load: str | None = None
    then: list[Then] = field(default_factory=list)  # what all who asked for it want

    @property
    def share(self) -> float:
        """Of the bytes that are to come."""
        return min(MOST_SHARE, self.done_bytes / self.total_bytes) if self.total_bytes else 0.0

    @property
    def eta_s(self) -> float | None:
        """How much longer it takes; None: unknown."""
        if self.began_at is None or self.first_bytes is None or self.total_bytes is None:
            return None
        came = self.done_bytes - self.first_bytes
        so_far_s = time.monotonic() - self.began_at
        return round(so_far_s * (self.total_bytes - self.done_bytes) / came, 1) if came > 0 else None


class Pulls:
    """One for each daemon. Use from the event loop's thread."""

    def __init__(self) -> None:
        self._command: tuple[str, ...] | None = None
        self._reload: Callable[[str], Awaitable[object]] | None = None
        self._pulls: dict[str, Pull] = {}  # by number, the oldest first
        self._current: dict[ModelId, Pull] = {}  # that others may join
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by number, of those that are not over
        self._turn = asyncio.Semaphore(1)
        self._last = time.time_ns() // 1_000_000  # no number comes again after a restart: clients may still ask for it

    def open(self, configuration: Configuration, reload: Callable[[str], Awaitable[object]]) -> None:
        """Fetch what this configuration names. `reload` reads what has come."""
        self._reload = reload
        if configuration.foreign is None:
            self._command = ("pull", "--watched", "--config", str(configuration.base), "--")

    def begin(self, model: ModelId, then: Then) -> Pull:
        """Fetch its files, after those that were asked for earlier. If that is under way, it is that one.

        Raises UnavailableError where nothing can be fetched, or too many wait.
        """
        if self._command is None:
            raise UnavailableError("llmux has no configuration file of its own here, so it can't fetch files.")
        if (pull := self._current.get(model)) is not None:
            pull.then.append(then)
            return pull
        if len(self._tasks) >= MOST_WAITING:
            raise UnavailableError(f"{MOST_WAITING} models are waiting for their files; try again later.")
        self._last += 1
        pull = self._current[model] = self._pulls[str(self._last)] = Pull(str(self._last), model, then=[then])
        if len(self._pulls) > KEPT:  # which is more than may wait
            del self._pulls[next(number for number, old in self._pulls.items() if old.took_s is not None)]
        task = self._tasks[pull.id] = asyncio.create_task(self._run(pull), name=f"pull of {model}")
        task.add_done_callback(partial(self._over, pull))  # not in the task: one that is cancelled at once never runs
        return pull

    def find(self, number: str) -> Pull | None:
        """One that is under way, or not long over."""
        return self._pulls.get(number)

    def current(self, model: ModelId) -> Pull | None:
        """The pull of this model that is under way."""
        return self._current.get(model)

    def cancel(self, model: ModelId) -> None:
        """End the pull of this model, if there is one. Another one may begin at once."""
        if (pull := self._current.pop(model, None)) is not None:
            self._tasks[pull.id].cancel()

    async def close(self) -> None:
        """End all of them."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, pull: Pull) -> None:
        assert self._reload is not None
        try:
            async with self._turn:
                pull.state, pull.began_at = "pulling", time.monotonic()
                log.info("pull.began", model=pull.model)
                await self._fetch(pull)
                await self._reload(f"the files of {pull.model} came")
            for then in pull.then:  # others may come meanwhile
                pull.load = await then() or pull.load
            pull.state = "done"
        except LlmuxError as error:
            pull.state, pull.error = "failed", error.message
        except Exception as error:
            pull.state, pull.error = "failed", "llmux could not start or follow the pull; its log says why"
            log.exception("pull.broke", model=pull.model, reason=str(error))
        finally:
            self._leave(pull)

    def _leave(self, pull: Pull) -> None:
        """Nobody joins it any more."""
        if self._current.get(pull.model) is pull:
            del self._current[pull.model]

    def _over(self, pull: Pull, task: asyncio.Task[None]) -> None:
        self._leave(pull)
        del self._tasks[pull.id]
        if task.cancelled():
            pull.state, pull.error = "failed", "it was cancelled"
        pull.took_s = round(time.monotonic() - pull.asked_at, 3)
        log.info("pull.ended", model=pull.model, state=pull.state, error=pull.error, took_s=pull.took_s)

    async def _fetch(self, pull: Pull) -> None:
        """Raises UnavailableError with the program's last words."""
        assert self._command is not None

        def amount(line: bytes) -> None:
            with contextlib.suppress(msgspec.MsgspecError):
                amount = msgspec.json.decode(line, type=Amount)
                pull.done_bytes, pull.total_bytes = amount.done_bytes, amount.total_bytes
                if pull.first_bytes is None:
                    pull.first_bytes = amount.done_bytes

        await watched.run((*self._command, pull.model), amount)
