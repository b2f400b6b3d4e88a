"""From OpenAI's client through the daemon to both engines."""

from __future__ import annotations

import io
import os
import signal
import threading

import httpx
import openai
import pytest

from tests.e2e.runtimes.transcription.conftest import HEARD, keys_of
from tests.e2e.runtimes.transcription.test_turns import LONG_H, hours
from tests.support import hearing
from tests.support.daemon import running, wait_until

MODELS = ("quick", "exact", "cohere")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    cohere = {"runtime": "transformers", "type": "asr", "path": str(hearing.cohere()), "default_language": "en"}
    models = {"quick": keys_of("faster_whisper"), "exact": keys_of("transformers"), "cohere": cohere}
    virtual = {f"{name}-german": {"model": name, "defaults": {"language": "de"}} for name in MODELS}
    virtual["quick-subtitles"] = {"model": "quick", "force": {"response_format": "vtt"}}
    models = {name: {**keys, "public": True} for name, keys in models.items()}
    with running(tmp_path_factory.mktemp("hearing"), {"models": models, "virtual_models": virtual}) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def sdk(site):
    transport = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0, http_client=transport) as client:
        yield client


def sound(name: str = "speech.mp3") -> io.BytesIO:
    file = io.BytesIO((hearing.sounds() / name).read_bytes())
    file.name = name
    return file


class TestOpenAI:
    """What their client sends and understands."""

    @pytest.mark.parametrize(
        ("model", "said"),
        [("quick", hearing.EXTENSION_FIELDS), ("exact", hearing.EXTENSION_FIELDS), ("cohere", hearing.COHERE_SAID)],
    )
    def test_transcription(self, sdk, model, said):
        answer = sdk.audio.transcriptions.create(model=model, file=sound())
        assert (answer.text, answer.usage.type) == (said, "duration")

    @pytest.mark.parametrize("model", ["quick", "exact"])
    def test_verbose(self, sdk, model):
        answer = sdk.audio.transcriptions.create(
            model=model,
            file=sound("speech.m4a"),
            language="de",
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
        assert (answer.language, [word.word for word in answer.words]) == ("german", hearing.EXTENSION_FIELDS.split())
        assert [segment.text for segment in answer.segments] == [" one two", " three four five"]

    @pytest.mark.parametrize("model", ["quick", "exact"])
    @pytest.mark.parametrize(("kind", "begins"), [("text", "one two"), ("srt", "1\n00:00"), ("vtt", "WEBVTT")])
    def test_texts(self, sdk, model, kind, begins):
        answer = sdk.audio.transcriptions.create(model=model, file=sound("speech.webm"), response_format=kind)
        assert answer.startswith(begins)

    @pytest.mark.parametrize("model", ["quick", "exact"])
    def test_stream(self, sdk, model):
        events = list(sdk.audio.transcriptions.create(model=model, file=sound("long.ogg"), stream=True))
        assert {event.type for event in events[:-1]} == {"transcript.text.delta"}
        assert events[-1].type == "transcript.text.done"
        assert "".join(event.delta for event in events[:-1]) == events[-1].text

    @pytest.mark.parametrize("model", ["quick", "exact"])
    def test_translation(self, sdk, model):
        assert sdk.audio.translations.create(model=model, file=sound("speech.flac")).text == hearing.EXTENSION_FIELDS

    @pytest.mark.parametrize("model", ["quick", "exact"])
    def test_errors(self, sdk, model):
        with pytest.raises(openai.BadRequestError, match="can't be read") as told:
            sdk.audio.transcriptions.create(model=model, file=("a.mp3", b"nonsense" * 100))
        assert (told.value.code, told.value.param) == ("invalid_audio", "file")


class TestDaemon:
    """Virtual models, other clients, capabilities, memory."""

    @pytest.mark.parametrize("model", MODELS)
    def test_defaults_of_virtual_models(self, sdk, model):
        ask = lambda **keys: sdk.audio.transcriptions.create(file=sound(), response_format="verbose_json", **keys)
        assert ask(model=f"{model}-german").language == "german"
        assert ask(model=f"{model}-german", language="fr").language == "french"

    def test_forced_formats(self, site):
        answer = site.post(HEARD, files={"file": sound()}, data={"model": "quick-subtitles", "response_format": "json"})
        assert answer.headers["content-type"].startswith("text/vtt")

    def test_open_webui(self, site):
        """Chunked, without a length, and the file as a stream of octets."""
        data = sound("speech.webm").read()
        form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nquick\r\n--b\r\n'
        form += b'Content-Disposition: form-data; name="language"\r\n\r\nen\r\n--b\r\nContent-Disposition: form-data; '
        form += (
            b'name="file"; filename="a.webm"\r\nContent-Type: application/octet-stream\r\n\r\n'
            + data
            + b"\r\n--b--\r\n"
        )
        pieces = (form[start : start + 4096] for start in range(0, len(form), 4096))
        answer = site.post(HEARD, content=pieces, headers={"Content-Type": "multipart/form-data; boundary=b"})
        assert answer.json()["text"] == hearing.EXTENSION_FIELDS

    def test_capabilities(self, site):
        for name in MODELS:
            assert site.model(name)["capabilities"]["modalities"] == ["audio"]
            assert site.model(name)["type"] == "asr"

    @pytest.mark.parametrize("name", MODELS)
    def test_estimate(self, site, sdk, name, record_property):
        """What it takes after a few requests is what was foretold, within 30 %."""
        for kind in ("speech.mp3", "long.ogg"):
            sdk.audio.transcriptions.create(model=name, file=sound(kind))

        memory = site.wait_foretold(name)
        print(f"{name}: {memory}")
        assert memory["estimate"]["source"] == "computed"


class TestKilled:
    """A worker that dies takes its request along and nothing else."""

    @pytest.mark.parametrize("name", ["quick", "exact"])
    def test_in_the_middle_of_a_stream(self, site, sdk, name):
        events = iter(sdk.audio.transcriptions.create(model=name, file=("long.wav", hours(LONG_H)), stream=True))
        assert next(events).type == "transcript.text.delta"
        self._kill(site, name)
        with pytest.raises((openai.APIError, httpx.TransportError)):
            list(events)
        assert sdk.audio.transcriptions.create(model=name, file=sound()).text == hearing.EXTENSION_FIELDS

    @pytest.mark.parametrize("name", ["quick", "exact"])
    def test_before_the_answer(self, site, sdk, name):
        failures: list[openai.APIStatusError] = []

        def ask() -> None:
            with pytest.raises(openai.APIStatusError) as told:
                sdk.audio.transcriptions.create(model=name, file=("long.wav", hours(LONG_H)))
            failures.append(told.value)

        assert sdk.audio.transcriptions.create(model=name, file=sound()).text == hearing.EXTENSION_FIELDS
        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: site.model(name)["in_flight"] == 1)
        self._kill(site, name)
        asking.join()
        assert failures[0].status_code in {502, 503}
        assert sdk.audio.transcriptions.create(model=name, file=sound()).text == hearing.EXTENSION_FIELDS

    @staticmethod
    def _kill(site, name: str) -> None:
        """Kill its worker; the daemon knows when this returns, until then it might be given requests."""
        pid = site.model(name)["worker"]["pid"]
        os.kill(pid, signal.SIGKILL)
        site.wait_gone(name, pid)
