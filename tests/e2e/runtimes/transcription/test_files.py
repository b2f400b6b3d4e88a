"""Every kind of file that clients send, and those that are none."""

from __future__ import annotations

import itertools

import pytest

from tests.e2e.runtimes.transcription.conftest import keys_of
from tests.support import hearing

FORMATS = [
    "speech.wav",
    "float.wav",
    "stereo.wav",
    "speech.flac",
    "speech.mp3",
    "speech.mpga",
    "speech.mpeg",
    "speech.mp4",
    "speech.m4a",
    "vorbis.ogg",
    "opus.ogg",
    "speech.webm",
    "video.webm",
]


class TestFormats:
    """Each is heard, whole."""

    @pytest.mark.parametrize("name", FORMATS)
    def test_format(self, ears, name):
        whole = ears.hear("speech.wav", response_format="verbose_json").json()["duration"]
        answer = ears.hear(name, response_format="verbose_json")
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"] == hearing.EXTENSION_FIELDS
        assert answer.json()["duration"] == pytest.approx(whole, abs=0.1)

    @pytest.mark.parametrize("language", ["en", "de"])
    def test_languages(self, ears, language):
        sound = (hearing.sounds() / "speech.mp3").read_bytes()
        answer = ears.hear(sound, response_format="verbose_json", language=language).json()
        assert (answer["text"], answer["language"]) == (
            hearing.EXTENSION_FIELDS,
            {"en": "english", "de": "german"}[language],
        )

    def test_the_name_of_the_file_says_nothing(self, ears):
        name, data = ears.file("speech.flac")
        assert name == "speech.flac"
        assert ears.hear(data).json()["text"] == hearing.EXTENSION_FIELDS


class TestBadFiles:
    """What is no sound is refused with words that help; never a failure of the worker."""

    @pytest.mark.parametrize(
        ("name", "clue"),
        [
            ("empty.wav", "The file is empty"),
            ("no-samples.wav", "can't be read|no sound"),
            ("text.mp3", "can't be read|no sound"),
            ("noise.mp3", "can't be read|no sound"),
            ("picture.png", "can't be read"),
            ("pictures.mp4", "no audio track; it has: video"),
            ("half-speech.m4a", "can't be read"),
            ("list.m3u8", "can't be read"),
            ("list.ffconcat", "can't be read"),
        ],
    )
    def test_refused(self, ears, name, clue):
        answer = ears.hear(name)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["param"], error["type"]) == ("invalid_audio", "file", "invalid_request_error")
        assert any(word in error["message"] for word in clue.split("|"))
        assert "Send flac, mp3" in error["message"]

    @pytest.mark.parametrize(
        "name", ["half-speech.wav", "half-speech.mp3", "half-opus.ogg", "half-speech.flac", "torn.mp3"]
    )
    def test_damaged_files_are_heard_as_far_as_they_go(self, ears, name):
        answer = ears.hear(name, response_format="verbose_json").json()
        whole = ears.hear(response_format="verbose_json").json()["duration"]
        assert answer["text"] == hearing.EXTENSION_FIELDS
        assert (0.8 if name == "torn.mp3" else 0.3) * whole < answer["duration"] < whole + 0.1

    @pytest.mark.parametrize("name", ["silent.wav", "silent.mp3", "one-sample.wav", "not-a-number.wav"])
    def test_nothing_to_hear(self, ears, name):
        answer = ears.hear(name)
        assert (answer.status_code, answer.json()["text"]) == (200, "")

    @pytest.mark.parametrize(("kind", "text"), [("text", "\n"), ("srt", ""), ("vtt", "WEBVTT\n\n")])
    def test_silence_in_every_format(self, ears, kind, text):
        assert ears.hear("silent.wav", response_format=kind).text == text

    def test_silence_in_full(self, ears):
        answer = ears.hear(
            "silent.wav", response_format="verbose_json", timestamp_granularities=["word", "segment"]
        ).json()
        assert (answer["text"], answer["segments"], answer["words"], answer["duration"]) == ("", [], [], 3.0)

    def test_silence_as_a_stream(self, ears):
        answer = ears.hear("silent.wav", stream="true")
        assert '"transcript.text.done","text":""' in answer.text

    def test_nothing_of_that_hurts_the_worker(self, ears):
        assert ears.hear().json()["text"] == hearing.EXTENSION_FIELDS
        assert "Traceback" not in ears.log.read_text()


class TestLength:
    """Long files are heard in parts; too long ones are refused before they fill the memory."""

    def test_long(self, ears):
        answer = ears.hear(
            "long.ogg", response_format="verbose_json", timestamp_granularities=["segment", "word"]
        ).json()
        assert answer["duration"] > 60
        segments = answer["segments"]
        assert answer["text"] == " ".join([hearing.EXTENSION_FIELDS] * (len(segments) // 2))
        assert [segment["id"] for segment in segments] == list(range(len(segments)))
        assert all(one["end"] <= two["start"] for one, two in itertools.pairwise(segments))
        assert segments[-1]["end"] <= answer["duration"] < segments[-1]["end"] + 30
        assert len(segments) >= 2 * answer["duration"] // 30
        starts = [word["start"] for word in answer["words"]]
        assert starts == sorted(starts)
        assert len(starts) == 5 * len(segments) // 2

    def test_too_long(self, begin, engine):
        ears = begin(**keys_of(engine), max_audio_s=2)
        error = ears.hear().json()["error"]
        assert (error["code"], "longer than 2 s" in error["message"]) == ("audio_too_long", True)
        assert ears.hear("tone.flac").status_code == 200
