"""What only a worker has that asks another program: the program's death, its nonsense, its port, and a client that leaves."""

from __future__ import annotations

import contextlib
import io
import json
import wave

import httpx
import psutil
import pytest

from tests.e2e.runtimes.transcription.conftest import HEARD
from tests.support import fake_whisper_server, hearing
from tests.support.daemon import wait_until
from tests.support.limits import LIMIT_S


def noise(trick: int, *, seconds: int = 1) -> bytes:
    """Its first sample tells the fake server what to do."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        sound.writeframes(trick.to_bytes(2, "little") + b"\x00\x20\x00\xe0" * 8_000 * seconds)
    return file.getvalue()


@pytest.fixture
def keys(tmp_path):
    server = fake_whisper_server.fake(tmp_path)
    return {"runtime": "whisper_cpp", "path": str(hearing.ggml()), "binary": str(server), "threads": 1}


@pytest.fixture
def ears(begin, keys):
    return begin(**keys)


def asked(ears) -> list[dict[str, str]]:
    lines = ears.log.read_text().splitlines()
    return [json.loads(line.removeprefix("asked: ")) for line in lines if line.startswith("asked: ")]


class TestServer:
    """It runs below the worker, and no longer."""

    def test_it_ends_with_the_worker(self, ears):
        (child,) = psutil.Process(ears.process.pid).children()
        ears.process.terminate()
        ears.process.wait(LIMIT_S)
        assert not child.is_running()

    def test_its_death_is_the_workers(self, ears):
        with contextlib.suppress(httpx.TransportError):  # it may end before it answers
            assert ears.hear(noise(1)).status_code == 500
        assert ears.process.wait(LIMIT_S) != 0
        assert "ended with -9" in ears.log.read_text()

    @pytest.mark.parametrize(("number", "why"), [(2, "failed to process audio"), (3, "Expecting value")])
    def test_what_it_says_wrong_is_an_error(self, ears, number, why):
        answer = ears.hear(noise(number))
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "worker_failed")
        assert why in answer.json()["error"]["message"]
        assert ears.hear().json()["text"] == hearing.EXTENSION_FIELDS

    def test_it_stops_for_a_client_that_leaves(self, ears):
        files = {"file": ("noise.wav", noise(4))}
        with pytest.raises(httpx.ReadTimeout):
            ears.http.post(HEARD, files=files, timeout=httpx.Timeout(LIMIT_S, read=1.0))
        wait_until(lambda: "client disconnected" in ears.log.read_text(), what="it stops")
        assert ears.hear().json()["text"] == hearing.EXTENSION_FIELDS


class TestAsked:
    """What the server is told of a request."""

    def test_fields(self, ears):
        ears.hear(language="German", prompt="Ada", temperature="0.4", path="/v1/audio/translations")
        last = asked(ears)[-1]
        assert (last["language"], last["prompt"], last["temperature"], last["translate"]) == (
            "de",
            "Ada",
            "0.4",
            "true",
        )
        assert (last["temperature_inc"], last["no_language_probabilities"]) == ("0.0", "true")

    def test_a_language_to_detect(self, ears):
        metrics = ears.hear().json()["metrics"]
        assert (metrics["language"], metrics["language_probability"]) == ("en", 0.875)
        assert asked(ears)[-1]["language"] == "auto"

    def test_pieces_of_tokens_are_words(self, ears):
        answer = ears.hear(response_format="verbose_json", timestamp_granularities="word").json()
        assert [word["word"] for word in answer["words"]] == hearing.EXTENSION_FIELDS.split()
        assert (answer["words"][3]["start"], answer["words"][3]["end"]) == (1.38, 1.68)

    def test_the_next_piece_knows_the_text_before(self, ears):
        before = len(asked(ears))
        ears.hear(noise(0, seconds=130))
        first, second = (fields["prompt"] for fields in asked(ears)[before:])
        assert first == ""
        assert second.strip().endswith("three four five")
