"""Our leases in a store that others use, too. Engine and store are puppets; the real ones meet in tests/e2e/daemon."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from runtimes.device_kind import CUDA
from supervisor.core.effects import StartWorker
from supervisor.core.events import LeaseLost, LeasesSeen
from supervisor.core.memory.device_ledger import Lease, Phase
from supervisor.core.types import CrashClass, DeviceId, Generation, ModelId
from supervisor.engine.shared_leases import SharedLeases
from supervisor.host.memory.memory import DeviceInfo
from supervisor.host.store.lease_store import Refusal, StoreUnreachableError

GPU, CARD = DeviceId("gpu0"), "GPU-12345"
HOLDER = (ModelId("m"), Generation(1))
TTL_S = 60.0


class Engine:
    """With one device."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.partners_held: list[ModelId] = []
        self.posted: list[object] = []

    def devices(self):
        return [SimpleNamespace(id=GPU, leases=tuple(self.leases))]

    def partners(self):
        return [SimpleNamespace(id=name) for name in self.partners_held]

    def post(self, event: object) -> None:
        self.posted.append(event)

    def starts(self) -> None:
        self.leases.append(Lease(HOLDER, GPU, Phase.STARTING, 500))


class Store:
    def __init__(self) -> None:
        self.fields: dict[str, int] = {}
        self.full = False
        self.away = False
        self.has_just_begun = False

    async def take(self, holder, shares, ttl_s, *, has_it):
        self._answer()
        if self.full or (self.has_just_begun and not has_it):
            return Refusal(CARD if self.full else None)
        self.fields[holder] = shares[CARD].mib
        return None

    async def look(self, devices):
        self._answer()
        return not self.has_just_begun, {CARD: dict(self.fields)}

    async def release(self, holder, devices):
        self._answer()
        del self.fields[holder]

    def _answer(self) -> None:
        if self.away:
            raise StoreUnreachableError("the lease store can't be reached (gone)")


class Site:
    def __init__(self) -> None:
        self.engine, self.store, self.now = Engine(), Store(), 1000.0
        device = DeviceInfo(GPU, CUDA, "a card", 1000, 100, 0, CARD)
        self.shared = SharedLeases(self.engine, self.store, [device], "inst", TTL_S, lambda: self.now)  # type: ignore[arg-type]

    async def load(self) -> None:
        self.engine.starts()
        assert await self.shared.lease_for_start(StartWorker(*HOLDER, (GPU,), (500,))) is None

    async def after(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            await self.shared.run_once()

    def lost(self) -> list[LeaseLost]:
        return [event for event in self.engine.posted if isinstance(event, LeaseLost)]

    def seen(self) -> LeasesSeen:
        return [event for event in self.engine.posted if isinstance(event, LeasesSeen)][-1]


@pytest.fixture
def site() -> Site:
    return Site()


class TestStart:
    """Nothing begins before the store has its lease."""

    def test_nothing_is_known_before_it_was_asked(self, site):
        assert site.seen().trouble is not None

    async def test_a_lease_is_in_the_store_before_the_worker_starts(self, site):
        await site.load()
        assert list(site.store.fields.values()) == [500]

    async def test_a_refusal_is_not_the_models_fault(self, site):
        site.engine.starts()
        site.store.full = True
        crash = await site.shared.lease_for_start(StartWorker(*HOLDER, (GPU,), (500,)))
        assert crash is not None
        assert crash.kind is CrashClass.HOST

    async def test_nor_is_a_store_that_is_away(self, site):
        site.engine.starts()
        site.store.away = True
        crash = await site.shared.lease_for_start(StartWorker(*HOLDER, (GPU,), (500,)))
        assert crash is not None
        assert "can't be reached" in crash.summary
        assert site.seen().trouble is not None

    async def test_nor_is_one_that_has_just_begun(self, site):
        site.store.has_just_begun = True
        site.engine.starts()
        crash = await site.shared.lease_for_start(StartWorker(*HOLDER, (GPU,), (500,)))
        assert crash is not None
        assert "just begun" in crash.summary
        assert "just begun" in (site.seen().trouble or "")
        site.engine.leases = [Lease(HOLDER, GPU, Phase.IN_USE, 500, 1000.0)]
        await site.after(1)  # what runs goes on
        assert len(site.store.fields) == 1
        assert site.lost() == []


class TestOthers:
    """What others have counts in our ledger, and nothing of ours does."""

    async def test_they_are_told_once(self, site):
        await site.load()
        site.store.fields["somebody else"] = 300
        await site.after(3)
        assert site.engine.posted[1:] == [LeasesSeen({GPU: 300})]

    async def test_leftovers_of_an_earlier_daemon_here_are_given_back(self, site):
        await site.load()
        (mine,) = site.store.fields
        left = mine.replace("m:1", "gone:7")
        site.store.fields[left] = 400
        await site.after(1)
        assert set(site.store.fields) == {mine}


class TestKeep:
    """It stays in the store as long as our ledger has it."""

    async def test_until_its_memory_is_back(self, site):
        await site.load()
        await site.after(100)
        assert len(site.store.fields) == 1
        site.engine.leases = [Lease(HOLDER, GPU, Phase.RETURNING, 500, 1100.0)]
        await site.after(100)
        assert len(site.store.fields) == 1
        site.engine.leases = []
        await site.after(1)
        assert site.store.fields == {}

    async def test_one_that_the_store_forgot_is_taken_again_at_once(self, site):
        await site.load()
        await site.after(1)
        site.store.fields = {}
        await site.after(1)
        assert list(site.store.fields.values()) == [500]

    async def test_one_that_was_handed_over_is_taken(self, site):
        site.engine.leases = [Lease(HOLDER, GPU, Phase.IN_USE, 500, 1000.0)]
        await site.after(1)
        assert list(site.store.fields.values()) == [500]


class TestLose:
    """A holder whose lease may be another's stops; until then an outage stops nobody."""

    async def test_a_short_outage_changes_nothing(self, site):
        await site.load()
        site.store.away = True
        await site.after(30)
        site.store.away = False
        site.store.fields = {}  # it forgot everything
        await site.after(1)
        assert site.lost() == []
        assert list(site.store.fields.values()) == [500]
        assert site.seen().trouble is None

    async def test_a_worker_is_stopped_before_its_lease_ends(self, site):
        await site.load()
        site.store.away = True
        await site.after(49)
        assert site.lost() == []
        await site.after(2)
        assert [event.model for event in site.lost()] == ["m"]
        assert "could not be renewed" in site.lost()[0].reason

    async def test_a_partner_is_told_earlier(self, site):
        site.engine.partners_held = [HOLDER[0]]
        await site.load()
        site.store.away = True
        await site.after(31)
        assert len(site.lost()) == 1

    async def test_one_whose_memory_others_have_is_stopped_once(self, site):
        await site.load()
        site.store.full = True
        await site.after(60)
        assert len(site.lost()) == 1
        assert "others have leased the memory" in site.lost()[0].reason
