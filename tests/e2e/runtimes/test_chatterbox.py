"""The chatterbox runtime: text in sentences, files as they are made, voices; a real worker with the library's model classes
replaced, and (make test-chatterbox) the real library on a random checkpoint of full width.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import pytest

from runtimes.adapters.worker_adapter import BOOTSTRAP
from runtimes.chatterbox.adapter import WEIGHTS
from runtimes.chatterbox.shared.languages import LANGUAGES
from runtimes.chatterbox.worker.sentences import pieces
from tests.support import environments
from tests.support.chatterbox import checkpoint, clip
from tests.support.chatterbox import runtimes_dir as runtimes_dir
from tests.support.daemon import running, wait_until
from tests.support.limits import LIMIT_S
from tests.support.made_once import generated, program
from tests.support.ports import quiet_ports

REAL = os.environ.get("LLMUX_TEST_CHATTERBOX") == "1"
TEXT = "The first sentence is here. The second one follows it at once, as sentences do. And a third."


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, runtimes_dir):
    folder = tmp_path_factory.mktemp("chatterbox")
    clip(folder / "voices" / "anna.wav")
    clip(folder / "voices" / "bob.wav", 7.01)
    (folder / "voices" / "broken.wav").write_bytes(b"x")
    (folder / "voices" / "notes.txt").write_text("not a clip")
    models = {
        variant: {
            "runtime": "chatterbox",
            "path": str(checkpoint(folder / variant, variant)),
            "variant": variant,
            "voices": str(folder / "voices"),
            "voice_aliases": {"alloy": "anna"},
            "default_voice": "bob",
            "vram_mib": 900,
        }
        for variant in WEIGHTS
    }
    config = {
        "models": models,
        "virtual_models": {"lively": {"model": "default", "defaults": {"exaggeration": 1.5}}},
        "server": {"runtimes_dir": str(runtimes_dir)},
    }
    with running(folder, config) as started:
        yield started


def speak(daemon, model: str = "default", **body) -> httpx.Response:
    return daemon.post("/v1/audio/speech", json={"model": model, "input": "Hello.", **body})


def log(daemon, model: str) -> str:
    return daemon.get(f"/v1/admin/models/{model}/logs").text


def samples(data: bytes, runtimes_dir: Path) -> list[float]:
    """Any file as mono samples at 24 kHz, decoded by the worker's own PyAV."""
    script = (
        "import av, io, json, sys\n"
        "r = av.AudioResampler(format='flt', layout='mono', rate=24000)\n"
        "f = av.open(io.BytesIO(sys.stdin.buffer.read()))\n"
        "out = [x for frame in f.decode(audio=0) for p in r.resample(frame) for x in p.to_ndarray()[0].tolist()]\n"
        "print(json.dumps(out))"
    )
    python = runtimes_dir / "chatterbox" / "bin" / "python"
    done = subprocess.run([str(python), "-c", script], input=data, capture_output=True, check=True)
    return json.loads(done.stdout)


class TestSpeech:
    """Files of every format hold the speech, and are complete."""

    @pytest.mark.parametrize(
        ("name", "media_type", "start"),
        [
            ("mp3", "audio/mpeg", (b"ID3", b"\xff\xf3", b"\xff\xfb")),
            ("opus", "audio/ogg", (b"OggS",)),
            ("aac", "audio/aac", (b"\xff\xf1",)),
            ("flac", "audio/flac", (b"fLaC",)),
            ("wav", "audio/wav", (b"RIFF",)),
        ],
    )
    def test_formats(self, daemon, runtimes_dir, name, media_type, start):
        answer = speak(daemon, input=TEXT, response_format=name)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == media_type
        assert answer.content.startswith(start)
        heard = samples(answer.content, runtimes_dir)
        assert len(heard) / 24000 == pytest.approx(0.05 * len(TEXT), rel=0.06)
        assert max(heard) > 0.3

    def test_pcm(self, daemon):
        answer = speak(daemon, response_format="pcm")
        assert len(answer.content) == 2 * int(0.05 * len("Hello.") * 24000)
        assert max(struct.unpack(f"<{len(answer.content) // 2}h", answer.content)) > 10000

    def test_a_field_that_nobody_knows_has_no_effect_and_is_named(self, daemon):
        told = speak(daemon, brand_new=1, unset=None)
        assert (told.status_code, told.headers["x-llmux-ignored"]) == (200, "brand_new")

    def test_mp3_is_the_default(self, daemon):
        assert speak(daemon).headers["content-type"] == "audio/mpeg"

    def test_sdk(self, daemon):
        said = {"model": "default", "voice": "anna", "input": TEXT}
        with (
            openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as sdk,
            sdk.audio.speech.with_streaming_response.create(**said) as answer,
        ):
            assert sum(map(len, answer.iter_bytes())) > 3000

    def test_it_comes_as_it_is_made(self, daemon):
        """The first sentence is heard while the next are made."""
        body = {"model": "default", "input": f"{TEXT} " * 100, "response_format": "pcm"}
        with daemon.client() as client, client.stream("POST", "/v1/audio/speech", json=body) as answer:
            rest = answer.iter_raw()
            for _ in range(3):
                assert next(rest)
                assert daemon.model("default")["in_flight"] == 1

    def test_events(self, daemon):
        plain = speak(daemon, input=TEXT, response_format="pcm", seed=1).content
        answer = speak(daemon, input=TEXT, response_format="pcm", seed=1, stream_format="sse")
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"}
        assert events[-1]["type"] == "speech.audio.done"
        read = sum(map(len, pieces(TEXT)))
        assert events[-1]["usage"] == {"input_tokens": read, "output_tokens": 2 * read, "total_tokens": 3 * read}
        assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == plain

    @pytest.mark.parametrize("speed", [0.25, 0.5, 1.5, 4])
    def test_speed(self, daemon, speed):
        plain = speak(daemon, input=TEXT, response_format="pcm").content
        changed = speak(daemon, input=TEXT, response_format="pcm", speed=speed).content
        assert len(plain) / len(changed) == pytest.approx(speed, rel=0.05)

    def test_seed(self, daemon):
        first, same, other = (speak(daemon, response_format="pcm", seed=seed).content for seed in (7, 7, 8))
        assert first == same
        assert first != other

    def test_virtual_model(self, daemon):
        speak(daemon, "lively", input="So lively.")
        assert "spoke 'So lively.' 1.5" in log(daemon, "default")

    @pytest.mark.parametrize(
        ("model", "body", "clue"),
        [
            ("default", {"input": ""}, "input is needed"),
            ("default", {"input": "x" * 100_001}, "100000 are the most"),
            ("default", {"voice": "nobody"}, "one of anna, bob, broken, alloy"),
            ("default", {"response_format": "m4a"}, "one of mp3, opus, aac"),
            ("default", {"speed": 9}, "from 0.25 to 4"),
            ("default", {"instructions": "Whisper."}, "choose a voice"),
            ("default", {"language": "de"}, "English only"),
            ("default", {"top_k": 5}, "only the turbo variant"),
            ("turbo", {"exaggeration": 1}, "no such control"),
            ("multilingual", {"language": "xx"}, "language is 'xx', but must be one of de, en"),
            ("multilingual", {"language": "Germann"}, "did you mean de, German?"),
            ("default", {"voice": "broken"}, "broken.wav can't be used"),
        ],
    )
    def test_what_it_refuses(self, daemon, model, body, clue):
        refused = speak(daemon, model, **body)
        assert refused.status_code == 400, refused.text
        assert clue in refused.json()["error"]["message"]


class TestVariants:
    def test_multilingual(self, daemon):
        assert speak(daemon, "multilingual", language="de-DE").status_code == 200
        assert speak(daemon, "multilingual", language="German").status_code == 200
        assert speak(daemon, "multilingual").status_code == 200
        text = log(daemon, "multilingual")
        assert text.count("language de") == 2
        assert text.index("language de") < text.rindex("language en")

    def test_turbo(self, daemon):
        assert speak(daemon, "turbo", top_k=5, norm_loudness=False, cfg_weight=0).status_code == 200
        assert "'top_k': 5" in log(daemon, "turbo")
        assert "{'norm_loudness': False}" in log(daemon, "turbo")


class Stalled:
    """A client that asks the worker itself, has little room for the answer, and doesn't read it."""

    def __init__(self, port: int, body: dict[str, object]) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(LIMIT_S)
        self.socket.connect(("127.0.0.1", port))
        data = json.dumps(body).encode()
        head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)

    def read(self, size: int) -> int:
        """So many bytes at least."""
        got = 0
        while got < size:
            got += len(self.socket.recv(1 << 16))
        return got


@pytest.fixture
def worker(tmp_path, runtimes_dir):
    """A turbo worker without a daemon, and its log."""
    clip(tmp_path / "voices" / "anna.wav")
    port = quiet_ports()
    settings = {"model": "tts", "host": "127.0.0.1", "port": port, "parallel": 1, "queue": 2, "variant": "turbo"}
    settings |= {"path": str(checkpoint(tmp_path / "turbo", "turbo")), "voices": str(tmp_path / "voices")}
    settings |= {"default_voice": None, "aliases": {}, "default_language": "en", "device": "cpu"}
    python = runtimes_dir / "chatterbox" / "bin" / "python"
    command = [str(python), "-I", str(BOOTSTRAP), "runtimes.chatterbox.worker", json.dumps(settings)]
    said = tmp_path / "log"
    with said.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S, trust_env=False)

    def healthy() -> bool:
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(healthy)
        yield client, said
    finally:
        client.close()
        process.kill()
        process.wait()


class TestListeners:
    """Nobody waits for somebody else's listener, and nothing piles up for one who doesn't read."""

    def test_one_who_stops_reading(self, worker):
        client, said = worker
        body = {"input": "Word after word is said here. " * 2000, "response_format": "pcm"}
        total = len(pieces(body["input"]))
        stalled = Stalled(client.base_url.port, body)
        spoken = lambda: said.read_text().count("spoke 'Word")
        hello = {"input": "Hello.", "response_format": "pcm"}

        def at_rest() -> int:
            """How many pieces were spoken, once several others in a row had their turns between them and no further one."""
            before = spoken()
            answers = [client.post("/v1/audio/speech", json=hello) for _ in range(4)]
            assert {answer.status_code for answer in answers} == {200}
            return before if spoken() == before else 0

        before = wait_until(lambda: (found := at_rest()) > 1 and found)
        assert before < total / 4
        stalled.read(before * 600_000)  # it goes on where it was
        wait_until(lambda: spoken() > before)
        stalled.socket.close()
        wait_until(lambda: "llmux_worker_running 0.0" in client.get("/metrics").text)
        assert spoken() < total

    def test_a_short_text_between_the_sentences_of_a_long_one(self, daemon):
        body = {"model": "default", "input": f"{TEXT} " * 40, "response_format": "pcm"}
        with daemon.client() as client, client.stream("POST", "/v1/audio/speech", json=body) as answer:
            rest = answer.iter_raw()
            next(rest)
            assert speak(daemon, input="Meanwhile.").status_code == 200
            assert daemon.model("default")["in_flight"] == 1
            answer.close()


class TestVoices:
    """A voice is a clip in a folder; preparing one is done once."""

    def test_pitch_tells_them_apart(self, daemon):
        anna, alias, bob, default, built = (
            speak(daemon, response_format="pcm", seed=1, **voice).content
            for voice in ({"voice": "anna"}, {"voice": {"id": "alloy"}}, {"voice": "bob"}, {}, {"voice": "anna"})
        )
        assert anna == alias == built
        assert bob == default != anna
        assert log(daemon, "default").count("prepared anna.wav") <= 1

    def test_listing(self, daemon):
        voices = {"anna", "bob", "broken", "alloy"}
        listed = httpx.get(f"{daemon.url}/v1/audio/voices", trust_env=False).json()["voices"]
        assert {voice["id"] for voice in listed} == voices
        assert all(voice["name"] for voice in listed)
        models = httpx.get(f"{daemon.url}/v1/audio/models", trust_env=False).json()["models"]
        assert {"lively", "turbo", "multilingual"} <= {model["id"] for model in models}


class TestEnds:
    def test_a_client_that_leaves(self, daemon):
        """It ends within a token, not with the text."""
        body = {"model": "default", "input": "Hello there, all of you. " * 2000, "response_format": "pcm"}
        with daemon.client() as client, client.stream("POST", "/v1/audio/speech", json=body) as answer:
            next(answer.iter_raw())
        wait_until(lambda: daemon.model("default")["in_flight"] == 0)
        pieces_spoken = lambda: log(daemon, "default").count("spoke 'Hello there")
        speak(daemon)  # after what was under way
        before = pieces_spoken()
        assert before < len(pieces(body["input"])) / 4
        for _ in range(3):  # it would have its turn between these
            speak(daemon)
        assert pieces_spoken() == before

    def test_killed_while_it_speaks(self, daemon):
        speak(daemon, "turbo")
        pid = daemon.model("turbo")["worker"]["pid"]
        errors: list[Exception] = []

        def ask() -> None:
            try:
                speak(daemon, "turbo", input="Hello there, all of you. " * 2000)
            except httpx.HTTPError as error:
                errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: daemon.model("turbo")["in_flight"] == 1)
        os.kill(pid, signal.SIGKILL)
        asking.join()
        daemon.wait_gone("turbo", pid)
        assert speak(daemon, "turbo").status_code == 200


@pytest.mark.skipif(not REAL, reason="the real library takes 1.8 GB and minutes: make test-chatterbox")
@pytest.mark.timeout(1500)
def test_the_real_library(tmp_path, capsys):
    """A random checkpoint of full width is loaded and speaks: noise of the right length, in chunks."""
    source = environments.installed("chatterbox") / "chatterbox"
    listing = "from chatterbox.mtl_tts import SUPPORTED_LANGUAGES as known; print(*sorted(known))"
    told = subprocess.run([str(source / "bin" / "python"), "-c", listing], capture_output=True, text=True, check=True)
    assert tuple(told.stdout.split()[-23:]) == LANGUAGES
    model = generated("chatterbox-small", "write_chatterbox", "chatterbox", small=True)
    folder = tmp_path / "runtimes"
    subprocess.run(
        [str(source / "bin" / "python"), "-m", "venv", "--without-pip", str(folder / "chatterbox")], check=True
    )
    (site_packages,) = (folder / "chatterbox" / "lib").glob("python*/site-packages")
    (real,) = source.resolve().glob("lib/python*/site-packages")
    shutil.copy(program("write_chatterbox"), site_packages / "write_chatterbox.py")
    (site_packages / "real.pth").write_text(f"{real}\nimport write_chatterbox; write_chatterbox.shrink()\n")
    clip(tmp_path / "voices" / "anna.wav", 7)
    models = {"tts": {"runtime": "chatterbox", "path": str(model), "voices": str(tmp_path / "voices")}}
    config = {
        "devices": [{"kind": "host", "budget_mib": 9000, "margin_mib": 0}],
        "models": models,
        "server": {"runtimes_dir": str(folder)},
        "limits": {"first_byte_s": 1200},
    }
    with running(tmp_path, config) as daemon:
        body = {"model": "tts", "input": "Hello.", "response_format": "pcm", "temperature": 5, "stream_format": "sse"}
        with daemon.client() as client:
            answer = client.post("/v1/audio/speech", json=body, timeout=1400)
        assert answer.status_code == 200, answer.text
        *deltas, done = (json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {"))
        seconds = sum(len(base64.b64decode(delta["audio"])) for delta in deltas) / 48000
        assert seconds > 0.5
        assert done["usage"]["input_tokens"] == len("Hello.") + 2  # a character each, begin and end
        assert done["usage"]["output_tokens"] >= 25 * seconds  # some are no sound and are left out
        memory = daemon.model("tts")["memory"]
        with capsys.disabled():
            print(f"\n{seconds:.1f} s of speech in {answer.elapsed.total_seconds():.0f} s; {memory}", file=sys.stderr)
        assert memory["measured_mib"] * 0.7 <= memory["estimate"]["mib"] <= memory["measured_mib"] * 1.3
