"""Adds models while the daemon runs: one `llmux add` at a time, each in a process of its own.

`look` shows the entry beforehand, without a change. No entry is written before all files are fetched. Partial files are kept, so
the next try continues them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import structlog

from supervisor.catalog.assembly import NAME_RULE, is_name
from supervisor.errors import InvalidRequestError, LlmuxError, NotFoundError, UnavailableError
from supervisor.host.process import watched
from supervisor.jobs.pulls import Amount
from supervisor.schema import edit as schema
from supervisor.schema.edit import Addition, Found, Wanted

log = structlog.get_logger("llmux.additions")

KEPT: Final = 20
MOST_WAITING: Final = 8
LOOK_S: Final = 120.0
LONGEST: Final = 500
_CONTROLS: Final = {chr(code) for code in (*range(32), *range(127, 160))}


class Additions:
    """One for each daemon. Use from the event loop's thread."""

    def __init__(self) -> None:
        self._base = Path()
        self._reload: Callable[[str], Awaitable[object]] | None = None
        self._all: dict[str, Addition] = {}  # by number, the oldest first
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of open additions, by number
        self._lock = asyncio.Semaphore(1)
        self._last_number = time.time_ns() // 1_000_000  # the clock: so no number is used again after a restart

    def open(self, base: Path, reload: Callable[[str], Awaitable[object]]) -> None:
        """Add models to this configuration file; `reload` reads it again."""
        self._base, self._reload = base, reload

    async def look(self, wanted: Wanted) -> Found:
        """The entry that `begin` would make, without making it. Takes as long as the hub. Raises as `begin` does."""
        lines: list[bytes] = []
        command = self._command(wanted, "--dry-run")
        try:
            async with asyncio.timeout(LOOK_S):
                await watched.run(command, lines.append)
        except TimeoutError as error:
            message = f"Nobody said within {LOOK_S:.0f} s what there is of {wanted.what}."
            raise UnavailableError(message, retry_after_s=LOOK_S) from error
        except UnavailableError as error:
            raise InvalidRequestError(error.message, code="addition_failed", param="what") from error
        return msgspec.json.decode(lines[-1], type=Found)

    def begin(self, wanted: Wanted) -> Addition:
        """Add the model, after earlier additions. Returns the open addition of the same model, if there is one.

        Raises InvalidRequestError; UnavailableError if too many additions wait.
        """
        command = self._command(wanted)
        for number in self._tasks:
            if (self._all[number].what, self._all[number].name) == (wanted.what, wanted.name):
                return self._all[number]
        if len(self._tasks) >= MOST_WAITING:
            raise UnavailableError(f"{MOST_WAITING} models are being added; try again later.", retry_after_s=LOOK_S)
        self._last_number += 1
        addition = self._all[str(self._last_number)] = Addition(str(self._last_number), wanted.what, wanted.name)
        if len(self._all) > KEPT:
            del self._all[next(number for number in self._all if number not in self._tasks)]
        task = self._tasks[addition.id] = asyncio.create_task(self._run(addition, command), name=f"add {wanted.what}")
        task.add_done_callback(
            partial(self._finish_addition, addition)
        )  # not in the task: a task that is cancelled at once never runs
        return addition

    def listing(self) -> schema.Additions:
        """The open additions and the most recently ended ones, the newest first."""
        return schema.Additions([*reversed(self._all.values())])

    def find(self, number: str) -> Addition:
        """The addition of this id. Raises NotFoundError."""
        if (found := self._all.get(number)) is None:
            raise NotFoundError(f"There is no addition {number[:50]!r}.", code="addition_not_found")
        return found

    async def cancel(self, number: str) -> Addition:
        """Cancel an addition. Its partial files stay. One that is over stays as it is. Raises NotFoundError."""
        found = self.find(number)
        if (task := self._tasks.get(number)) is not None:
            task.cancel()
            await asyncio.wait({task})
        return found

    async def close(self) -> None:
        """End all additions."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _command(self, wanted: Wanted, *more: str) -> tuple[str, ...]:
        """The words of the `llmux` command. Raises InvalidRequestError for values that it would misread."""
        what = wanted.what.strip()
        if not what or len(what) > LONGEST or not _CONTROLS.isdisjoint(what):
            raise InvalidRequestError(f"what: expected 1 to {LONGEST} characters that can be printed.", param="what")
        if what.startswith(("./", "../")) or what in (".", ".."):
            raise InvalidRequestError("what: a path begins with / or ~, on the machine of the daemon.", param="what")
        if wanted.name is not None and not is_name(wanted.name):
            raise InvalidRequestError(f"{wanted.name[:200]!r} is not a name: {NAME_RULE}.", param="name")
        named = () if wanted.name is None else ("--name", wanted.name)
        return ("add", "--watched", *more, "--config", str(self._base), *named, "--", what)

    async def _run(self, addition: Addition, command: tuple[str, ...]) -> None:
        assert self._reload is not None
        began: list[tuple[float, int]] = []

        def read_line(text: bytes) -> None:
            with contextlib.suppress(msgspec.MsgspecError):
                _note_progress(addition, msgspec.json.decode(text, type=Amount), began)
                return
            with contextlib.suppress(msgspec.MsgspecError):
                addition.names = msgspec.json.decode(text, type=Found).names

        def note_text(text: str) -> None:
            addition.stage = text

        try:
            async with self._lock:
                addition.state = "running"
                log.info("addition.began", what=addition.what, name=addition.name)
                await watched.run(command, read_line, note_text)
                addition.stage = ""
                await self._reload(f"{addition.what} was added")
            addition.state = "done"
        except LlmuxError as error:
            addition.state, addition.error = "failed", "\n".join((error.message, *error.detail))
        except Exception as error:
            addition.state, addition.error = "failed", "llmux could not start or follow it; its log says why"
            log.exception("addition.broke", what=addition.what, reason=str(error))

    def _finish_addition(self, addition: Addition, task: asyncio.Task[None]) -> None:
        del self._tasks[addition.id]
        if task.cancelled():
            addition.state = "cancelled"
        addition.eta_s = None
        log.info("addition.ended", what=addition.what, names=addition.names, state=addition.state, error=addition.error)


def _note_progress(addition: Addition, amount: Amount, began: list[tuple[float, int]]) -> None:
    """Note a download's progress, and its speed since the first bytes of this try. `began`: their time, and the bytes then."""
    now = time.monotonic()
    began[:] = began or [(now, amount.done_bytes)]
    (at, first) = began[0]
    addition.done_bytes, addition.total_bytes = amount.done_bytes, amount.total_bytes
    if now > at and amount.done_bytes > first:
        rate = (amount.done_bytes - first) / (now - at)
        addition.bytes_per_s = round(rate, 1)
        addition.eta_s = round((amount.total_bytes - amount.done_bytes) / rate, 1)
