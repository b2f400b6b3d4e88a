"""The home server with together.yaml: recognition and a voice stay loaded beside whatever language model has the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.e2e.home_server.asking import chat, speak, transcribe
from tests.e2e.home_server.conftest import FOLDER, HomeServer, serving

HEARING, VOICE = "cohere-transcribe", "chatterbox-multilingual"
SMALL, MEDIUM, LARGE = "qwen3.5-4b", "qwen3.5-9b-fp8", "gpt-oss-20b"
NAMES = {SMALL: "Qwen3.5-4B-Instruct", MEDIUM: "Qwen3.5-9B-FP8-Instruct", LARGE: "GPT-OSS-20B-Low"}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HomeServer]:
    folder = tmp_path_factory.mktemp("together")
    yield from serving(HomeServer(folder, yaml.safe_load((FOLDER / "together.yaml").read_text())))


@pytest.mark.parametrize("model", [MEDIUM, LARGE, SMALL])
def test_a_spoken_conversation_with_any_of_them_waits_for_no_model(together, model):
    before = together.given(HEARING, VOICE)
    chat(together.sdk, NAMES[model])
    assert together.loaded() == {HEARING, VOICE, model}
    assert together.settled() == {SMALL: 5376, MEDIUM: 13312, LARGE: 14080}[model]
    told = {(decision["model"], decision["kind"]) for decision in together.decisions()[before:]}
    assert told == {(model, "admit"), (model, "ready")}, "nobody had to go"
    before = len(together.decisions())
    transcribe(together.sdk)
    chat(together.sdk, NAMES[model])
    speak(together.sdk, "Chatterbox-Multilingual")
    assert together.decisions()[before:] == []
    where = {row["name"]: row["devices"] for row in together.models() if row["name"] in together.loaded()}
    assert where == {HEARING: ["host"], VOICE: ["host"], model: ["gpu0"]}
