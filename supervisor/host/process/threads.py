"""Runs work in a thread; reports a machine that allows no more threads as OSError."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_REFUSED = "can't start new thread"


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread and return its result. Raises OSError, instead of RuntimeError, where no thread can be started."""
    try:
        return await asyncio.to_thread(work)
    except RuntimeError as error:
        if str(error) != _REFUSED:
            raise
        raise OSError(errno.EAGAIN, _REFUSED) from error
