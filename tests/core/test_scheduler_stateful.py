"""Random traffic, faults and operators against the scheduler; the simulated machine checks the laws after every event."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from supervisor.core.types import (
    Crash,
    CrashClass,
    DeviceId,
    Eviction,
    Limits,
    LoadAsked,
    ModelId,
    PinAsked,
    Policy,
    Respecified,
    UnloadAsked,
    WorkerReady,
    WorkerUnready,
)
from tests.core.simulation import GPU, World, model

NAMES = ["asr", "tts", "small", "medium", "large"]
names = st.sampled_from(NAMES)


def models(changed: int) -> tuple:
    return (
        model("asr", 4000, "asr"),
        model("tts", 2000, "tts", keep_alive_s=20.0),
        model("small", 4000, target_inflight=2, definition=f"small {changed}"),
        model("medium", 9000, preload=True),
        model("large", 13000),
    )


class Scheduling(RuleBasedStateMachine):
    @initialize(
        return_s=st.sampled_from([0.0, 0.1, 1.5, 6.0]),
        at_exit=st.booleans(),
        two=st.booleans(),
        strict=st.booleans(),
        limit=st.booleans(),
    )
    def build(self, return_s: float, at_exit: bool, two: bool, strict: bool, limit: bool) -> None:
        totals = {GPU: 16384} | ({DeviceId("gpu1"): 8192} if two else {})
        self.world = World(totals=totals, returns_at_exit=at_exit, return_s=return_s)
        self.policy = Policy(Eviction.STRICT if strict else Eviction.LAST_RESORT, {"llm": 1} if limit else {})
        self.limits = Limits(queue_per_model=8, queue_total=20, queue_wait_s=300.0)
        self.changed = 0
        self.world.configure(*models(0), limits=self.limits, policy=self.policy)

    @rule(name=names, priority=st.integers(0, 2))
    def arrive(self, name: str, priority: int) -> None:
        self.world.request(name, priority)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.world.open:
            self.world.finish(data.draw(st.sampled_from(sorted(self.world.open))))

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 5.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule(data=st.data(), kind=st.sampled_from([CrashClass.UNKNOWN, CrashClass.OUT_OF_MEMORY, CrashClass.BAD_ARGUMENTS]))
    def crash(self, data: st.DataObject, kind: CrashClass) -> None:
        running = sorted(name for name, generation in self.world.alive if (name, generation) not in self.world.stopping)
        if running:
            self.world.crash(data.draw(st.sampled_from(running)), Crash(kind, "crashed"))

    @rule(name=names)
    def load(self, name: str) -> None:
        self.world.post(LoadAsked(ModelId(name)))

    @rule(name=names, force=st.booleans())
    def unload(self, name: str, force: bool) -> None:
        self.world.post(UnloadAsked(ModelId(name), force))

    @rule(name=names, pin=st.booleans())
    def pin(self, name: str, pin: bool) -> None:
        self.world.post(PinAsked(ModelId(name), pin))

    @rule(mib=st.sampled_from([3000, 5000]), load=st.booleans())
    def respecify(self, mib: int, load: bool) -> None:
        self.world.post(Respecified(model("small", mib, definition=f"small with {mib}")))
        if load:
            self.world.post(LoadAsked(ModelId("small")))

    @rule(mib=st.sampled_from([0, 2000, 6000]))
    def outside(self, mib: int) -> None:
        used = sum(held for device, held in self.world.using.values() if device == GPU)
        if used + mib <= 16384 and not self.world.alive:  # outsiders do not take what a running load was promised
            self.world.outside = {GPU: mib}
            self.world.sample()

    @rule(data=st.data())
    def lose_and_find(self, data: st.DataObject) -> None:
        ready = [key for key in self.world.alive if self.world.state(key[0]) == "ready"]
        if ready:
            key = data.draw(st.sampled_from(ready))
            self.world.post(WorkerUnready(*key, "probe failed"))
            self.world.later(1.0, lambda: self.world.post(WorkerReady(*key)))

    @rule()
    def reload(self) -> None:
        self.changed += 1
        self.world.configure(*models(self.changed % 2), limits=self.limits, policy=self.policy)

    def teardown(self) -> None:
        """Whatever happened, everybody who stays gets an answer, and it all replays."""
        if not hasattr(self, "world"):
            return
        for _ in range(60):
            for ticket in list(self.world.dispatched):
                self.world.finish(ticket)
            self.world.run(10.0)
            if not self.world.open:
                break
        assert not self.world.open, "a request waits for ever"
        assert self.world.journal.replay() is None


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
