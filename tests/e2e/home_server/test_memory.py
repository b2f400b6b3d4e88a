"""Who is loaded before and after: the home server's models come and go as its file says they do."""

from __future__ import annotations

import pytest

from tests.e2e.home_server.asking import chat, speak, transcribe
from tests.support.daemon import wait_until

HEARING, VOICE = "cohere-transcribe", "chatterbox-multilingual"
SMALL, MEDIUM, LARGE = "qwen3.5-4b", "qwen3.5-9b-fp8", "gpt-oss-20b"


@pytest.fixture
def became(home, record_property, request):
    """`became(before, *names)`: exactly these are loaded now; the new decisions of these kinds, newest last."""

    def check(before: int, *names: str) -> list[str]:
        taken = home.settled()
        assert home.loaded() == set(names)
        assert taken == sum(home.sizes[name] for name in names)
        told = [f"{d['model']}: {d['kind']}: {d['reason']}" for d in home.decisions()[before:]]
        record_property("taken_mib", taken)
        record_property("decisions", told)
        print(f"\n[{request.node.name}] {taken} MiB:", *told, sep="\n  ")
        return told

    return check


class TestTogether:
    """What fits stays."""

    def test_a_small_language_model_comes_beside_hearing_and_voice(self, home, became):
        before = home.given(HEARING, VOICE)
        chat(home.sdk, "Qwen3.5-4B-Instruct")
        told = became(before, HEARING, VOICE, SMALL)
        assert f"{SMALL}: admit: needs 5376 MiB on Fake 16 GiB (gpu0), 6784 free" in told
        assert home.used_mib() == 14464

    def test_a_spoken_conversation_waits_for_no_model(self, home, became):
        before = home.given(HEARING, VOICE, SMALL)
        for _ in range(2):
            transcribe(home.sdk, language="de")
            chat(home.sdk, "Qwen3.5-4B-Instruct")
            speak(home.sdk, "Chatterbox-Multilingual", "anna", extra_body={"language": "de"})
        assert became(before, HEARING, VOICE, SMALL) == []

    def test_a_loaded_one_answers_at_once(self, home, became):
        before = home.given(HEARING, SMALL)
        worker = home.model(SMALL)["worker"]["pid"]
        chat(home.sdk, "Qwen3.5-4B-Thinking")
        chat(home.sdk, "Qwen3.5-4B-Instruct")
        assert became(before, HEARING, SMALL) == []
        assert home.model(SMALL)["worker"]["pid"] == worker

    def test_a_voice_comes_beside_hearing_and_a_small_language_model(self, home, became):
        before = home.given(HEARING, SMALL)
        speak(home.sdk, "Chatterbox-Multilingual")
        told = became(before, HEARING, SMALL, VOICE)
        assert f"{VOICE}: admit: needs 4480 MiB on Fake 16 GiB (gpu0), 5888 free" in told


class TestTurns:
    """What doesn't fit makes room, the least important first."""

    @pytest.mark.parametrize(
        ("model", "name", "mib"), [(MEDIUM, "Qwen3.5-9B-FP8-Thinking", 13312), (LARGE, "GPT-OSS-20B-Low", 14080)]
    )
    def test_a_larger_language_model_is_alone(self, home, became, model, name, mib):
        before = home.given(HEARING, VOICE, SMALL)
        chat(home.sdk, name)
        became(before, model)
        reason = home.reason(model, "evict")
        assert reason.startswith(
            f"needs {mib} MiB on Fake 16 GiB (gpu0), 1408 free, max_loaded allows 1 llm; as a last resort evicting"
        )
        order = [reason.index(other) for other in (SMALL, VOICE, HEARING)]
        assert order == sorted(order)

    def test_and_back_again(self, home, became):
        before = home.given(MEDIUM)
        chat(home.sdk, "Qwen3.5-4B-Instruct")
        became(before, SMALL)
        assert f"evicting {MEDIUM} (llm, 13312 MiB" in home.reason(SMALL, "evict")

    def test_a_voice_takes_the_place_of_a_large_one(self, home, became):
        before = home.given(LARGE)
        speak(home.sdk, "Chatterbox-Multilingual")
        became(before, VOICE)
        reason = home.reason(VOICE, "evict")
        assert reason.startswith(
            "needs 4480 MiB on Fake 16 GiB (gpu0), 1792 free; evicting gpt-oss-20b (llm, 14080 MiB"
        )

    def test_hearing_never_makes_room_for_a_voice(self, home):
        """A game takes 2 GB: something must go for the voice, and it is the language model, however idle hearing is."""
        home.given(HEARING, SMALL)
        home.gpu.write(first={"processes": [{"pid": 1, "mib": 2000}]})
        try:
            wait_until(lambda: home.used_mib() == 4608 + 5376 + 2000, what="the game is seen")
            chat(home.sdk, "Qwen3.5-4B-Instruct")  # hearing has been idle for longer
            speak(home.sdk, "Chatterbox-Multilingual")
            wait_until(lambda: home.loaded() == {HEARING, VOICE}, what="the language model has gone")
            reason = home.reason(VOICE, "evict")
            assert f"evicting {SMALL}" in reason
            assert HEARING not in reason
        finally:
            home.gpu.write()

    def test_hearing_takes_the_place_of_a_large_one(self, home, became):
        before = home.given(LARGE)
        transcribe(home.sdk)
        became(before, HEARING)
        reason = home.reason(HEARING, "evict")
        assert reason.startswith(
            "needs 4608 MiB on Fake 16 GiB (gpu0), 1792 free; evicting gpt-oss-20b (llm, 14080 MiB"
        )
