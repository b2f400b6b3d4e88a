"""A 16 GiB card and nine models of which few fit together: the situations that such a machine is in every day.

Names and sizes are those of the real models; workers are fakes, and what they take on the card is the fake driver's.
"""

from __future__ import annotations

import pytest

from tests.faults.conftest import measured as measured  # a fixture
from tests.support.clients import Gpu
from tests.support.daemon import Daemon, fake, running, wait_until

ASR, TTS, OTHER_TTS = "cohere-transcribe", "chatterbox-multilingual", "chatterbox-turbo"
SMALL, MEDIUM, UNCENSORED = "qwen3.5-4b", "qwen3.5-9b-fp8", "qwen3.5-9b-fp8-uncensored"
LARGE, LARGE_TOO = "gpt-oss-20b", "gpt-oss-20b-uncensored"
SIZES = {
    MEDIUM: ("llm", 9216),
    UNCENSORED: ("llm", 9216),
    SMALL: ("llm", 4096),
    LARGE: ("llm", 13312),
    LARGE_TOO: ("llm", 13312),
    ASR: ("asr", 4096),
    OTHER_TTS: ("tts", 2048),
    TTS: ("tts", 2048),
    "chatterbox": ("tts", 2048),
}
# What is loaded, what is asked for, what is loaded then.
SITUATIONS = {
    "already-loaded": ((ASR, SMALL), SMALL, {ASR, SMALL}),
    "medium-replaces-small": ((ASR, TTS, SMALL), MEDIUM, {ASR, TTS, MEDIUM}),
    "large-takes-the-card": ((ASR, TTS, SMALL), LARGE, {LARGE}),
    "transcription-replaces-large": ((LARGE,), ASR, {ASR}),
    "speech-fits-beside": ((ASR, SMALL), TTS, {ASR, SMALL, TTS}),
    "small-beside-asr-and-tts": ((ASR, TTS), SMALL, {ASR, TTS, SMALL}),
    "one-voice-at-a-time": ((ASR, TTS), OTHER_TTS, {ASR, OTHER_TTS}),
    "swap-large-for-large": ((LARGE,), LARGE_TOO, {LARGE_TOO}),
    "swap-medium-for-medium": ((ASR, TTS, MEDIUM), UNCENSORED, {ASR, TTS, UNCENSORED}),
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    gpu = Gpu(folder)
    models = {name: fake(type=kind, vram_mib=mib, env=gpu.takes(mib)) for name, (kind, mib) in SIZES.items()}
    config = {"devices": "auto", "models": models, "limits": {"max_loaded": {"llm": 1, "tts": 1}}}
    config["virtual_models"] = {
        "GPT-OSS-20B-Low": {"model": LARGE, "system_prompt_prefix": "Reasoning: low"},
        "Qwen3.5-9B-FP8-Instruct": {"model": MEDIUM, "enable_thinking": False},
    }
    del config["virtual_models"]["Qwen3.5-9B-FP8-Instruct"]["enable_thinking"]  # these commands know no such switch
    with running(folder, config, env=gpu.env) as daemon:
        yield daemon


def loaded(daemon: Daemon) -> set[str]:
    views = daemon.get("/v1/admin/models").json()["data"]
    return {view["name"] for view in views if view["state"] == "ready"}


def settled(daemon: Daemon) -> None:
    """Wait until the driver's reading is of what is loaded now: a decision on an older one may be another."""

    def shown() -> bool:
        device, _host = daemon.get("/v1/admin/gpu-memory").json()["devices"]
        return device["free_mib"] is not None and device["total_mib"] - device["free_mib"] == sum(
            SIZES[name][1] for name in loaded(daemon)
        )

    wait_until(shown, what="the driver shows what is loaded")


def leased(daemon: Daemon) -> int:
    device, _host = daemon.get("/v1/admin/gpu-memory").json()["devices"]
    assert device["kind"] == "cuda"
    return sum(lease["lease_mib"] for lease in device["leases"])


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situation(daemon, situation, measured):
    """What is asked for is answered; lowest priority goes first, and nothing goes that need not."""
    before, asked, after = SITUATIONS[situation]
    for name in loaded(daemon) - set(before):
        daemon.post(f"/v1/admin/models/{name}/unload")
    for name in before:
        settled(daemon)
        assert daemon.post(f"/v1/admin/models/{name}/load").status_code == 200
    settled(daemon)
    assert loaded(daemon) == set(before), daemon.decisions()
    last = max((decision["seq"] for decision in daemon.decisions()), default=-1)

    public = {LARGE: "GPT-OSS-20B-Low", MEDIUM: "Qwen3.5-9B-FP8-Instruct"}.get(asked, asked)
    answer = daemon.chat(public)
    assert (answer.status_code, answer.json()["model"]) == (200, public)
    assert loaded(daemon) == after
    expected = sum(SIZES[name][1] for name in after)
    assert expected <= 16384
    wait_until(lambda: leased(daemon) == expected, what="what went holds no lease any more")
    told = [decision["reason"] for decision in daemon.decisions() if decision["seq"] > last]
    if after >= set(before):
        assert not any("evicting" in reason for reason in told)
    else:
        gone = set(before) - after
        order = next(reason for reason in told if "evicting" in reason)
        assert all(f"{name} ({SIZES[name][0]}, {SIZES[name][1]} MiB" in order for name in gone)
        places = [
            order.index(f"{name} (")
            for name in sorted(gone, key=lambda name: ("llm", "tts", "asr").index(SIZES[name][0]))
        ]
        assert places == sorted(places), "the lowest priority first"
        measured(why=order)
    wait_until(lambda: {lease["measured_mib"] for lease in device_leases(daemon)} == {SIZES[name][1] for name in after})


def device_leases(daemon: Daemon) -> list[dict]:
    return daemon.get("/v1/admin/gpu-memory").json()["devices"][0]["leases"]
