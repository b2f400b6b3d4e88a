"""A command of `llmux` that the daemon runs in a process of its own, and follows: it keeps the hub's client out of the daemon.

The command reads its standard input and ends when that does, so it ends with the daemon, whatever becomes of that. Its standard
output is lines of JSON; the last lines of its standard error say what is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from typing import Final

from supervisor.errors import UnavailableError

TOLD_LINES: Final = 4
LONGEST: Final = 500
_LINE_BYTES: Final = 1 << 20

Line = Callable[[bytes], None]
Words = Callable[[str], None]


async def run(words: tuple[str, ...], line: Line, said: Words = lambda _: None) -> None:
    """Run `llmux` with these words. `line` gets each line of its output, `said` each that it writes for people.

    Ends the command and all that it started if cancelled. Raises UnavailableError with its last words where it fails.
    """
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-P", "-m", "supervisor.cli", *words)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, limit=_LINE_BYTES
    )
    assert process.stdout is not None
    assert process.stderr is not None
    last: deque[str] = deque(maxlen=TOLD_LINES)

    def note(text: str) -> None:
        last.append(text)
        said(text)

    try:
        await asyncio.gather(_follow(process.stdout, line), _listen(process.stderr, note))
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own group: it began a session
            await process.wait()
    if code:
        raise UnavailableError("; ".join(last) or f"llmux {words[0]} ended with {code}")


async def _follow(stdout: asyncio.StreamReader, line: Line) -> None:
    async for text in stdout:
        line(text)


async def _listen(stderr: asyncio.StreamReader, said: Words) -> None:
    async for line in stderr:
        if text := line.decode("utf-8", "replace").strip():
            said(text[:LONGEST])
