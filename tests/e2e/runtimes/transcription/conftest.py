"""All engines, each with a tiny Whisper that says the same; every test that takes `ears` runs on each."""

from __future__ import annotations

import atexit
import contextlib
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
import psutil
import pytest

from runtimes import device_kind
from runtimes.base import LaunchContext
from runtimes.device_kind import DeviceAssignment
from runtimes.registry import REGISTRY
from tests.contract.conftest import BASE_ENVIRONMENT
from tests.support import environments, fake_whisper_server, hearing
from tests.support.daemon import wait_until
from tests.support.limits import LIMIT_S
from tests.support.ports import quiet_ports

HEARD = "/v1/audio/transcriptions"


@dataclass
class Ears:
    """A worker, and how to ask it."""

    process: subprocess.Popen[bytes]
    http: httpx.Client
    log: Path

    def hear(self, sound: str | Path | bytes = "speech.wav", path: str = HEARD, **fields: object) -> httpx.Response:
        """The answer about a file of `hearing.sounds()`, another, or these bytes."""
        data = {name.replace("granularities", "granularities[]"): value for name, value in fields.items()}
        return self.http.post(path, files={"file": self.file(sound)}, data=data)

    @staticmethod
    def file(sound: str | Path | bytes) -> tuple[str, bytes]:
        if isinstance(sound, bytes):
            return "file", sound
        path = hearing.sounds() / sound
        return path.name, path.read_bytes()

    def running(self) -> float:
        """Requests the model works on."""
        lines = self.http.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("llmux_worker_running ")).split()[1])

    def healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/health").status_code == 200
        return False


@cache
def whisper_server() -> Path:
    """One for all tests of this process; another process may run its own meanwhile."""
    folder = Path(tempfile.mkdtemp(prefix="whisper-server-"))
    atexit.register(shutil.rmtree, folder)
    return fake_whisper_server.program(folder)


def keys_of(engine: str) -> dict[str, object]:
    """The configuration of a tiny model."""
    if engine == "whisper_cpp":
        return {"runtime": engine, "path": str(hearing.ggml()), "binary": str(whisper_server()), "threads": 1}
    if engine == "faster_whisper":
        return {"runtime": engine, "path": str(hearing.converted()), "threads": 1}
    return {"runtime": "transformers", "type": "asr", "path": str(hearing.whisper()), "threads": 1}


@contextlib.contextmanager
def started(folder: Path, **keys: object) -> Iterator[Ears]:
    """A worker of this configuration, ready."""
    port = quiet_ports()
    adapter = REGISTRY.get(str(keys["runtime"]))
    environments.installed(adapter.name)
    key = secrets.token_hex(16)
    context = LaunchContext(
        "the-model", "127.0.0.1", port, key, (DeviceAssignment("host", device_kind.HOST),), environments.FOLDER
    )
    spec = adapter.launch(adapter.config(**keys), context)
    log = folder / "worker.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            spec.argv, env={**BASE_ENVIRONMENT, **spec.env}, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    headers = {"Authorization": spec.auth or ""}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=LIMIT_S, trust_env=False) as http:
        ears = Ears(process, http, log)
        try:
            wait_until(ears.healthy, what="the worker is healthy")
            yield ears
        finally:
            below = psutil.Process(process.pid).children() if process.poll() is None else []
            for each in [process, *below]:  # no shim looks after what it started
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()


@pytest.fixture(scope="session", params=["faster_whisper", "transformers", "whisper_cpp"])
def engine(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def ears(engine, tmp_path_factory) -> Iterator[Ears]:
    """A worker of each engine, for one request at a time, shared by all tests that leave it as it is."""
    with started(tmp_path_factory.mktemp(engine), **keys_of(engine)) as worker:
        yield worker


@pytest.fixture
def begin(tmp_path) -> Iterator[Callable[..., Ears]]:
    """A worker of one's own."""
    with contextlib.ExitStack() as stack:
        yield lambda **keys: stack.enter_context(started(tmp_path, **keys))


def timed(work: Callable[[], object]) -> float:
    """Seconds it takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began
