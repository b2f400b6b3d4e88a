"""Files of models that clients have fetched before a load: one `llmux pull` after the other, each in a process of its own.

The hub's client stays out of the daemon that way, and a pull ends with the daemon, whatever becomes of that: it reads its
standard input and ends when that does. What has come is kept, and the next pull goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
import structlog

from supervisor.catalog import Configuration
from supervisor.core.types import ModelId
from supervisor.errors import LlmuxError, UnavailableError
from supervisor.host.process import watched
from supervisor.jobs.job import Pull, number_of
from supervisor.jobs.jobs import Jobs, Kind, Progress
from supervisor.schema.job import State

log = structlog.get_logger("llmux.pulls")

KEPT: Final = 100
"""So many pulls that ended are kept."""
MOST_WAITING: Final = 32
MOST_SHARE: Final = 0.99
"""Of a pull that isn't over."""

_CUT: Final[Mapping[State, str]] = {
    "cancelled": "it was cancelled",
    "interrupted": "llmux ended, or another daemon took over, before the files had come",
}

Then = Callable[[], Awaitable[str | None]]
"""What is done once the files are there; the number of the load that this began."""


class Amount(msgspec.Struct):
    """How much of the files is there."""

    done_bytes: int
    total_bytes: int


@dataclass(slots=True)
class _Running:
    """A pull that isn't over."""

    pull: Pull
    then: list[Then] = field(default_factory=list)  # what all who asked for it want
    task: asyncio.Task[State] = field(init=False)


class Pulls:
    """One for each daemon. Use from the event loop's thread."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._command: tuple[str, ...] | None = None
        self._reload: Callable[[str], Awaitable[object]] | None = None
        self._running: dict[str, _Running] = {}  # by id
        self._current: dict[ModelId, _Running] = {}  # that others may join
        self._turn = asyncio.Semaphore(1)
        self._last = time.time_ns() // 1_000_000  # no number comes again, also of a pull that could not be kept
        self._is_closed = False
        jobs.kinds[Pull] = Kind(self._cancel, progress_of, KEPT)

    def restore(self) -> None:
        """Take in those that are kept. Call it once, before the first begins."""
        for pull in self._jobs.of(Pull):
            self._last = max(self._last, number_of(pull))
            if not pull.is_over:
                self._end(pull, "interrupted")

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
        if (running := self._current.get(model)) is not None:
            running.then.append(then)
            return running.pull
        if len(self._running) >= MOST_WAITING:
            raise UnavailableError(f"{MOST_WAITING} models are waiting for their files; try again later.")
        self._last += 1
        pull = Pull(id=f"pull-{self._last}", created_at=round(time.time(), 3), model=model)
        running = self._current[model] = self._running[pull.id] = _Running(pull, [then])
        self._jobs.add(pull)
        self._save(pull)
        running.task = asyncio.create_task(self._run(running), name=f"pull of {model}")
        running.task.add_done_callback(partial(self._over, running))  # one that is cancelled at once never runs
        return pull

    def find(self, number: str) -> Pull | None:
        """One that is under way, or is kept."""
        found = self._jobs.get(f"pull-{number}")
        return found if isinstance(found, Pull) else None

    def current(self, model: ModelId) -> Pull | None:
        """The pull of this model that is under way."""
        running = self._current.get(model)
        return None if running is None else running.pull

    def cancel(self, model: ModelId) -> None:
        """End the pull of this model, if there is one. Another one may begin at once."""
        if (running := self._current.pop(model, None)) is not None:
            running.task.cancel()

    async def _cancel(self, pull: Pull) -> None:
        running = self._running[pull.id]
        self._leave(running)
        running.task.cancel()
        await asyncio.wait({running.task})

    async def close(self) -> None:
        """End all of them: they are interrupted."""
        self._is_closed = True
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, running: _Running) -> State:
        """How it ends."""
        assert self._reload is not None
        pull = running.pull
        try:
            async with self._turn:
                pull.state, pull.started_at = "running", round(time.time(), 3)
                self._save(pull)
                log.info("pull.began", model=pull.model)
                await self._fetch(pull)
                await self._reload(f"the files of {pull.model} came")
            for then in running.then:  # others may come meanwhile
                number = await then()
                pull.load = pull.load if number is None else f"load-{number}"
        except LlmuxError as error:
            pull.error = _error(error.message)
            return "failed"
        except Exception as error:
            pull.error = _error("llmux could not start or follow the pull; its log says why")
            log.exception("pull.broke", model=pull.model, reason=str(error))
            return "failed"
        finally:
            self._leave(running)
        return "completed"

    def _leave(self, running: _Running) -> None:
        """Nobody joins it any more."""
        if self._current.get(running.pull.model) is running:
            del self._current[running.pull.model]

    def _over(self, running: _Running, task: asyncio.Task[State]) -> None:
        pull = running.pull
        self._leave(running)
        del self._running[pull.id]
        cut: State = "interrupted" if self._is_closed else "cancelled"
        self._end(pull, cut if task.cancelled() else task.result())
        state = "done" if pull.state == "completed" else "failed"
        log.info("pull.ended", model=pull.model, state=state, error=trouble_of(pull), took_s=took_s(pull))

    def _end(self, pull: Pull, state: State) -> None:
        pull.state, pull.ended_at = state, round(time.time(), 3)
        self._save(pull)

    def _save(self, pull: Pull) -> None:
        def failed(reason: str) -> None:
            if not self._is_closed:  # else a successor has the store, and has interrupted this one itself
                log.warning("pull.not_saved", pull=pull.id, reason=reason)

        self._jobs.note(pull, failed)

    async def _fetch(self, pull: Pull) -> None:
        """Raises UnavailableError with the program's last words."""
        assert self._command is not None

        def amount(line: bytes) -> None:
            with contextlib.suppress(msgspec.MsgspecError):
                amount = msgspec.json.decode(line, type=Amount)
                pull.done_bytes, pull.total_bytes = amount.done_bytes, amount.total_bytes
                if pull.first_bytes is None:
                    pull.first_bytes = amount.done_bytes
                self._jobs.wake()

        await watched.run((*self._command, pull.model), amount)


def progress_of(pull: Pull) -> Progress:
    """How much of its bytes has come, and how much longer the rest takes."""
    if pull.state == "completed":
        return Progress(1.0)
    share = min(MOST_SHARE, pull.done_bytes / pull.total_bytes) if pull.total_bytes else 0.0
    if pull.is_over or not pull.total_bytes:
        return Progress(share, message=trouble_of(pull))
    came = pull.done_bytes - (pull.first_bytes or 0)
    if pull.started_at is None or came <= 0:
        return Progress(share)
    so_far_s = time.time() - pull.started_at
    return Progress(share, round(so_far_s * (pull.total_bytes - pull.done_bytes) / came, 1))


def took_s(pull: Pull) -> float | None:
    """From when it was asked for to its end; None: before that, or nobody saw it."""
    if pull.ended_at is None or pull.state == "interrupted":
        return None
    return round(max(0.0, pull.ended_at - pull.created_at), 3)


def trouble_of(pull: Pull) -> str:
    """Why it ended before all files had come; empty: it didn't."""
    if pull.error is not None:
        return str(pull.error["message"])
    return _CUT.get(pull.state, "")


def _error(message: str) -> dict[str, str]:
    return {"message": message, "code": "pull_failed"}
