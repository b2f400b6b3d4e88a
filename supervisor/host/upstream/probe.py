"""Probes over HTTP, and the pure state machines that evaluate their results.

A probe never raises for network errors. It is ok, not ok, or *inconclusive* if we ourselves cause the error (no descriptors
left, our event loop stalled), which must never count against a worker. Each probe opens a connection: a reused one would not
prove that the worker accepts connections, and its closing would look like a failure.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from supervisor.errors import UpstreamError
from supervisor.host.memory.memory import MIB
from supervisor.host.process import procfs
from supervisor.host.process.progress import Progress
from supervisor.host.upstream.upstream import UpstreamPool, UpstreamResponse

Address = tuple[str, int]
"""A host's IP address and a port."""

BODY_LIMIT = 16 * 1024
DETAIL_LENGTH = 200
READINESS_FAILURES = 3
LIVENESS_FAILURES = 6
RSS_STEP = MIB
"""Growth of a process that counts as progress; a waiting process changes by a few pages."""

OUR_OWN_TROUBLE = procfs.OUR_OWN_TROUBLE | {errno.EADDRNOTAVAIL}
"""Errors of sockets that this machine causes, not the other side."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one probe. `status` is None without an answer; `detail` is a line for people."""

    ok: bool
    status: int | None
    detail: str
    inconclusive: bool = False


async def check_health(address: Address, path: str, timeout_s: float, auth: str | None = None) -> ProbeResult:
    """GET `path`; any 2xx is ok. Follows no redirect, uses no proxy, reads little more than BODY_LIMIT bytes.

    Connecting and the response take at most `timeout_s` together. `auth` is for the Authorization header.
    """
    return await _send_probe(address, "GET", path, b"", timeout_s, auth)


async def check_inference(
    address: Address, path: str, body: bytes, timeout_s: float, auth: str | None = None
) -> ProbeResult:
    """POST this JSON to `path` to see whether the model computes. Any answer below 500 is ok: a refusing worker lives."""
    result = await _send_probe(address, "POST", path, body, timeout_s, auth)
    return replace(result, ok=result.status is not None and result.status < 500)


async def _send_probe(
    address: Address, method: str, path: str, body: bytes, timeout_s: float, auth: str | None
) -> ProbeResult:
    began = time.monotonic()
    upstream = UpstreamPool(*address, auth, connect_s=2 * timeout_s)
    headers = [(b"content-type", b"application/json")] if body else []
    try:
        async with asyncio.timeout(timeout_s):
            return await result_of(await upstream.request(method, path.encode(), headers, body))
    except (OSError, UpstreamError) as error:
        return _failed_result(error, began, timeout_s)
    finally:
        upstream.close()


async def check_ready(address: Address, path: str, then: str | None, auth: str | None, timeout_s: float) -> ProbeResult:
    """GET `path`, and if that is ok, `then` with this Authorization."""
    probe = await check_health(address, path, timeout_s)
    return await check_health(address, then, timeout_s, auth) if probe.ok and then is not None else probe


async def result_of(response: UpstreamResponse, label: str = "") -> ProbeResult:
    """Turn a response into a probe's result, with `label` before the status. Closes the response."""
    try:
        body = await response.read(BODY_LIMIT)
    finally:
        response.close()
    text = " ".join(body[: 4 * DETAIL_LENGTH].decode(errors="replace").split())[:DETAIL_LENGTH]
    ok = 200 <= response.status < 300
    return ProbeResult(ok, response.status, f"{label}HTTP {response.status}" + ("" if ok or not text else f": {text}"))


def _failed_result(error: Exception, began: float, timeout_s: float) -> ProbeResult:
    if isinstance(error, TimeoutError):
        # The timeout fired far too late: our own loop did not run.
        stalled = time.monotonic() - began > 2 * timeout_s + 1
        detail = "our event loop was stalled" if stalled else f"no answer within {timeout_s:g} s"
        return ProbeResult(False, None, detail, inconclusive=stalled)
    numbers = {cause.errno for cause in causes(error) if isinstance(cause, OSError)}
    detail = "nothing listens" if errno.ECONNREFUSED in numbers else f"{type(error).__name__}: {error}".rstrip(": ")
    return ProbeResult(False, None, detail, inconclusive=bool(numbers & OUR_OWN_TROUBLE))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                yield from causes(inner)
        error = error.__cause__ or error.__context__


def startup_delay_s(elapsed_s: float, longest_s: float = 0.5) -> float:
    """Pause before the next poll of a worker that has been starting for `elapsed_s`.

    A twentieth of that, so that polling adds at most 5 % to any start: 20 ms at first, under 100 ms up to two seconds.
    """
    return min(longest_s, max(0.02, elapsed_s / 20))


class Readiness:
    """May requests go to the worker? Not after READINESS_FAILURES failed probes in a row, until one probe succeeds."""

    def __init__(self, *, ready: bool = True) -> None:
        self.ready = ready
        self._failures = 0  # in a row

    def observe(self, result: ProbeResult) -> bool:
        """Add a result; True: it changes `ready`."""
        if result.inconclusive:
            return False
        self._failures = 0 if result.ok else self._failures + 1
        before = self.ready
        self.ready = result.ok or (before and self._failures < READINESS_FAILURES)
        return self.ready != before


class Liveness:
    """Must the worker be replaced? After LIVENESS_FAILURES failed probes in a row, if it sent no byte meanwhile."""

    def __init__(self) -> None:
        self._failures = 0

    def observe(self, result: ProbeResult, *, bytes_flowed: bool = False) -> bool:
        """Add a result; True: the worker is dead. `bytes_flowed`: since the last result, so the worker is busy but alive."""
        if result.ok or bytes_flowed:
            self._failures = 0
        elif not result.inconclusive:
            self._failures += 1
        return self._failures >= LIVENESS_FAILURES


class StartupPatience:
    """The limits of a start: `no_progress_s` without any progress, and `limit_s` in all."""

    def __init__(self, no_progress_s: float, limit_s: float, started_at: float) -> None:
        self._no_progress_s, self._limit_s = no_progress_s, limit_s
        self._started_at = self._moved_at = started_at
        self._last = Progress()

    def observe(self, progress: Progress, now: float) -> str | None:
        """Add a measurement; returns the reason to give up, or None."""
        last = self._last
        grown = progress.rss - last.rss
        # A log may also shrink: it is bounded, and rotated. The counts of ended processes are lost.
        if progress.log_size != last.log_size or progress.bytes_read > last.bytes_read or grown >= RSS_STEP:
            self._moved_at = now
        # Slow growth adds up to a step, and a fall is a new beginning.
        rss = progress.rss if grown >= RSS_STEP or grown < -RSS_STEP else last.rss
        self._last = Progress(progress.log_size, max(progress.bytes_read, last.bytes_read), rss)
        if now - self._started_at >= self._limit_s:
            return f"not ready after {self._limit_s:g} s"
        if now - self._moved_at >= self._no_progress_s:
            return f"no progress for {self._no_progress_s:g} s (log, reads and memory stand still)"
        return None
