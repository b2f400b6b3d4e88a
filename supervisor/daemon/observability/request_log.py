"""Keeps finished requests over restarts: the most recent ones, and each key's usage by day. Writes every few seconds, off the
loop.

A killed daemon loses only the requests that finished after the last write. Nothing is written while a successor has the
store.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from datetime import date, timedelta
from typing import Final

import structlog

from supervisor.daemon.observability.usage import Used, summed, today, used
from supervisor.gateway.in_flight import InFlight
from supervisor.gateway.record import ENDED, RequestRecord, restored, written
from supervisor.host.store.store import NotSavedError, Store

log = structlog.get_logger("llmux.requests")

FLUSH_S: Final = 2.0
KEPT_DAYS: Final = 400
_ADD: Final = """
    INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (day, key_id, model) DO UPDATE SET
        key = excluded.key,
        requests = requests + excluded.requests,
        failed = failed + excluded.failed,
        prompt_tokens = prompt_tokens + excluded.prompt_tokens,
        cached_tokens = cached_tokens + excluded.cached_tokens,
        completion_tokens = completion_tokens + excluded.completion_tokens,
        gpu_s = gpu_s + excluded.gpu_s
"""


class RequestLog:
    """A daemon's log of requests. Use from the event loop's thread."""

    def __init__(self, store: Store, requests: InFlight, epoch: float, run: str) -> None:
        """`epoch`: the zero of the engine's clock, in Unix seconds. `run`: the prefix of this daemon's request numbers."""
        self._store = store
        self._requests = requests
        self._epoch = epoch
        self._run = run
        self._turn = asyncio.Lock()
        self._has_failed = False

    async def open(self) -> None:
        """Restore the most recent requests, and keep finished ones from now on."""
        self._requests.kept = []
        with contextlib.suppress(NotSavedError):  # `Store` has logged it
            texts = await self._store.run(_stored_views)
            self._requests.restore(one for text in texts if (one := restored(text, self._epoch)) is not None)

    async def run(self) -> None:
        """Write finished requests, forever."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Write the requests finished so far. A failed write is retried with the next."""
        async with self._turn:
            self._requests.record()
            ended = self._requests.kept
            if not ended:
                return
            self._requests.kept = []
            try:
                await self._store.run(lambda file: self._write(file, ended))
                self._has_failed = False
            except NotSavedError as error:
                self._requests.kept = [*ended, *self._requests.kept][-ENDED:]
                if not self._has_failed:  # only once, not every few seconds
                    log.warning("requests.not_kept", reason=error.message)
                self._has_failed = True

    async def usage(self, first: date, last: date) -> list[Used]:
        """The usage on these days. Raises NotSavedError if it can't be read."""
        await self.flush()
        return await self._store.run(
            lambda file: [
                Used(*row)
                for row in file.execute("SELECT * FROM usage WHERE day BETWEEN ? AND ?", (str(first), str(last)))
            ]
        )

    def _write(self, file: sqlite3.Connection, ended: list[RequestRecord]) -> None:
        """Write to the database. Runs in the store's thread."""
        texts = [(written(one, self._epoch, self._run),) for one in ended[-ENDED:]]
        file.executemany("INSERT INTO requests (view) VALUES (?)", texts)
        file.execute("DELETE FROM requests WHERE number <= (SELECT max(number) FROM requests) - ?", (ENDED,))
        file.executemany(_ADD, summed(used(one, self._epoch) for one in ended))
        file.execute("DELETE FROM usage WHERE day < ?", (str(today() - timedelta(days=KEPT_DAYS)),))


def _stored_views(file: sqlite3.Connection) -> list[str]:
    return [text for (text,) in file.execute("SELECT view FROM requests ORDER BY number")]
