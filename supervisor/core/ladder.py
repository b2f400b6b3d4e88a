"""A task's ladder: chooses the candidate that gets a request. Pure: depends only on the candidates' current state.

A task's candidates are in order of preference; the first is the primary. The choice among candidates not tried yet:

 1. the primary, if it is pinned;
 2. else the first warm local model (loaded and answering);
 3. else the first.

A remote model is always ready, so readiness doesn't count for it. Otherwise cold local models would never be loaded, and
prompts would leave this machine without need. A remote model is chosen only by its position in the list.

The guard against cloud fallbacks removes remote models from all positions but the first. The primary is a deliberate choice
of the configuration, so the guard never leaves a ladder empty.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rung:
    """The current state of a candidate."""

    is_ready: bool = False  # can take a request now, without a load
    is_remote: bool = False  # another host runs the model


def allowed(rungs: Sequence[Rung], *, allow_cloud_fallback: bool) -> tuple[int, ...]:
    """The positions that the guard against cloud fallbacks allows, in order. The primary's is always among them."""
    return tuple(at for at, rung in enumerate(rungs) if at == 0 or allow_cloud_fallback or not rung.is_remote)


def choose(
    rungs: Sequence[Rung],
    *,
    pin_primary: bool = False,
    allow_cloud_fallback: bool = True,
    without: Collection[int] = (),
) -> int | None:
    """The position to try next; None when none is left. `without`: positions tried already, or unable to serve the request."""
    left = [at for at in allowed(rungs, allow_cloud_fallback=allow_cloud_fallback) if at not in without]
    if not left:
        return None
    if left[0] == 0 and pin_primary:
        return 0
    warm = (at for at in left if rungs[at].is_ready and (at == left[0] or not rungs[at].is_remote))
    return next(warm, left[0])
