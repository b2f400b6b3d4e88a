"""A task's ladder: which of its candidates gets a request. A pure choice, by the state of the candidates now.

A task's candidates stand in the order of preference; the first is its primary. Of those not tried yet

 1. the primary, where it is pinned;
 2. else the first that is warm, where a local model of our own is warm: loaded, and answering;
 3. else the first.

A remote model is never preferred for being ready, as it always is: a cold model of our own would then never be loaded, and
prompts would leave this machine for no other reason. It gets its turn in the order of the list.

The guard against cloud fallbacks takes remote models out of all positions but the first. What is configured as primary is a
deliberate choice, so the guard never leaves a ladder empty.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rung:
    """A candidate as it is now."""

    is_ready: bool = False  # it could take a request now, without a load
    is_remote: bool = False  # others run it


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
    """The position to try next; None when none is left. `without`: those that were tried, or can't serve the request."""
    left = [at for at in allowed(rungs, allow_cloud_fallback=allow_cloud_fallback) if at not in without]
    if not left:
        return None
    if left[0] == 0 and pin_primary:
        return 0
    warm = (at for at in left if rungs[at].is_ready and (at == left[0] or not rungs[at].is_remote))
    return next(warm, left[0])
