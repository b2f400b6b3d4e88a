"""The queue as the admin API shows it: how many wait, how long others have waited lately, and which limits are in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import JsonValue

from supervisor.core.limits import Counted, Standing

if TYPE_CHECKING:
    from supervisor.core.types import ModelId
    from supervisor.daemon.daemon import Daemon

Json = dict[str, JsonValue]


def queue_view(daemon: Daemon) -> Json:
    """All models together, then those that somebody waits for."""
    queue = daemon.engine.queue()
    waited_for = [model for model in daemon.engine.active() if model.queued]
    return {
        "depth": queue.waiting,
        "max_depth": queue.most,
        "in_flight": queue.in_flight,
        **_waits(daemon),
        "models": [
            {
                "name": model.id,
                "depth": model.queued,
                "max_depth": queue.most_per_model if model.spec.max_queue is None else model.spec.max_queue,
                "in_flight": model.in_flight,
                **_waits(daemon, model.id),
            }
            for model in waited_for
        ],
        "limits": [_limit(standing) for standing in daemon.engine.limited()],
    }


def _waits(daemon: Daemon, model: ModelId | None = None) -> Json:
    figures = daemon.engine.waits(model)
    return {"avg_wait_ms": _ms(figures.mean_s), "p95_wait_ms": _ms(figures.p95_s)}


def _ms(wait_s: float | None) -> int | None:
    return None if wait_s is None else round(wait_s * 1000)


def _limit(standing: Standing) -> Json:
    is_rate = standing.counted is not Counted.CONCURRENCY
    return {
        "account": standing.account,
        "counts": standing.counted.value,
        "limit": standing.limit,
        "period_s": standing.period_s if is_rate else None,
        "remaining": standing.remaining,
        "reset_s": round(standing.reset_s, 1) if is_rate else None,
    }
