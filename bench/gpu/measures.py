"""The measurements of a model on a GPU: each function drives a real daemon and reads the card without it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from bench.gpu.card import Card
from bench.gpu.subjects import CHAT, Subject
from tests.support.daemon import Daemon, wait_until

LOAD_S = 600.0
BACK_S = 60.0
SETTLED_S = 1.0
LOG_LINES = 15
LOOSE_MIB = 64  # the driver's own use of memory may vary by this

TAKE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
for call in (
    lambda: cuda.cuInit(0),
    lambda: cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0),
    lambda: cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
):
    error = call()
    assert error == 0, error
mib = min(int(sys.argv[1]), (free.value >> 20) - 256)
while mib > 0 and cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(mib << 20)) != 0:
    mib -= 64
assert mib > 0, "nothing is free"
print("taken", mib, flush=True)
sys.stdin.read()
"""
"""A program that takes so many MiB of the first GPU, until its input ends. Where less is free, it leaves 256 MiB.

Its own context takes hundreds of MiB, and other processes take memory meanwhile, so it asks for less until it succeeds.
"""


@dataclass(frozen=True, slots=True)
class Footprint:
    """MiB: the estimate, and the card's memory that the load took."""

    estimate_mib: int
    taken_mib: int


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one streamed answer. `tokens_per_s` counts from the first event to the last."""

    first_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Swaps:
    """The median seconds of a swap from one model to the other, and the card's free memory lost from the first to the last."""

    count: int
    median_s: float
    leak_mib: int


@dataclass(frozen=True, slots=True)
class Beside:
    """The result of a load beside another process: whether that process came during the load, and the daemon's failure message."""

    during: bool
    failure: str | None


def load(daemon: Daemon, model: str) -> float:
    """Load a model; the seconds until it is ready. Raises AssertionError with the daemon's message where the load fails."""
    began = time.monotonic()
    with daemon.client() as client:
        response = client.post(
            f"/v1/admin/models/{model}/load", timeout=LOAD_S
        )  # the response comes when the model is ready
    assert response.is_success, response.text
    return time.monotonic() - began


def load_beside(daemon: Daemon, model: str, outsider: Outsider) -> Beside:
    """Load a model while another process starts and takes memory."""
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(load, daemon, model)
        wait_until(lambda: loading.done() or daemon.model(model)["state"] == "starting", what=f"{model} starts")
        with outsider:
            during = not loading.done()
            error = loading.exception()
            assert daemon.get("/health").status_code == 200
    if error is not None and not isinstance(error, AssertionError):
        raise error
    return Beside(during, None if error is None else str(error))


def settled(card: Card) -> int:
    """The free MiB, once unchanged for a second: memory is freed a while after its process has ended."""
    began = since = time.monotonic()
    free_mib = card.free_mib()
    while (now := time.monotonic()) - since < SETTLED_S and now - began < BACK_S:
        time.sleep(SETTLED_S / 10)
        if (found := card.free_mib()) != free_mib:
            since, free_mib = now, found
    return free_mib


def footprint(daemon: Daemon, card: Card, model: str, before_mib: int) -> Footprint:
    """The footprint of a loaded model; `before_mib` was free before the load."""
    return Footprint(daemon.model(model)["memory"]["estimate"]["mib"], before_mib - settled(card))


def answered(daemon: Daemon, subject: Subject, model: str) -> None:
    """Send one request. Raises AssertionError if it fails."""
    arguments = dict(subject.request())
    field = "json" if "json" in arguments else "data"
    arguments[field] = {**arguments[field], "model": model}
    with daemon.client() as client:
        answer = client.post(subject.path, timeout=LOAD_S, **arguments)
    assert answer.status_code == 200, answer.text


def speed(daemon: Daemon, subject: Subject, model: str) -> Speed | None:
    """The speed of a chat's stream; None for a subject without chat. Raises AssertionError if the stream has no answer."""
    if subject.path != CHAT:
        return None
    body = {**subject.request()["json"], "model": model, "stream": True, "stream_options": {"include_usage": True}}
    began, times, tokens = time.monotonic(), [], 0
    with daemon.client() as client, client.stream("POST", CHAT, json=body, timeout=LOAD_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                times += [time.monotonic()] if event.get("choices") else []
                assert "error" not in event, event
    assert times, "the stream holds no answer"
    seconds = times[-1] - times[0]
    return Speed(times[0] - began, (tokens - 1) / seconds if seconds > 0 else 0.0)


def kill(daemon: Daemon, card: Card, model: str, before_mib: int) -> float:
    """Kill the model's worker; the seconds until the card has `before_mib` free again."""
    pid = daemon.model(model)["worker"]["pid"]
    os.kill(pid, signal.SIGKILL)
    took_s = back(card, before_mib)
    wait_until(lambda: (daemon.model(model)["worker"] or {}).get("pid") != pid, what="the daemon knows of it")
    return took_s


def back(card: Card, before_mib: int, *, limit_s: float = BACK_S) -> float:
    """The seconds until so much is free again. Raises AssertionError after `limit_s`."""
    began = time.monotonic()
    wait_until(lambda: card.free_mib() >= before_mib - LOOSE_MIB, limit_s, f"{before_mib} MiB are free again")
    return time.monotonic() - began


def swaps(daemon: Daemon, card: Card, subject: Subject, models: Sequence[str], count: int) -> Swaps:
    """Send requests to the models in turn, while only one may be loaded."""
    for model in models:  # load each model once before the measurement
        answered(daemon, subject, model)
    before_mib, seconds = settled(card), []
    for turn in range(count):
        began = time.monotonic()
        answered(daemon, subject, models[turn % len(models)])
        seconds.append(time.monotonic() - began)
    wait_until(lambda: not any(daemon.model(model)["in_flight"] for model in models))
    return Swaps(count, statistics.median(seconds), before_mib - settled(card))


class Outsider:
    """A process outside llmux that takes memory of the card, `mib` at most. `argv`: another program, started without `mib`."""

    def __init__(self, mib: int, *, argv: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        self._argv = list(argv) or [sys.executable, "-c", TAKE, str(mib)]
        self._env = {**os.environ, **(env or {})}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self._env
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith(b"taken"), "it could take no memory"
        return self

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.communicate()


def contexts(daemon: Daemon, card: Card) -> list[str]:
    """The supervisor's own processes that use the card, or have its driver open: there should be none."""
    assert daemon.process is not None
    own = psutil.Process(daemon.process.pid)
    used = card.pids()
    found = []
    for process in (own, *own.children()):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):  # a child that has ended
            if process != own and "shim" not in " ".join(process.cmdline()):
                continue
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            if process.pid in used or "libcuda.so" in maps:
                found.append(f"{process.pid} {process.name()}")
    return found
