"""What is measured, of real models of each kind: text, sound heard, speech, vectors."""

from __future__ import annotations

import io
import json
import wave

import pytest

from supervisor.cli.bench import audio, page
from tests.e2e.cli.bench.conftest import pretender
from tests.support import environments, hearing, minilm, tiny, tiny_language
from tests.support.chatterbox import checkpoint, clip
from tests.support.daemon import gguf


class TestText:
    """Language models, on the real llama.cpp."""

    def test_figures_of_a_real_model(self, bench):
        bench.write({"chat": gguf()})
        found = bench.json("chat", "--rounds", "2", "--prompt", "Hello")
        (row,) = found["devices"]
        assert (found["unit"], found["ratio"]) == ("tokens/s", None)
        assert (row["device"], row["kind"], row["problem"]) == ("host", "cpu", None)
        assert len(row["rounds"]) == 2
        assert min(row["rate"], row["prompt_tokens_per_s"], row["first_ms"], row["load_s"]) > 0
        assert 0 < row["measured_mib"] < 200
        assert 0 < row["estimate_mib"] < 200

    def test_a_table_for_people(self, bench):
        bench.write({"chat": gguf()})
        done = bench("chat", "--rounds", "1", "--prompt", "Hello")
        head, row = done.stdout.splitlines()
        assert head.split() == ["DEVICE", "TOKENS/S", "PROMPT", "FIRST", "LOAD", "ESTIMATE", "MEASURED", "NOTE"]
        assert row.startswith("host ")
        assert "answers end after" in row
        assert "warming up" in done.stderr

    def test_tokens_end_the_answer(self, bench):
        bench.write({"chat": gguf()})
        (row,) = bench.json("chat", "--tokens", "3", "--rounds", "1", "--prompt", "Hello")["devices"]
        assert [round_["amount"] for round_ in row["rounds"]] == [3]

    def test_a_virtual_model_is_asked_as_clients_would(self, bench):
        virtual = {name: {"model": "chat", "enable_thinking": name == "thinker"} for name in ("thinker", "quick")}
        bench.write({"chat": gguf()}, virtual_models=virtual)

        def tokens(name: str) -> float:
            (row,) = bench.json(name, "--rounds", "1", "--prompt", "Hello")["devices"]
            return row["rounds"][0]["amount"]

        assert tokens("quick") < tokens("thinker")

    def test_the_workers_own_count_of_tokens(self, bench):
        bench.write({"chat": pretender(slow=0.01)})
        (row,) = bench.json("chat", "--tokens", "20", "--rounds", "1")["devices"]
        assert row["rounds"][0]["amount"] == 40
        assert 0 < row["rate"] < 400  # two every 10 ms, or fewer on a busy machine

    def test_reranking(self, bench):
        bench.write({"judge": pretender(endpoints=["/v1/rerank"])})
        found = bench.json("judge")
        assert found["unit"] == "documents/s"
        assert [round_["amount"] for round_ in found["devices"][0]["rounds"]] == [32] * 3


class TestReading:
    """`--ocr`: a page is read by a real model that sees."""

    @pytest.fixture(scope="class")
    @staticmethod
    def seeing() -> dict[str, object]:
        return gguf(tiny.model(name="tiny-reader", context=8192), mmproj=str(tiny.projector()), n_ctx=8192, parallel=1)

    def test_the_first_answer_is_told_apart(self, bench, seeing):
        bench.write({"eye": seeing})
        (row,) = bench.json("eye", "--ocr", "--rounds", "2")["devices"]
        assert row["problem"] is None
        assert len(row["rounds"]) == 2
        assert row["cold"]["seconds"] > 0
        assert row["cold"]["first_ms"] > 0
        assert (
            row["cold"]["words_found"] == 2
        )  # "from" and "a" stand on the page; the model's answer is the same to anything

    def test_a_table_for_people(self, bench, seeing):
        bench.write({"eye": seeing}, virtual_models={"quick": {"model": "eye", "enable_thinking": False}})
        done = bench("quick", "--ocr", "--rounds", "1")
        assert done.returncode == 0, done.stderr
        assert "host: the first answer took" in done.stdout
        assert f"2 of {len(page.printed())} words of the page" in done.stdout

    def test_a_real_model_of_transformers(self, bench):
        """A Qwen-VL, whose answer is the same to anything."""
        seeing = {
            "runtime": "transformers",
            "path": str(tiny_language.model("qwen3_5_vision", max_position_embeddings=16384)),
        }
        bench.write({"eye": seeing | {"threads": 1}}, environments.installed("transformers"))
        (row,) = bench.json("eye", "--ocr", "--rounds", "1", "--devices", "cpu")["devices"]
        assert row["problem"] is None
        assert row["cold"]["first_ms"] > 0
        assert [one["words_found"] for one in row["rounds"]] == [2]

    def test_greedy_and_long(self, bench, tmp_path):
        """temperature 0, top_k 1, and no more than 2048 tokens."""
        asked = tmp_path / "asked.json"
        bench.write({"eye": pretender("--saw-to", str(asked), slow=0, modalities=["text", "image"])})
        bench.json("eye", "--ocr", "--rounds", "1")
        request = json.loads(json.loads(asked.read_text().splitlines()[-1])[1])
        assert (request["temperature"], request["top_k"], request["max_tokens"]) == (0, 1, 2048)
        picture, text = request["messages"][0]["content"]
        assert picture["image_url"]["url"].startswith("data:image/png;base64,")
        assert "Markdown" in text["text"]

    def test_a_blind_model(self, bench):
        bench.write({"chat": gguf()})
        done = bench("chat", "--ocr")
        assert done.returncode == 1
        assert "--ocr is for models that see" in done.stderr


class TestVectors:
    """Embeddings."""

    def test_a_real_model(self, bench):
        bench.write(
            {"vectors": {"runtime": "embeddings", "path": str(minilm.folder())}}, environments.installed("embeddings")
        )
        found = bench.json("vectors", "--rounds", "1")
        (row,) = found["devices"]
        assert found["unit"] == "vectors/s"
        assert row["rounds"][0]["amount"] == 32
        assert row["rate"] > 0
        assert row["measured_mib"] > 100


class TestSound:
    """Models that hear or speak."""

    def test_a_real_model_that_hears(self, bench):
        model = {"runtime": "faster_whisper", "type": "asr", "path": str(hearing.converted())}
        bench.write({"ear": model}, environments.installed("faster_whisper"))
        found = bench.json("ear", "--rounds", "1")
        (row,) = found["devices"]
        assert found["unit"] == "x real time"
        assert row["rounds"][0]["amount"] == audio.SECONDS
        assert row["rate"] == pytest.approx(audio.SECONDS / row["rounds"][0]["seconds"], rel=0.01)
        assert row["note"] is None  # something was heard
        assert "host: real-time factor 0." in bench("ear", "--rounds", "1").stdout

    def test_a_prompt_is_no_sound(self, bench):
        bench.write({"ear": pretender(type="asr")})
        refused = bench("ear", "--prompt", "Hello")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "--prompt" in refused.stderr

    def test_speech_of_unknown_length(self, bench):
        bench.write({"voice": pretender(slow=0.01, type="tts")})
        found = bench.json("voice", "--rounds", "1")
        (row,) = found["devices"]
        assert found["unit"] == "x real time"
        assert row["rounds"][0]["amount"] == 2
        assert 0 < row["rate"] <= 10  # 2 s of speech, made in 200 ms or more
        assert row["real_time_factor"] == pytest.approx(1 / row["rate"], rel=0.01)
        assert 10 <= row["first_ms"] < row["rounds"][0]["seconds"] * 1000

    def test_the_worker_of_chatterbox(self, bench, runtimes_dir):
        clip(bench.folder / "voices" / "anna.wav")
        model = {"path": str(checkpoint(bench.folder / "model", "default")), "voices": str(bench.folder / "voices")}
        bench.write({"voice": {"runtime": "chatterbox", **model, "vram_mib": 900}}, runtimes_dir)
        (row,) = bench.json("voice", "--rounds", "1", "--prompt", "Hello.")["devices"]
        assert 0 < row["rounds"][0]["amount"] < 60  # whatever its streamed head says
        assert 0 < row["first_ms"] <= row["rounds"][0]["seconds"] * 1000 + 1  # both are rounded

    def test_the_generated_sound_is_a_wav(self):
        with wave.open(io.BytesIO(audio.murmur())) as file:
            assert file.getnframes() == audio.SECONDS * file.getframerate()
            assert max(map(abs, memoryview(file.readframes(audio.RATE)).cast("h"))) > 3000
        assert audio.seconds_of(audio.murmur()) == audio.SECONDS

    @pytest.mark.parametrize(
        "content", [b"", b"RIFF", b"ID3" + bytes(100), b"RIFF\0\0\0\0WAVE", b"RIFF\0\0\0\0WAVEdata\0\0\0\0\1"]
    )
    def test_no_wav_has_no_length(self, content):
        assert audio.seconds_of(content) == 0
