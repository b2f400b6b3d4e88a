"""Everything that the home server's people do with it, by OpenAI's client, each name in each of its modes."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from tests.e2e.home_server.asking import HELLO, chat, speak, streamed, transcribe, whole
from tests.support import tiny
from tests.support.asking import WEATHER, looking, picture
from tests.support.daemon import wait_until

HYBRID = {
    "qwen3.5-4b": ("Qwen3.5-4B-Thinking", "Qwen3.5-4B-Instruct"),
    "qwen3.5-9b-fp8": ("Qwen3.5-9B-FP8-Thinking", "Qwen3.5-9B-FP8-Instruct"),
    "qwen3.5-9b-fp8-uncensored": ("Qwen3.5-9B-FP8-Uncensored-Thinking", "Qwen3.5-9B-FP8-Uncensored-Instruct"),
}
GRADED = {
    "gpt-oss-20b": ("GPT-OSS-20B-Low", "GPT-OSS-20B-Medium", "GPT-OSS-20B-High"),
    "gpt-oss-20b-uncensored": (
        "GPT-OSS-20B-Uncensored-Low",
        "GPT-OSS-20B-Uncensored-Medium",
        "GPT-OSS-20B-Uncensored-High",
    ),
}
VOICES = ("Chatterbox-Turbo", "Chatterbox", "Chatterbox-Multilingual")


class TestDoor:
    """Nobody comes in without a key, and everybody with one finds the same sixteen names."""

    @pytest.mark.parametrize("key", [None, "sk-llmux-openwebui-guessed", "<openwebui>"])
    @pytest.mark.parametrize(
        ("method", "path"),
        [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/v1/audio/transcriptions")],
    )
    def test_without_a_key(self, home, method, path, key):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        answer = httpx.request(method, f"{home.url}{path}", headers=headers, trust_env=False)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"

    def test_clients_keys_open_no_administration(self, home):
        headers = {"Authorization": f"Bearer {home.keys['OpenCode']}"}
        assert httpx.get(f"{home.url}/v1/admin/models", headers=headers, trust_env=False).status_code == 403

    @pytest.mark.parametrize("client", ["Open WebUI", "Remote Whisper clients", "OpenCode"])
    def test_names(self, home, client):
        with home.client_of(client) as sdk:
            names = [model.id for model in sdk.models.list()]
        expected = {name for names in (HYBRID | GRADED).values() for name in names} | {*VOICES, "cohere-transcribe"}
        assert len(names) == 16
        assert set(names) == expected

    def test_health_is_open(self, home):
        assert httpx.get(f"{home.url}/health", trust_env=False).status_code == 200


class TestHearing:
    """Dictation."""

    @pytest.mark.parametrize(("language", "name"), [("en", "english"), ("de", "german")])
    def test_languages(self, home, language, name):
        answer = transcribe(home.sdk, language=language, response_format="verbose_json")
        assert answer.language == name

    def test_english_unless_said(self, home):
        assert transcribe(home.sdk, response_format="verbose_json").language == "english"

    @pytest.mark.parametrize("kind", ["flac", "mp3", "mp4", "mpeg", "mpga", "m4a", "wav", "webm"])
    def test_formats(self, home, kind):
        transcribe(home.sdk, f"speech.{kind}")

    def test_ogg(self, home):
        transcribe(home.sdk, "opus.ogg")


class TestVoice:
    """Reading aloud, in three ways."""

    @pytest.mark.parametrize("name", VOICES)
    def test_speaks(self, home, name):
        """mp3 where no format is asked for; the model's own voice for OpenAI's, and one's own clip."""
        own, clip = (speak(home.sdk, name, voice) for voice in ("alloy", "anna"))
        assert own.startswith((b"ID3", b"\xff\xf3", b"\xff\xfb"))
        assert own != clip
        voices = {"chatterbox", "chatterbox-turbo", "chatterbox-multilingual"}
        wait_until(lambda: len(home.loaded() & voices) == 1, what="the one before has ended")

    def test_german(self, home):
        speak(home.sdk, "Chatterbox-Multilingual", extra_body={"language": "de"})
        assert "language de" in home.get("/v1/admin/models/chatterbox-multilingual/logs").text

    def test_voices_are_listed_without_a_key(self, home):
        listed = httpx.get(f"{home.url}/v1/audio/voices", trust_env=False).json()["voices"]
        assert {voice["id"] for voice in listed} == {"anna", "default", "alloy"}
        models = httpx.get(f"{home.url}/v1/audio/models", trust_env=False).json()["models"]
        assert {model["id"] for model in models} == set(VOICES)


@pytest.mark.parametrize("model", HYBRID, scope="class")
class TestQwen:
    """Thinks or not by its name, sees, calls tools."""

    def test_modes(self, home, model):
        """Whatever the client itself asks for."""
        for name, thinks in zip(HYBRID[model], (True, False), strict=True):
            contrary = {"extra_body": {"chat_template_kwargs": {"enable_thinking": not thinks}}}
            for ask, wish in ((whole, {}), (streamed, {}), (whole, contrary)):
                answer = ask(home.sdk, model=name, messages=HELLO, **wish)
                assert answer.said.startswith(tiny.ANSWER)
                assert (answer.thought, answer.finish) == (tiny.THOUGHT if thinks else "", "stop")

    def test_modes_share_a_worker(self, home, model):
        pids = set()
        for name in HYBRID[model]:
            chat(home.sdk, name)
            pids.add(home.model(model)["worker"]["pid"])
        assert len(pids) == 1

    def test_streams_token_by_token(self, home, model):
        assert_streams(home, HYBRID[model][1])

    def test_sees(self, home, model):
        thinking = HYBRID[model][0]
        plain = whole(home.sdk, model=thinking, messages=[{"role": "user", "content": "what is it?"}])
        seen = whole(home.sdk, model=thinking, messages=looking(picture()))
        assert seen.said.startswith(tiny.ANSWER)
        assert seen.prompt_tokens > plain.prompt_tokens + 3  # the picture's own
        assert home.model(model)["capabilities"]["modalities"] == ["text", "image"]

    def test_calls_tools(self, home, model):
        for name in HYBRID[model]:
            assert_calls_tools(home, name)


@pytest.mark.parametrize("model", GRADED, scope="class")
class TestGptOss:
    """Thinks as much as its name says, and calls tools."""

    def test_modes(self, home, model):
        """Its chat template is told: the prompts differ by the letters of low, medium and high."""
        lengths = []
        for name in GRADED[model]:
            for ask in (whole, streamed):
                answer = ask(home.sdk, model=name, messages=HELLO)
                assert answer.said.startswith(tiny.ANSWER)
                assert (answer.thought, answer.finish) == (tiny.THOUGHT, "stop")
            lengths.append(answer.prompt_tokens)
        low, medium, high = lengths
        assert (medium - low, high - low) == (3, 1)

    def test_beside_the_clients_own_system_prompt(self, home, model):
        messages = [{"role": "system", "content": "Be brief."}, *HELLO]
        low, medium, high = (whole(home.sdk, model=name, messages=messages).prompt_tokens for name in GRADED[model])
        assert (medium - low, high - low) == (3, 1)

    def test_streams_token_by_token(self, home, model):
        assert_streams(home, GRADED[model][0])

    def test_sees_nothing(self, home, model):
        with pytest.raises(openai.BadRequestError) as told:
            whole(home.sdk, model=GRADED[model][0], messages=looking(picture()))
        assert told.value.code == "modality_unsupported"

    def test_calls_tools(self, home, model):
        for name in GRADED[model]:
            assert_calls_tools(home, name)


def assert_streams(home, name: str) -> None:
    """A word at a time."""
    deltas = [
        chunk.choices[0].delta.content
        for chunk in home.sdk.chat.completions.create(model=name, messages=HELLO, stream=True)
        if chunk.choices and chunk.choices[0].delta.content
    ]
    assert len(deltas) >= 5
    assert "".join(deltas).startswith(tiny.ANSWER)


def assert_calls_tools(home, name: str) -> None:
    """It asks for the weather, whole and streamed, and goes on when it is told."""
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    for ask in (whole, streamed):
        answer = ask(home.sdk, model=name, messages=question, tools=[WEATHER])
        ((function, arguments),) = answer.calls
        assert (function, json.loads(arguments), answer.finish) == ("get_weather", {"city": "Paris"}, "tool_calls")
    answer = home.sdk.chat.completions.create(model=name, messages=question, tools=[WEATHER])
    asked = answer.choices[0].message
    told = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "sunny"}
    conversation = [*question, asked.model_dump(exclude_none=True), told]
    assert whole(home.sdk, model=name, messages=conversation, tools=[WEATHER]).said.startswith(tiny.ANSWER)
