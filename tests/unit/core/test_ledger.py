"""The ledger: its formula, memory that comes back late, and a simulated device that no lease may over-commit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from supervisor.core.events import DeviceSample
from supervisor.core.memory.ledger import Holder, Ledger, Phase
from supervisor.core.types import DeviceId, Devices, DeviceSpec, Generation, Limits, ModelId
from tests.support.counts import examples

GPU, HOST = DeviceId("gpu0"), DeviceId("host")
LIMITS = Limits(memory_warn_s=5.0, memory_quarantine_s=30.0)


def holder(name: str, generation: int = 1) -> Holder:
    return (ModelId(name), Generation(generation))


A, B, C = holder("a"), holder("b"), holder("c")


@pytest.fixture
def ledger() -> Ledger:
    """A GPU of 16000 MiB, margin 500, all of it free at the sample of 0 s."""
    ledger = Ledger()
    ledger.configure([DeviceSpec(GPU, 16000, 500)], LIMITS)
    sample(ledger, 16000, 0.0)
    return ledger


def released_by(ledger: Ledger, reading: DeviceSample, at: float) -> list[Holder]:
    """Let it take the reading; whose leases on the device it released."""
    before = [lease.holder for lease in ledger.leases() if lease.device == reading.id]
    ledger.sample(reading, at)
    left = {lease.holder for lease in ledger.leases() if lease.device == reading.id}
    return [holder for holder in before if holder not in left]


def sample(ledger: Ledger, free: int, at: float, *, outside: int | None = None, **used: int) -> list[Holder]:
    for name, mib in used.items():
        ledger.measure(holder(name), GPU, mib)
    released = released_by(ledger, DeviceSample(GPU, free, outside_mib=outside), at)
    ledger.check()
    return released


def held(ledger: Ledger, who: Holder, lease: int, used: int, *, free: int, at: float) -> None:
    """A worker that is ready and measured; `free` is what the device has left then."""
    ledger.begin(who, (GPU,), (lease,))
    ledger.settle(who, at)
    sample(ledger, free, at + 0.1, **{who[0]: used})


class TestFree:
    """free = min(measured free - what may still be taken, total - leases) - margin."""

    def test_an_empty_device_offers_all_but_the_margin(self, ledger):
        assert ledger.view(GPU).free_mib == 15500

    def test_a_starting_worker_counts_with_its_whole_lease(self, ledger):
        ledger.begin(A, (GPU,), (4000,))
        assert ledger.view(GPU).free_mib == 11500

        sample(ledger, 13000, 1.0, a=3000)  # it has taken 3000 and may take 1000 more
        assert ledger.view(GPU).free_mib == 11500

    def test_use_from_outside_is_seen(self, ledger):
        held(ledger, A, 4000, 4000, free=6000, at=1.0)  # others hold 6000

        assert ledger.view(GPU).free_mib == 5500

    def test_a_worker_that_takes_less_than_its_lease_keeps_it(self, ledger):
        held(ledger, A, 4000, 1000, free=15000, at=1.0)

        assert ledger.view(GPU).free_mib == 11500

    def test_a_worker_that_outgrew_its_lease_counts_with_what_it_took(self, ledger):
        held(ledger, A, 4000, 5000, free=11000, at=1.0)

        assert ledger.view(GPU).free_mib == 10500

    def test_growth_into_the_margin_makes_free_negative(self, ledger):
        held(ledger, A, 15000, 15800, free=200, at=1.0)

        assert ledger.view(GPU).free_mib == -300
        assert ledger.totals(GPU).available_mib == 0

    def test_ready_is_believed_only_when_a_later_sample_shows_it(self, ledger):
        """Between ready and the next sample, the last one still shows as free what the worker took."""
        sample(ledger, 10000, 1.0)  # 6000 used outside
        ledger.begin(A, (GPU,), (4000,))
        ledger.settle(A, 3.0)
        assert ledger.view(GPU).free_mib == 5500

        sample(ledger, 10000, 2.0)  # a reading that began before it was ready
        assert ledger.view(GPU).free_mib == 5500

        sample(ledger, 6000, 3.5, a=4000)
        assert ledger.view(GPU).free_mib == 5500

    def test_views_say_the_same_as_the_figures(self, ledger):
        ledger.begin(A, (GPU,), (4000,))

        view = ledger.view(GPU)
        assert (view.total_mib, view.usable_mib, view.free_mib, view.blocked) == (16000, 15500, 11500, None)


class TestBlocked:
    """Nothing new is placed on a device that can't be trusted."""

    def test_never_sampled(self):
        ledger = Ledger()
        ledger.configure([DeviceSpec(GPU, 16000, 500)], LIMITS)

        assert ledger.view(GPU).blocked == "its memory has not been read yet"
        with pytest.raises(AssertionError, match="not been read"):
            ledger.begin(A, (GPU,), (1,))
        assert not ledger.holds(A)

    def test_stale_until_it_is_read_again(self, ledger):
        ledger.sample(DeviceSample(GPU, 16000, stale=True), 1.0)
        assert ledger.view(GPU).blocked == "its memory can't be read"

        sample(ledger, 16000, 2.0)
        assert ledger.view(GPU).blocked is None

    def test_an_older_reading_does_not_replace_a_newer_one(self, ledger):
        sample(ledger, 9000, 5.0)
        ledger.sample(DeviceSample(GPU, 16000), 4.0)

        assert ledger.view(GPU).free_mib == 8500

    def test_beginning_without_the_memory_is_a_bug(self, ledger):
        ledger.begin(A, (GPU,), (9000,))
        with pytest.raises(AssertionError, match="7000 MiB on gpu0, 6500 free"):
            ledger.begin(B, (GPU,), (7000,))
        ledger.check()

    def test_one_lease_a_holder(self, ledger):
        ledger.begin(A, (GPU,), (10,))
        with pytest.raises(AssertionError):
            ledger.begin(A, (GPU,), (10,))

    def test_a_device_no_longer_configured_goes_with_its_last_lease(self, ledger):
        held(ledger, A, 10, 10, free=15990, at=1.0)
        ledger.configure([], LIMITS)
        assert ledger.view(GPU).blocked == "no longer configured"
        assert ledger.device_ids() == ()

        ledger.returning(A, 2.0)
        ledger.check()
        with pytest.raises(KeyError):
            ledger.view(GPU)


class TestReturning:
    """A lease outlives its process until a sample taken after the exit shows the memory back."""

    def test_a_sample_from_before_the_exit_proves_nothing(self, ledger):
        held(ledger, A, 4000, 4000, free=12000, at=1.0)
        ledger.returning(A, 5.0)

        assert sample(ledger, 16000, 4.9) == []
        assert ledger.view(GPU).free_mib == 11500
        assert sample(ledger, 16000, 5.1) == [A]
        assert ledger.view(GPU).free_mib == 15500

    @pytest.mark.parametrize(("missing", "back"), [(401, False), (400, True), (0, True)])
    def test_a_tenth_may_be_missing(self, ledger, missing, back):
        held(ledger, A, 4000, 4000, free=12000, at=1.0)
        ledger.returning(A, 5.0)

        assert sample(ledger, 16000 - missing, 6.0) == ([A] if back else [])

    def test_or_64_mib_of_a_small_one(self, ledger):
        held(ledger, A, 100, 100, free=15900, at=1.0)
        ledger.returning(A, 5.0)

        assert sample(ledger, 15935, 6.0) == []
        assert sample(ledger, 15936, 7.0) == [A]

    def test_what_others_take_meanwhile_is_allowed_for(self, ledger):
        held(ledger, A, 4000, 4000, free=12000, at=1.0)
        ledger.begin(B, (GPU,), (8000,))
        ledger.returning(A, 5.0)

        assert sample(ledger, 9000, 6.0, b=3000) == []  # B took 3000, nothing came back
        assert sample(ledger, 13000, 7.0, b=3000) == [A]

    def test_what_others_give_back_is_not_mistaken_for_it(self, ledger):
        held(ledger, A, 4000, 4000, free=12000, at=1.0)
        held(ledger, B, 4000, 4000, free=8000, at=2.0)
        ledger.returning(A, 5.0)

        assert sample(ledger, 12000, 6.0, b=0) == []
        assert sample(ledger, 16000, 7.0, b=0) == [A]

    def test_of_two_that_ended_one_is_credited_once(self, ledger):
        held(ledger, A, 4000, 4000, free=12000, at=1.0)
        held(ledger, B, 4000, 4000, free=8000, at=2.0)
        ledger.returning(A, 5.0)
        ledger.returning(B, 5.0)

        assert sample(ledger, 12000, 6.0) == [A]
        assert sample(ledger, 12000, 7.0) == []
        assert sample(ledger, 16000, 8.0) == [B]

    def test_what_was_back_in_part_is_not_waited_for_again(self, ledger):
        """B's last reading shows only a part of A's memory as used: no more than that is still to come from A."""
        held(ledger, A, 4000, 4000, free=12000, at=1.0)
        ledger.returning(A, 2.0)
        held(ledger, B, 4000, 4000, free=9600, at=3.0)  # 2400 of A are missing
        ledger.returning(B, 4.0)

        assert sample(ledger, 12000, 5.0) == [A]
        assert sample(ledger, 15500, 6.0) == []
        assert sample(ledger, 15600, 7.0) == [B]

    def test_so_of_two_together(self, ledger):
        """Nobody knows which of A and B gave how much back, only what both still held."""
        held(ledger, A, 4000, 4000, free=12000, at=1.0)
        held(ledger, B, 4000, 4000, free=8000, at=2.0)
        ledger.returning(A, 3.0)
        ledger.returning(B, 3.0)
        held(ledger, C, 4000, 4000, free=6000, at=4.0)  # 6000 of A and B are missing
        ledger.returning(C, 5.0)

        assert sample(ledger, 12000, 6.0) == [A, B]
        assert sample(ledger, 15500, 7.0) == []
        assert sample(ledger, 15600, 8.0) == [C]

    def test_memory_taken_by_others_at_once_is_explained_by_their_use(self, ledger):
        """Another program takes what came back before any sample shows it free."""
        held(ledger, A, 4000, 4000, free=12000, at=1.0)
        ledger.returning(A, 5.0)

        assert sample(ledger, 12000, 6.0, outside=2000) == []
        assert sample(ledger, 12000, 7.0, outside=4000) == [A]

    def test_a_start_that_ended_before_it_was_measured_is_not_waited_for(self, ledger):
        ledger.begin(A, (GPU,), (4000,))
        ledger.returning(A, 1.0)
        assert ledger.view(GPU).free_mib == 11500

        assert sample(ledger, 16000, 2.0) == [A]

    def test_it_is_judged_by_the_measurement_of_the_last_readable_sample(self, ledger):
        """It grew while the device could not be read: the free memory we compare with is older than that."""
        held(ledger, A, 9000, 4000, free=12000, at=1.0)
        ledger.measure(A, GPU, 8000)
        ledger.sample(DeviceSample(GPU, 0, stale=True), 2.0)
        ledger.returning(A, 3.0)

        assert sample(ledger, 16000, 4.0) == [A]

    def test_memory_that_is_back_before_we_hear_of_the_exit(self, ledger):
        """A blind driver's figure of the worker is old by then: the device is compared with what it showed before."""
        held(ledger, A, 4000, 4000, free=12000, at=1.0)
        ledger.stopping(A)
        for at in (5.0, 6.0, 7.0):
            assert sample(ledger, 16000, at) == []
        ledger.returning(A, 8.0)

        assert sample(ledger, 12000, 9.0) == []
        assert sample(ledger, 16000, 10.0) == [A]

    def test_so_of_a_crash(self, ledger):
        held(ledger, A, 4000, 4000, free=12000, at=1.0)
        assert sample(ledger, 16000, 5.0) == []
        ledger.returning(A, 5.1)

        assert sample(ledger, 16000, 6.0) == [A]

    def test_what_came_back_before_is_not_waited_for_again(self, ledger):
        """The reading that showed an earlier worker's memory back is what a later, short life is compared with."""
        held(ledger, A, 4000, 4000, free=12000, at=1.0)
        ledger.returning(A, 2.0)
        assert sample(ledger, 16000, 3.0) == [A]
        ledger.begin(B, (GPU,), (4000,))
        ledger.returning(B, 4.0)

        assert sample(ledger, 16000, 5.0) == [B]

    def test_what_is_measured_after_the_exit_is_not_what_it_held(self, ledger):
        held(ledger, A, 4000, 5000, free=11000, at=1.0)
        ledger.returning(A, 3.0)
        ledger.measure(A, GPU, 0)

        assert [lease.reserved_mib for lease in ledger.leases()] == [5000]

    def test_host_memory_is_back_at_the_exit(self):
        ledger = Ledger()
        ledger.configure([DeviceSpec(HOST, 8000, 0, returns_at_exit=True)], LIMITS)
        ledger.sample(DeviceSample(HOST, 9000), 0.0)
        ledger.begin(A, (HOST,), (3000,))
        ledger.returning(A, 1.0)
        assert released_by(ledger, DeviceSample(HOST, 6000), 0.9) == []  # a reading that began before the exit

        assert released_by(ledger, DeviceSample(HOST, 6000), 1.1) == [A]  # others use it now
        assert ledger.view(HOST).free_mib == 6000


class TestLate:
    """Late memory is warned of once, then blocks the device until it is back."""

    def test_warning_then_quarantine_then_lifted(self, ledger):
        held(ledger, A, 4000, 4000, free=12000, at=1.0)
        ledger.returning(A, 10.0)
        assert ledger.is_waiting()
        assert ledger.deadline(10.0) == 15.0
        assert ledger.overdue(14.9) == []

        assert [(alert.code, alert.model) for alert in ledger.overdue(15.0)] == [("memory.late", "a")]
        assert ledger.overdue(16.0) == []
        assert ledger.deadline(16.0) == 40.0

        (alert,) = ledger.overdue(40.0)
        assert alert.code == "device.quarantined"
        assert alert.message == (
            "a's worker ended 30 s ago and gpu0 does not show its 4000 MiB back; it takes no new models until it does"
        )
        assert ledger.view(GPU).blocked is not None
        assert ledger.totals(GPU).quarantined
        assert ledger.deadline(41.0) == math.inf

        assert sample(ledger, 16000, 50.0) == [A]
        assert [alert.code for alert in ledger.overdue(50.0)] == ["device.lifted"]
        assert ledger.view(GPU).blocked is None
        assert not ledger.is_waiting()

    def test_an_unkillable_worker_blocks_its_device_until_it_is_gone(self, ledger):
        held(ledger, A, 4000, 4000, free=12000, at=1.0)
        ledger.quarantine(A, "survived SIGKILL")
        assert ledger.view(GPU).blocked == "quarantined: a's worker survived SIGKILL"

        ledger.returning(A, 5.0)
        assert ledger.view(GPU).blocked is not None
        sample(ledger, 16000, 6.0)
        assert ledger.view(GPU).blocked is None

    def test_two_causes_must_both_end(self, ledger):
        held(ledger, A, 4000, 4000, free=12000, at=1.0)
        held(ledger, B, 4000, 4000, free=8000, at=2.0)
        ledger.quarantine(A, "is stuck")
        ledger.quarantine(B, "is stuck")

        ledger.returning(A, 3.0)
        assert sample(ledger, 12000, 4.0, b=4000) == [A]
        assert ledger.view(GPU).blocked == "quarantined: b's worker is stuck"
        assert ledger.overdue(5.0) == []


# ------------------------------------------------------------------------------------------- against a simulated device


@dataclass
class Truth:
    """What really happens on a device, some of which the ledger has not been told yet."""

    spec: DeviceSpec
    outside: int = 0
    knows_outside: bool = True
    used: dict[Holder, int] = field(default_factory=dict)  # living workers
    ghosts: dict[Holder, int] = field(default_factory=dict)  # gone, memory still on its way back

    def free(self) -> int:
        return self.spec.total_mib - self.outside - sum(self.used.values()) - sum(self.ghosts.values())


@dataclass
class Reading:
    at: float
    devices: list[DeviceSample]
    workers: dict[tuple[Holder, DeviceId], int]


KNOWING, BLIND = DeviceId("gpu-knowing"), DeviceId("gpu-blind")
SPECS = [
    DeviceSpec(KNOWING, 16000, 500),
    DeviceSpec(BLIND, 8000, 300),
    DeviceSpec(HOST, 4000, 0, returns_at_exit=True),
]
PLACES = st.sampled_from([(KNOWING,), (BLIND,), (HOST,), (KNOWING, BLIND)])
SIZES = st.sampled_from([200, 1000, 2500, 4000, 9000])
PARTS = st.sampled_from([0.0, 0.3, 1.0])


class LedgerMachine(RuleBasedStateMachine):
    """Workers that load, grow within their lease, and die; memory that comes back in its own time; readings that
    arrive late. Whatever the order: a worker that was allowed to start finds its memory."""

    @initialize()
    def boot(self) -> None:
        self.now = 0.0
        self.serial = 0
        self.ledger = Ledger()
        self.ledger.configure(SPECS, LIMITS)
        self.truth = {spec.id: Truth(spec, knows_outside=spec.id != BLIND) for spec in SPECS}
        self.truth[KNOWING].outside, self.truth[BLIND].outside = 5000, 2500
        self.pending: list[Reading] = []
        self.alerted: set[tuple[str, str, str]] = set()
        self.deliver_all()

    # -------------------------------------------------------------------------------------------------- what is known

    def leases(self, *phases: Phase):
        return [lease for lease in self.ledger.leases() if lease.phase in phases]

    def fresh(self) -> Holder:
        self.serial += 1
        return holder(f"m{self.serial}")

    def tick(self) -> None:
        self.now += 0.5

    def read(self) -> None:
        self.tick()
        workers = {(who, at): mib for at, truth in self.truth.items() for who, mib in truth.used.items()}
        samples = [
            DeviceSample(name, truth.free(), outside_mib=truth.outside if truth.knows_outside else None)
            for name, truth in self.truth.items()
        ]
        self.pending.append(Reading(self.now, samples, workers))

    def deliver_all(self) -> None:
        self.read()
        while self.pending:
            self.deliver()

    # ----------------------------------------------------------------------------------------------------------- rules

    @rule(devices=PLACES, mib=SIZES)
    def begin_at_once(self, devices, mib):
        self.begin(self.fresh(), devices, mib)

    def begin(self, who: Holder, devices: Devices, mib: int) -> None:
        views = [self.ledger.view(device) for device in devices]
        if any(view.blocked is not None or view.free_mib < mib for view in views):
            with pytest.raises(AssertionError):
                self.ledger.begin(who, devices, (mib,) * len(devices))
            return
        self.ledger.begin(who, devices, (mib,) * len(devices))
        for device in devices:
            self.begun(who, device)

    def begun(self, who: Holder, device: DeviceId) -> None:
        truth = self.truth[device]
        truth.used[who] = 0
        starting = [lease for lease in self.leases(Phase.STARTING) if lease.device == device]
        still_taking = sum(lease.mib - truth.used[lease.holder] for lease in starting)
        assert truth.free() - still_taking >= truth.spec.margin_mib, "a worker may not find its memory"
        leased = sum(lease.reserved_mib for lease in self.ledger.leases() if lease.device == device)
        assert leased <= truth.spec.total_mib - truth.spec.margin_mib, "more is leased than there is"

    @rule(devices=PLACES, mib=SIZES, end=st.sampled_from(["ready", "crash"]))
    def whole_start_between_two_readings(self, devices, mib, end):
        who = self.fresh()
        self.begin(who, devices, mib)
        if not self.ledger.holds(who):
            return
        for device in devices:
            self.truth[device].used[who] = mib
        self.tick()
        if end == "ready":
            self.ledger.settle(who, self.now)
        else:
            self.ends(who)

    @precondition(lambda self: self.leases(Phase.STARTING))
    @rule(data=st.data(), part=PARTS)
    def load(self, data, part):
        lease = data.draw(st.sampled_from(self.leases(Phase.STARTING)))
        used = self.truth[lease.device].used
        used[lease.holder] = max(used[lease.holder], int(lease.mib * part))

    @precondition(lambda self: self.leases(Phase.STARTING))
    @rule(data=st.data())
    def settle(self, data):
        self.tick()
        self.ledger.settle(data.draw(st.sampled_from(self.leases(Phase.STARTING))).holder, self.now)

    @precondition(lambda self: self.leases(Phase.IN_USE))
    @rule(data=st.data(), part=PARTS)
    def use_changes_and_is_seen(self, data, part):
        lease = data.draw(st.sampled_from(self.leases(Phase.IN_USE)))
        self.truth[lease.device].used[lease.holder] = int(lease.mib * part)
        self.pending.clear()
        self.deliver_all()

    @precondition(lambda self: self.leases(Phase.STARTING, Phase.IN_USE))
    @rule(data=st.data())
    def exits(self, data):
        self.tick()
        self.ends(data.draw(st.sampled_from(self.leases(Phase.STARTING, Phase.IN_USE))).holder)

    def ends(self, who: Holder) -> None:
        for lease in self.ledger.leases_of(who):
            truth = self.truth[lease.device]
            ghost = truth.used.pop(who)
            if not truth.spec.returns_at_exit:
                truth.ghosts[who] = ghost
        self.ledger.returning(who, self.now)

    @precondition(lambda self: any(truth.ghosts for truth in self.truth.values()))
    @rule(data=st.data(), left=st.sampled_from([0.0, 0.0, 0.6]))
    def memory_comes_back(self, data, left):
        truth = data.draw(st.sampled_from([truth for truth in self.truth.values() if truth.ghosts]))
        who = data.draw(st.sampled_from(list(truth.ghosts)))
        truth.ghosts[who] = int(truth.ghosts[who] * left)
        if truth.ghosts[who] == 0:
            del truth.ghosts[who]

    @rule(mib=st.sampled_from([0, 3000, 7000]))
    def outside_changes_and_is_seen(self, mib):
        """Only where it takes nothing that was promised to a starting worker: that nobody could prevent."""
        if self.ledger.view(KNOWING).free_mib > mib - self.truth[KNOWING].outside and self.truth[KNOWING].free() > mib:
            self.truth[KNOWING].outside = mib
            self.pending.clear()
            self.deliver_all()

    @rule()
    def reading_begins(self):
        self.read()

    @precondition(lambda self: self.pending)
    @rule()
    def deliver(self):
        reading = self.pending.pop(0)
        for (who, at), mib in reading.workers.items():
            self.ledger.measure(who, at, mib)
        for device in reading.devices:
            for who in released_by(self.ledger, device, reading.at):
                assert device.id not in [lease.device for lease in self.ledger.leases_of(who)]

    @rule(device=st.sampled_from([KNOWING, BLIND, HOST]))
    def device_cannot_be_read(self, device):
        self.tick()
        self.pending.clear()
        self.ledger.sample(DeviceSample(device, 0, stale=True), self.now)
        assert self.ledger.view(device).blocked is not None

    @rule(seconds=st.sampled_from([1.0, 6.0, 31.0]))
    def time_passes(self, seconds):
        self.now += seconds
        is_due = self.ledger.deadline(self.now) <= self.now
        alerts = self.ledger.overdue(self.now)
        assert is_due == bool(alerts)
        assert self.ledger.overdue(self.now) == []
        for alert in alerts:
            if alert.code == "memory.late":
                assert (alert.code, alert.model, alert.device) not in self.alerted
                self.alerted.add((alert.code, alert.model, alert.device))

    @rule()
    def all_memory_is_back_and_seen(self):
        """Whatever happened before: nothing stays leased, or blocked, for a worker that is gone."""
        for truth in self.truth.values():
            truth.ghosts.clear()
        self.deliver_all()
        assert self.leases(Phase.RETURNING) == []
        assert [self.ledger.view(device).blocked for device in self.truth] == [None, None, None]

    @invariant()
    def laws_hold(self):
        if hasattr(self, "ledger"):
            self.ledger.check()
            alive = {lease.holder for lease in self.leases(Phase.STARTING, Phase.IN_USE)}
            assert {who for truth in self.truth.values() for who in truth.used} == alive


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=examples(200), stateful_step_count=50)
