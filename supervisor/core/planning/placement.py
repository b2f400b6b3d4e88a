"""Placement: asks the planner for every waiter whose plan may have changed, and executes the plans.

The admission policy orders the waiters, and each plan treats earlier plans as executed (`snapshots`). So a later model can
use remaining memory but can never take memory that is being freed for an earlier one, and no waiter starves.

A round plans only the waiters that an event affects: new ones, those with a place on a changed device, and those that could
gain by the change. They are planned in order. When a waiter gets a different place, the later waiters on these devices are
planned again; if it evicts, the earlier ones too. With many devices, a new waiter evaluates only the best device by a rough
estimate, and only a few waiters per device have a place; the rest wait in line.

A remote model needs no plan: nothing is evicted for it, and it is in no snapshot.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from supervisor.core.admission.dispatch import reject_all
from supervisor.core.admission.waiters import Key, Place
from supervisor.core.effects import StartWorker
from supervisor.core.memory import partners
from supervisor.core.model_state import ModelState
from supervisor.core.planning import default_models
from supervisor.core.planning.eviction import settle_claims
from supervisor.core.planning.planner import plan
from supervisor.core.planning.plans import (
    Admit,
    DeviceSummary,
    Evict,
    EvictionBlock,
    LoadDemand,
    Option,
    Plan,
    Refuse,
    Snapshot,
    Wait,
)
from supervisor.core.planning.shortlist import room_for_waiter, shortlisted
from supervisor.core.planning.snapshots import by_leases, device_summary, snapshot, usable_spread
from supervisor.core.state import SchedulerState, Step
from supervisor.core.types import (
    MODEL_PLACEHOLDER,
    REMOTE,
    SERVES,
    DeviceId,
    Devices,
    ModelId,
    Parts,
    RejectCode,
    StopCause,
    WorkerState,
)
from supervisor.core.workers import replicas
from supervisor.core.workers.lifecycle import Trigger, advance
from supervisor.core.workers.termination import stop_now

REFUSED_RETRY_S = 30.0

PLACES_PER_DEVICE = 4
"""Maximum number of waiters planned for one device; later ones would only wait for these."""

SHORTLIST_ABOVE = 8
"""With more device sets than this, a waiter without a place evaluates only the best by estimate: see `shortlist`."""


def place_wanted(state: SchedulerState, step: Step) -> None:
    """Plan all waiters that may be affected by changes, and execute the plans."""
    if state.handing_over:  # waiters keep waiting: the successor plans
        state.wanted.give_up_places()
        state.ledger.take_changed()
        state.wanted.take_unplanned()
        settle_claims(state, step)
        return
    while state.ledger.has_changed() or state.wanted.has_unplanned():
        _Round(state, step).run()
        settle_claims(state, step)
    settle_claims(state, step)


class _Round:
    """One pass over the affected waiters, in order."""

    def __init__(self, state: SchedulerState, step: Step) -> None:
        self.state = state
        self.step = step
        self.wanted = state.wanted
        self.is_limited = bool(state.admission.limits_loaded())  # then each plan depends on all devices
        self.due: list[tuple[Key, DeviceId]] = []  # a heap of (waiter, device where it could gain memory, or "")

    def run(self) -> None:
        changed = self.state.ledger.take_changed()
        unplanned = self.wanted.take_unplanned()
        if not len(self.wanted):
            return
        if self.is_limited:
            unplanned, changed = list(self.wanted.after(None)), []
        self.due = [(key, DeviceId("")) for key in unplanned]
        heapq.heapify(self.due)
        for device in changed:
            self._pass_on_change(device, None)
        while self.due:
            key, device = heapq.heappop(self.due)
            offered = {device}
            while self.due and self.due[0][0] == key:
                offered.add(heapq.heappop(self.due)[1])
            self.step.about = key[1]
            if self.wanted.key(key[1]) == key:
                self._plan_waiter(key, offered)
            for device in sorted(offered - {DeviceId("")}):
                self._offer_to_next_waiter(device, key)

    def _plan_waiter(self, key: Key, offered: set[DeviceId]) -> None:
        """Plan a waiter again: for its own place and the `offered` devices, or for all devices (`offered` contains "")."""
        model, before = self.state.models[key[1]], self.wanted.place(key[1])
        if model.spec.remote:
            _start_load(self.state, self.step, model, REMOTE, (0,), "connecting")
            return
        self._plan_model(model, key, before, offered)
        if self.is_limited:  # another round follows if anything changed
            return
        now = self.wanted.place(model.id)
        touched = dict.fromkeys(self.state.ledger.take_changed())
        for device in touched:  # earlier waiters may use memory that it evicts there
            for earlier in self.wanted.placed_on(device):
                if earlier < key:
                    heapq.heappush(self.due, (earlier, device))
        if now != before:
            touched |= dict.fromkeys((*(before.devices if before else ()), *(now.devices if now else ())))
            for victim in now.claims if now else ():  # the victim leaves its other devices, too
                if (found := self.state.models.get(victim)) is not None:
                    touched |= dict.fromkeys(found.devices)
        for device in touched:
            self._pass_on_change(device, key)

    def _pass_on_change(self, device: DeviceId, after: Key | None) -> None:
        """The device has changed: replan waiters with a place there, and the first other waiter that could gain by the change."""
        for key in self.wanted.placed_on(device):
            if after is None or key > after:
                heapq.heappush(self.due, (key, device))
        self._offer_to_next_waiter(device, after)

    # ---------------------------------------------------------------------------------------------------------- offers

    def _offer_to_next_waiter(self, device: DeviceId, after: Key | None) -> None:
        """Plan the next waiter that could gain memory on the device."""
        placed = self.wanted.placed_on(device)
        if len(placed) == len(self.wanted):
            return
        there = device_summary(self.state, self.step.now, device)
        is_full = len(placed) >= PLACES_PER_DEVICE
        most_mib = there.free_mib + there.coming_mib + there.evictable_mib[-1]
        if there.outage is not None or (is_full and most_mib <= 0):
            return
        for key in self.wanted.after(after):
            self.step.about = key[1]
            if self._could_gain(key, device, there, is_full=is_full):
                heapq.heappush(self.due, (key, device))
                return

    def _could_gain(self, key: Key, device: DeviceId, there: DeviceSummary, *, is_full: bool) -> bool:
        model, place = self.state.models[key[1]], self.wanted.place(key[1])
        if model.spec.remote or (place is not None and device in place.devices):
            return False
        need_mib = model.least_mib(device, self.state.ledger.devices())
        if need_mib is None:
            return False
        is_background = not self.state.is_requested(model)
        if place is None and not is_full and not is_background:
            return True
        now_mib, later_mib, _ = room_for_waiter(self.state, key, device, there)
        if need_mib <= now_mib:
            return there.is_open or place is None
        if is_background or (place is not None and self._are_stopping(place.claims)):
            return False
        return need_mib <= later_mib + there.evictable_mib[-1]

    def _are_stopping(self, claims: tuple[ModelId, ...]) -> bool:
        """Whether there are claimed models and all of them are stopping."""
        return bool(claims) and all(
            (victim := self.state.models.get(model_id)) is not None and victim.state is WorkerState.STOPPING
            for model_id in claims
        )

    # ----------------------------------------------------------------------------------------------------------- plans

    def _plan_model(self, model: ModelState, key: Key, before: Place | None, offered: set[DeviceId]) -> None:
        options, spread = model.options(self.state.ledger.devices()), usable_spread(self.state, self.step.now, model)
        chosen = list(options.values())
        if len(chosen) > SHORTLIST_ABOVE and not self.is_limited:
            chosen = shortlisted(self.state, self.step.now, model, key, options, before, offered)
        alone = spread if len(chosen) == len(options) else None  # a single device takes precedence over a split
        demand = LoadDemand(model.id, model.spec.type, model.spec.priority, tuple(chosen), alone)
        for apart in replicas.demands_to_plan_first(
            self.state, model, replace(demand, options=tuple(options.values()), spread=spread)
        ):
            some = {option.devices: option for option in apart.options}
            is_many = len(some) > SHORTLIST_ABOVE and not self.is_limited
            worth = (
                tuple(shortlisted(self.state, self.step.now, model, key, some, None, {DeviceId("")}))
                if is_many
                else apart.options
            )
            answer, seen = self._ask_planner(replace(apart, options=worth), key)
            if isinstance(answer, Admit):
                self._carry_out(model, key, answer, seen, options)
                return
        answer, seen = self._ask_planner(demand, key)
        if len(chosen) < len(options):
            if isinstance(answer, Wait) and before is not None and not _keeps_its_place(answer, seen, before):
                demand = replace(
                    demand,
                    options=tuple(shortlisted(self.state, self.step.now, model, key, options, before, {DeviceId("")})),
                )
                answer, seen = self._ask_planner(demand, key)
            if isinstance(answer, Refuse):
                demand = replace(demand, options=tuple(options.values()), spread=spread)
                answer, seen = self._ask_planner(demand, key)
        if isinstance(answer, Evict) and before is not None and self._are_stopping(before.claims):
            its_own = options.get(before.devices) or Option(before.devices, before.need_mib)
            there, seen_there = self._ask_planner(replace(demand, options=(its_own,), spread=None), key)
            if isinstance(there, Wait) and self._are_stopping(there.waits_for):  # no other model needs to be evicted
                answer, seen = there, seen_there
        answer = self._wait_for_reading(demand, seen, answer)
        if model.partner is not None:
            answer = partners.plan_for_partner(self.state, model.partner, answer)
        if before is not None and not offered & {"", *before.devices} and not isinstance(answer, Admit | Evict):
            return  # the offered devices are no better: keep the place
        self._carry_out(model, key, answer, seen, options)

    def _ask_planner(self, demand: LoadDemand, key: Key) -> tuple[Plan, Snapshot]:
        devices = self.state.ledger.device_ids() if self.is_limited else demand.devices
        seen = snapshot(self.state, self.step.now, devices, key)
        seen = default_models.pin_other_defaults(self.state, self.state.models[demand.model], seen)
        return plan(demand, seen), seen

    def _wait_for_reading(self, demand: LoadDemand, seen: Snapshot, answer: Plan) -> Plan:
        """Replace a plan by a Wait for another reading if the last one may be wrong about the missing memory.

        A refusal is postponed while a load or a stop may explain the missing memory. An eviction is postponed while a worker
        that has just loaded counts twice: by its lease, and by its use at the last reading.
        """
        if not isinstance(answer, Refuse | Evict):
            return answer
        ledger, now = self.state.ledger, self.step.now
        if isinstance(answer, Evict) and not any(ledger.has_unsampled_worker(device) for device in answer.devices):
            return answer
        if isinstance(answer, Refuse) and (answer.outage is not None or answer.fits_nowhere):
            return answer
        otherwise = plan(demand, by_leases(seen))
        if isinstance(otherwise, Refuse) or (isinstance(answer, Evict) and not isinstance(otherwise, Admit)):
            return answer
        spread = () if demand.spread is None else (demand.spread.devices,)
        for devices in (*(option.devices for option in demand.options), *spread):
            for device in devices:
                moving = ledger.model_in_transition(device, now)
                if moving is not None:
                    self.state.wake(ledger.transition_ends_at(device, now), demand.model)
                    reason = f"{answer.reason}; waiting to see what {moving} takes or gives back"
                    return Wait(devices, (), (), reason)
        return answer

    def _carry_out(
        self, model: ModelState, key: Key, answer: Plan, seen: Snapshot, options: dict[Devices, Option]
    ) -> None:
        state, step = self.state, self.step
        is_settled = isinstance(answer, Admit) or default_models.may_evict(state, step, model, answer)
        if not state.is_requested(model) and not is_settled:
            self._postpone_background_load(model, answer, options)
            return
        _record_decision(step, model, answer)
        match answer:
            case Admit(devices, need_mib, reason):
                _start_load(state, step, model, devices, need_mib, reason)
            case Evict(devices, need_mib, victims, reason):
                self.wanted.set_place(model.id, Place(devices, need_mib, victims, is_sure=True))
                for victim_id in victims:
                    victim = state.models[victim_id]
                    stop_now(state, step, victim, StopCause.ROOM, f"evicted for {model.id}")
                    step.decide("evicted", victim_id, f"made room for {model.id}: {reason}")
            case Wait(devices, need_mib, waits_for):
                ahead = max((sum(other < key for other in self.wanted.placed_on(d)) for d in devices), default=0)
                is_in_line = ahead >= PLACES_PER_DEVICE and not self.is_limited
                place = Place(devices, need_mib, waits_for, is_sure=_waits_only_for_stopping(answer, seen))
                self.wanted.set_place(model.id, place if devices and not is_in_line else None)
            case Refuse(reason, outage, fits_nowhere):
                model.life.reason = reason
                code = outage or RejectCode.INSUFFICIENT_MEMORY
                message = f"{MODEL_PLACEHOLDER} can't be loaded: {replicas.with_placeholder(state, model, reason)}"
                message += f". To mend it: {model.spec.remedy}" if fits_nowhere else ""
                lasts = fits_nowhere or outage is not None
                reject_all(state, step, model, code, message, retry_after_s=None if lasts else REFUSED_RETRY_S)
                state.update_wanted(model)

    def _postpone_background_load(self, model: ModelState, answer: Plan, options: dict[Devices, Option]) -> None:
        """Let a model without requests wait, or drop its load intent: nothing is evicted or drained for it."""
        waits_for = answer.waits_for if isinstance(answer, Wait) else ()
        in_use = any(self.state.models[victim].state in SERVES for victim in waits_for)
        comes_back = isinstance(answer, Refuse) and answer.outage is not None
        if in_use or not (isinstance(answer, Wait) or comes_back):
            model.load_intent = None
            self.step.decide("leave", model.id, f"not loaded unasked: {answer.reason}")
            self.state.update_wanted(model)
        else:
            devices = answer.devices if isinstance(answer, Wait) else next(iter(options))
            self.wanted.set_place(model.id, Place(devices))


def _waits_only_for_stopping(answer: Wait, seen: Snapshot) -> bool:
    """Whether all models that the plan waits for are stopping anyway."""
    going = {resident.model for resident in seen.residents if resident.block is EvictionBlock.STOPPING}
    return going.issuperset(answer.waits_for)


def _keeps_its_place(answer: Wait, seen: Snapshot, before: Place) -> bool:
    """Whether the plan waits for the same models as before, or for more that stop anyway. If not, another place may be better."""
    is_sure = _waits_only_for_stopping(answer, seen)
    if answer.waits_for == before.claims:
        return is_sure >= before.is_sure
    return is_sure and before.is_sure and bool(before.claims) and set(before.claims) <= set(answer.waits_for)


def _start_load(
    state: SchedulerState, step: Step, model: ModelState, devices: Devices, need_mib: Parts, reason: str
) -> None:
    advance(model, Trigger.START, step.now, reason, devices=devices)
    if not model.spec.remote:
        state.ledger.begin(model.holder, devices, need_mib, is_partner=model.partner is not None)
    state.update_wanted(model)
    if model.partner is not None:
        partners.grant(state, step, model)
    else:
        step.emit(StartWorker(model.id, model.generation, devices, need_mib))


def _record_decision(step: Step, model: ModelState, answer: Plan) -> None:
    """Record a plan as a decision, unless only its numbers have changed."""
    kind = type(answer).__name__.lower()
    others = answer.victims if isinstance(answer, Evict) else answer.waits_for if isinstance(answer, Wait) else ()
    gist = f"{kind} {' '.join(others)}"
    if gist != model.last_plan or isinstance(answer, Admit):
        model.last_plan = gist
        step.decide(kind, model.id, answer.reason)
