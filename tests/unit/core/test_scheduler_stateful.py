"""Random traffic, faults and operators against the scheduler; the simulated machine checks the laws after every event.

Faults of all kinds: crashes, workers that can't be killed, memory that comes back late or never while anybody looks,
readings that are stale, late or blind, workers that outgrow their leases, messages about workers long gone. And
operators of all kinds, up to a shutdown in the middle of everything. At the end all faults pass, and the law of
liveness must hold: everybody who stays gets an answer, not by running out of patience, and the machine comes to rest.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from supervisor.core.admission.admission import POLICIES
from supervisor.core.admission.limits import Account, Counted, Rate, TenantLimits
from supervisor.core.demand import AnswerTimes
from supervisor.core.events import (
    HandoverEnded,
    HandoverRequested,
    LeaseEnded,
    LeaseLost,
    LeaseRenewed,
    LeasesSeen,
    LoadCancelled,
    LoadRequested,
    MemorySampled,
    PinRequested,
    RequestFinished,
    Respecified,
    ShutdownRequested,
    UnloadRequested,
    WorkerExited,
    WorkerReady,
    WorkerUnkillable,
    WorkerUnready,
)
from supervisor.core.types import (
    Crash,
    CrashClass,
    DeviceId,
    Eviction,
    Footprint,
    FootprintSource,
    Generation,
    Limits,
    ModelId,
    ModelSpec,
    Policy,
    RejectCode,
    TicketId,
    WorkerState,
)
from tests.support.counts import examples
from tests.support.simulation import GPU, Key, World, model

NAMES = ["asr", "tts", "small", "medium", "large", "guess", "spread"]
GPU1 = DeviceId("gpu1")
PATIENCE_S = 1e6
names = st.sampled_from(NAMES)
PHONE = Account("key phone", TenantLimits(requests=Rate(5, 10.0), concurrency=4))
ALICE = Account("tenant alice", TenantLimits(requests=Rate(3, 1.0), tokens=Rate(200, 60.0)))
partners = st.sampled_from(["job", "other job"])
RESTS = {WorkerState.STOPPED, WorkerState.READY, WorkerState.BACKOFF, WorkerState.FAILED}


def small(changed: int, mib: int = 4000, definition: str | None = None) -> ModelSpec:
    """One worker of it, always two, up to three, or two to three."""
    few, most = [(1, 1), (2, 2), (1, 3), (2, 3)][changed % 4]
    definition = definition or f"small {changed % 2}"
    shape = {"target_inflight": 1 + changed % 3, "shared_context": 100 if changed % 2 else 0}
    return model("small", mib, replicas=few, replica_max=most, definition=definition, **shape)


def models(changed: int) -> tuple[ModelSpec, ...]:
    guess = model("guess", 3000, "embedding", definition=f"guess {changed % 2}")
    return (
        model("asr", 4000, "asr"),
        model("tts", 2000, "tts", keep_alive_s=[20.0, 5.0, 0.0][changed % 3]),
        small(changed),
        model("medium", 9000, preload=True, devices=(GPU,) if changed % 4 else ()),
        model("large", 13000, hold_s=10.0 if changed % 2 else 0.0),
        replace(guess, footprint=Footprint(3000, FootprintSource.COMPUTED)),
    )


class Scheduling(RuleBasedStateMachine):
    machine: ClassVar[type[World]] = World

    @initialize(
        return_s=st.sampled_from([0.0, 0.1, 1.5, 6.0, 45.0]),
        at_exit=st.booleans(),
        two=st.booleans(),
        in_parts=st.booleans(),
        strict=st.booleans(),
        limit=st.sampled_from([{}, {"llm": 1}, {"llm": 2, "asr": 1}]),
        gradual=st.booleans(),
        blind=st.booleans(),
    )
    def build(
        self,
        return_s: float,
        at_exit: bool,
        two: bool,
        in_parts: bool,
        strict: bool,
        limit: dict[str, int],
        gradual: bool,
        blind: bool,
    ) -> None:
        totals = {GPU: 16384} | ({GPU1: 8192} if two else {})
        self.world = self.machine(
            totals=totals, returns_at_exit=at_exit, return_s=return_s, gradual=gradual, blind=blind and not at_exit
        )
        self.in_parts = in_parts
        self.policy = Policy(Eviction.STRICT if strict else Eviction.LAST_RESORT, limit)
        self.limits = Limits(queue_per_model=8, queue_total=20, queue_wait_s=PATIENCE_S)
        self.changed = 0
        self.readings: list[MemorySampled] = []
        self.shutting_down = False
        # Without these there is always a way to make room, so nobody is ever refused for want of memory. (Where nobody
        # can tell whose memory is missing, what is still not back after `memory_warn_s` is somebody else's.)
        self.may_refuse = strict or (self.world.blind and return_s > self.limits.memory_warn_s)
        self.configure()

    def configure(self, *without: str) -> None:
        shared = model("spread", 18000, spreads=True) if self.in_parts else model("spread", 10000, gpus=2)
        spread = [shared] if GPU1 in self.world.totals else []
        specs = [spec for spec in [*models(self.changed), *spread] if spec.id not in without]
        self.world.configure(*specs, limits=self.limits, policy=self.policy)

    def of(self, *states: WorkerState) -> list[Key]:
        """The living workers of models in these states."""
        return sorted(key for key in self.world.alive if self.world.state(key[0]) in states)

    # --------------------------------------------------------------------------------------------------------- traffic

    @rule(
        name=names,
        priority=st.integers(0, 2),
        accounts=st.sampled_from([(), (PHONE,), (PHONE, ALICE)]),
        keep_alive_s=st.sampled_from([None, 0.0, 30.0]),
        budget_s=st.sampled_from([None, None, 0.5, 8.0]),
        tokens=st.sampled_from([0, 20, 60, 200]),
    )
    def arrive(
        self,
        name: str,
        priority: int,
        accounts: tuple[Account, ...],
        keep_alive_s: float | None,
        budget_s: float | None,
        tokens: int,
    ) -> None:
        demand = {
            "keep_alive_s": keep_alive_s,
            "budget_s": budget_s,
            "answers": AnswerTimes(0.3, 1.0),
            "tokens": tokens,
        }
        self.world.request(name, priority, accounts, **demand)

    @rule(data=st.data(), tokens=st.sampled_from([0, 100]), served=st.booleans())
    def finish(self, data: st.DataObject, tokens: int, served: bool) -> None:
        if self.world.open:
            self.world.finish(data.draw(st.sampled_from(sorted(self.world.open))), tokens, served=served)

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 5.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule(data=st.data(), read=st.sampled_from([0, 1000, 10**6]))
    def read_slowly(self, data: st.DataObject, read: int) -> None:
        """Its client holds it up from now on, and reads now and then."""
        if self.world.dispatched:
            ticket = data.draw(st.sampled_from(sorted(self.world.dispatched)))
            self.world.read[ticket] = self.world.read.get(ticket, 0) + read

    @rule()
    def nobody_finishes(self) -> None:
        self.world.post(RequestFinished(TicketId("nobody")))

    # ---------------------------------------------------------------------------------------------------------- faults

    @rule(data=st.data(), kind=st.sampled_from(CrashClass))
    def crash(self, data: st.DataObject, kind: CrashClass) -> None:
        alive = sorted(set(self.world.alive) - self.world.immortal)  # also those that are being stopped
        if alive:
            self.world.crash(data.draw(st.sampled_from(alive))[0], Crash(kind, "crashed"))

    @rule(data=st.data())
    def can_not_be_killed(self, data: st.DataObject) -> None:
        if alive := sorted(set(self.world.alive) - self.world.immortal):
            self.world.not_to_be_killed(data.draw(st.sampled_from(alive)))

    @precondition(lambda self: self.world.immortal)
    @rule()
    def dies_at_last(self) -> None:
        self.world.dies_at_last(min(self.world.immortal))

    @rule(data=st.data())
    def lose_and_find(self, data: st.DataObject) -> None:
        if ready := self.of(WorkerState.READY):
            key = data.draw(st.sampled_from(ready))
            self.world.post(WorkerUnready(*key, "probe failed"))
            self.world.later(1.0, lambda: self.world.post(WorkerReady(*key)))

    @rule(name=names, back=st.integers(0, 3), which=st.integers(0, 3))
    def late_word(self, name: str, back: int, which: int) -> None:
        known = self.world.scheduler.state.models.get(ModelId(name))
        if known is None:
            return
        key = (known.id, Generation(known.generation - back))
        if key not in self.world.alive:
            crash = Crash(CrashClass.OUT_OF_MEMORY, "late")
            words = (
                WorkerReady(*key),
                WorkerUnready(*key, "late"),
                WorkerExited(*key, crash),
                WorkerUnkillable(*key, "late"),
            )
            self.world.post(words[which])

    # -------------------------------------------------------------------------------------------------------- partners

    @rule(
        name=partners,
        mib=st.sampled_from([3000, 9000, 15000]),
        pid=st.sampled_from([None, 1]),
        ttl_s=st.sampled_from([2.0, 60.0]),
        waits=st.booleans(),
    )
    def ask_for_lease(self, name: str, mib: int, pid: int | None, ttl_s: float, waits: bool) -> None:
        known = self.world.scheduler.state.models.get(ModelId(name))
        gone = self.world.others.get(ModelId(name))
        if known is None and (gone is None or gone.takes == 0):
            self.may_refuse = True
            self.world.lease(name, mib, ttl_s=ttl_s, pid=pid, waits=waits)

    @rule(name=partners)
    def renew_lease(self, name: str) -> None:
        self.world.post(LeaseRenewed(ModelId(name)))

    @rule(name=partners, part=st.sampled_from([0.0, 0.5, 1.0]))
    def take_of_lease(self, name: str, part: float) -> None:
        if (other := self.world.others.get(ModelId(name))) is not None:
            other.takes = int(other.may_take * part)

    @rule(mib=st.sampled_from([0, 5000, 14000]), trouble=st.sampled_from([None, None, "the store is away"]))
    def others_share(self, mib: int, trouble: str | None) -> None:
        self.may_refuse = True
        self.world.post(LeasesSeen({GPU: mib} if mib else {}, trouble))

    @rule(data=st.data())
    def lose_lease(self, data: st.DataObject) -> None:
        if ready := self.of(WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING):
            self.world.post(LeaseLost(*data.draw(st.sampled_from(ready)), "others may have it"))

    @rule(name=partners)
    def end_lease(self, name: str) -> None:
        """In good order: its process has ended."""
        if (other := self.world.others.get(ModelId(name))) is not None:
            other.takes = 0
        self.world.post(LeaseEnded(ModelId(name), "done"))

    # ---------------------------------------------------------------------------------------------------------- memory

    @rule(mib=st.sampled_from([0, 2000, 6000]))
    def outside(self, mib: int) -> None:
        used = sum(parts.get(GPU, 0) for parts in self.world.using.values())
        if (
            used + mib <= 16384 and not self.world.alive and not self.world.others
        ):  # outsiders do not take what a running load was promised
            self.may_refuse = True
            self.world.outside = {GPU: mib}
            self.world.sample()

    @rule(data=st.data(), mib=st.sampled_from([100, 1500]))
    def outgrow(self, data: st.DataObject, mib: int) -> None:
        """Seen at once, and only into memory that nobody was promised: what else happens then nobody could prevent."""
        if not (ready := self.of(WorkerState.READY)):
            return
        if self.world.blind and any(other.takes < other.may_take for other in self.world.others.values()):
            return  # it would look as if the partner took what it may
        key = data.draw(st.sampled_from(ready))
        parts = self.world.using[key]
        taken = {
            device: sum(
                max(held[device], self.world.leased.get(other, held)[device])
                for other, held in self.world.using.items()
                if device in held
            )
            + sum(max(o.may_take, o.takes) for o in self.world.others.values() if device in o.where)
            for device in parts
        }
        if all(taken[d] + mib + self.world.outside.get(d, 0) <= self.world.totals[d] for d in parts):
            self.may_refuse = True
            for device, leased_mib in self.world.leased[key].items():
                parts[device] = max(parts[device], leased_mib) + mib
            self.world.sample()

    @rule()
    def reading_begins(self) -> None:
        self.readings.append(self.world.reading())

    @precondition(lambda self: self.readings)
    @rule(data=st.data())
    def reading_arrives(self, data: st.DataObject) -> None:
        self.world.post(self.readings.pop(data.draw(st.integers(0, len(self.readings) - 1))))

    @rule(which=st.sampled_from([{GPU}, {GPU1}, set()]))
    def can_not_be_read(self, which: set[DeviceId]) -> None:
        self.world.stale = which
        self.world.sample()

    # ------------------------------------------------------------------------------------------------------- operators

    @rule(name=names)
    def load(self, name: str) -> None:
        self.world.post(LoadRequested(ModelId(name)))

    @rule(data=st.data())
    def cancel_load(self, data: st.DataObject) -> None:
        if models := sorted(self.world.scheduler.state.models):  # and replicas, and partners
            self.world.post(LoadCancelled(data.draw(st.sampled_from(models))))

    @rule(name=names, force=st.booleans())
    def unload(self, name: str, force: bool) -> None:
        self.world.post(UnloadRequested(ModelId(name), force))

    @rule(name=names, pin=st.booleans())
    def pin(self, name: str, pin: bool) -> None:
        self.may_refuse = self.may_refuse or pin
        self.world.post(PinRequested(ModelId(name), pin))

    @rule(mib=st.sampled_from([3000, 5000]), load=st.booleans())
    def respecify(self, mib: int, load: bool) -> None:
        self.world.post(Respecified(small(self.changed, mib, f"small with {mib}")))
        if load:
            self.world.post(LoadRequested(ModelId("small")))

    @rule(changed=st.integers(0, 11))
    def reload(self, changed: int) -> None:
        self.changed = changed
        self.configure()

    @rule(without=st.sets(names, max_size=3))
    def reload_with_fewer(self, without: set[str]) -> None:
        self.configure(*without)

    @rule(
        loads=st.integers(1, 3),
        drain_s=st.sampled_from([None, 0.0, 30.0, math.inf]),
        residency_s=st.sampled_from([0.0, 30.0]),
    )
    def other_limits(self, loads: int, drain_s: float | None, residency_s: float) -> None:
        self.limits = replace(self.limits, loads_per_device=loads, drain_s=drain_s, min_residency_s=residency_s)
        self.configure()

    @rule(limit=st.sampled_from([{}, {"llm": 1}, {"tts": 1, "llm": 2}]), admission=st.sampled_from([*POLICIES]))
    def other_policy(self, limit: dict[str, int], admission: str) -> None:
        self.policy = replace(self.policy, max_loaded=limit, admission=admission)
        self.configure()

    @rule(names=st.lists(names, max_size=3, unique=True), after_s=st.sampled_from([1.0, 30.0]))
    def other_default_models(self, names: list[str], after_s: float) -> None:
        self.policy = replace(self.policy, default_models=tuple(map(ModelId, names)))
        self.limits = replace(self.limits, default_after_s=after_s)
        self.configure()

    @precondition(lambda self: not self.shutting_down and self.world.now > 1100)
    @rule(seconds=st.sampled_from([0.0, 1.0, 20.0]))
    def has_no_successor_after_all(self, seconds: float) -> None:
        self.world.post(HandoverRequested())
        self.world.run(seconds)
        self.world.post(HandoverEnded())

    @rule(really=st.integers(0, 9))
    def shut_down(self, really: int) -> None:
        if really == 0:
            self.shutting_down = True
            self.world.post(ShutdownRequested())

    # --------------------------------------------------------------------------------------------------------- the end

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.stale = set()
        world.crash_on_start = lambda _name: None
        for key in list(world.immortal):
            world.dies_at_last(key)
        world.post(LeasesSeen())
        for name, other in world.others.items():
            other.takes = 0
            world.post(LeaseEnded(name, "done"))
        for name in ("job", "other job"):  # one that waits for ever
            world.post(LeaseEnded(ModelId(name), "done"))
        for _ in range(60):
            for ticket in list(world.dispatched):
                world.finish(ticket)
            world.run(10.0)
            if not world.open:
                break
        assert not world.open, "a request waits for ever"
        world.run(400.0)  # longer than it takes to write off memory that nobody can account for
        inner = world.scheduler.state
        assert {m.id: m.state for m in inner.models.values() if m.state not in RESTS} == {}
        assert not inner.wanted, "a model is wanted for ever"
        assert not world.scheduler.is_impatient()
        assert not any(m.removed for m in inner.models.values()), "a removed model is remembered for ever"
        if self.shutting_down:
            assert world.alive == {}
        refused = {reject.code for reject in world.rejected.values()}
        assert RejectCode.QUEUE_TIMEOUT not in refused
        assert self.may_refuse or RejectCode.INSUFFICIENT_MEMORY not in refused, "refused what there was a way to place"
        assert not any(s.counted is Counted.CONCURRENCY for s in inner.admission.accounts.used_limits(world.now))
        assert world.replays()


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=examples(60), stateful_step_count=40)
