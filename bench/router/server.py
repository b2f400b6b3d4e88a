"""llama.cpp's router and llmux with one interface: both serve OpenAI's API and the paths /models/load and /models/unload.

Both start the same llama-server with the same options for a model. The router limits the number of loaded models, llmux
their memory: here each model has 1000 MiB, and llmux gets 1000 MiB for each model of the limit.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import httpx

from bench.targets import LLMUX, Target, free_port
from supervisor.cli.demo import tiny

ROUTER: Final = "llama.cpp's router"
MODELS: Final = ("alpha", "beta", "gamma")
BROKEN: Final = "broken"
SIZE_MIB: Final = 100
SLOTS: Final = 4
HUNG_S: Final = 30.0
POLL_S: Final = 0.005

_CONFIG: Final = """
devices: [{{kind: host, budget_mib: {budget}, margin_mib: 0}}]
models:
"""
_MODEL: Final = (
    "  {name}: {{path: {models}/{name}.gguf, program: binary, binary: {program}, threads: 1, n_ctx: 8192,"
    " parallel: {slots}, vram_mib: 1000}}\n"
)

Kind = Literal["good", "wrong", "error", "hung", "left"]


@dataclass(frozen=True, slots=True)
class Answer:
    """Kinds: `good`: complete and by the requested model; `wrong`: complete, but otherwise.

    `hung`: incomplete after `HUNG_S`. `left`: no answer, but a worker that survived its server.
    """

    kind: Kind
    seconds: float
    first_s: float = 0.0
    """Seconds to the first event of a stream."""
    events: int = 0


def write_models(folder: Path) -> None:
    """Write three models that answer with their names, and one with a truncated file."""
    for seed, name in enumerate(MODELS):
        tiny.write(folder / f"{name}.gguf", tiny.Tiny(name=name, seed=seed, answer=says(name), size_mib=SIZE_MIB))
    (folder / f"{BROKEN}.gguf").write_bytes((folder / f"{MODELS[0]}.gguf").read_bytes()[: 1 << 20])


def says(model: str) -> str:
    return f"I am {model}"


def router_command(program: Path, folder: Path, port: int, limit: int) -> list[str]:
    """llama-server as a router, with the same options for its workers as llmux's workers get."""
    argv = [str(program), "--models-dir", str(folder / "models"), "--models-max", str(limit), "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--threads", "1", "--ctx-size", "8192", "--parallel", str(SLOTS)]
    return [*argv, "--n-gpu-layers", "0", "--kv-unified", "--cache-ram", "0"]


def llmux_command(program: Path, folder: Path, port: int, limit: int) -> list[str]:
    """`llmux serve` with memory for `limit` models, everything else by default."""
    config, found = folder / "llmux.yaml", folder / "models"
    models = (_MODEL.format(name=name, models=found, program=program, slots=SLOTS) for name in (*MODELS, BROKEN))
    config.write_text(_CONFIG.format(budget=1000 * limit) + "".join(models))
    argv = [sys.executable, "-m", "supervisor.cli", "serve", "--config", str(config), "--port", str(port)]
    return [*argv, "--state-dir", str(folder / "state")]


COMMANDS: Final[dict[str, Callable[[Path, Path, int, int], list[str]]]] = {ROUTER: router_command, LLMUX: llmux_command}


class Server(Target):
    """A running router or llmux. `models`: this server's own folder."""

    def __init__(self, name: str, port: int, process: subprocess.Popen[bytes], models: Path) -> None:
        super().__init__(name, port, process)
        self.root = process
        self._models = os.fsencode(models)
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=HUNG_S, limits=limits
        )

    def workers(self) -> dict[int, str]:
        """The process id and model of each running llama-server of this server."""
        found = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) > self.root.pid:
                with suppress(OSError):
                    words = Path(entry.path, "cmdline").read_bytes().split(b"\0")
                    mine = [word for word in words if word.startswith(self._models) and word.endswith(b".gguf")]
                    if mine and b"llama-server" in words[0]:
                        found[int(entry.name)] = Path(os.fsdecode(mine[0])).stem
        return found

    async def until_ended(self, limit_s: float) -> float | None:
        """Seconds until all workers have ended; None if one still runs after `limit_s`."""
        began = time.monotonic()
        while self.workers():
            if time.monotonic() - began > limit_s:
                return None
            await asyncio.sleep(POLL_S)
        return time.monotonic() - began

    def own_mib(self) -> float:
        """The memory of all processes but the workers, in MiB; a shared page is divided among its processes."""
        pids, workers = [self.root.pid], self.workers()
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split() if int(child) not in workers]
        texts = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
        return (
            sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("Pss:")) / 1024
        )

    async def ask(self, model: str, tokens: int = 8, started: asyncio.Event | None = None) -> Answer:
        """Request a stream of so many tokens. Sets `started` at its first event. Raises nothing but CancelledError."""
        body = {"model": model, "messages": [{"role": "user", "content": "Who?"}], "max_tokens": tokens}
        body |= {"ignore_eos": True, "stream": True}
        began, first_s, events, text, finish = time.monotonic(), 0.0, 0, "", ""

        async def read() -> Kind:
            nonlocal first_s, events, text, finish
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    return "error"
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        whole = says(model) in text and finish == "length"
                        return "good" if whole else "wrong"
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return "error"
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                        finish = choice.get("finish_reason") or finish
                    events += 1
                    first_s = first_s or time.monotonic() - began
                    if started:
                        started.set()
            return "error"

        try:
            async with asyncio.timeout(HUNG_S):
                kind = await read()
        except (TimeoutError, httpx.TimeoutException):
            kind = "hung"
        except httpx.HTTPError:
            kind = "error"
        return Answer(kind, time.monotonic() - began, first_s, events)

    async def ask_plainly(self, model: str) -> Answer:
        """Request one token, not streamed, on an open connection of earlier answers, if any."""
        body = {"model": model, "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1}
        began = time.monotonic()
        try:
            kind: Kind = "good" if (await self._client.post("/v1/chat/completions", json=body)).is_success else "error"
        except httpx.TimeoutException:
            kind = "hung"
        except httpx.HTTPError:
            kind = "error"
        return Answer(kind, time.monotonic() - began)

    async def unload(self, model: str) -> None:
        (await self._client.post("/models/unload", json={"model": model})).raise_for_status()

    async def healthy(self) -> None:
        """Wait until the server answers."""
        async with asyncio.timeout(60):
            while True:
                assert self.root.poll() is None, f"{self.name} ended with {self.root.returncode}"
                with suppress(httpx.TransportError):
                    if (await self._client.get("/health")).is_success:
                        return
                await asyncio.sleep(POLL_S)

    async def end(self) -> None:
        """Stop the server and leftover workers."""
        await self._client.aclose()
        if self.root.poll() is None:
            self.stop()
        for pid in self.workers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def running(name: str, program: Path, folder: Path, limit: int) -> AsyncIterator[Server]:
    """Run a server for the block. `folder` has the models; the server gets its own folder with links to them."""
    port = free_port()
    home = folder / str(port)
    (home / "models").mkdir(parents=True)
    for file in folder.glob("*.gguf"):
        (home / "models" / file.name).hardlink_to(file)
    with (home / "log").open("wb") as log:
        argv = COMMANDS[name](program, home, port, limit)
        process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
    server = Server(name, port, process, home / "models")
    try:
        await server.healthy()
        yield server
    finally:
        await server.end()
