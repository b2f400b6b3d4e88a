"""What workers and devices say of themselves: ready, unready, so much memory.

Every report names its worker by model and generation; one about an older worker is dropped. A reading of the memory is
made beside the events, so it can be older than what is known already: it counts from when it began.
"""

from __future__ import annotations

from supervisor.core.lifecycle import Step
from supervisor.core.state import Record, Turn, World
from supervisor.core.termination import forget, settle_stopped
from supervisor.core.types import Learn, MemorySampled, RejectCode, State, WorkerReady, WorkerSample, WorkerUnready

REMOTE_RETRY_S = 10.0

LEARN_STEP = 1.05
"""A peak is learned anew when it exceeds what was known by this factor."""


def ready(world: World, turn: Turn, event: WorkerReady) -> None:
    """It answers: for the first time, or again. Those who wait for it are dispatched in this turn."""
    record = world.current(event.model, event.generation)
    if record is None or record.state not in {State.STARTING, State.READY}:
        return
    record.answering = True
    if record.spec.remote:
        _reachable(turn, record)
    elif record.state is State.STARTING:
        record.load_s = turn.now - record.life.since
        record.oom_retried = False
        _begins_to_serve(turn, record, f"loaded in {record.load_s:.1f} s")
        world.ledger.settle(record.holder, turn.now)
        turn.decide("ready", record.id, record.life.reason)
        if record.crashes:
            world.wake(turn.now + world.limits.backoff_reset_s, record.id)
        world.keep_alive(record)
    world.dispatch(turn, record)


def _begins_to_serve(turn: Turn, record: Record, reason: str) -> None:
    record.ready_at = record.last_used = turn.now
    record.restore = False
    record.asked_at = None
    record.life.step(Step.READY, turn.now, reason)


def _reachable(turn: Turn, record: Record) -> None:
    if record.state is State.STARTING:
        _begins_to_serve(turn, record, "runs elsewhere")
        turn.decide("ready", record.id, record.life.reason)
    else:
        record.life.reason = "answers again"
        turn.decide("recovered", record.id, record.life.reason)


def unready(world: World, turn: Turn, event: WorkerUnready) -> None:
    """It does not answer for now: new requests wait."""
    record = world.current(event.model, event.generation)
    if record is None:
        return
    if record.spec.remote:
        _unreachable(world, turn, record, event.reason)
    elif record.state is State.READY and record.answering:
        record.answering = False
        turn.decide("unready", record.id, event.reason)


def _unreachable(world: World, turn: Turn, record: Record, reason: str) -> None:
    """Nothing here can bring a remote back, and nobody knows when it will be: no request waits for it."""
    if record.state is State.STARTING:
        _begins_to_serve(turn, record, reason)
    elif record.state is not State.READY:
        return
    record.answering = False
    record.life.reason = reason
    turn.decide("unready", record.id, reason)
    world.reject_all(
        turn, record, RejectCode.REMOTE_UNAVAILABLE, f"{record.id}: {reason}", retry_after_s=REMOTE_RETRY_S
    )


def sampled(world: World, turn: Turn, event: MemorySampled) -> None:
    """The books are brought up to date, and what was waiting for memory to be back goes on."""
    stale = {device.id for device in event.devices if device.stale}  # what it says of workers there is older than it is
    for worker in event.workers:
        if worker.used_mib is not None and worker.device not in stale:
            world.ledger.measure((worker.model, worker.generation), worker.device, worker.used_mib)
            _learn(world, turn, worker, worker.used_mib, event.taken_at)
    for device in event.devices:
        world.ledger.sample(device, event.taken_at)
    for record in list(world.records.values()):
        settle_stopped(world, turn, record)
        if record.retired and record.id in world.records:
            forget(world, turn, record)


def _learn(world: World, turn: Turn, worker: WorkerSample, used_mib: int, taken_at: float) -> None:
    """Keep the most it was seen to take, from readings that show all of it: begun after it was ready, and not empty."""
    record = world.current(worker.model, worker.generation)
    if record is None or record.state is not State.READY or record.next_spec is not None:
        return
    if used_mib <= 0 or taken_at <= record.ready_at:
        return
    known = record.spec.learned.get(worker.device)
    if known is None or used_mib > known.mib * LEARN_STEP:
        record.learn(worker.device, used_mib)
        turn.emit(Learn(record.id, worker.device, record.spec.footprint_key, used_mib))


def watch_memory(world: World, turn: Turn) -> None:
    """Warn of memory that does not come back, quarantine the device when it still doesn't."""
    for alert in world.ledger.overdue(turn.now):
        turn.emit(alert)
        turn.decide(alert.code, alert.model, alert.message)
