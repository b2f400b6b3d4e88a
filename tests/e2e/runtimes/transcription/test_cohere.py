"""CohereAsr: must be told the language, tells times of segments only, doesn't translate."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.runtimes.transcription.conftest import started
from tests.support import hearing
from tests.support.limits import LIMIT_S


def keys(**more: object) -> dict[str, object]:
    return {"runtime": "transformers", "type": "asr", "path": str(hearing.cohere()), "threads": 1, **more}


@pytest.fixture(scope="module")
def ears(tmp_path_factory):
    with started(tmp_path_factory.mktemp("cohere"), **keys(default_language="en")) as worker:
        yield worker


class TestCohere:
    """A tiny CohereAsr checkpoint, really loaded."""

    @pytest.mark.parametrize(
        "name", ["speech.wav", "speech.mp3", "speech.m4a", "opus.ogg", "speech.webm", "speech.mp4"]
    )
    def test_hears(self, ears, name):
        assert ears.hear(name).json()["text"] == hearing.COHERE_SAID

    @pytest.mark.parametrize(("language", "name"), [(None, "english"), ("de", "german"), ("Japanese", "japanese")])
    def test_language(self, ears, language, name):
        fields = {} if language is None else {"language": language}
        assert ears.hear(response_format="verbose_json", **fields).json()["language"] == name

    def test_long_audio_is_cut_where_it_is_quiet(self, ears):
        answer = ears.hear("long.ogg", response_format="verbose_json").json()
        segments = answer["segments"]
        assert answer["text"] == " ".join([hearing.COHERE_SAID] * len(segments))
        assert len(segments) > answer["duration"] // 30
        assert (segments[0]["start"], segments[-1]["end"]) == (0.0, answer["duration"])
        assert all(segment["end"] - segment["start"] <= 30 for segment in segments)
        assert [segment["end"] for segment in segments[:-1]] == [segment["start"] for segment in segments[1:]]
        assert ears.hear("long.ogg", language="ja").json()["text"] == hearing.COHERE_SAID * len(segments)

    def test_stream(self, ears):
        assert f'"transcript.text.done","text":"{hearing.COHERE_SAID}"' in ears.hear(stream="true").text

    def test_silence(self, ears):
        assert ears.hear("silent.wav").json()["text"] == ""

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"prompt": "Ada"}, "prompt"),
            ({"timestamp_granularities": "word", "response_format": "verbose_json"}, "timestamp_granularities"),
            ({"language": "fi"}, "language"),
        ],
        ids=str,
    )
    def test_refused(self, ears, fields, param):
        answer = ears.hear(**fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    def test_it_does_not_translate(self, ears):
        answer = ears.hear(path="/v1/audio/translations")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "endpoint_not_supported")

    def test_without_a_language(self, begin):
        ears = begin(**keys())
        error = ears.hear().json()["error"]
        assert (error["param"], "default_language" in error["message"]) == ("language", True)
        assert ears.hear(language="de").json()["text"] == hearing.COHERE_SAID


class TestFeatures:
    """What the model gets of a sound is what a transformers gives it that computes its table of frequencies itself.

    The environment of embeddings has one. What a tiny model says doesn't depend on what it hears.
    """

    def test_they_are_the_same(self, tmp_path):
        script = """
import sys
import numpy
root, path, place = sys.argv[1:]
if root:
    sys.path.insert(0, root)
    from runtimes.transformers.worker.transcribe.cohere import load_processor
    extractor = load_processor(path).feature_extractor
else:
    from transformers import AutoFeatureExtractor
    extractor = AutoFeatureExtractor.from_pretrained(path)
noise = numpy.random.default_rng(0).standard_normal(16000).astype(numpy.float32)
numpy.save(place, extractor(noise, sampling_rate=16000, return_tensors="pt")["input_features"].numpy())
"""
        found = []
        for runtime, root in (("transformers", Path(__file__).parents[4]), ("embeddings", "")):
            place = tmp_path / f"{runtime}.npy"
            argv = [hearing.python(runtime), "-I", "-c", script, root, hearing.cohere(), place]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
            assert done.returncode == 0, done.stderr
            found.append(np.load(place))
        assert found[0].shape[-1] == 128
        assert np.allclose(*found, atol=1e-4)


class TestEnglishOnly:
    """Whisper models that know no other language."""

    @pytest.mark.parametrize("engine", ["faster_whisper", "transformers"])
    def test_it(self, begin, engine):
        path = (
            hearing.converted(multilingual=False) if engine == "faster_whisper" else hearing.whisper(multilingual=False)
        )
        ears = begin(runtime=engine, type="asr", path=str(path), threads=1, default_language="de")
        answer = ears.hear(response_format="verbose_json", timestamp_granularities=["word", "segment"]).json()
        assert (answer["text"], answer["language"], len(answer["words"])) == (hearing.EXTENSION_FIELDS, "english", 5)
        assert ears.hear(language="de").status_code == 400
        assert ears.hear(path="/v1/audio/translations").json()["error"]["code"] == "endpoint_not_supported"


class TestOtherModels:
    """What the folder holds is looked at."""

    def test_vad_leaves_out_what_is_no_speech(self, begin):
        ears = begin(runtime="faster_whisper", path=str(hearing.converted()), threads=1, vad=True)
        assert ears.hear("tone.flac").json()["text"] == ""
        assert ears.hear().status_code == 200
