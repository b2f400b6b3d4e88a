"""Several requests, and clients that leave."""

from __future__ import annotations

import contextlib
import io
import threading
import wave
from collections.abc import Iterator

import pytest

from tests.e2e.runtimes.transcription.conftest import HEARD, Ears, keys_of, started
from tests.support import hearing
from tests.support.daemon import wait_until
from tests.support.leaving import leave

LONG_H = 0.7  # most of the work is left when the beginning has been heard, a hundred times what a short file is


def hours(count: float) -> bytes:
    """A tone for so long."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(4000)
        file.writeframes(bytes([90, 110, 150, 170, 150, 110]) * int(count * 3600 * 4000 / 6))
    return buffer.getvalue()


def counted(ears, name: str) -> float:
    lines = ears.http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


@contextlib.contextmanager
def listening(ears: Ears) -> Iterator[None]:
    """Somebody hears the beginning of a long file, and leaves at the end."""
    files = {"file": ("long.wav", hours(LONG_H))}
    with ears.http.stream("POST", HEARD, files=files, data={"stream": "true"}) as answer:
        lines = answer.iter_lines()  # httpx closes the connection with it
        assert next(lines).startswith('data: {"type":"transcript.text.delta"')
        yield


@pytest.fixture(scope="module")
def pair(engine, tmp_path_factory) -> Iterator[Ears]:
    """A worker of each engine that hears two at once."""
    if engine == "whisper_cpp":
        pytest.skip("whisper.cpp's server does one request at a time")
    with started(tmp_path_factory.mktemp(engine), **keys_of(engine), parallel=2) as worker:
        yield worker


class TestLeaving:
    """Nothing is heard for nobody."""

    def test_from_a_stream(self, ears):
        before = counted(ears, "llmux_worker_audio_seconds_total")
        with listening(ears):
            assert ears.running() == 1
        wait_until(lambda: ears.running() == 0)
        assert counted(ears, "llmux_worker_audio_seconds_total") == before  # it counts what was heard to the end

    def test_from_an_answer(self, ears):
        before = counted(ears, "llmux_worker_audio_seconds_total")
        request = ears.http.build_request("POST", HEARD, files={"file": ("long.wav", hours(LONG_H))})
        leave(ears.http, request, lambda: ears.running() == 1)
        wait_until(lambda: ears.running() == 0)
        assert counted(ears, "llmux_worker_audio_seconds_total") == before


class TestTurns:
    """As many at once as configured; the rest wait."""

    def test_one_after_the_other(self, ears):
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(ears.hear("long.ogg").json()["text"]))
        with listening(ears):
            asking.start()
            wait_until(lambda: counted(ears, "llmux_worker_waiting") == 1)
            assert (ears.running(), answers) == (1, [])
        asking.join()
        assert set(answers[0].split()) == set(hearing.EXTENSION_FIELDS.split())

    def test_two_at_once(self, pair):
        with listening(pair):
            answer = pair.hear(hours(0.02), response_format="verbose_json").json()
            assert pair.running() == 1  # the long one, still
        assert answer["duration"] == 72.0
        assert set(answer["text"].split()) == set(hearing.EXTENSION_FIELDS.split())

    def test_words_of_two_at_once(self, pair):
        fields = {"response_format": "verbose_json", "timestamp_granularities": "word"}
        hear = lambda sound: {**pair.hear(sound, **fields).json(), "metrics": None}  # which tell how long it took
        expected = {sound: hear(sound) for sound in ("long.ogg", "speech.mp3")}
        found: list[tuple[str, dict]] = []
        ask = lambda sound: found.append((sound, hear(sound)))
        threads = [threading.Thread(target=ask, args=(sound,)) for sound in expected for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        for sound, answer in found:
            assert answer == expected[sound]
