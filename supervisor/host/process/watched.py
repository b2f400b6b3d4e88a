"""Runs a command of `llmux` in a separate process and reads its output. So the daemon never imports the hub's client.

The command ends at the end of its standard input, so it ends together with the daemon. Its standard output is lines of JSON.
The last lines of its standard error explain a failure.
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

ERROR_LINES: Final = 4
LONGEST: Final = 500
_LINE_BYTES: Final = 1 << 20

OnLine = Callable[[bytes], None]
OnText = Callable[[str], None]


async def run(words: tuple[str, ...], on_line: OnLine, on_text: OnText = lambda _: None) -> None:
    """Run `llmux` with these words. `on_line` gets each line of standard output, `on_text` each line of standard error.

    Cancelling kills the command and its children. Raises UnavailableError with the last lines if the command fails.
    """
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-P", "-m", "supervisor.cli", *words)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, limit=_LINE_BYTES
    )
    assert process.stdout is not None
    assert process.stderr is not None
    last: deque[str] = deque(maxlen=ERROR_LINES)

    def note(text: str) -> None:
        last.append(text)
        on_text(text)

    try:
        await asyncio.gather(_read_lines(process.stdout, on_line), _read_errors(process.stderr, note))
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the command leads its own process group
            await process.wait()
    if code:
        raise UnavailableError("; ".join(last) or f"llmux {words[0]} ended with {code}")


async def _read_lines(stdout: asyncio.StreamReader, on_line: OnLine) -> None:
    async for text in stdout:
        on_line(text)


async def _read_errors(stderr: asyncio.StreamReader, on_text: OnText) -> None:
    async for line in stderr:
        if text := line.decode("utf-8", "replace").strip():
            on_text(text[:LONGEST])
