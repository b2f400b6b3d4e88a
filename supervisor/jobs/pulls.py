"""Downloads of model files that clients request before a load: one `llmux pull` at a time, each in a process of its own.

So the daemon doesn't import the hub's client. A pull also ends with the daemon, even if that is killed: the process ends when
its standard input does. Partial files are kept, and the next pull continues them.
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
"""The most ended pulls that are kept."""
MOST_WAITING: Final = 32
MOST_SHARE: Final = 0.99
"""The greatest progress of a pull that isn't over."""

_REASONS: Final[Mapping[State, str]] = {
    "cancelled": "it was cancelled",
    "interrupted": "llmux ended, or another daemon took over, before the files had come",
}

Then = Callable[[], Awaitable[str | None]]
"""An action after the download. Returns the number of the load that it began, if any."""


class Amount(msgspec.Struct):
    """The progress of a download, as the process prints it."""

    done_bytes: int
    total_bytes: int


@dataclass(slots=True)
class _Running:
    """A pull whose task runs."""

    pull: Pull
    then: list[Then] = field(default_factory=list)  # an action for each caller of `begin`
    is_joinable: bool = True  # by further callers
    task: asyncio.Task[State] = field(init=False)


class Pulls:
    """One for each daemon. Use from the event loop's thread."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._command: tuple[str, ...] | None = None
        self._reload: Callable[[str], Awaitable[object]] | None = None
        self._running: dict[str, _Running] = {}  # by id
        self._download_lock = asyncio.Lock()
        self._last_number = (
            time.time_ns() // 1_000_000
        )  # the clock: so no number is used twice, even if a pull wasn't saved
        self._is_closed = False
        jobs.kinds[Pull] = Kind(self._cancel, progress_of, KEPT)

    def restore(self) -> None:
        """Mark stored pulls that weren't over as interrupted. Call it once, before the first `begin`."""
        for pull in self._jobs.of(Pull):
            self._last_number = max(self._last_number, number_of(pull))
            if not pull.is_over:
                self._note_end(pull, "interrupted")

    def open(self, configuration: Configuration, reload: Callable[[str], Awaitable[object]]) -> None:
        """Allow pulls of this configuration's models. `reload` reloads it after a pull."""
        self._reload = reload
        if configuration.foreign is None:
            self._command = ("pull", "--watched", "--config", str(configuration.base), "--")

    def begin(self, model: ModelId, then: Then) -> Pull:
        """Fetch the model's files, after earlier pulls; `then` follows. Joins a pull of this model that is under way.

        Raises UnavailableError if nothing can be fetched, or if too many pulls wait.
        """
        if self._command is None:
            raise UnavailableError("llmux has no configuration file of its own here, so it can't fetch files.")
        if (running := self._joinable(model)) is not None:
            running.then.append(then)
            return running.pull
        if len(self._running) >= MOST_WAITING:
            raise UnavailableError(f"{MOST_WAITING} models are waiting for their files; try again later.")
        self._last_number += 1
        pull = Pull(id=f"pull-{self._last_number}", created_at=round(time.time(), 3), model=model)
        running = self._running[pull.id] = _Running(pull, [then])
        self._jobs.add(pull)
        self._save(pull)
        running.task = asyncio.create_task(self._run(running), name=f"pull of {model}")
        running.task.add_done_callback(partial(self._finish, running))  # a task that is cancelled at once never runs
        return pull

    def find(self, number: str) -> Pull | None:
        """The open or stored pull with this number."""
        found = self._jobs.get(f"pull-{number}")
        return found if isinstance(found, Pull) else None

    def current(self, model: ModelId) -> Pull | None:
        """The pull of this model that is under way."""
        running = self._joinable(model)
        return None if running is None else running.pull

    def cancel(self, model: ModelId) -> None:
        """Cancel the pull of this model, if there is one. Another pull may begin at once."""
        if (running := self._joinable(model)) is not None:
            running.is_joinable = False
            running.task.cancel()

    def _joinable(self, model: ModelId) -> _Running | None:
        """The pull of this model that further callers may join."""
        return next((one for one in self._running.values() if one.pull.model == model and one.is_joinable), None)

    async def _cancel(self, pull: Pull) -> None:
        running = self._running[pull.id]
        running.is_joinable = False
        running.task.cancel()
        await asyncio.wait({running.task})

    async def close(self) -> None:
        """Interrupt all pulls."""
        self._is_closed = True
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, running: _Running) -> State:
        """Fetch the files, and run the actions that follow. Returns the pull's last state."""
        assert self._reload is not None
        pull = running.pull
        try:
            async with self._download_lock:
                pull.state, pull.started_at = "running", round(time.time(), 3)
                self._save(pull)
                log.info("pull.began", model=pull.model)
                await self._fetch(pull)
                await self._reload(f"the files of {pull.model} came")
            for then in running.then:  # callers may join meanwhile
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
            running.is_joinable = False
        return "completed"

    def _finish(self, running: _Running, task: asyncio.Task[State]) -> None:
        pull = running.pull
        del self._running[pull.id]
        state_if_cancelled: State = "interrupted" if self._is_closed else "cancelled"
        self._note_end(pull, state_if_cancelled if task.cancelled() else task.result())
        state = "done" if pull.state == "completed" else "failed"
        log.info("pull.ended", model=pull.model, state=state, error=trouble_of(pull), took_s=took_s(pull))

    def _note_end(self, pull: Pull, state: State) -> None:
        pull.state, pull.ended_at = state, round(time.time(), 3)
        self._save(pull)

    def _save(self, pull: Pull) -> None:
        def failed(reason: str) -> None:
            if not self._is_closed:  # else a successor has the store, and marks this pull as interrupted itself
                log.warning("pull.not_saved", pull=pull.id, reason=reason)

        self._jobs.note(pull, failed)

    async def _fetch(self, pull: Pull) -> None:
        """Run the download. Raises UnavailableError with the last lines of its output."""
        assert self._command is not None

        def read_amount(line: bytes) -> None:
            with contextlib.suppress(msgspec.MsgspecError):
                amount = msgspec.json.decode(line, type=Amount)
                pull.done_bytes, pull.total_bytes = amount.done_bytes, amount.total_bytes
                if pull.first_bytes is None:
                    pull.first_bytes = amount.done_bytes
                self._jobs.wake()

        await watched.run((*self._command, pull.model), read_amount)


def progress_of(pull: Pull) -> Progress:
    """The share of the bytes that were fetched, and the remaining time."""
    if pull.state == "completed":
        return Progress(1.0)
    share = min(MOST_SHARE, pull.done_bytes / pull.total_bytes) if pull.total_bytes else 0.0
    if pull.is_over or not pull.total_bytes:
        return Progress(share, message=trouble_of(pull))
    fetched = pull.done_bytes - (pull.first_bytes or 0)
    if pull.started_at is None or fetched <= 0:
        return Progress(share)
    so_far_s = time.time() - pull.started_at
    return Progress(share, round(so_far_s * (pull.total_bytes - pull.done_bytes) / fetched, 1))


def took_s(pull: Pull) -> float | None:
    """Seconds from the request to the end; None: before the end, or unknown after an interruption."""
    if pull.ended_at is None or pull.state == "interrupted":
        return None
    return round(max(0.0, pull.ended_at - pull.created_at), 3)


def trouble_of(pull: Pull) -> str:
    """The reason why the pull ended before all files were fetched; empty: there is none."""
    if pull.error is not None:
        return str(pull.error["message"])
    return _REASONS.get(pull.state, "")


def _error(message: str) -> dict[str, str]:
    return {"message": message, "code": "pull_failed"}
