"""`llmux` that is stuck in one place, which `LLMUX_TEST_STUCK` names, when it is told to end. Run as `python -m`.

What it may take of its own for its end is a third, so that tests don't wait.
"""

from __future__ import annotations

import asyncio
import os
import threading

from supervisor.cli import daemon
from supervisor.cli.main import main
from supervisor.core import termination
from supervisor.daemon.engine import Engine


def wait(*_: object) -> None:
    threading.Event().wait()


async def start_thread() -> None:
    asyncio.get_running_loop().run_in_executor(None, wait)


def be_stuck(place: str) -> None:
    if place == "state":  # it never hears that a worker has ended
        termination.exited = lambda *_: None
    elif place == "loop":
        Engine.shutdown = wait
    elif place == "thread":  # the interpreter waits for it at its end
        shutdown = Engine.shutdown

        async def end(engine: Engine) -> None:
            await start_thread()
            await shutdown(engine)

        Engine.shutdown = end


if __name__ == "__main__":
    daemon.OWN_STOP_S /= 3
    be_stuck(os.environ["LLMUX_TEST_STUCK"])
    main()
