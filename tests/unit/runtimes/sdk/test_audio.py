"""Transcripts, languages, and long sound in pieces."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.sdk.audio.samples import QUIET, RATE, is_silent
from runtimes.sdk.audio.transcript import Segment, Transcript, Word
from runtimes.sdk.audio.windows import windows
from runtimes.shared.languages import NAMES, code_of
from tests.support.cases import cases


def body(transcript: Transcript, kind, granularities=()) -> str:
    return bytes(transcript.response(kind, granularities).body).decode()


class TestTranscript:
    """Texts and times in each format."""

    transcript = Transcript(
        "transcribe",
        3725.5,
        "de",
        [
            Segment(0.0, 1.5, " Größe & <Gewicht>", (Word(0.0, 0.7, "Größe"), Word(0.7, 1.5, "&"))),
            Segment(3661.0006, 3725.4996, " a --> b\n\nc"),
        ],
    )

    def test_srt(self):
        assert body(self.transcript, "srt") == (
            "1\n00:00:00,000 --> 00:00:01,500\nGröße & <Gewicht>\n\n2\n01:01:01,001 --> 01:02:05,500\na -> b c\n\n"
        )

    def test_vtt(self):
        assert body(self.transcript, "vtt") == (
            "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nGröße &amp; &lt;Gewicht&gt;\n\n"
            "01:01:01.001 --> 01:02:05.500\na -&gt; b c\n\n"
        )

    def test_json(self):
        answer = json.loads(body(self.transcript, "json"))
        assert answer.pop("metrics")["audio_s"] == 3725.5
        assert answer == {"text": "Größe & <Gewicht> a --> b\n\nc", "usage": {"type": "duration", "seconds": 3726}}

    def test_verbose(self):
        answer = json.loads(body(self.transcript, "verbose_json", ["word"]))
        assert (answer["language"], answer["words"][0]) == ("german", {"word": "Größe", "start": 0.0, "end": 0.7})
        assert "segments" not in answer

    def test_nothing(self):
        answer = json.loads(body(Transcript("translate", 0.5), "verbose_json"))
        assert answer.pop("metrics")["language"] is None
        assert answer == {
            "task": "translate",
            "language": "unknown",
            "duration": 0.5,
            "text": "",
            "usage": {"type": "duration", "seconds": 1},
            "segments": [],
        }


class TestMetrics:
    """How long it took, beside how long the sound was."""

    transcript = Transcript("transcribe", 8.0, "de", probability=0.98765, processing_s=2.001)

    def test_in_json(self):
        told = {
            "audio_s": 8.0,
            "processing_ms": 2001,
            "real_time_factor": 0.2501,
            "language": "de",
            "language_probability": 0.9877,
        }
        for kind in ("json", "verbose_json"):
            assert json.loads(body(self.transcript, kind))["metrics"] == told

    @cases("kind", ["json", "verbose_json", "text", "srt", "vtt"])
    def test_in_headers(self, kind):
        headers = self.transcript.response(kind, ()).headers
        assert headers["x-audio-s"] == "8.0"
        assert headers["x-processing-ms"] == "2001"
        assert headers["x-real-time-factor"] == "0.2501"
        assert (headers["x-language"], headers["x-language-probability"]) == ("de", "0.9877")

    def test_what_is_not_known_is_null_and_in_no_header(self):
        answer = Transcript("transcribe", 0.0).response("json", ())
        metrics = json.loads(bytes(answer.body))["metrics"]
        assert (metrics["real_time_factor"], metrics["language_probability"]) == (None, None)
        assert not {"x-real-time-factor", "x-language", "x-language-probability"} & set(answer.headers)


class TestLanguages:
    """Codes, regions and names mean a language."""

    @cases(
        ("text", "code"),
        [
            ("en", "en"),
            ("EN", "en"),
            ("en-US", "en"),
            ("pt_BR", "pt"),
            (" German ", "de"),
            ("Mandarin", "zh"),
            ("haitian creole", "ht"),
            ("yue", "yue"),
            ("xx", None),
            ("", None),
            ("Klingon", None),
        ],
    )
    def test_meant(self, text, code):
        assert code_of(text, NAMES) == code

    def test_only_what_the_model_knows(self):
        assert code_of("French", {"en", "de"}) is None

    def test_names(self):
        assert len(NAMES) == 100
        assert all(code.isalpha() and name == name.lower() for code, name in NAMES.items())


class TestWindows:
    """Nothing is lost but silence, and cuts are where it is quiet."""

    @given(st.floats(0.1, 40), st.floats(1, 10), st.floats(0.2, 1))
    def test_all_of_it(self, length_s, longest_s, search_s):
        sound = np.random.default_rng(1).normal(0, 0.1, int(length_s * RATE)).astype(np.float32)
        found = list(windows(sound, longest_s, search_s))
        assert np.array_equal(np.concatenate([window.samples for window in found]), sound)
        assert all(len(window.samples) <= longest_s * RATE for window in found)
        assert all(one.end_s == pytest.approx(two.start_s) for one, two in itertools.pairwise(found))

    def test_cut_where_it_is_quiet(self):
        sound = np.full(20 * RATE, 0.1, np.float32)
        sound[int(8.3 * RATE) : int(8.7 * RATE)] = 0.001
        first, *_ = windows(sound, 10, 3)
        assert 8.3 < first.end_s < 8.7

    def test_silence_is_left_out(self):
        sound = np.zeros(30 * RATE, np.float32)
        sound[25 * RATE :] = 0.1
        first, *others = windows(sound, 10, 2)
        assert 15 <= first.start_s < 25
        assert sum(window.samples.sum() for window in (first, *others)) == pytest.approx(sound.sum(), rel=1e-3)

    def test_silence(self):
        assert is_silent(np.zeros(0, np.float32))
        assert is_silent(np.full(100, QUIET / 2, np.float32))
        assert not is_silent(np.array([0, -2 * QUIET], np.float32))
