"""The way to a model that a program answers, run once for each request: `Upstream`, as for a worker or a remote.

Each process is started below a shim, as workers are (see spawn.py): whatever it forks ends with it, and all of it with the
request, with the client that leaves, and with the daemon, however that ends. Its stdin is the prompt, in memory; stdout and
stderr are pipes that are read only as fast as the client reads. It runs in an empty folder of its own, which is removed
after it; what a killed daemon left of these is removed when the model is connected next.

What it wrote to stderr can hold somebody's prompt. So clients learn that it failed, and the model's log says how.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from runtimes.base import ProgramCall, ProgramError, ProgramSpec, RequestRefusedError
from supervisor.errors import InvalidRequestError, LlmuxError, UpstreamError, UpstreamTimeoutError
from supervisor.io.held_body import HeldBody
from supervisor.io.process import SpawnError, UnkillableError, WorkerProcess
from supervisor.io.procfs import Proc
from supervisor.io.program_output import ProgramOutput, pipe
from supervisor.io.spawn import SpawnOrder, spawn
from supervisor.io.threads import in_thread
from supervisor.io.upstream import Body, Headers, UpstreamResponse

log = structlog.get_logger("llmux.remote")

FOLDERS: Final = ".requests"  # instead of the log's suffix
LOG_LIMIT_BYTES: Final = 1024 * 1024
LAST_WORDS: Final = 8192  # bytes of stderr
KILL_WAIT_S: Final = 5.0
THIS: Final = "The program that answers for this model"

T = TypeVar("T")

_numbers = itertools.count(1)


class ProgramPool:
    """The processes of one model. Use from one event loop; `close` it when the model goes."""

    def __init__(self, spec: ProgramSpec, model: str, instance: str, env: Mapping[str, str], log_file: Path) -> None:
        """`env` is the program's whole environment. Its folders are beside `log_file`, where its failures are told."""
        self.loop = asyncio.get_running_loop()
        self.spec = spec
        self.model = model
        self.open_responses = 0
        self._instance = instance
        self._env = env
        self._log = log_file
        self._folders = log_file.with_suffix(FOLDERS)
        self._turns = asyncio.Semaphore(spec.parallel)
        self._running: set[ProgramResponse] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def sweep(self) -> None:
        """Remove the folders of requests whose daemon is gone, as far as that is possible."""
        with contextlib.suppress(OSError):
            await in_thread(self._sweep)

    async def request(
        self, method: str, target: bytes, headers: Headers, body: Body = b"", *, first_byte_s: float | None = None
    ) -> ProgramResponse:
        """See `Upstream`. Nothing of the request but its body counts: the time that it has is the model's `timeout_s`.

        Returns with the first piece of the answer, so a program that fails before makes no answer. Raises
        InvalidRequestError for what a program can't do.
        """
        if isinstance(body, bytes | bytearray):
            body = HeldBody(data=body)
        assert isinstance(body, HeldBody), "it was read to find the model"
        data = b"".join([bytes(piece) async for piece in body.pieces()])
        body.sent()
        await self._turns.acquire()
        starting = self._in_background(self._start(data))
        try:
            response = await asyncio.shield(starting)  # what a thread makes for it must not be lost
        except asyncio.CancelledError:
            starting.add_done_callback(_abandon)
            raise
        try:
            await response.begin()
        except BaseException:
            response.close()
            raise
        return response

    async def close(self) -> None:
        """Kill every process; answers under way break off. Returns when nothing of them is left, or can't be killed."""
        self._closed = True
        for response in self._running:
            response.end(_disconnected())
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * KILL_WAIT_S)

    def kill(self, process: WorkerProcess) -> None:
        """Called by responses: end it with all below it, without waiting for that."""
        self._in_background(self._killed(process))

    def ended(self, response: ProgramResponse) -> None:
        """Called by responses: nobody reads it any more."""
        self._running.discard(response)
        self._in_background(self._clean_up(response))

    def failed(self, reason: str, last_words: bytes) -> None:
        """Called by responses: tell operators what a program did."""
        lines = last_words.decode("utf-8", "replace").splitlines()[-20:]
        log.warning("remote.program_failed", model=self.model, reason=reason)
        text = "".join(f"{line}\n" for line in (f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}", *lines))
        self._in_background(self._write(text))

    # ------------------------------------------------------------------------------------------------------- a request

    async def _start(self, data: bytes) -> ProgramResponse:
        """Takes over the turn: the response's end, or its own failure, gives it back."""
        number, folder = next(_numbers), None
        try:
            folder = self._folders / f"{_this_daemon()}-{number}"
            with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
                call, stdin = await in_thread(partial(self._prepare, data, folder))
                theirs.callback(os.close, stdin)
                (out, stdout), (err, stderr) = (pipe(ours, theirs) for _ in range(2))
                order = SpawnOrder(
                    instance=self._instance,
                    model=f"{self.model}/{os.getpid()}",  # a successor counts anew
                    generation=number,
                    argv=call.argv,
                    env=self._env,
                    cwd=folder / "work",
                    log=folder / "unused.log",
                    stdio=(stdin, stdout, stderr),
                )
                process = await spawn(order)
                response = ProgramResponse(self, process, call, folder, out, err)
                ours.pop_all()
        except BaseException as error:
            self._turns.release()
            if folder is not None:
                self._in_background(self._remove(folder))
            match error:
                case RequestRefusedError():
                    raise InvalidRequestError(error.message, param=error.param, code=error.code) from error
                case SpawnError() | OSError():
                    self.failed(f"it can't be started: {error}", b"")
                    raise UpstreamError(f"{THIS} can't be started; its log says why.") from error
            raise
        self._running.add(response)
        self.open_responses += 1
        if self._closed:
            response.end(_disconnected())
        return response

    def _prepare(self, data: bytes, folder: Path) -> tuple[ProgramCall, int]:
        """How to ask, and a descriptor of the prompt. Raises RequestRefusedError, and OSError."""
        call = self.spec.call(data, folder)
        (folder / "work").mkdir(parents=True, mode=0o700)
        folder.chmod(0o700)
        for name, content in call.files.items():
            (folder / name).write_bytes(content)
        stdin = os.memfd_create("prompt", os.MFD_CLOEXEC)
        try:
            left = memoryview(call.stdin)
            while left:
                left = left[os.write(stdin, left) :]
            os.lseek(stdin, 0, os.SEEK_SET)
        except BaseException:
            os.close(stdin)
            raise
        return call, stdin

    async def _clean_up(self, response: ProgramResponse) -> None:
        await self._killed(response.process)
        self.open_responses -= 1
        self._turns.release()
        await self._remove(response.folder)

    async def _killed(self, process: WorkerProcess) -> None:
        try:
            await process.stop(0.0, KILL_WAIT_S)
        except UnkillableError as error:
            log.warning("remote.program_unkillable", model=self.model, reason=str(error))
            await process.wait()

    def _in_background(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _remove(self, folder: Path) -> None:
        with contextlib.suppress(OSError):
            await in_thread(lambda: shutil.rmtree(folder, ignore_errors=True))

    def _sweep(self) -> None:
        for folder in self._folders.iterdir():
            pid = folder.name.partition("-")[0]
            if not (pid.isdecimal() and folder.name.startswith(f"{_daemon(int(pid))}-")):
                shutil.rmtree(folder, ignore_errors=True)

    async def _write(self, text: str) -> None:
        def append() -> None:
            if self._log.exists() and self._log.stat().st_size > LOG_LIMIT_BYTES:
                self._log.replace(f"{self._log}.1")
            descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "a", encoding="utf-8") as file:
                file.write(text)

        with contextlib.suppress(OSError):
            await in_thread(append)


def _daemon(pid: int) -> str:
    """What no other process has, not even a later one with its pid. Raises OSError."""
    proc = Proc.read(pid)
    return f"{pid}-{proc.started if proc is not None else 'gone'}"


def _this_daemon() -> str:
    return _daemon(os.getpid())


def _abandon(starting: asyncio.Task[ProgramResponse]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()


def _disconnected() -> UpstreamError:
    return UpstreamError("The model was disconnected in the middle of its answer.", code="upstream_broken")


class ProgramResponse(UpstreamResponse):
    """One process as an `UpstreamResponse`. One consumer."""

    def __init__(
        self,
        pool: ProgramPool,
        process: WorkerProcess,
        call: ProgramCall,
        folder: Path,
        stdout: ProgramOutput,
        stderr: ProgramOutput,
    ) -> None:
        """Both outputs are this object's from now on."""
        self.status = 200
        self.headers: Headers = [(b"content-type", call.answer.content_type.encode())]
        self.ignored = call.ignored  # of the request's fields
        self.complete = False
        self.process = process
        self.folder = folder
        self._pool = pool
        self._answer = call.answer
        self._open = True
        self._first = b""
        self._left = pool.spec.output_bytes
        self._why: LlmuxError | None = None  # set iff it was killed for that
        self._stdout, self._stderr = stdout, stderr
        self._last_words = b""
        self._hearing: asyncio.Task[None] | None = None
        self._timer = pool.loop.call_later(pool.spec.timeout_s, self._time_is_over)

    async def begin(self) -> None:
        """Wait for the first piece. Raises UpstreamError, UpstreamTimeoutError."""
        self._hearing = self._pool.loop.create_task(self._hear())
        self._first = await self.next_chunk()

    @property
    def drained(self) -> bool:
        return self.complete and not self._first

    async def next_chunk(self) -> bytes:
        """The next piece; see `UpstreamResponse`."""
        if self._first:
            first, self._first = self._first, b""
            return first
        while not self.complete:
            output = await self._stdout.read()
            try:
                piece = self._answer.feed(output) if self._counted(output) else b""
                if not output:
                    await self._ended_well()
                    piece, self.complete = self._answer.finish(), True
            except ProgramError as error:
                raise self._failure(str(error)) from error
            if piece:
                return piece
        return b""

    def end(self, why: LlmuxError) -> None:
        """Kill it; the consumer gets this error."""
        if self._why is None and not self.complete:
            self._why = why
            self._pool.kill(self.process)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._timer.cancel()
        if self._hearing is not None:
            self._hearing.cancel()
        self._stdout.close()
        self._stderr.close()
        self._pool.ended(self)

    def _time_is_over(self) -> None:
        limit_s = self._pool.spec.timeout_s
        self.end(UpstreamTimeoutError(f"{THIS} did not end within {limit_s:g} s."))

    def _counted(self, output: bytes) -> bool:
        """Is it within what the program may print?"""
        self._left -= len(output)
        if self._left < 0:
            mib = self._pool.spec.output_bytes >> 20
            self.end(
                UpstreamError(
                    f"{THIS} printed more than {mib} MiB (its output_mib), and was ended.",
                    code="upstream_too_large",
                )
            )
        return self._left >= 0

    async def _hear(self) -> None:
        while said := await self._stderr.read():
            if self._counted(said):
                self._last_words = (self._last_words + said)[-LAST_WORDS:]

    async def _ended_well(self) -> None:
        """Its output has ended. Raises what became of it, unless it has exited with 0."""
        code = (await self.process.wait()).code
        if self._hearing is not None:
            await asyncio.wait({self._hearing})
        if self._why is not None:
            why, self._why = self._why, UpstreamError("The response has failed before.")
            self._pool.failed(why.message, self._last_words)
            raise why
        if code is None:
            raise self._failure("its shim was killed")
        if code != 0:
            raise self._failure(f"it exited with {code}" if code > 0 else f"signal {-code} ended it")

    def _failure(self, reason: str) -> UpstreamError:
        self._pool.failed(reason, self._last_words)
        return UpstreamError(f"{THIS} failed; its log says why.")
