"""Every response format, streams, languages, parameters."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.runtimes.transcription.conftest import keys_of
from tests.support import hearing

TRANSLATED = "/v1/audio/translations"


class TestFormats:
    """The bodies and content types of OpenAI's API."""

    def test_json_is_the_default(self, ears):
        answer = ears.hear()
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["text"] == hearing.EXTENSION_FIELDS
        assert answer.json()["usage"]["type"] == "duration"
        again = ears.hear(response_format="json").json()
        assert (again["text"], again["usage"]) == (answer.json()["text"], answer.json()["usage"])

    def test_text(self, ears):
        answer = ears.hear(response_format="text")
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.text == f"{hearing.EXTENSION_FIELDS}\n"

    def test_srt(self, ears):
        answer = ears.hear(response_format="srt")
        assert answer.headers["content-type"].startswith("application/x-subrip")
        assert answer.text == (
            "1\n00:00:00,000 --> 00:00:01,000\none two\n\n2\n00:00:01,020 --> 00:00:02,000\nthree four five\n\n"
        )

    def test_vtt(self, ears):
        answer = ears.hear(response_format="vtt")
        assert answer.headers["content-type"] == "text/vtt; charset=utf-8"
        assert answer.text == (
            "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\none two\n\n00:00:01.020 --> 00:00:02.000\nthree four five\n\n"
        )

    def test_verbose_json(self, ears):
        answer = ears.hear(response_format="verbose_json").json()
        assert (answer["task"], answer["language"], answer["text"]) == (
            "transcribe",
            "english",
            hearing.EXTENSION_FIELDS,
        )
        assert "words" not in answer
        first, second = answer["segments"]
        assert (first["id"], first["start"], first["end"], first["text"]) == (0, 0.0, 1.0, " one two")
        assert (second["id"], second["start"], second["end"], second["text"]) == (1, 1.02, 2.0, " three four five")
        assert set(first) == {"id", "seek", "start", "end", "text", "tokens", "temperature"} | {
            "avg_logprob",
            "compression_ratio",
            "no_speech_prob",
        }
        assert first["avg_logprob"] > -0.1
        assert 0 <= first["no_speech_prob"] < 0.1
        assert first["tokens"]

    def test_words(self, ears):
        answer = ears.hear(response_format="verbose_json", timestamp_granularities="word").json()
        assert "segments" not in answer
        assert [word["word"] for word in answer["words"]] == hearing.EXTENSION_FIELDS.split()
        for word, (_, start, end) in zip(answer["words"], hearing.WORDS, strict=True):
            assert word["start"] == pytest.approx(start, abs=0.06)
            assert word["end"] == pytest.approx(end, abs=0.06)

    def test_words_and_segments(self, ears):
        answer = ears.hear(response_format="verbose_json", timestamp_granularities=["word", "segment"]).json()
        assert (len(answer["words"]), len(answer["segments"])) == (5, 2)

    def test_translation(self, ears):
        answer = ears.hear(path=TRANSLATED, response_format="verbose_json", language="de").json()
        assert (answer["task"], answer["language"], answer["text"]) == ("translate", "german", hearing.EXTENSION_FIELDS)


class TestMetrics:
    """What an answer says about its own making, and what adds up in /metrics."""

    def test_of_a_detected_language(self, ears):
        metrics = ears.hear().json()["metrics"]
        assert metrics["audio_s"] == pytest.approx(ears.hear(response_format="verbose_json").json()["duration"])
        assert metrics["processing_ms"] > 0
        assert metrics["real_time_factor"] == pytest.approx(
            metrics["processing_ms"] / 1000 / metrics["audio_s"], abs=0.001
        )
        assert metrics["language"] == "en"
        assert 0 < metrics["language_probability"] <= 1

    def test_a_given_language_was_not_detected(self, ears):
        metrics = ears.hear(language="de").json()["metrics"]
        assert (metrics["language"], metrics["language_probability"]) == ("de", None)

    def test_every_format_has_them_in_its_headers(self, ears):
        headers = ears.hear(response_format="srt").headers
        assert float(headers["x-real-time-factor"]) > 0
        assert (headers["x-language"], int(headers["x-processing-ms"]) > 0) == ("en", True)

    def test_a_stream_has_them_in_its_last_event(self, ears):
        lines = [line for line in ears.hear(stream="true").text.splitlines() if line]
        assert json.loads(lines[-2].removeprefix("data: "))["metrics"]["language"] == "en"

    def test_counters(self, ears):
        def counted(name: str) -> float:
            lines = ears.http.get("/metrics").text.splitlines()
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

        names = ("llmux_worker_audio_seconds_total", "llmux_worker_audio_processing_seconds_total")
        before, transcripts = (
            [counted(name) for name in names],
            counted('llmux_worker_transcripts_total{language="de"}'),
        )
        metrics = ears.hear(language="de").json()["metrics"]
        sound, work = (counted(name) - old for name, old in zip(names, before, strict=True))
        assert sound == pytest.approx(metrics["audio_s"], abs=0.0005)  # an answer has whole milliseconds
        assert work == pytest.approx(metrics["processing_ms"] / 1000, abs=0.002)
        assert counted('llmux_worker_transcripts_total{language="de"}') == transcripts + 1


class TestStream:
    """Events as OpenAI's, a delta a segment."""

    @pytest.mark.parametrize("sound", ["speech.wav", "long.ogg"])
    def test_events(self, ears, sound):
        answer = ears.hear(sound, stream="true")
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert done == "[DONE]"
        *deltas, last = map(json.loads, events)
        assert {delta["type"] for delta in deltas} == {"transcript.text.delta"}
        assert (last["type"], last["text"]) == ("transcript.text.done", ears.hear(sound).json()["text"])
        assert "".join(delta["delta"] for delta in deltas) == last["text"]
        assert len(deltas) >= 2

    def test_a_bad_file_is_an_answer_with_a_status(self, ears):
        answer = ears.hear("text.mp3", stream="true")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_audio")


class TestParameters:
    """Each does something, or is refused by name."""

    @pytest.mark.parametrize("language", ["de", "DE", "de-AT", "German", "german"])
    def test_language(self, ears, language):
        assert ears.hear(response_format="verbose_json", language=language).json()["language"] == "german"

    @pytest.mark.parametrize(
        "fields",
        [
            {"prompt": "Names: Ada, Grace."},
            {"prompt": "word " * 400},
            {"temperature": "0.4"},
            {"model": "whatever"},
            {"language": "", "prompt": ""},
            {"chunking_strategy": "auto"},
            {"stream": "false"},
            {"timestamp_granularities": "segment"},
        ],
        ids=str,
    )
    def test_taken(self, ears, fields):
        answer = ears.hear(**fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"] == hearing.EXTENSION_FIELDS

    @pytest.mark.parametrize(
        ("fields", "param", "clue"),
        [
            ({"language": "klingon"}, "language", "this model knows: "),
            ({"response_format": "yaml"}, "response_format", "one of json, text, srt, verbose_json, vtt"),
            ({"response_format": "diarized_json"}, "response_format", "one of json"),
            ({"temperature": "hot"}, "temperature", "a number"),
            ({"temperature": "3"}, "temperature", "from 0 to 1"),
            ({"temperature": "nan"}, "temperature", "a number"),
            ({"timestamp_granularities": "word"}, "timestamp_granularities", "verbose_json"),
            ({"timestamp_granularities": "sentence"}, "timestamp_granularities", "segment, word"),
            ({"stream": "maybe"}, "stream", "true or false"),
            ({"stream": "true", "response_format": "srt"}, "stream", "srt is not streamed"),
            ({"include[]": "logprobs"}, "include", "tokens"),
            ({"chunking_strategy": '{"type": "server_vad"}'}, "chunking_strategy", "can't be chosen"),
            ({"known_speaker_names[]": "Ada"}, "known_speaker_names", "speakers"),
        ],
        ids=str,
    )
    def test_refused(self, ears, fields, param, clue):
        answer = ears.hear(**fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert clue in error["message"]

    def test_default_language(self, begin, engine):
        ears = begin(**keys_of(engine), default_language="de")
        assert ears.hear(response_format="verbose_json").json()["language"] == "german"
        assert ears.hear(response_format="verbose_json", language="fr").json()["language"] == "french"
        assert ears.hear("silent.wav", response_format="verbose_json").json()["language"] == "german"


class TestForms:
    """Multipart as clients write it."""

    def test_chunked_without_a_length(self, ears):
        form = b"".join(
            b"--x\r\nContent-Disposition: form-data; name=" + part + b"\r\n"
            for part in (
                b'"model"\r\n\r\nthe-model',
                b'"language"\r\n\r\nen',
                b'"file"; filename="audio.bin"\r\nContent-Type: application/octet-stream\r\n\r\n'
                + ears.file("speech.webm")[1],
            )
        )
        form += b"--x--\r\n"
        pieces = (form[start : start + 1000] for start in range(0, len(form), 1000))
        answer = ears.http.post(
            "/v1/audio/transcriptions", content=pieces, headers={"Content-Type": "multipart/form-data; boundary=x"}
        )
        assert answer.request.headers["transfer-encoding"] == "chunked"
        assert answer.json()["text"] == hearing.EXTENSION_FIELDS

    @pytest.mark.parametrize(
        ("keys", "code", "clue"),
        [
            ({"data": {"model": "m"}, "files": {}}, "invalid_form", "multipart/form-data"),
            ({"json": {"file": "x"}}, "invalid_form", "not 'application/json'"),
            ({"files": {"model": (None, "m")}}, "missing_file", "file is needed"),
            ({"files": {"file": (None, "text")}}, "invalid_request", "a part with a filename"),
            ({"files": {"audio": ("a.wav", b"x")}}, "invalid_request", "belongs into the field file"),
            ({"files": [("file", ("a", b"x")), ("file", ("b", b"y"))]}, "invalid_form", "Too many files"),
            ({"content": b"--x", "headers": {"Content-Type": "multipart/form-data"}}, "invalid_form", "can't be read"),
            (
                {"content": b"nonsense", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
                "invalid_form",
                "can't be read",
            ),
        ],
        ids=lambda value: None if isinstance(value, dict) else value,
    )
    def test_refused(self, ears, keys, code, clue):
        answer = ears.http.post("/v1/audio/transcriptions", **keys)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == code
        assert re.search(clue, answer.json()["error"]["message"])
