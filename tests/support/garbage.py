"""What the collector would find."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_cycles_of(*kinds: type) -> Iterator[None]:
    """Fails if the block leaves an object of these kinds in a reference cycle: what it refers to would stay for long."""
    gc.collect()
    gc.freeze()  # what others have left is looked through once
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [item for item in gc.garbage if isinstance(item, kinds)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
