"""Runs the program once for each request: writes the prompt to stdin, reads the output, ends the whole process group.

The program runs in its own session and in an empty folder, removed afterwards. Its stderr may quote somebody's prompt. So
clients only learn that it failed, and the worker's log says how.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from runtimes.claude_cli.worker.conversation import ProgramRequest
from runtimes.claude_cli.worker.descendants import Descendants
from runtimes.claude_cli.worker.output import OUTPUTS, OutputError, Result
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.own_folder import OwnFolder
from runtimes.sdk.worker_pool import Cancel

POLL_S: Final = 0.05  # for a cancellation
GRACE_S: Final = 1.0  # between SIGTERM and SIGKILL
PIECE: Final = 64 * 1024
LAST_BYTES: Final = 8192  # of stderr
LAST_LINES: Final = 20
PROGRAM: Final = "The program that answers for this model"

_PLACEHOLDER: Final = re.compile(r"\$\{(model|system_file)\}")


@dataclass(frozen=True, slots=True)
class Options:
    """How the program is run, as configured. `command` begins with its full path."""

    command: Sequence[str]
    system_args: Sequence[str]
    output: str
    upstream_model: str
    timeout_s: float
    output_bytes: int  # stdout and stderr together

    def argv(self, request: ProgramRequest, system_file: Path) -> list[str]:
        """The program's command line, which never contains the prompt."""
        values = {"model": self.upstream_model, "system_file": str(system_file)}
        words = [*self.command, *(self.system_args if request.system else ())]
        return [_PLACEHOLDER.sub(lambda match: values[match[1]], word) for word in words]

    def prompt(self, request: ProgramRequest) -> str:
        """The program's standard input."""
        return f"{request.system}\n\n{request.prompt}" if request.system and not self.system_args else request.prompt


class Program:
    """The program. Use it from any thread."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._folder = OwnFolder("llmux-claude-cli-")
        self._descendants = Descendants()

    def close(self) -> None:
        """Delete the temporary folder. Call this only when no run is left, or the last ones are about to end."""
        self._folder.close()

    def run(self, request: ProgramRequest, cancel: Cancel) -> Iterator[str | Result]:
        """The text of the answer in pieces, then the result. Blocks. Raises WorkerError and CancelledWorkError."""
        output, last_words = OUTPUTS[self._options.output](), bytearray()
        try:
            with self._running_process(request) as process:
                for is_error, piece in self._read_output(process, cancel):
                    if is_error:
                        last_words[:] = (last_words + piece)[-LAST_BYTES:]
                    elif text := output.feed(piece):
                        yield _without_surrogates(text)
            _check_exit_code(process.returncode)
            result = output.end()
            if result.text:
                yield _without_surrogates(result.text)
            yield result
        except OutputError as error:
            _log_failure(str(error), last_words)
            raise WorkerError(f"{PROGRAM} failed; its log says why.", code="upstream_error", status=502) from error
        except WorkerError as error:
            _log_failure(str(error), last_words)
            raise

    @contextlib.contextmanager
    def _running_process(self, request: ProgramRequest) -> Iterator[subprocess.Popen[bytes]]:
        """A running process of the program; none of its processes is left on exit. Raises OutputError if it can't start."""
        with (
            TemporaryDirectory(dir=self._folder.path, ignore_cleanup_errors=True) as folder,
            self._descendants.killing_leftovers(),
        ):
            try:
                process = self._start_process(request, Path(folder))
            except OSError as error:
                raise OutputError(f"it can't be started: {error}") from error
            try:
                yield process
            finally:
                _end_process_group(process)

    def _start_process(self, request: ProgramRequest, folder: Path) -> subprocess.Popen[bytes]:
        """Start the process. Raises OSError."""
        (work := folder / "work").mkdir()
        (system_file := folder / "system.txt").write_bytes(request.system.encode())
        with os.fdopen(os.memfd_create("prompt"), "w+b") as prompt:
            prompt.write(self._options.prompt(request).encode())
            prompt.seek(0)
            return subprocess.Popen(
                self._options.argv(request, system_file),
                stdin=prompt,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=work,
                start_new_session=True,
            )

    def _read_output(self, process: subprocess.Popen[bytes], cancel: Cancel) -> Iterator[tuple[bool, bytes]]:
        """The output of the process until its end, each piece with a flag for stderr. Raises WorkerError beyond a limit, and CancelledWorkError."""
        options, left = self._options, self._options.output_bytes
        until = time.monotonic() + options.timeout_s
        pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
        with os.fdopen(os.pidfd_open(process.pid)) as end, selectors.DefaultSelector() as selector:
            for number in (*(pipe.fileno() for pipe in pipes), end.fileno()):
                os.set_blocking(number, False)
                selector.register(number, selectors.EVENT_READ)
            has_ended = False
            while not has_ended:
                ready = {key.fd for key, _ in selector.select(POLL_S)}
                has_ended = end.fileno() in ready
                for pipe in pipes:
                    while piece := pipe.read(PIECE):
                        left -= len(piece)
                        if left < 0:
                            message = f"{PROGRAM} printed more than {options.output_bytes >> 20} MiB (its output_mib), and was ended."
                            raise WorkerError(message, code="upstream_too_large", status=502)
                        yield pipe is process.stderr, piece
                    if piece is not None and pipe.fileno() in ready:  # its end
                        selector.unregister(pipe.fileno())
                cancel.check()
                if time.monotonic() > until:
                    message = f"{PROGRAM} did not end within {options.timeout_s:g} s."
                    raise WorkerError(message, code="upstream_timeout", status=504)


def _check_exit_code(code: int) -> None:
    """Raises OutputError for an exit code other than 0."""
    if code != 0:
        raise OutputError(f"it exited with {code}" if code > 0 else f"signal {-code} ended it")


def _end_process_group(process: subprocess.Popen[bytes]) -> None:
    """End the process group: SIGKILL at once if the process has exited, else SIGTERM first. The pid stays valid until `wait`."""
    until = time.monotonic() + GRACE_S
    if not _has_ended(process):
        _signal_group(process, signal.SIGTERM)
    while not _has_ended(process) and time.monotonic() < until:
        time.sleep(POLL_S / 5)  # in the thread of one request
    _signal_group(process, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):  # not before: a late write would end it by SIGPIPE
        if pipe is not None:
            pipe.close()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # all have ended, or changed their user
        os.killpg(process.pid, number)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _without_surrogates(text: str) -> str:
    """The text with lone surrogates replaced, because they can't be encoded."""
    return text.encode(errors="replace").decode()


def _log_failure(reason: str, last_words: bytes | bytearray) -> None:
    lines = last_words.decode("utf-8", "replace").splitlines()[-LAST_LINES:]
    sys.stderr.write("".join(f"{line}\n" for line in (f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}", *lines)))
    sys.stderr.flush()
