"""One job: what is known of it, whose it is, and what came of sending its request. `daemon.jobs` has all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from supervisor.catalog.keys import Key, Scope
from supervisor.errors import UnavailableError
from supervisor.io.request_buffer import Bytes, RequestBuffer
from supervisor.io.store import NotSavedError, Store
from supervisor.schema.job import JobState

KEY: Final = "key"  # where the ASGI scope's state has the request's key
KEPT_HEADERS: Final = (
    *("x-priority", "x-tenant-id", "x-allow-remote", "x-timeout", "x-cache-mode", "x-cache-tag"),
    *("anthropic-version", "anthropic-beta"),
)
"""Of the request that makes a job: they hold for its own."""


class JobInterruptedError(Exception):
    """The daemon ends, or another one takes over: the job is to be run again."""


class JobFullError(UnavailableError):
    """No further job is taken now."""

    code = "queue_full"


@dataclass(frozen=True, slots=True)
class Line:
    """The line of a batch that a job answers."""

    batch: str  # its id
    number: int  # of the line in the batch's file, from 1
    custom_id: str


@dataclass(slots=True)
class Job:
    """One job. Times are seconds since the epoch."""

    id: str
    endpoint: str  # path
    model: str | None
    headers: dict[str, str]  # of its request
    owner: str | None  # the key's id; None: no key was needed
    created_at: float
    state: JobState = "queued"
    started_at: float | None = None  # the last time
    ended_at: float | None = None
    tries: int = 0
    deaths: int = 0  # of the daemon, while this was sent; one more while it is
    status: int | None = None  # of the answer
    content_type: str = ""
    result_bytes: int | None = None  # set iff there is a result
    request_bytes: int = 0
    error: dict[str, Any] | None = None  # as its endpoint's clients get it
    request_id: str = ""  # of its last try
    response: str | None = None  # the name of the kept response that it generates; then it goes when it is over
    line: Line | None = None  # set iff it answers a line of a batch; then it goes when it is over

    @property
    def is_over(self) -> bool:
        """Has it ended, one way or the other?"""
        return self.state not in {"queued", "running"}

    @property
    def keeps_end(self) -> bool:
        """Does it stay when it is over, with its result? Else a response or a batch tells how it ended."""
        return self.response is None and self.line is None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of sending a job's request once."""

    status: int
    content_type: str
    body: Bytes
    error: dict[str, Any] | None = None  # set iff it failed
    retry_after_s: float | None = None  # set iff it may be sent again
    held: RequestBuffer | None = None  # counts the body; release it when that is kept


def failed(code: str, message: str, retry_after_s: float | None = None) -> Answer:
    """An answer of llmux itself."""
    return Answer(500, "", b"", {"message": message, "code": code}, retry_after_s)


@dataclass(slots=True)
class Running:
    """A job that has a place."""

    is_sending: bool = False
    is_stopped: bool = False
    is_cancelled: bool = False  # by its client, not by the daemon's end
    task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Cuts it only while it is sent: what came of it is kept, and the task ends by itself."""
        self.is_stopped = True
        if self.is_sending and self.task is not None:
            self.is_sending = False
            self.task.cancel()


def owner_of(state: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Whose things a request may see, by its scope's state: the key's id, and whether all."""
    key: Key | None = state.get(KEY)
    return (None, True) if key is None else (key.id, Scope.ADMIN in key.scopes)


async def former_owners(store: Store, keys: Iterable[Key]) -> Mapping[str, str]:
    """Ids of keys by their names, which stood for them in what was kept before there were ids.

    They are those of the first start with ids, and stay so: a later key of such a name is another.
    """
    found = store.get("owners", "ids")
    if isinstance(found, dict):
        return {name: str(key_id) for name, key_id in found.items()}
    ids = {key.name: key.id for key in keys}
    with contextlib.suppress(NotSavedError):
        await store.put("owners", "ids", {**ids})
    return ids


Send = Callable[[Job, bytes], Awaitable[Answer]]
"""Sends a job's request, with its body, of which nobody else keeps anything. Raises JobInterruptedError. Cancelled, it gives the worker up at once."""
