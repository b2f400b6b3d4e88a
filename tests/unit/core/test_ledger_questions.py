"""What others ask the ledger: whether figures are complete, what is due, who holds what; also of devices it doesn't know."""

from __future__ import annotations

import math

import pytest

from supervisor.core.events import DeviceSample
from supervisor.core.memory.ledger import Ledger, Phase
from supervisor.core.types import DeviceId, DeviceSpec, Generation, Limits, ModelId

GPU, OTHER = DeviceId("gpu0"), DeviceId("gpu1")
A, B = (ModelId("a"), Generation(1)), (ModelId("b"), Generation(1))
LIMITS = Limits(memory_warn_s=5.0, memory_quarantine_s=30.0)


def made(*, at_exit=False, devices=(GPU,)):
    ledger = Ledger()
    ledger.configure([DeviceSpec(device, 16000, 500, returns_at_exit=at_exit) for device in devices], LIMITS)
    for device in devices:
        ledger.sample(DeviceSample(device, 16000), 0.0)
    return ledger


def read(ledger, free, at, **keys):
    ledger.sample(DeviceSample(GPU, free, **keys), at)
    ledger.check()


def held(ledger, holder=A, *, mib=4000, at=1.0, devices=(GPU,)):
    """A worker that is ready and measured."""
    ledger.begin(holder, devices, (mib,) * len(devices))
    ledger.settle(holder, at)
    for device in devices:
        ledger.measure(holder, device, mib)
        ledger.sample(DeviceSample(device, ledger.totals(device).free_mib - mib), at + 0.5)
    ledger.check()


class TestInMotion:
    """A load or an end that the figures may not show in full."""

    def test_nothing_happened(self):
        assert made().model_in_transition(GPU, 100.0) is None

    def test_a_start(self):
        ledger = made()
        ledger.begin(A, (GPU,), (4000,))
        assert ledger.model_in_transition(GPU, 100.0) == "a"

    def test_ready_until_a_later_reading(self):
        ledger = made()
        ledger.begin(A, (GPU,), (4000,))
        ledger.settle(A, 1.0)
        read(ledger, 12000, 1.0)
        assert ledger.model_in_transition(GPU, 2.0) == "a"
        read(ledger, 12000, 1.1)
        assert ledger.model_in_transition(GPU, 2.0) is None

    def test_an_end_until_its_memory_is_back_and_a_little_longer(self):
        ledger = made()
        held(ledger)
        ledger.returning(A, 10.0)
        assert ledger.model_in_transition(GPU, 10.1) == "a"
        read(ledger, 16000, 10.2)
        assert ledger.leases() == ()
        assert ledger.model_in_transition(GPU, 14.9) == "a"
        assert ledger.model_in_transition(GPU, 15.0) is None

    def test_host_memory_is_back_at_once(self):
        ledger = made(at_exit=True)
        held(ledger)
        ledger.returning(A, 10.0)
        read(ledger, 16000, 10.2)
        assert ledger.model_in_transition(GPU, 10.3) is None


class TestDue:
    """When there will be something to tell."""

    def test_nothing(self):
        assert made().deadline(5.0) == math.inf
        assert made().overdue(1e9) == []

    def test_late_memory(self):
        ledger = made()
        held(ledger)
        ledger.returning(A, 10.0)
        assert ledger.deadline(11.0) == 15.0
        assert ledger.overdue(14.9) == []
        assert [alert.code for alert in ledger.overdue(15.0)] == ["memory.late"]
        assert ledger.deadline(16.0) == 40.0
        assert ledger.overdue(39.9) == []
        assert [alert.code for alert in ledger.overdue(40.0)] == ["device.quarantined"]
        assert ledger.deadline(41.0) == math.inf
        read(ledger, 16000, 42.0)
        assert ledger.deadline(43.0) == 43.0
        assert [(alert.code, alert.device, alert.model) for alert in ledger.overdue(43.0)] == [
            ("device.lifted", GPU, "a")
        ]
        assert ledger.deadline(44.0) == math.inf

    def test_a_device_that_can_not_be_read(self):
        ledger = made()
        read(ledger, 0, 1.0, stale=True)
        assert ledger.overdue(2.0) == []
        assert ledger.deadline(3.0) == 32.0
        assert ledger.view(GPU).outage is None
        assert ledger.overdue(31.9) == []
        (alert,) = ledger.overdue(32.0)
        assert (alert.code, alert.device) == ("device.lost", GPU)
        assert ledger.view(GPU).outage == "device_lost"
        assert ledger.deadline(33.0) == math.inf
        assert ledger.overdue(100.0) == []
        read(ledger, 16000, 101.0)
        assert [alert.code for alert in ledger.overdue(102.0)] == ["device.lifted"]
        assert ledger.view(GPU).outage is None
        assert ledger.view(GPU).blocked is None

    def test_a_device_that_is_lost_is_told_once(self):
        ledger = made()
        for at in (1.0, 2.0, 3.0):
            read(ledger, 0, at, stale=True, lost="GPU is lost")
        assert [alert.code for alert in ledger.overdue(4.0)] == ["device.lost"]
        assert ledger.view(GPU).blocked == "lost: GPU is lost"


class TestFigures:
    """They are anew after each change, also of what was looked at before."""

    def test_a_quarantine(self):
        ledger = made()
        held(ledger)
        assert ledger.view(GPU).blocked is None
        ledger.quarantine(A, "is stuck")
        ledger.check()
        assert ledger.view(GPU).blocked == "quarantined: a's worker is stuck"
        assert ledger.blocked(GPU, A[0]) == "quarantined: its own worker is stuck"
        assert ledger.view(GPU).outage == "device_quarantined"
        assert ledger.quarantined_by(A) == "is stuck"
        assert ledger.quarantined_by(B) is None
        assert ledger.totals(GPU).available_mib == 0

    def test_other_limits_of_a_device(self):
        ledger = made()
        assert ledger.view(GPU).free_mib == 15500
        ledger.configure([DeviceSpec(GPU, 16000, 1500)], LIMITS)
        ledger.check()
        assert ledger.view(GPU).free_mib == 14500

    def test_totals(self):
        ledger = made()
        held(ledger, A, mib=4000)
        ledger.begin(B, (GPU,), (3000,))
        read(ledger, 12000, 5.0, outside_mib=7)
        totals = ledger.totals(GPU)
        assert (totals.reserved_mib, totals.starting_mib, totals.returning_mib) == (4000, 3000, 0)
        assert (totals.available_mib, totals.outside_mib) == (8500, 7)
        assert not totals.quarantined
        ledger.returning(A, 6.0)
        assert (ledger.totals(GPU).reserved_mib, ledger.totals(GPU).returning_mib) == (0, 4000)

    def test_how_many_start(self):
        ledger = made()
        held(ledger, A)
        assert ledger.starting(GPU) == 0
        ledger.begin(B, (GPU,), (3000,))
        assert ledger.starting(GPU) == 1

    def test_is_waiting_only_for_memory_on_its_way_back(self):
        ledger = made()
        held(ledger)
        assert not ledger.is_waiting()
        ledger.returning(A, 10.0)
        assert ledger.is_waiting()


class TestWho:
    """Which device, and which worker, is meant."""

    def test_a_reading_of_an_unknown_device(self):
        ledger = made()
        ledger.sample(DeviceSample(OTHER, 1), 1.0)
        assert ledger.device_ids() == (GPU,)

    def test_a_measurement_of_nobody(self):
        ledger = made()
        ledger.measure(A, GPU, 5)
        ledger.measure(A, OTHER, 5)
        assert ledger.leases() == ()

    def test_what_is_measured_while_memory_returns_is_ignored(self):
        ledger = made()
        held(ledger)
        ledger.returning(A, 10.0)
        ledger.measure(A, GPU, 9999)
        assert ledger.leases()[0].measured_mib == 4000

    def test_two_devices_return_each_at_its_time(self):
        ledger = made(devices=(OTHER, GPU))
        assert ledger.device_ids() == (GPU, OTHER)
        held(ledger, devices=(GPU, OTHER))
        ledger.stopping(A)
        ledger.returning(A, 10.0)
        read(ledger, 16000, 11.0)
        assert [(lease.device, lease.phase) for lease in ledger.leases_of(A)] == [(OTHER, Phase.RETURNING)]
        assert ledger.leases_on(GPU) == ()
        assert ledger.holds(A)
        assert ledger.holds_any(ModelId("a"))
        ledger.sample(DeviceSample(OTHER, 16000), 11.0)
        assert not ledger.holds(A)
        assert not ledger.holds_any(ModelId("a"))

    def test_a_reading_that_began_at_the_exit_proves_nothing(self):
        ledger = made()
        held(ledger)
        ledger.returning(A, 10.0)
        read(ledger, 16000, 10.0)
        assert ledger.holds(A)
        read(ledger, 16000, 10.1)
        assert not ledger.holds(A)

    def test_a_stop_is_judged_by_the_last_reading_before_it(self):
        """Later ones may show some of its memory as back already."""
        ledger = made()
        held(ledger)  # 12000 free
        read(ledger, 13000, 3.0)  # others gave 1000 back
        ledger.stopping(A)
        ledger.measure(A, GPU, 100)
        read(ledger, 16900, 4.0)
        ledger.stopping(A)  # told again
        ledger.returning(A, 5.0)
        read(ledger, 16000, 6.0)
        assert ledger.holds(A), "17000 must be free"
        read(ledger, 16900, 7.0)
        assert not ledger.holds(A)

    def test_memory_nobody_accounts_for_is_written_off_at_last(self):
        ledger = made()
        held(ledger)
        ledger.returning(A, 10.0)
        read(ledger, 12000, 10.0 + 299)
        assert ledger.holds(A)
        read(ledger, 12000, 10.0 + 300)
        assert not ledger.holds(A)

    @pytest.mark.parametrize("is_leased", [True, False])
    def test_a_device_that_is_taken_out_of_the_configuration(self, is_leased):
        ledger = made(devices=(GPU, OTHER))
        if is_leased:
            held(ledger)
        ledger.configure([DeviceSpec(OTHER, 16000, 500)], LIMITS)
        ledger.check()
        assert ledger.device_ids() == (OTHER,)
        assert ledger.holds(A) is is_leased
        if is_leased:
            assert ledger.view(GPU).blocked == "no longer configured"
            ledger.returning(A, 5.0)
            ledger.check()
            assert not ledger.holds(A)

    def test_one_with_several_goes_with_the_last(self):
        ledger = made(devices=(GPU, OTHER))
        held(ledger, A)
        held(ledger, B, at=2.0)
        ledger.configure([DeviceSpec(OTHER, 16000, 500)], LIMITS)
        ledger.returning(A, 5.0)
        ledger.check()
        assert [lease.holder for lease in ledger.leases_on(GPU)] == [B]
        ledger.returning(B, 6.0)
        ledger.check()
        assert ledger.leases() == ()
