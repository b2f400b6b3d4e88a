"""The state machine: `handle(event, now) -> [Effect]`.

One object owns all state and is called from one place; nothing here waits, reads a clock, or touches a process. Each
event changes the records it is about, then wanted models are planned (`placement`), so that every decision is made on
the state as it is at the end of the event. Given the same events at the same times it returns the same effects: that is
what the journal replays.

A request's way:
 1. arrives → refused at once (unknown, failed, full, shutting down), or
 2. dispatched at once to a ready worker with room, or
 3. queued, which makes its model wanted; the worker's READY dispatches it *in the same turn*, so that nothing can evict
    the model between becoming ready and its first request;
 4. finished, however it ended.
"""

from __future__ import annotations

import random
from typing import assert_never

from supervisor.core.lifecycle import Lifecycle, Step
from supervisor.core.placement import place
from supervisor.core.types import (
    Alert,
    Configured,
    Crash,
    CrashClass,
    CutRequest,
    Decided,
    Effect,
    Event,
    Learn,
    LoadAsked,
    MemorySampled,
    ModelId,
    ModelSpec,
    PinAsked,
    Reject,
    RejectCode,
    RequestArrived,
    RequestFinished,
    Respecified,
    ShutdownAsked,
    State,
    StopWorker,
    Tick,
    UnloadAsked,
    WorkerExited,
    WorkerReady,
    WorkerUnkillable,
    WorkerUnready,
)
from supervisor.core.world import Record, Turn, World

LEARN_STEP = 1.05
"""A peak is learned anew when it exceeds what was known by this factor."""

HOPELESS = frozenset({CrashClass.BAD_ARGUMENTS})
"""A start that failed like this fails the same way again, so it isn't tried again by itself."""


class Scheduler:
    """Decides what runs where and who is served. Not thread-safe: one writer."""

    def __init__(self) -> None:
        self.world = World()

    # ------------------------------------------------------------------------------------------------------- the turn

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at `now` (monotonic seconds, never going back) and say what has to be done, in order."""
        turn = Turn(now)
        replan = self._take(turn, event)
        for model in self.world.due(now):
            if (record := self.world.records.get(model)) is not None:
                self._on_time(turn, record)
                replan = True
        if self.world.queue.deadline() <= now:
            self._expire(turn)
            replan = True
        if replan:
            self._watch_memory(turn)
            place(self.world, turn)
        return turn.effects

    def deadline(self, now: float) -> float:
        """When `Tick` is needed at the latest; infinity when nothing is due."""
        timers = self.world.timers
        return min(
            timers[0][0] if timers else float("inf"), self.world.queue.deadline(), self.world.ledger.deadline(now)
        )

    def is_impatient(self) -> bool:
        """Is somebody waiting for memory, so that it should be sampled often?"""
        return bool(self.world.wanted) or self.world.ledger.is_waiting()

    def _take(self, turn: Turn, event: Event) -> bool:
        """Apply the event; True when plans have to be made anew."""
        match event:
            case RequestArrived():
                return self._on_arrived(turn, event)
            case RequestFinished():
                return self._on_finished(turn, event)
            case WorkerReady():
                self._on_ready(turn, event)
            case WorkerUnready():
                self._on_unready(turn, event)
            case WorkerExited():
                self._on_exited(turn, event)
            case WorkerUnkillable():
                self._on_unkillable(turn, event)
            case MemorySampled():
                self._on_sampled(turn, event)
            case LoadAsked():
                self._on_load(turn, event)
            case UnloadAsked():
                self._on_unload(turn, event)
            case PinAsked():
                self._on_pin(turn, event)
            case Respecified():
                self._on_respecified(turn, event)
            case Configured():
                self._on_configured(turn, event)
            case ShutdownAsked():
                self._on_shutdown(turn)
            case Tick():
                pass
            case _:
                assert_never(event)
        return True

    # ------------------------------------------------------------------------------------------------------- requests

    def _on_arrived(self, turn: Turn, event: RequestArrived) -> bool:
        world = self.world
        record = world.records.get(event.model)
        if record is None or record.retired:
            turn.emit(Reject(event.ticket, RejectCode.MODEL_NOT_FOUND, f"There is no model {event.model!r}."))
            return False
        if world.shutting_down:
            message = "llmux is shutting down; try again in a moment."
            turn.emit(Reject(event.ticket, RejectCode.SHUTTING_DOWN, message, retry_after_s=5.0))
            return False
        if record.state is State.FAILED or record.stuck:
            turn.emit(self._failed_reject(event, record))
            return False
        idle_queue = world.queue.count(record.id) == 0
        if record.state is State.READY and record.answering and idle_queue and not world.is_full(record):
            world.assign(turn, record, event.ticket)
            return False
        full = world.queue.push(event.ticket, event.model, event.priority, turn.now)
        if full is not None:
            retry_after_s = min(120.0, max(1.0, record.load_s or 1.0))
            message = f"The queue is full: {full}. Try again in {retry_after_s:.0f} s."
            turn.emit(Reject(event.ticket, RejectCode.QUEUE_FULL, message, retry_after_s))
            return False
        known = record.id in world.wanted
        world.want(record)
        return not known and record.id in world.wanted

    def _failed_reject(self, event: RequestArrived, record: Record) -> Reject:
        what = record.crash.summary if record.crash is not None else record.life.reason
        remedy = f"Fix the cause, then: llmux load {record.id}"
        tail = record.crash.log_tail if record.crash is not None else ()
        return Reject(
            event.ticket, RejectCode.MODEL_FAILED, f"{record.id} does not start: {what}. {remedy}", 60.0, tail
        )

    def _on_finished(self, turn: Turn, event: RequestFinished) -> bool:
        world = self.world
        model = world.tickets.pop(event.ticket, None)
        if model is None:  # it was still queued, or its worker is gone already
            waiting = world.queue.remove(event.ticket)
            if waiting is None:
                return False
            record = world.records[waiting.model]
            world.want(record)
            self._cancel_needless_load(turn, record)
            return True
        record = world.records[model]
        if record.in_flight.pop(event.ticket, "absent") == "absent":
            return False
        record.last_used = turn.now
        world.dispatch(turn, record)
        if record.in_flight:
            return False
        if record.state is State.DRAINING and record.stop_reason is not None:
            world.stop(turn, record, record.stop_reason)
        elif record.state is State.DRAINING and record.claimed_by is not None:
            record.life.step(Step.RESUME, turn.now, "idle")  # place() stops it in this same turn if it is still claimed
            return True
        return bool(world.wanted)

    def _cancel_needless_load(self, turn: Turn, record: Record) -> None:
        """Stop a load that nobody waits for any more, unless most of it is behind us."""
        if record.state is not State.STARTING or record.asked_at is not None or self.world.queue.count(record.id) > 0:
            return
        if record.load_s is not None and turn.now - record.life.since > record.load_s / 2:
            return
        reason = "nobody waits for it any more"
        self.world.stop(turn, record, reason, force=True)
        turn.decide("cancel", record.id, f"load cancelled: {reason}")

    def _expire(self, turn: Turn) -> None:
        waited = self.world.limits.queue_wait_s
        for waiting in self.world.queue.expired(turn.now):
            record = self.world.records[waiting.model]
            message = f"Waited {waited:.0f} s for {record.id} without getting a turn. To see why: llmux why {record.id}"
            turn.emit(Reject(waiting.ticket, RejectCode.QUEUE_TIMEOUT, message, 30.0))
            self.world.want(record)
            self._cancel_needless_load(turn, record)

    # -------------------------------------------------------------------------------------------------------- workers

    def _on_ready(self, turn: Turn, event: WorkerReady) -> None:
        record = self.world.current(event.model, event.generation)
        if record is None or record.state not in {State.STARTING, State.READY}:
            return
        record.answering = True
        if record.state is State.STARTING:
            record.load_s = turn.now - record.life.since
            record.ready_at = record.last_used = turn.now
            record.oom_retried = False
            record.asked_at = None
            record.life.step(Step.READY, turn.now, f"loaded in {record.load_s:.1f} s")
            self.world.ledger.settle(record.holder, turn.now)
            turn.decide("ready", record.id, record.life.reason)
            self.world.wake(turn.now + self.world.limits.backoff_reset_s, record.id)
            if record.spec.keep_alive_s is not None:
                self.world.wake(turn.now + record.spec.keep_alive_s, record.id)
        self.world.dispatch(turn, record)

    def _on_unready(self, turn: Turn, event: WorkerUnready) -> None:
        record = self.world.current(event.model, event.generation)
        if record is not None and record.state is State.READY and record.answering:
            record.answering = False
            turn.decide("unready", record.id, event.reason)

    def _on_exited(self, turn: Turn, event: WorkerExited) -> None:
        record = self.world.current(event.model, event.generation)
        if record is None or record.exited:
            return
        for ticket in record.in_flight:
            self.world.tickets.pop(ticket, None)
        record.in_flight.clear()
        record.answering = False
        record.stuck = False
        record.exited = True
        self.world.ledger.returning(record.holder, turn.now)
        if record.state is State.STOPPING:
            self._settle_stopped(turn, record)
        else:
            crash = event.crash or Crash(CrashClass.UNKNOWN, "the worker ended although nobody stopped it")
            self._on_crash(turn, record, crash)

    def _settle_stopped(self, turn: Turn, record: Record) -> None:
        """STOPPING ends when the tree is gone *and* its memory is back; then whatever waited for that happens."""
        if record.state is not State.STOPPING or self.world.ledger.holds(record.holder):
            return
        record.life.step(Step.GONE, turn.now, record.life.reason)
        record.stop_reason = None
        record.device = None
        self._adopt_spec(record)
        if record.retired:
            self._forget(turn, record)
        else:
            self.world.want(record)

    def _on_crash(self, turn: Turn, record: Record, crash: Crash) -> None:
        limits = self.world.limits
        was_loaded = record.state is not State.STARTING
        record.crash = crash
        record.stop_reason = None
        turn.decide("crash", record.id, f"{crash.kind}: {crash.summary}")
        if crash.kind is CrashClass.NOT_INSTALLED:
            record.life.step(Step.GONE, turn.now, crash.summary)
            self.world.reject_all(turn, record, RejectCode.RUNTIME_NOT_INSTALLED, crash.summary)
        elif crash.kind is CrashClass.OUT_OF_MEMORY and not was_loaded and not record.oom_retried:
            record.oom_retried = True
            record.life.step(Step.GONE, turn.now, "ran out of memory while loading; tried once more with more room")
        else:
            record.restore = was_loaded and not record.retired
            record.crashes.append(turn.now)
            recent = sum(1 for at in record.crashes if turn.now - at <= limits.crash_window_s)
            if crash.kind in HOPELESS or recent >= limits.crash_limit:
                self._fail(turn, record, crash, recent)
            else:
                self._back_off(turn, record, crash, recent)
        if record.retired:
            self._forget(turn, record)
            return
        self._adopt_spec(record)
        self.world.want(record)

    def _fail(self, turn: Turn, record: Record, crash: Crash, recent: int) -> None:
        times = "" if crash.kind in HOPELESS else f" {recent} times in {self.world.limits.crash_window_s / 60:.0f} min"
        record.life.step(Step.FAIL, turn.now, f"failed{times}: {crash.summary}")
        message = f"{record.id} does not start: {crash.summary}. Fix the cause, then: llmux load {record.id}"
        self.world.reject_all(turn, record, RejectCode.MODEL_FAILED, message, retry_after_s=60.0, detail=crash.log_tail)
        turn.emit(Alert("model.failed", record.life.reason, model=record.id))

    def _back_off(self, turn: Turn, record: Record, crash: Crash, recent: int) -> None:
        limits = self.world.limits
        delay = min(limits.backoff_max_s, limits.backoff_first_s * 2 ** (recent - 1))
        # Deterministic, so that a replay makes the same decision; different for each model, so that they don't march in step.
        noise = random.Random(f"{record.id}:{record.generation}").uniform(-1.0, 1.0)  # noqa: S311 (not for secrets)
        delay *= 1.0 + limits.backoff_jitter * noise
        record.retry_at = turn.now + delay
        record.life.step(Step.CRASH, turn.now, f"{crash.summary}; next try in {delay:.1f} s")
        self.world.wake(record.retry_at, record.id)

    def _on_unkillable(self, turn: Turn, event: WorkerUnkillable) -> None:
        record = self.world.current(event.model, event.generation)
        if record is None or record.device is None:
            return
        record.stuck = True
        message = f"{record.id}: {event.reason}; {record.device} takes no new models until it is gone"
        self.world.ledger.quarantine(record.holder, message)
        turn.emit(Alert("device.quarantined", message, device=record.device, model=record.id))
        turn.decide("quarantine", record.id, message)
        self.world.reject_all(turn, record, RejectCode.LOAD_FAILED, message, retry_after_s=60.0)

    # --------------------------------------------------------------------------------------------------------- memory

    def _on_sampled(self, turn: Turn, event: MemorySampled) -> None:
        ledger = self.world.ledger
        for worker in event.workers:
            if worker.used_mib is not None:
                ledger.measure((worker.model, worker.generation), worker.used_mib)
                self._learn(turn, worker.model, worker.used_mib)
        for device in event.devices:
            ledger.sample(device, event.taken_at)
        for record in list(self.world.records.values()):
            self._settle_stopped(turn, record)
            if record.retired and record.id in self.world.records:
                self._forget(turn, record)

    def _learn(self, turn: Turn, model: ModelId, used_mib: int) -> None:
        record = self.world.records.get(model)
        if record is None or record.device is None or record.state is not State.READY or record.next_spec is not None:
            return
        known = record.spec.learned.get(record.device)
        if known is None or used_mib > known.mib * LEARN_STEP:
            record.learn(record.device, used_mib)
            turn.emit(Learn(record.id, record.device, record.spec.definition, used_mib))

    def _watch_memory(self, turn: Turn) -> None:
        """Warn of memory that does not come back, quarantine the device when it still doesn't."""
        for alert in self.world.ledger.overdue(turn.now):
            turn.emit(alert)
            turn.decide(alert.code, alert.model, alert.message)

    # ------------------------------------------------------------------------------------------------------ operators

    def _on_load(self, turn: Turn, event: LoadAsked) -> None:
        record = self.world.records.get(event.model)
        if record is None or self.world.shutting_down:
            return
        if record.life.can(Step.RESET):
            record.life.step(Step.RESET, turn.now, "reset by an operator")
            record.crashes.clear()
            record.crash = None
        if record.state is State.DRAINING and record.stop_reason is not None and record.next_spec is None:
            record.stop_reason = record.drain_until = None
            record.life.step(Step.RESUME, turn.now, "an operator asked for it again")
            self.world.dispatch(turn, record)
        elif record.state not in {State.READY, State.DRAINING} or record.next_spec is not None:
            record.asked_at = turn.now if record.asked_at is None else record.asked_at
        self.world.want(record)

    def _on_unload(self, turn: Turn, event: UnloadAsked) -> None:
        record = self.world.records.get(event.model)
        if record is None:
            return
        record.asked_at = None
        record.restore = False
        if event.force or record.state not in {State.READY, State.DRAINING}:
            self.world.reject_all(
                turn, record, RejectCode.MODEL_UNLOADED, f"{record.id} was unloaded by an operator.", retry_after_s=5.0
            )
        self._take_down(turn, record, "unloaded by an operator", force=event.force)
        if record.life.can(Step.RESET):
            record.life.step(Step.RESET, turn.now, "unloaded by an operator")
            record.crashes.clear()
            record.crash = None
        self.world.want(record)

    def _take_down(self, turn: Turn, record: Record, reason: str, *, force: bool = False) -> None:
        """End the worker: after its running requests within the drain time, or at once."""
        if not record.has_worker:
            return
        if record.state is State.STOPPING:
            if force and not record.exited:
                turn.emit(StopWorker(record.id, record.generation, reason, force=True))
            return
        if record.in_flight and not force:
            record.stop_reason = reason
            record.drain_until = turn.now + self.world.limits.drain_s
            self.world.wake(record.drain_until, record.id)
            if record.state is State.READY:
                record.life.step(Step.DRAIN, turn.now, reason)
            turn.decide("drain", record.id, f"{reason}; {len(record.in_flight)} in flight")
            return
        for ticket in record.in_flight:
            turn.emit(CutRequest(ticket, reason))
        self.world.stop(turn, record, reason, force=force or record.state is State.STARTING)
        turn.decide("stop", record.id, reason)

    def _on_pin(self, turn: Turn, event: PinAsked) -> None:
        record = self.world.records.get(event.model)
        if record is None:
            return
        record.pin = event.pin
        turn.decide("pin" if event.pin else "unpin", record.id, "asked by an operator")
        if not event.pin and record.state is State.READY:
            self.world.wake(turn.now, record.id)  # its keep-alive counts again

    def _on_respecified(self, turn: Turn, event: Respecified) -> None:
        record = self.world.records.get(event.spec.id)
        if record is not None and not record.retired:
            self._configure_model(turn, event.spec, "an operator loads it with other settings")

    def _on_configured(self, turn: Turn, event: Configured) -> None:
        world = self.world
        world.limits, world.policy = event.limits, event.policy
        world.ledger.configure(event.devices, event.limits)
        world.queue.configure(event.limits)
        named = {spec.id for spec in event.models}
        for spec in event.models:
            self._configure_model(turn, spec, "its configuration changed")
        for record in list(world.records.values()):
            if record.id not in named:
                self._retire(turn, record)

    def _configure_model(self, turn: Turn, spec: ModelSpec, why: str) -> None:
        record = self.world.records.get(spec.id)
        if record is None:
            record = self.world.records[spec.id] = Record(spec, Lifecycle(spec.id, turn.now), last_used=turn.now)
            if spec.preload:
                record.asked_at = turn.now
        elif record.spec.definition == spec.definition or not record.has_worker:
            if record.spec.definition != spec.definition and record.life.can(Step.RESET):
                record.life.step(Step.RESET, turn.now, why)
                record.crashes.clear()
                record.crash = None
            record.spec = spec
            record.next_spec = None
            record.retired = False
            if record.state is State.READY:
                self.world.wake(turn.now, record.id)  # its keep-alive may be another
        else:
            record.next_spec = spec
            record.retired = False
            record.restore = True
            self._take_down(turn, record, why)
        self.world.want(record)

    def _adopt_spec(self, record: Record) -> None:
        if record.next_spec is not None:
            record.spec, record.next_spec = record.next_spec, None

    def _retire(self, turn: Turn, record: Record) -> None:
        record.retired = True
        message = f"{record.id} was removed from the configuration."
        self.world.reject_all(turn, record, RejectCode.MODEL_NOT_FOUND, message)
        if record.has_worker:
            self._take_down(turn, record, "removed from the configuration")
        else:
            self._forget(turn, record)

    def _forget(self, turn: Turn, record: Record) -> None:
        """Drop a removed model, once nothing of it is left; until then every reading of the memory comes back here."""
        self.world.want(record)
        if record.has_worker or self.world.ledger.holds(record.holder):
            return
        del self.world.records[record.id]
        turn.emit(Decided("forgotten", record.id, "removed from the configuration"))

    def _on_shutdown(self, turn: Turn) -> None:
        self.world.shutting_down = True
        for record in list(self.world.records.values()):
            message = "llmux is shutting down; try again in a moment."
            self.world.reject_all(turn, record, RejectCode.SHUTTING_DOWN, message, retry_after_s=5.0)
            self.world.want(record)
            self._take_down(turn, record, "llmux is shutting down")

    # ----------------------------------------------------------------------------------------------------------- time

    def _on_time(self, turn: Turn, record: Record) -> None:
        """A timer of this model came; which one follows from its state."""
        if record.state is State.BACKOFF and turn.now >= record.retry_at:
            record.life.step(Step.RETRY, turn.now, "backoff over")
            self.world.want(record)
        if record.state is State.DRAINING and record.drain_until is not None and turn.now >= record.drain_until:
            reason = record.stop_reason or "drain time is over"
            for ticket in record.in_flight:
                turn.emit(CutRequest(ticket, reason))
            self.world.stop(turn, record, reason)
            turn.decide(
                "stop", record.id, f"{reason}; cut {len(record.in_flight)} after {self.world.limits.drain_s:.0f} s"
            )
        if record.state is State.READY:
            if record.crashes and turn.now - record.ready_at >= self.world.limits.backoff_reset_s:
                record.crashes.clear()
            self._keep_alive(turn, record)

    def _keep_alive(self, turn: Turn, record: Record) -> None:
        keep_alive_s = record.spec.keep_alive_s
        if keep_alive_s is None or record.pinned:
            return
        ends = (turn.now if record.in_flight else record.last_used) + keep_alive_s
        if ends > turn.now:
            self.world.wake(ends, record.id)
        else:
            reason = f"idle for {keep_alive_s:.0f} s (keep_alive_s)"
            self.world.stop(turn, record, reason)
            turn.decide("stop", record.id, reason)
