"""Is a worker there? Probes over HTTP, and the pure state machines that judge their answers.

A probe never raises for trouble of the network: it answers ok, not ok, or *inconclusive* when the trouble is our own (no
descriptors left, our event loop stalled), which must never count against a worker. Each probe is a new connection: a
kept one would prove nothing about the worker's accepting, and its closing by the worker would look like a failure.

httpx is imported and its client built in a thread at the first probe, while that worker is starting: they cost 150 ms
of CPU and more, which neither the daemon's start, nor the event loop, nor the worker's first answer should pay.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from supervisor.io.memory import MIB
from supervisor.io.proc_tree import ProcessTable, bytes_read, resident_quickly

if TYPE_CHECKING:
    import httpx

BODY_LIMIT = 16 * 1024
DETAIL_LENGTH = 200
RSS_STEP = MIB
"""Growth of a process that counts as progress; a process that only waits moves by a few pages."""

_OUR_OWN_TROUBLE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One answer. `status` is None without one; `detail` is a line for people; `inconclusive` says nothing either way."""

    ok: bool
    status: int | None
    detail: str
    elapsed_s: float
    inconclusive: bool = False


class Prober:
    """Asks workers for their health. One for all of them; close it at the end."""

    def __init__(self) -> None:
        self._opening: asyncio.Future[httpx.AsyncClient] | None = None

    async def check(
        self, base_url: str, path: str, headers: Mapping[str, str], timeout_s: float, *, starting: bool = False
    ) -> ProbeResult:
        """GET `path`; any 2xx is ok. Follows no redirect, uses no proxy, reads at most BODY_LIMIT bytes.

        `base_url` is `http://host:port`. Connecting and the exchange each take at most `timeout_s`, opening the first
        client aside. With `starting` a bare connect finds out first whether anything listens, which costs a tenth.
        """
        place = urlsplit(base_url)
        assert place.scheme == "http", base_url
        assert place.hostname is not None, base_url
        began = time.monotonic()
        try:
            opening = self._open()  # already while nothing listens, so that the first answer need not wait for it
            if starting:
                async with asyncio.timeout(timeout_s):
                    _, writer = await asyncio.open_connection(place.hostname, place.port)
                    writer.transport.abort()
            client = await asyncio.shield(opening)
            began = time.monotonic()
            async with asyncio.timeout(timeout_s):
                return await self._get(client, f"{base_url}{path}", headers, began)
        except OSError as error:
            return _failed(error, began, timeout_s)

    async def _get(self, client: httpx.AsyncClient, url: str, headers: Mapping[str, str], began: float) -> ProbeResult:
        import httpx  # noqa: PLC0415  # the client exists, so this costs nothing

        body = bytearray()
        try:
            async with client.stream("GET", url, headers=headers) as response:
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) >= BODY_LIMIT:
                        break
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return _failed(error, began)
        text = " ".join(bytes(body[: 4 * DETAIL_LENGTH]).decode(errors="replace").split())[:DETAIL_LENGTH]
        detail = f"HTTP {response.status_code}" + ("" if response.is_success or not text else f": {text}")
        return ProbeResult(response.is_success, response.status_code, detail, time.monotonic() - began)

    def _open(self) -> asyncio.Future[httpx.AsyncClient]:
        if self._opening is None:
            self._opening = asyncio.ensure_future(asyncio.to_thread(_open_client))
            self._opening.add_done_callback(self._opened)
        return self._opening

    def _opened(self, opening: asyncio.Future[httpx.AsyncClient]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._opening = None  # no descriptors to import with, say: try again next time

    async def close(self) -> None:
        """Close the client. The prober must not be used any more."""
        if self._opening is not None:
            await (await asyncio.shield(self._opening)).aclose()


def _open_client() -> httpx.AsyncClient:
    import httpx  # noqa: PLC0415  # see the module's text

    return httpx.AsyncClient(
        trust_env=False,  # else loopback traffic and its key go to HTTP_PROXY
        verify=False,  # noqa: S501  # http only; building a TLS context costs more than all the rest
        follow_redirects=False,
        timeout=None,  # noqa: S113  # check() bounds the whole exchange
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )


def _failed(error: Exception, began: float, timeout_s: float | None = None) -> ProbeResult:
    elapsed_s = time.monotonic() - began
    if isinstance(error, TimeoutError) and timeout_s is not None:
        # Far later than it should have fired: it was our own loop that did not run, not the worker.
        stalled = elapsed_s > 2 * timeout_s + 1
        detail = "our event loop was stalled" if stalled else f"no answer within {timeout_s:g} s"
        return ProbeResult(False, None, detail, elapsed_s, inconclusive=stalled)
    numbers = {cause.errno for cause in _causes(error) if isinstance(cause, OSError)}
    detail = "nothing listens" if errno.ECONNREFUSED in numbers else f"{type(error).__name__}: {error}".rstrip(": ")
    return ProbeResult(False, None, detail, elapsed_s, inconclusive=bool(numbers & _OUR_OWN_TROUBLE))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                yield from _causes(inner)
        error = error.__cause__ or error.__context__


def startup_delay_s(elapsed_s: float, longest_s: float = 0.5) -> float:
    """Pause before the next poll of a worker that has been starting for `elapsed_s`.

    A twentieth of it, so that polling adds at most 5 % to any start: 20 ms at first, under 100 ms up to two seconds.
    """
    return min(longest_s, max(0.02, elapsed_s / 20))


class Readiness:
    """May requests go to it? Not after `fall` failures in a row; again after `rise` successes."""

    def __init__(self, fall: int = 3, rise: int = 1, *, ready: bool = True) -> None:
        self._fall, self._rise = fall, rise
        self._against = 0  # answers in a row that contradict `ready`
        self.ready = ready

    def observe(self, result: ProbeResult) -> bool:
        """Take an answer in; True when `ready` has changed by it."""
        if result.inconclusive:
            return False
        if result.ok == self.ready:
            self._against = 0
            return False
        self._against += 1
        if self._against < (self._fall if self.ready else self._rise):
            return False
        self.ready, self._against = not self.ready, 0
        return True


class Liveness:
    """Must it be replaced? After `fall` failures in a row during which no bytes flowed from it."""

    def __init__(self, fall: int = 6) -> None:
        self._fall = fall
        self._failures = 0

    @property
    def dead(self) -> bool:
        return self._failures >= self._fall

    def observe(self, result: ProbeResult, *, bytes_flowed: bool = False) -> bool:
        """Take an answer in; True when it is now dead. `bytes_flowed`: since the last answer; it is alive, if busy."""
        if result.ok or bytes_flowed:
            self._failures = 0
        elif not result.inconclusive:
            self._failures += 1
        return self.dead


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a start has come, in bytes: its log, what its tree has read, what its tree has in memory."""

    log_size: int = 0
    bytes_read: int = 0
    rss: int = 0


def read_progress(roots: Iterable[int], log: Path) -> Progress:
    """Look at a starting worker. Blocks for a few milliseconds. Raises OSError only when we are out of descriptors."""
    tree = ProcessTable.scan().tree(roots)
    try:
        log_size = log.stat().st_size
    except FileNotFoundError:
        log_size = 0
    return Progress(
        log_size, sum(bytes_read(pid) for pid in tree), sum(resident_quickly(pid).total_bytes for pid in tree)
    )


class StartupPatience:
    """How long a start may take: `no_progress_s` without any progress, and `limit_s` in all."""

    def __init__(self, no_progress_s: float, limit_s: float, started_at: float) -> None:
        self._no_progress_s, self._limit_s = no_progress_s, limit_s
        self._started_at = self._moved_at = started_at
        self._last = Progress()

    def observe(self, progress: Progress, now: float) -> str | None:
        """Take a look in; the reason to give up, or None."""
        last = self._last
        # A log may also shrink: it is bounded, and rotated. Members of the tree that end take their counts with them.
        if progress.log_size != last.log_size or progress.bytes_read > last.bytes_read:
            self._moved_at = now
        if progress.rss >= last.rss + RSS_STEP:
            self._moved_at = now
        self._last = Progress(
            progress.log_size, max(progress.bytes_read, last.bytes_read), self._rss(progress.rss, last.rss)
        )
        if now - self._started_at >= self._limit_s:
            return f"not ready after {self._limit_s:g} s"
        if now - self._moved_at >= self._no_progress_s:
            return f"no progress for {self._no_progress_s:g} s (log, reads and memory stand still)"
        return None

    @staticmethod
    def _rss(now: int, before: int) -> int:
        """The level to grow from: slow growth adds up to a step, and a fall is a new beginning."""
        return now if now >= before + RSS_STEP or now < before - RSS_STEP else before
