"""Workers that come up, or go on, only when a test says so: an order of events where a delay would be a guess.

A machine that pauses for a moment lets every delay run out unseen; what waits for a file, or is stopped, waits on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.daemon import fake

_WAIT = 'until [ -e "$0" ]; do sleep 0.02; done; exec "$@"'


def held(gate: Path, *flags: str, **keys: object) -> dict[str, object]:
    """A model of the fake worker, which begins once the file `gate` is there; until then the model is starting."""
    return behind(gate, fake(*flags, **keys))


def behind(gate: Path, model: dict[str, Any]) -> dict[str, Any]:
    """The same model, whose program begins once the file is there."""
    return model | {"cmd": ["/bin/sh", "-c", _WAIT, str(gate), *model["cmd"]]}


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """The process takes what is sent to it, and does nothing, until the block ends."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
