"""Several requests, and clients that leave."""

from __future__ import annotations

import io
import threading
import wave

import httpx
import pytest

from tests import hearing
from tests.daemon import wait_until
from tests.transcription.conftest import HEARD, keys_of


def hours(count: float) -> bytes:
    """A tone for so long."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(8000)
        file.writeframes(bytes([90, 110, 150, 170, 150, 110]) * int(count * 3600 * 8000 / 6))
    return buffer.getvalue()


def counted(ears, name: str) -> float:
    lines = ears.http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


class TestLeaving:
    """Nothing is heard for nobody."""

    def test_from_a_stream(self, ears):
        before = counted(ears, "llmux_worker_audio_seconds_total")
        files = {"file": ("hour.wav", hours(1))}
        with ears.http.stream("POST", HEARD, files=files, data={"stream": "true"}) as answer:
            assert next(answer.iter_lines()).startswith('data: {"type":"transcript.text.delta"')
            assert ears.running() == 1
        wait_until(lambda: ears.running() == 0, 10)
        assert counted(ears, "llmux_worker_audio_seconds_total") == before  # it counts what was heard to the end

    def test_from_an_answer(self, ears):
        before = counted(ears, "llmux_worker_audio_seconds_total")
        with httpx.Client(base_url=ears.http.base_url, headers=ears.http.headers, trust_env=False) as other:
            asking = threading.Thread(target=lambda: self._ask_and_leave(other))
            asking.start()
            wait_until(lambda: ears.running() == 1)
            asking.join()
        wait_until(lambda: ears.running() == 0, 10)
        assert counted(ears, "llmux_worker_audio_seconds_total") == before

    @staticmethod
    def _ask_and_leave(other: httpx.Client) -> None:
        with pytest.raises(httpx.ReadTimeout):
            other.post(HEARD, files={"file": ("hour.wav", hours(1))}, timeout=1.0)


class TestTurns:
    """As many at once as configured; the rest wait."""

    @pytest.mark.parametrize("parallel", [1, 2])
    def test_two(self, begin, engine, parallel):
        ears = begin(**keys_of(engine), parallel=parallel)
        sounds = [hours(0.3), hours(0.2)]
        answers: dict[int, httpx.Response] = {}
        threads = [
            threading.Thread(
                target=lambda at=at: answers.update({at: ears.hear(sounds[at], response_format="verbose_json")})
            )
            for at in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: counted(ears, "llmux_worker_running") == parallel)
        wait_until(lambda: counted(ears, "llmux_worker_waiting") == 2 - parallel or len(answers) > 0)
        for thread in threads:
            thread.join()
        assert [answers[at].json()["duration"] for at in range(2)] == [1080.0, 720.0]
        for answer in answers.values():
            assert set(answer.json()["text"].split()) == set(hearing.SAID.split())

    def test_words_of_two_at_once(self, begin, engine):
        ears = begin(**keys_of(engine), parallel=2)
        fields = {"response_format": "verbose_json", "timestamp_granularities": "word"}
        expected = {sound: ears.hear(sound, **fields).json() for sound in ("long.ogg", "speech.mp3")}
        found: list[tuple[str, dict]] = []
        ask = lambda sound: found.append((sound, ears.hear(sound, **fields).json()))
        threads = [threading.Thread(target=ask, args=(sound,)) for sound in expected for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        for sound, answer in found:
            assert answer == expected[sound]
