"""A soak: clients that ask for models which don't fit together, while workers, memory, driver and operators misbehave.

What happens is drawn from a seed alone: `requests_of(seed, lane)` and `faults_of(seed)` are the same sequences each time. How
far each gets until the soak is over, and when, depends on the machine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.clients import Gpu
from tests.support.daemon import Daemon, fake, llama_command

FAKES = {"a": 9000, "b": 9000, "c": 5000, "d": 3000}  # MiB of the card's 16384
REAL = {"real-1": 6000, "real-2": 8000}
MODELS = (*FAKES, *REAL)
LANES = 8

# How a worker starts next time, and then no more: its switches.
STARTS = {
    "slow": "--start-delay 0.7",
    "warming up": "--warmup 0.7",
    "never ready": "--mute",
    "exits": "--exit-code 3",
    "out of memory": "--exit-code 1 --log-text CUDA_error:_out_of_memory",
    "log flood": "--flood",
    "a tree that ignores SIGTERM": "--daemonize --fork --ignore-term",
    "dies while it answers": "--die-after 1",
}
_ONCE = 'if mv "$0" "$0.used" 2>/dev/null; then exec "$@" $(cat "$0.used"); fi; exec "$@"'


@dataclass(frozen=True)
class Request:
    """What a client asks, and how long it stays."""

    id: str
    model: str
    stream: bool
    stays_s: float | None  # None: until the end
    fake: dict[str, float]

    def body(self) -> dict[str, Any]:
        own = {"fake": self.fake} if self.model in FAKES else {"max_tokens": 8}
        return {"model": self.model, "messages": [{"role": "user", "content": "Hi"}], "stream": self.stream, **own}


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong; `pause_s` later comes the next."""

    kind: str
    model: str
    lasting_s: float
    start: str
    pause_s: float


@dataclass(frozen=True)
class Answer:
    """How a request ended, for its client. `status` 0: without a status."""

    request: Request
    status: int
    text: str
    cut: bool
    left: bool = False

    @property
    def honest(self) -> bool:
        """It is whole, or says that it isn't, or was cut: never something between that looks whole."""
        if self.left or self.cut:
            return True
        if self.status != 200:
            return self.status in {502, 503, 504} and "error" in json.loads(self.text)
        if not self.request.stream:
            return "choices" in json.loads(self.text)
        return self.text.endswith("data: [DONE]\n\n") != ('"error"' in self.text)


def requests_of(seed: int, lane: int) -> Iterator[Request]:
    chance = random.Random(f"{seed} lane {lane}")
    for number in itertools.count():
        yield Request(
            id=f"soak-{lane}-{number}",
            model=chance.choice(MODELS),
            stream=chance.random() < 0.6,
            stays_s=chance.choice((0.0, 0.05, 0.3, 1.0)) if chance.random() < 0.25 else None,
            fake={
                "delay": chance.choice((0, 0, 0, 0.05, 0.3)),
                "chunks": chance.choice((1, 5, 20)),
                "chunk_delay": chance.choice((0, 0.01, 0.05)),
            },
        )


KINDS = {  # how likely each is, beside the others
    "kill worker": 4,
    "kill shim": 2,
    "stop worker": 1,
    "health hangs": 1,
    "next start": 6,
    "memory returns late": 2,
    "driver lost": 1,
    "unload": 2,
    "unload by force": 1,
    "load": 2,
    "reload": 1,
    "reload of a broken file": 1,
}


def faults_of(seed: int) -> Iterator[Fault]:
    chance = random.Random(f"{seed} faults")
    kinds, weights = list(KINDS), list(KINDS.values())
    while True:
        kind = chance.choices(kinds, weights)[0]
        yield Fault(
            kind=kind,
            model=chance.choice(list(FAKES) if kind in {"next start", "health hangs"} else MODELS),
            lasting_s=chance.choice((0.3, 0.3, 1.5, 4.0)),
            start=chance.choice(list(STARTS)),
            pause_s=chance.uniform(0.05, 0.6),
        )


def configuration(folder: Path, gpu: Gpu) -> dict[str, Any]:
    models = {}
    for name, mib in FAKES.items():
        flags = ("--ids-to", str(folder / "ids"), "--mute-while", str(folder / f"{name}.mute"))
        model = fake(*flags, vram_mib=mib, env=gpu.takes(mib), startup_timeout_s=3.0, grace_s=0.5)
        models[name] = model | {"cmd": ["/bin/sh", "-c", _ONCE, str(folder / f"{name}.start"), *model["cmd"]]}
    for name, mib in REAL.items():
        models[name] = llama_command(vram_mib=mib, env=gpu.takes(mib), grace_s=2.0)  # gguf would be on the processor
    limits = {
        "min_residency_s": 0.2,
        "drain_s": 1,
        "queue_wait_s": 60,
        "first_byte_s": 20,
        "stream_idle_s": 20,
        "backoff_first_s": 0.05,
        "backoff_max_s": 0.2,
        "crash_limit": 1000,
        "readiness_interval_s": 0.2,
        "liveness_interval_s": 0.3,
        "memory_warn_s": 1,
    }
    return {"devices": "auto", "models": models, "limits": limits}


class Lane:
    """A client that asks one thing after another."""

    def __init__(self, daemon: Daemon, seed: int, lane: int) -> None:
        self.answers: list[Answer] = []
        self._daemon = daemon
        self._requests = requests_of(seed, lane)

    def run(self, over: threading.Event) -> None:
        with self._daemon.client() as client:
            while not over.is_set():
                request = next(self._requests)
                ask = self._whole if request.stays_s is None else self._left
                self.answers.append(ask(client, request))

    def _whole(self, client: httpx.Client, request: Request) -> Answer:
        status, text = 0, ""
        headers = {"X-Request-Id": request.id}
        try:
            with client.stream("POST", "/v1/chat/completions", json=request.body(), headers=headers) as response:
                status = response.status_code
                for piece in response.iter_text():
                    text += piece
        except httpx.TimeoutException:
            raise
        except httpx.TransportError:
            return Answer(request, status, text, cut=True)
        return Answer(request, status, text, cut=False)

    def _left(self, _client: httpx.Client, request: Request) -> Answer:
        body = json.dumps(request.body()).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._daemon.port}\r\nX-Request-Id: {request.id}\r\n"
        head += f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self._daemon.port)) as connection:
            connection.sendall(head.encode() + body)
            connection.settimeout(request.stays_s or 0.001)
            with contextlib.suppress(OSError):
                while connection.recv(65536):
                    pass
        return Answer(request, 0, "", cut=False, left=True)


@dataclass
class Trouble:
    """Lets the faults happen, one after another."""

    daemon: Daemon
    gpu: Gpu
    faults: Iterator[Fault]
    done: list[Fault] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    _late_s: float = 0.0

    def run(self, over: threading.Event) -> None:
        with self.daemon.client() as client:
            while not over.is_set():
                fault = next(self.faults)
                try:
                    self._cause(fault, client, over)
                except Exception as error:
                    self.mistakes.append(f"{fault}: {error!r}")
                    return
                self.done.append(fault)
                over.wait(fault.pause_s)
        self.gpu.write()

    def _cause(self, fault: Fault, client: httpx.Client, over: threading.Event) -> None:
        match fault.kind:
            case "kill worker":
                self._signal(fault.model, "pid", signal.SIGKILL)
            case "kill shim":
                self._signal(fault.model, "shim_pid", signal.SIGKILL)
            case "stop worker":
                self._signal(fault.model, "pid", signal.SIGSTOP)
            case "health hangs":
                file = self.daemon.folder / f"{fault.model}.mute"
                file.touch()
                over.wait(fault.lasting_s)
                file.unlink()
            case "next start":
                file = self.daemon.folder / f"{fault.model}.start"
                file.with_suffix(".new").write_text(STARTS[fault.start])
                file.with_suffix(".new").rename(file)
            case "memory returns late":
                self._late_s = fault.lasting_s if self._late_s == 0.0 else 0.0
                self.gpu.write(return_after_s=self._late_s)
            case "driver lost":
                self.gpu.write(return_after_s=self._late_s, errors={"nvmlDeviceGetMemoryInfo": 15})
                over.wait(fault.lasting_s)
                self.gpu.write(return_after_s=self._late_s)
            case "unload" | "unload by force" | "load":
                verb, _, force = fault.kind.partition(" ")
                with contextlib.suppress(httpx.TimeoutException):  # it goes on without us
                    path = f"/v1/admin/models/{fault.model}/{verb}"
                    answer = client.post(path, params={"force": "true"} if force else {}, timeout=2)
                    assert answer.status_code in {200, 409, 503}, answer.text
            case "reload" | "reload of a broken file":
                self._reload(client, broken="broken" in fault.kind, pause_s=fault.pause_s)
            case _:
                raise AssertionError(fault.kind)

    def _signal(self, model: str, whose: str, number: signal.Signals) -> None:
        """Only to what carries the daemon's mark now: pids are used again."""
        worker = self.daemon.model(model)["worker"]
        if worker and worker[whose]:
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(worker[whose])
                try:
                    mark = f"LLMUX_INSTANCE={self.daemon.instance}".encode()
                    if mark in Path(f"/proc/{worker[whose]}/environ").read_bytes().split(b"\0"):
                        signal.pidfd_send_signal(pidfd, number)
                finally:
                    os.close(pidfd)

    def _reload(self, client: httpx.Client, *, broken: bool, pause_s: float) -> None:
        path, good = self.daemon.config_path, self.daemon.config
        good["virtual_models"] = {"alias": {"model": "a", "description": f"after {pause_s}"}}
        path.with_suffix(".new").write_text("models: {a: {" if broken else yaml.safe_dump(good, sort_keys=False))
        path.with_suffix(".new").rename(path)
        answer = client.post("/v1/admin/reload")
        assert answer.is_success != broken, answer.text


class Soak:
    """The lanes, and what troubles them; `run` as often as needed: each goes on where it was."""

    def __init__(self, daemon: Daemon, gpu: Gpu, seed: int) -> None:
        self.lanes = [Lane(daemon, seed, lane) for lane in range(LANES)]
        self.trouble = Trouble(daemon, gpu, faults_of(seed))
        self._failed: list[BaseException] = []

    @property
    def answers(self) -> list[Answer]:
        return [answer for lane in self.lanes for answer in lane.answers]

    def run(self, enough: Callable[[], bool]) -> None:
        """Until it is enough, and until the last request that runs then has ended."""
        over = threading.Event()
        threads = [
            threading.Thread(target=self._safe, args=(each.run, over), daemon=True)
            for each in (*self.lanes, self.trouble)
        ]
        for thread in threads:
            thread.start()
        try:
            while not enough() and not self._failed and not self.trouble.mistakes:
                over.wait(0.3)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not self._failed, self._failed
        assert not self.trouble.mistakes, self.trouble.mistakes

    def _safe(self, run: Callable[[threading.Event], None], over: threading.Event) -> None:
        try:
            run(over)
        except BaseException as error:
            self._failed.append(error)
