"""The planner's tree, rule by rule, and the golden scenarios of a 16 GiB card with nine models.

The golden files hold whole plans with their exact reasons; `LLMUX_GOLDEN=update` writes them anew (`make golden`).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import pytest

from supervisor.core.admission.admission import AdmissionPolicy
from supervisor.core.messages import listed
from supervisor.core.planning.planner import plan
from supervisor.core.planning.plans import (
    Admit,
    DeviceView,
    Evict,
    EvictionBlock,
    LoadDemand,
    Option,
    Plan,
    Refuse,
    Resident,
    Snapshot,
    Wait,
)
from supervisor.core.types import DEFAULT_PRIORITY, DeviceId, Eviction, ModelId, Policy
from tests.support.cases import cases

GOLDEN = Path(__file__).parents[2] / "golden" / "planner"
GPU = DeviceId("gpu0")
TOTAL, MARGIN = 16384, 512

MODELS: dict[str, tuple[str, int]] = {
    "qwen3.5-9b-fp8": ("llm", 9216),
    "qwen3.5-9b-fp8-uncensored": ("llm", 9216),
    "qwen3.5-4b": ("llm", 4096),
    "gpt-oss-20b": ("llm", 13312),
    "gpt-oss-20b-uncensored": ("llm", 13312),
    "cohere-transcribe": ("asr", 4096),
    "chatterbox-turbo": ("tts", 2048),
    "chatterbox-multilingual": ("tts", 2048),
    "chatterbox": ("tts", 2048),
}
ASR, TTS, SMALL, MEDIUM, LARGE = (
    "cohere-transcribe",
    "chatterbox-multilingual",
    "qwen3.5-4b",
    "qwen3.5-9b-fp8",
    "gpt-oss-20b",
)


def resident(
    name: str, block: EvictionBlock = EvictionBlock.NONE, idle_s: float = 60.0, in_flight: int = 0
) -> Resident:
    kind, mib = MODELS[name]
    return Resident(ModelId(name), kind, DEFAULT_PRIORITY[kind], (GPU,), (mib,), block, idle_s, mib / 1024, in_flight)


def demand(name: str) -> LoadDemand:
    kind, mib = MODELS[name]
    return LoadDemand(ModelId(name), kind, DEFAULT_PRIORITY[kind], (Option((GPU,), (mib,)),))


@dataclass(frozen=True)
class Scenario:
    """What is loaded, what is asked for, and under which eviction modes."""

    slug: str
    loaded: tuple[Resident, ...]
    wanted: str
    outside_mib: int = 0
    blocked: str | None = None
    modes: tuple[Eviction, ...] = field(default=(Eviction.LAST_RESORT, Eviction.STRICT))

    def snapshot(self, mode: Eviction) -> Snapshot:
        free = TOTAL - MARGIN - self.outside_mib - sum(r.reserved_on(GPU) for r in self.loaded)
        view = DeviceView(GPU, TOTAL, TOTAL - MARGIN, free, self.blocked)
        return Snapshot((view,), self.loaded, AdmissionPolicy(policy=Policy(mode, {"llm": 1, "tts": 1})))

    def text(self) -> str:
        """The scenario and its plans; one plan where the modes agree."""
        lines = [
            "loaded: "
            + (", ".join(f"{r.model} ({r.type}, {r.reserved_on(GPU)} MiB, {r.block})" for r in self.loaded) or "-")
        ]
        lines.append(f"wanted: {self.wanted} ({MODELS[self.wanted][0]}, {MODELS[self.wanted][1]} MiB)")
        plans = {mode: rendered(plan(demand(self.wanted), self.snapshot(mode))) for mode in self.modes}
        if len(set(plans.values())) == 1:
            lines += ["", "in both modes:", next(iter(plans.values()))]
        else:
            for mode, text in plans.items():
                lines += ["", f"{mode}:", text]
        return "\n".join(lines) + "\n"


def mib(parts: tuple[int, ...]) -> str:
    return " + ".join(map(str, parts)) or "0"


def rendered(answer: Plan) -> str:
    match answer:
        case Admit(devices, need, reason):
            return f"  admit on {listed(devices)} with {mib(need)} MiB\n  {reason}"
        case Evict(devices, need, victims, reason):
            return f"  evict {', '.join(victims)} for {mib(need)} MiB on {listed(devices)}\n  {reason}"
        case Wait(devices, need, waits_for, reason):
            return f"  wait for {', '.join(waits_for) or 'the device'}, then {mib(need)} MiB on {listed(devices)}\n  {reason}"
        case Refuse(reason):
            return f"  refuse\n  {reason}"


SCENARIOS = (
    # Typical scenarios
    Scenario("typical-1-loaded-already", (resident(ASR), resident(SMALL, EvictionBlock.BUSY, 0.0, 1)), SMALL),
    Scenario("typical-2-medium-llm-replaces-small", (resident(ASR), resident(TTS), resident(SMALL, idle_s=41)), MEDIUM),
    Scenario("typical-3-large-llm-takes-the-card", (resident(ASR), resident(TTS), resident(SMALL, idle_s=41)), LARGE),
    Scenario("typical-4-transcription-replaces-large-llm", (resident(LARGE),), ASR),
    Scenario("typical-5-speech-fits-beside", (resident(ASR), resident(SMALL)), TTS),
    # Phase 3
    Scenario("phase3-1-small-llm-beside-asr-and-tts", (resident(ASR), resident(TTS)), SMALL),
    Scenario("phase3-2-medium-llm-beside-asr-and-tts", (resident(ASR), resident(TTS)), MEDIUM),
    Scenario("phase3-3a-large-llm-evicts-asr-and-tts", (resident(ASR), resident(TTS)), LARGE),
    Scenario("phase3-3b-next-transcription-evicts-llm-first", (resident(LARGE),), ASR),
    Scenario("phase3-4a-swap-small-to-medium", (resident(SMALL),), MEDIUM),
    Scenario("phase3-4b-swap-medium-to-uncensored", (resident(ASR), resident(TTS), resident(MEDIUM)), "qwen3.5-9b-fp8-uncensored"),
    Scenario("phase3-4c-swap-large-to-large", (resident(LARGE),), "gpt-oss-20b-uncensored"),
    # What the two lists leave open
    Scenario("more-00-speech-evicts-llm-not-asr", (resident(ASR), resident(MEDIUM)), TTS, outside_mib=1500),
    Scenario("more-01-second-voice-replaces-the-first", (resident(ASR), resident(TTS), resident(SMALL)), "chatterbox-turbo"),
    Scenario("more-02-busy-llm-is-waited-for", (resident(ASR), resident(TTS), resident(SMALL, EvictionBlock.BUSY, 0.0, 3)), MEDIUM),
    Scenario("more-03-large-llm-waits-for-busy-small", (resident(ASR), resident(TTS), resident(SMALL, EvictionBlock.BUSY, 0.0, 1)), LARGE),
    Scenario("more-04-pinned-asr-stays", (resident(ASR, EvictionBlock.PINNED), resident(TTS), resident(SMALL)), LARGE),
    Scenario("more-05-young-llm-keeps-its-place-against-an-llm", (resident(SMALL, EvictionBlock.MIN_RESIDENCY, 0.1),), MEDIUM),
    Scenario("more-06-young-llm-yields-to-asr", (resident(LARGE, EvictionBlock.MIN_RESIDENCY, 0.1),), ASR),
    Scenario("more-07-first-request-is-not-evicted", (resident(LARGE, EvictionBlock.RESERVED, 0.0),), ASR),
    Scenario("more-08-starting-llm-counts", (resident(ASR), resident(SMALL, EvictionBlock.STARTING, 0.0)), MEDIUM),
    Scenario("more-09-nothing-goes-for-memory-on-its-way", (resident(TTS), resident(LARGE, EvictionBlock.STOPPING)), ASR),
    Scenario("more-10-another-program-holds-the-card", (resident(TTS),), LARGE, outside_mib=6000),
    Scenario("more-11-device-is-loading", (resident(ASR),), TTS, blocked="cohere-transcribe is loading"),
    Scenario("more-12-device-is-quarantined-and-full", (resident(LARGE),), ASR, blocked="quarantined: gpt-oss-20b ended 31 s ago"),
)  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.slug)
def test_golden_scenario(scenario: Scenario) -> None:
    path = GOLDEN / f"{scenario.slug}.txt"
    if os.environ.get("LLMUX_GOLDEN") == "update":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(scenario.text())
    assert path.read_text() == scenario.text()


def test_no_golden_file_is_left_over() -> None:
    assert {f"{scenario.slug}.txt" for scenario in SCENARIOS} == {path.name for path in GOLDEN.glob("*")}


# --------------------------------------------------------------------------------------------------- rule by rule


def view(name: str, free: int, total: int = 10000, blocked: str | None = None) -> DeviceView:
    return DeviceView(DeviceId(name), total, total, free, blocked)


def on(
    device: str, name: str, mib: int, priority: int = 100, block: EvictionBlock = EvictionBlock.NONE, **more: float
) -> Resident:
    return Resident(ModelId(name), "llm", priority, (DeviceId(device),), (mib,), block, **more)  # type: ignore[arg-type]  # only floats


def want(need: int, *devices: str, priority: int = 100) -> LoadDemand:
    return LoadDemand(
        ModelId("new"), "llm", priority, tuple(Option((DeviceId(d),), (need,)) for d in devices or ("d0",))
    )


def want_pairs(need: int, *devices: str) -> LoadDemand:
    """Of a model that two of these share."""
    pairs = combinations(map(DeviceId, devices), 2)
    return LoadDemand(ModelId("new"), "llm", 100, tuple(Option(pair, (need, need)) for pair in pairs))


def world(*parts: DeviceView | Resident, **policy: object) -> Snapshot:
    views = tuple(part for part in parts if isinstance(part, DeviceView))
    residents = tuple(part for part in parts if isinstance(part, Resident))
    return Snapshot(views, residents, AdmissionPolicy(policy=Policy(**policy)))  # type: ignore[arg-type]  # spelled out by each caller


class TestPlaces:
    """Rule 0: only devices that could ever hold the model count."""

    def test_too_large_everywhere_says_how_much_there_is(self):
        answer = plan(want(20000, "d0", "d1"), world(view("d0", 9000), view("d1", 9000)))

        assert answer == Refuse(
            "needs 20000 MiB on d0, which has 10000 usable; needs 20000 MiB on d1, which has 10000 usable",
            fits_nowhere=True,
        )

    def test_many_small_devices_are_counted_not_listed(self):
        names = [f"d{n}" for n in range(9)]
        answer = plan(want(20000, *names), world(*(view(name, 0) for name in names)))

        assert answer.reason.endswith("; 6 more are too small as well")

    def test_a_device_of_several_places_is_told_once(self):
        answer = plan(want_pairs(20000, "d0", "d1", "d2"), world(view("d0", 0), view("d1", 0), view("d2", 0)))

        assert answer == Refuse(
            "needs 20000 MiB on d0, which has 10000 usable; needs 20000 MiB on d1, which has 10000 usable; "
            "needs 20000 MiB on d2, which has 10000 usable",
            fits_nowhere=True,
        )

    def test_every_blocked_device_of_a_place_is_named(self):
        blocked = (view("d0", 9000, blocked="quarantined: stuck"), view("d1", 9000, blocked="other is loading"))
        answer = plan(want_pairs(9000, "d0", "d1"), world(*blocked))

        assert isinstance(answer, Wait)
        assert answer.reason.endswith("; waiting for d0 (quarantined: stuck) and d1 (other is loading)")

    def test_places_that_are_not_shown_are_no_devices(self):
        names = ("d0", "d1", "d2", "d3")
        pinned = (on(name, f"pinned-{name}", 9000, block=EvictionBlock.PINNED) for name in names)
        answer = plan(want_pairs(9000, *names), world(*(view(name, 1000) for name in names), *pinned))

        assert answer.reason.endswith("; 3 more places can't take it either")

    def test_a_device_that_is_gone_is_no_place(self):
        assert plan(want(1, "gone"), world(view("d0", 9000))) == Refuse(
            "no device that it may run on is there", fits_nowhere=True
        )

    def test_the_large_enough_one_of_two_is_used(self):
        answer = plan(want(9000, "d0", "d1"), world(view("d0", 8000, total=8000), view("d1", 9000)))

        assert answer == Admit((DeviceId("d1"),), (9000,), "needs 9000 MiB on d1, 9000 free")

    def test_a_model_that_is_there_needs_nothing(self):
        answer = plan(want(9000), world(view("d0", 0), on("d0", "new", 9000)))

        assert answer == Admit((DeviceId("d0"),), (), "already loaded on d0")


class TestAdmit:
    """Rule 1: what fits is loaded, on the first unblocked device by id."""

    def test_first_device_by_id_whatever_the_order_of_options(self):
        answer = plan(want(10, "d1", "d0"), world(view("d1", 10), view("d0", 10)))

        assert isinstance(answer, Admit)
        assert answer.devices == ("d0",)

    def test_a_blocked_device_is_passed_over(self):
        answer = plan(want(10, "d0", "d1"), world(view("d0", 10, blocked="stale"), view("d1", 10)))

        assert isinstance(answer, Admit)
        assert answer.devices == ("d1",)

    def test_exactly_full_fits(self):
        assert isinstance(plan(want(10), world(view("d0", 10))), Admit)


class TestMaxLoaded:
    """A limit by type asks for victims even where memory doesn't."""

    def test_the_victim_may_be_on_another_device(self):
        answer = plan(want(10), world(view("d0", 10), view("d1", 0), on("d1", "old", 5), max_loaded={"llm": 1}))

        assert isinstance(answer, Evict)
        assert (answer.devices, answer.victims) == (("d0",), ("old",))

    def test_its_memory_counts_where_it_is_on_the_device(self):
        answer = plan(
            want(10),
            world(view("d0", 4), on("d0", "a", 6, idle_s=9), on("d0", "b", 6, idle_s=1), max_loaded={"llm": 2}),
        )

        assert isinstance(answer, Evict)
        assert answer.victims == ("a",)

    def test_one_that_is_stopping_does_not_count(self):
        answer = plan(
            want(10), world(view("d0", 10), on("d0", "old", 5, block=EvictionBlock.STOPPING), max_loaded={"llm": 1})
        )

        assert isinstance(answer, Admit)

    def test_a_limit_of_none_at_all_refuses(self):
        answer = plan(want(10), world(view("d0", 10), max_loaded={"llm": 0}))

        assert answer == Refuse("needs 10 MiB on d0, 10 free; in the way: max_loaded allows 0 llm")

    def test_a_pinned_one_of_the_type_refuses(self):
        answer = plan(
            want(10),
            world(view("d0", 10), view("d1", 0), on("d1", "p", 5, block=EvictionBlock.PINNED), max_loaded={"llm": 1}),
        )

        assert answer == Refuse(
            "needs 10 MiB on d0, 10 free; in the way: max_loaded allows 1 llm, pinned p holds 5 MiB"
        )


class TestVictims:
    """Whole classes from below, of the last one the smallest set, long idle and cheap first."""

    def test_one_large_instead_of_two_small_of_the_same_class(self):
        residents = [on("d0", "a", 3, idle_s=99), on("d0", "b", 3, idle_s=99), on("d0", "c", 6, idle_s=1)]

        answer = plan(want(6), world(view("d0", 0), *residents))

        assert isinstance(answer, Evict)
        assert answer.victims == ("c",)

    def test_of_equally_small_sets_the_least_valuable(self):
        residents = [on("d0", n, 6, idle_s=i, reload_s=r) for n, i, r in (("a", 10, 5), ("b", 10, 1), ("c", 5, 1))]

        answer = plan(want(6), world(view("d0", 0), *residents))

        assert isinstance(answer, Evict)
        assert answer.victims == ("b",)

    def test_a_higher_class_is_touched_only_after_all_of_the_lower(self):
        residents = [on("d0", "low", 1, 50), on("d0", "mid", 2, 70), on("d0", "high", 9, 90)]

        answer = plan(want(9), world(view("d0", 0), *residents))

        assert isinstance(answer, Evict)
        assert answer.victims == ("low", "mid", "high")

    def test_one_that_holds_nothing_is_left_alone(self):
        answer = plan(want(5), world(view("d0", 0), on("d0", "empty", 0, 10), on("d0", "full", 5, 20)))

        assert isinstance(answer, Evict)
        assert answer.victims == ("full",)

    def test_the_device_with_the_lower_class_is_chosen_though_more_go(self):
        residents = [on("d0", "high", 9, 90), on("d1", "a", 5, 50), on("d1", "b", 5, 50)]

        answer = plan(want(9, "d0", "d1"), world(view("d0", 0), view("d1", 0), *residents))

        assert isinstance(answer, Evict)
        assert (answer.devices, answer.victims) == (("d1",), ("a", "b"))


class TestBlocks:
    """What is held now is waited for, what is held for good is not."""

    @cases(
        "block",
        [
            EvictionBlock.BUSY,
            EvictionBlock.STARTING,
            EvictionBlock.RESERVED,
            EvictionBlock.STOPPING,
            EvictionBlock.MIN_RESIDENCY,
            EvictionBlock.PROTECTED,
        ],
    )
    def test_a_passing_block_is_waited_for(self, block):
        answer = plan(want(5), world(view("d0", 0), on("d0", "old", 5, block=block)))

        assert isinstance(answer, Wait)
        assert answer.waits_for == ("old",)

    def test_an_idle_one_is_evicted_instead_of_waiting_for_a_busy_one(self):
        residents = [on("d0", "busy", 5, 10, EvictionBlock.BUSY), on("d0", "idle", 5, 100)]

        answer = plan(want(5), world(view("d0", 0), *residents))

        assert isinstance(answer, Evict)
        assert answer.victims == ("idle",)

    def test_waiting_comes_before_evicting_something_higher(self):
        residents = [on("d0", "busy", 5, 100, EvictionBlock.BUSY), on("d0", "high", 5, 200)]

        answer = plan(want(5), world(view("d0", 0), *residents))

        assert isinstance(answer, Wait)
        assert answer.waits_for == ("busy",)

    def test_minimum_residency_is_no_block_against_a_higher_priority(self):
        snapshot = world(view("d0", 0), on("d0", "young", 5, 100, EvictionBlock.MIN_RESIDENCY))

        assert isinstance(plan(want(5, priority=100), snapshot), Wait)
        assert isinstance(plan(want(5, priority=101), snapshot), Evict)

    def test_memory_on_its_way_saves_a_victim(self):
        residents = [on("d0", "going", 6, 900, EvictionBlock.STOPPING), on("d0", "a", 3), on("d0", "b", 3)]

        answer = plan(want(9), world(view("d0", 0), *residents))

        assert isinstance(answer, Evict)
        assert answer.victims == ("a",)
        assert answer.reason.endswith("evicting a (llm, 3 MiB, idle 0 s), after going (llm, 6 MiB, stopping)")

    def test_memory_on_its_way_that_is_not_needed_is_not_waited_for(self):
        residents = [on("d0", "going", 1, block=EvictionBlock.STOPPING), on("d0", "busy", 6, block=EvictionBlock.BUSY)]

        answer = plan(want(5), world(view("d0", 0), *residents))

        assert isinstance(answer, Wait)
        assert answer.waits_for == ("busy",)

    def test_promised_memory_makes_free_negative_and_is_not_promised_twice(self):
        """6 MiB are on their way back and promised to another waiter."""
        residents = [
            on("d0", "going", 6, block=EvictionBlock.STOPPING),
            on("d0", "waiter", 6, block=EvictionBlock.RESERVED),
        ]

        answer = plan(want(5), world(view("d0", -6), *residents))

        assert isinstance(answer, Wait)
        assert answer.waits_for == ("going", "waiter")

    def test_a_blocked_device_that_would_fit_is_waited_for(self):
        answer = plan(want(5), world(view("d0", 9, blocked="x is loading")))

        assert answer == Wait((DeviceId("d0"),), (5,), (), "needs 5 MiB on d0, 9 free; waiting for d0 (x is loading)")

    def test_nothing_is_evicted_on_a_blocked_device(self):
        answer = plan(want(5), world(view("d0", 0, blocked="x is loading"), on("d0", "idle", 5)))

        assert isinstance(answer, Wait)
        assert answer.waits_for == ()


class TestProtection:
    """A higher priority goes as a last resort, or never."""

    SNAPSHOT = world(view("d0", 0), on("d0", "high", 5, 200))

    def test_last_resort_takes_it_and_says_so(self):
        answer = plan(want(5), self.SNAPSHOT)

        assert isinstance(answer, Evict)
        assert "as a last resort evicting high" in answer.reason

    def test_strict_refuses_and_says_what_it_protects(self):
        answer = plan(want(5), replace(self.SNAPSHOT, admission=AdmissionPolicy(policy=Policy(Eviction.STRICT))))

        assert answer == Refuse(
            "needs 5 MiB on d0, 0 free; in the way: the strict policy protects high (llm, priority 200, 5 MiB), "
            "9995 MiB are used outside or promised to others"
        )

    def test_pinned_stays_in_either_mode(self):
        snapshot = world(view("d0", 0, total=5), on("d0", "p", 5, 10, EvictionBlock.PINNED))

        assert plan(want(5, priority=900), snapshot) == Refuse(
            "needs 5 MiB on d0, 0 free; in the way: pinned p holds 5 MiB"
        )


class TestCost:
    """A decision stays cheap with a thousand models on a hundred devices."""

    def test_deciding_takes_well_under_a_hundred_milliseconds(self, record_property):
        devices = [view(f"d{n:02}", 500) for n in range(100)]
        residents = [on(f"d{n % 100:02}", f"m{n}", 950, 100 + n % 3, idle_s=float(n)) for n in range(1000)]
        snapshot = Snapshot(tuple(devices), tuple(residents), AdmissionPolicy(policy=Policy(max_loaded={"tts": 1})))
        names = [device.id for device in devices]
        for label, need, expected in (("admit", 400, Admit), ("evict", 5000, Evict)):
            demanded = want(need, *names)
            best = float("inf")
            for _ in range(10):
                started = time.process_time()
                assert isinstance(plan(demanded, snapshot), expected)
                best = min(best, time.process_time() - started)
            record_property(f"{label}_us", round(best * 1e6))
            print(f"{label}: {best * 1e6:.0f} µs")
            assert best < 0.1
