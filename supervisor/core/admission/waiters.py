"""The waiters: the wanted models in the order in which they are planned, each with its planned place.

A model keeps the place of its last plan until something there changes, so an event costs as much as it changes, however many
models wait. `placement` makes the plans; this module keeps them, with an index by device and one by victim.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from supervisor.core.admission.admission import Rank
from supervisor.core.types import DeviceId, Devices, ModelId, Parts

_T = TypeVar("_T")

Key = tuple[Rank, ModelId]
"""Sort key of a waiter; the smallest is planned first."""


@dataclass(frozen=True, slots=True)
class Place:
    """The devices for a waiter's load, by its last plan."""

    devices: Devices  # the waiter is planned again when these change
    need_mib: Parts = ()  # MiB promised to it on each device; empty: nothing
    claims: tuple[ModelId, ...] = ()  # the models to evict for it
    is_sure: bool = False  # set iff all of these stop anyway

    def promised_on(self, device: DeviceId) -> int:
        """How many MiB of the device are promised to the waiter."""
        return self.need_mib[self.devices.index(device)] if self.need_mib else 0


class Waiters:
    """The wanted models. Iterating gives them in the order of plans."""

    __slots__ = ("_claimants", "_keys", "_order", "_placed", "_places", "_unplanned", "_unsettled")

    def __init__(self) -> None:
        self._keys: dict[ModelId, Key] = {}
        self._order: list[Key] = []  # sorted
        self._places: dict[ModelId, Place] = {}
        self._placed: dict[DeviceId, list[Key]] = {}  # sorted; none is empty
        self._claimants: dict[ModelId, list[Key]] = {}  # victim → waiters; sorted; none is empty
        self._unplanned: dict[ModelId, None] = {}
        self._unsettled: dict[ModelId, None] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, model_id: ModelId) -> bool:
        return model_id in self._keys

    def __iter__(self) -> Iterator[ModelId]:
        return (model_id for _, model_id in self._order)

    def put(self, model_id: ModelId, rank: Rank) -> Devices:
        """Add a wanted model. If its rank changed, it is planned again. Returns the devices of the place that it lost."""
        key = (rank, model_id)
        if self._keys.get(model_id) == key:
            return ()
        lost = self.remove(model_id)
        self._keys[model_id] = key
        insort(self._order, key)
        self._unplanned[model_id] = None
        return lost

    def remove(self, model_id: ModelId) -> Devices:
        """Remove a model that is no longer wanted. Returns the devices of the place that it had."""
        if model_id not in self._keys:
            return ()
        place = self._places.get(model_id)
        self.set_place(model_id, None)
        key = self._keys.pop(model_id)
        del self._order[bisect_left(self._order, key)]
        self._unplanned.pop(model_id, None)
        return () if place is None else place.devices

    # --------------------------------------------------------------------------------------------------------- places

    def set_place(self, model_id: ModelId, place: Place | None) -> None:
        """Set the model's place. Victims that it claims, or claimed before, become unsettled."""
        key, before = self._keys[model_id], self._places.pop(model_id, None)
        if before is not None:
            for device in before.devices:
                _take_out(self._placed, device, key)
            for victim in before.claims:
                _take_out(self._claimants, victim, key)
                self._unsettled[victim] = None
        if place is not None:
            self._places[model_id] = place
            for device in place.devices:
                insort(self._placed.setdefault(device, []), key)
            for victim in place.claims:
                insort(self._claimants.setdefault(victim, []), key)
                self._unsettled[victim] = None

    def place(self, model_id: ModelId) -> Place | None:
        """The model's place; None while earlier waiters come first everywhere."""
        return self._places.get(model_id)

    def placed_on(self, device: DeviceId) -> Sequence[Key]:
        """The waiters with a place on the device, in the order of plans."""
        return self._placed.get(device, ())

    def claimants(self, victim: ModelId) -> Sequence[Key]:
        """The waiters that claim the victim, in the order of plans."""
        return self._claimants.get(victim, ())

    def after(self, key: Key | None) -> Iterator[Key]:
        """The waiters after `key`, in the order of plans; None: all waiters."""
        start = 0 if key is None else bisect_right(self._order, key)
        return (self._order[i] for i in range(start, len(self._order)))

    # ------------------------------------------------------------------------------------------------ plans and claims

    def plan_again(self, model_id: ModelId) -> None:
        """Plan the model in the next round, if it is wanted."""
        if model_id in self._keys:
            self._unplanned[model_id] = None

    def plan_all_again(self) -> None:
        """Plan all waiters in the next round."""
        self._unplanned.update(dict.fromkeys(self._keys))

    def give_up_places(self) -> None:
        """Take all places away, and plan all waiters in the next round."""
        for model_id in self._keys:
            self.set_place(model_id, None)
        self.plan_all_again()

    def has_unplanned(self) -> bool:
        """Whether a waiter must be planned even if no device has changed."""
        return bool(self._unplanned)

    def take_unplanned(self) -> list[Key]:
        """Return the waiters to plan, and clear the list."""
        keys = [self._keys[model_id] for model_id in self._unplanned]
        self._unplanned.clear()
        return keys

    def key(self, model_id: ModelId) -> Key | None:
        """The model's sort key; None when it isn't wanted."""
        return self._keys.get(model_id)

    def settle_again(self, victim: ModelId) -> None:
        """Check the claims on this victim again in the next round."""
        self._unsettled[victim] = None

    def take_unsettled(self) -> list[ModelId]:
        """Return the models whose claims may have changed, and clear the list."""
        unsettled = list(self._unsettled)
        self._unsettled.clear()
        return unsettled

    def check(self) -> None:
        """Assert that all indexes agree."""
        assert self._order == sorted(self._keys.values())
        assert self._places.keys() <= self._keys.keys()
        placed = sorted((d, self._keys[m]) for m, place in self._places.items() for d in place.devices)
        assert placed == sorted((device, key) for device, keys in self._placed.items() for key in keys)
        claims = sorted((v, self._keys[m]) for m, place in self._places.items() for v in place.claims)
        assert claims == sorted((victim, key) for victim, keys in self._claimants.items() for key in keys)
        for index in (self._placed, self._claimants):
            assert all(keys and keys == sorted(keys) for keys in index.values())
        assert not self._unplanned, "somebody was not planned"
        assert not self._unsettled, "a claim was not settled"


def _take_out(index: dict[_T, list[Key]], at: _T, key: Key) -> None:
    keys = index[at]
    del keys[bisect_left(keys, key)]
    if not keys:
        del index[at]
