"""Unlike runtimes at once behind one endpoint: each answers beside the others, and none is touched by the end of another."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable

import httpx
import openai
import pytest

from tests.support import environments, fake_chatterbox, hearing, minilm, tiny, tiny_language
from tests.support.chatterbox import checkpoint, clip
from tests.support.counts import SOAK
from tests.support.daemon import gguf, running, wait_until

LONG = "Please say all of this aloud, slowly. " * 100
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
KILLED = [
    ("llama", "/v1/chat/completions", HELLO),
    ("voice", "/v1/audio/speech", {"input": LONG, "response_format": "pcm"}),
    ("ears", "/v1/audio/transcriptions", None),
]
KILLED_IN_A_SOAK = [  # they take longest to come back, and are stopped before they have read their request as the others are
    ("qwen", "/v1/chat/completions", HELLO),
    ("vectors", "/v1/embeddings", {"input": ["word " * 200] * 500}),
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("side_by_side")
    runtimes_dir = folder / "runtimes"
    runtimes_dir.mkdir()
    for name in ("llama_server", "transformers", "faster_whisper", "embeddings"):
        (runtimes_dir / name).symlink_to(environments.installed(name) / name)
    fake_chatterbox.environment(runtimes_dir / "chatterbox")
    clip(folder / "voices" / "anna.wav")
    spoken = {"path": str(checkpoint(folder / "chatterbox", "default")), "voices": str(folder / "voices")}
    models = {
        "llama": gguf(),
        "qwen": {"runtime": "transformers", "path": str(tiny_language.model("qwen3")), "threads": 1},
        "ears": {"runtime": "faster_whisper", "path": str(hearing.converted()), "threads": 1},
        "voice": {"runtime": "chatterbox", **spoken, "vram_mib": 700, "threads": 1},
        "vectors": {"runtime": "embeddings", "path": str(minilm.folder()), "threads": 1},
    }
    config = {
        "devices": [{"kind": "host", "budget_mib": 6000, "margin_mib": 0}],
        "models": models,
        "server": {"runtimes_dir": str(runtimes_dir)},
        "limits": {
            "readiness_interval_s": 100
        },  # a stopped worker isn't missed, however long its request is on its way
    }
    with running(folder, config) as started:
        yield started


@pytest.fixture(scope="module")
def sdk(daemon):
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=250, http_client=http
    ) as client:
        yield client


@pytest.fixture(scope="module")
def asks(sdk) -> dict[str, Callable[[], None]]:
    """A request to each model that checks its own answer."""

    def chat(model: str, answer: str) -> None:
        said = sdk.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello"}])
        assert said.choices[0].message.content.startswith(answer)

    def transcribe() -> None:
        file = io.BytesIO((hearing.sounds() / "speech.mp3").read_bytes())
        file.name = "speech.mp3"
        assert sdk.audio.transcriptions.create(model="ears", file=file).text == hearing.EXTENSION_FIELDS

    def speak() -> None:
        assert len(sdk.audio.speech.create(model="voice", voice="anna", input="Good morning.").content) > 1000

    def embed() -> None:
        assert len(sdk.embeddings.create(model="vectors", input="hello").data[0].embedding) == 384

    return {
        "llama": lambda: chat("llama", tiny.ANSWER),
        "qwen": lambda: chat("qwen", tiny_language.ANSWER),
        "ears": transcribe,
        "voice": speak,
        "vectors": embed,
    }


def pids(daemon) -> dict[str, int]:
    models = daemon.get("/v1/admin/models").json()["data"]
    return {model["name"]: model["worker"]["pid"] for model in models if model["worker"] is not None}


def all_measured(daemon) -> dict[str, dict] | None:
    """Every model, once the memory of all their workers was read."""
    models = daemon.get("/v1/admin/models").json()["data"]
    return {m["name"]: m for m in models} if all(m["memory"]["measured_mib"] for m in models) else None


class TestSideBySide:
    def test_all_at_once(self, daemon, asks, record_property):
        """Cold, asked all at once: five processes of five environments, each with its own answer."""
        failures: list[BaseException] = []

        def ask(request: Callable[[], None]) -> None:
            try:
                request()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=ask, args=(request,)) for request in asks.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        models = {model["name"]: model for model in daemon.get("/v1/admin/models").json()["data"]}
        assert {model["state"] for model in models.values()} == {"ready"}
        assert len(set(pids(daemon).values())) == 5
        models = wait_until(lambda: all_measured(daemon))
        table = {
            name: {
                "load_s": model["load_s"],
                "estimate_mib": model["memory"]["estimate"]["mib"],
                "measured_mib": model["memory"]["measured_mib"],
            }
            for name, model in models.items()
        }
        record_property("models", json.dumps(table))
        print("\n" + "\n".join(f"{name}: {figures}" for name, figures in table.items()))

    @pytest.mark.parametrize(("model", "path", "body"), [*KILLED, *(KILLED_IN_A_SOAK if SOAK else ())])
    def test_killed_in_the_middle_of_a_request(self, daemon, asks, model, path, body):
        """Its client hears of it, the others keep their processes, and the next request is served by a new one."""
        asks[model]()
        before = pids(daemon)
        stopped = before[model]
        os.kill(stopped, signal.SIGSTOP)  # so that the request is surely under way when it is killed
        outcome: list[object] = []

        def ask() -> None:
            try:
                with daemon.client() as client:
                    if body is None:
                        files = {"file": ("speech.mp3", (hearing.sounds() / "speech.mp3").read_bytes())}
                        outcome.append(client.post(path, data={"model": model}, files=files))
                    else:
                        outcome.append(client.post(path, json={"model": model, **body}))
            except httpx.HTTPError as error:
                outcome.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            wait_until(lambda: outcome or daemon.model(model)["in_flight"] == 1, what="it has the request")
            assert outcome == [], "it was answered by a worker that does not run"
        finally:
            os.kill(stopped, signal.SIGKILL)
        killed_at = time.monotonic()
        asking.join()
        (ended,) = outcome
        assert isinstance(ended, httpx.HTTPError) or ended.status_code == 502 or '"error"' in ended.text
        wait_until(lambda: pids(daemon).get(model) != stopped, what="the daemon knows")
        asks[model]()
        print(f"\n{model}: serving again {time.monotonic() - killed_at:.1f} s after kill -9")
        after = pids(daemon)
        assert after.pop(model) != before.pop(model)
        assert after == before
