"""What the fault tests share: clients that see the bytes, and a machine with a fake GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.support import fake_nvml
from tests.support.daemon import Daemon
from tests.support.limits import LIMIT_S


class Stream(threading.Thread):
    """A streaming chat in a thread of its own. `text` grows as bytes come; `error` tells how it broke off."""

    def __init__(self, daemon: Daemon, model: str, **fields: object) -> None:
        super().__init__(daemon=True)
        self.status = 0
        self.text = ""
        self.error: Exception | None = None
        self.headers: httpx.Headers | None = None
        self.ended_at = 0.0
        self._daemon = daemon
        self._body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True, **fields}
        self.start()

    def run(self) -> None:
        try:
            with (
                self._daemon.client() as client,
                client.stream("POST", "/v1/chat/completions", json=self._body) as response,
            ):
                self.status, self.headers = response.status_code, response.headers
                for piece in response.iter_raw():
                    self.text += piece.decode()
        except httpx.HTTPError as error:
            self.error = error
        self.ended_at = time.monotonic()

    @property
    def chunks(self) -> int:
        return self.text.count('"content"')

    @property
    def ended_cleanly(self) -> bool:
        """As far as a client can tell, the answer is complete."""
        return self.error is None and self.text.endswith("data: [DONE]\n\n")

    def result(self, timeout_s: float = LIMIT_S) -> Stream:
        self.join(timeout_s)
        assert not self.is_alive(), f"the stream goes on: {self.text[-200:]!r}"
        return self


class Call(threading.Thread):
    """A request in a thread of its own; `response` or `error`, and how long it took."""

    def __init__(self, daemon: Daemon, model: str, **fields: object) -> None:
        super().__init__(daemon=True)
        self.response: httpx.Response | None = None
        self.error: Exception | None = None
        self.elapsed_s = 0.0
        self._daemon, self._model, self._fields = daemon, model, fields
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.response = self._daemon.chat(self._model, **self._fields)
        except httpx.HTTPError as error:
            self.error = error
        self.elapsed_s = time.monotonic() - began

    @property
    def status(self) -> int | None:
        return None if self.response is None else self.response.status_code

    def result(self, timeout_s: float = LIMIT_S) -> Call:
        self.join(timeout_s)
        assert not self.is_alive(), "no answer"
        return self


def stats(daemon: Daemon, model: str) -> dict:
    """What the model's fake worker has seen, asked behind the daemon's back."""
    port = daemon.model(model)["worker"]["port"]
    return httpx.get(f"http://127.0.0.1:{port}/stats", trust_env=False, verify=False, timeout=10).json()


def code(response: httpx.Response) -> str:
    return response.json()["error"]["code"]


class Gpu:
    """A scripted driver with 16 GiB GPUs for one daemon, or those of `totals`, and models that take what they are told."""

    def __init__(self, folder: Path, *, count: int = 1, totals: Sequence[int] = ()) -> None:
        self.totals = totals or (16384,) * count
        self.script = folder / "nvml.json"
        self.world = str(folder)
        self.env = {"LLMUX_NVML_MODULE": fake_nvml.__file__, "LLMUX_FAKE_NVML": str(self.script)}
        self.write()

    def write(
        self, *, gpu: dict[str, object] | None = None, first: dict[str, object] | None = None, **keys: object
    ) -> None:
        """The driver's world from now on; `gpu` are further keys of each GPU, `first` of the first one."""
        cards = [{"total_mib": mib, "name": f"NVIDIA Fake {mib // 1024} GiB", **(gpu or {})} for mib in self.totals]
        cards[0] |= first or {}
        fake_nvml.write_script(self.script, gpus=cards, world=self.world, **keys)

    def takes(self, mib: int) -> dict[str, str]:
        """Environment of a worker that takes `mib` on each of its GPUs while it lives."""
        return {"FAKE_VRAM_MIB": str(mib), "FAKE_VRAM_WORLD": self.world}


def worker_tree(daemon: Daemon, model: str, generation: int) -> list[int]:
    """The living processes of one worker, its shim included."""
    marker = f"LLMUX_WORKER={model}:{generation}".encode()
    found = []
    for pid in daemon.workers():
        try:
            if marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            continue
    return found


def starts(daemon: Daemon, model: str) -> int:
    """How many workers of the model were spawned so far."""
    return sum(event["model"] == model for event in daemon.events("worker.spawned"))
