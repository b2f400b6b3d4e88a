"""A real `llmux serve` in a process of its own, on free ports and in a folder of its own, for end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support import forker, tiny
from tests.support.limits import LIMIT_S, pause_s
from tests.support.ports import quiet_ports

REPOSITORY = Path(__file__).parents[2]
LAUNCHER = REPOSITORY / "runtimes" / "llama_server" / "worker" / "launcher.py"
FAKE_WORKER = Path(__file__).with_name("fake_worker.py")


def fake(*flags: str, **keys: object) -> dict[str, object]:
    """A model of the `command` runtime that runs the fake worker with these flags."""
    cmd = [sys.executable, "-I", "-S", str(FAKE_WORKER), "--host", "${host}", "--port", "${port}", "--name", "${model}"]
    return {"runtime": "command", "cmd": [*cmd, *flags], "vram_mib": 100, **keys}


def gguf(path: Path | None = None, **keys: object) -> dict[str, object]:
    """A model of the embedded llama.cpp server: by default the tiny one that answers `tiny.ANSWER`."""
    path = tiny.model(name="tiny-chat") if path is None else path
    return {"runtime": "llama_server", "program": "embedded", "path": str(path), "n_ctx": 2048, "threads": 1, **keys}


def llama_command(**keys: object) -> dict[str, object]:
    """The same model as a program of one's own: llama.cpp's server, of whose APIs llmux knows only that it serves them."""
    python = tiny.runtimes_dir() / "llama_server" / "bin" / "python"
    settings = {"model": str(tiny.model(name="tiny-chat")), "n_ctx": 2048, "threads": 1, "host": "127.0.0.1"}
    words = json.dumps(settings)[:-1] + ', "port": ${port}}'
    cmd = [str(python), "-I", str(LAUNCHER), words]
    return {"runtime": "command", "cmd": cmd, "health_path": "/health", "vram_mib": 200, **keys}


def wait_until(condition: Callable[[], Any], timeout_s: float = LIMIT_S, what: str = "") -> Any:
    """Poll until `condition()` is truthy, and return it."""
    began = time.monotonic()
    while True:
        found = condition()
        if found:
            return found
        waited = time.monotonic() - began
        assert waited < timeout_s, f"not within {timeout_s} s: {what or condition}"
        time.sleep(pause_s(waited))


class Daemon:
    """One state directory, and at most one daemon on it. `start()` may be called again after the daemon ended."""

    program: tuple[str, ...] = ("-m", "supervisor.cli")
    has_file = True  # false: it is configured by variables alone
    by_exec = False  # true: not forked (`forker`), for a test of what a fork doesn't share with a start from nothing

    def __init__(self, folder: Path, config: dict[str, Any], env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        self.config_path = folder / "llmux.yaml"
        self.log_path = folder / "daemon.log"
        self.env = env or {}
        first = quiet_ports(40)
        self.port = first
        server = {
            "host": "127.0.0.1",
            "port": first,
            "worker_port_first": first + 1,
            "worker_port_last": first + 39,
            "state_dir": str(self.state_dir),
            "log_format": "json",
        }
        self.config = {"devices": [{"kind": "host", "budget_mib": 4000, "margin_mib": 0}], **config}
        self.config["server"] = server | config.get("server", {})
        if "runtimes_dir" not in self.config["server"]:  # else its environments need not be installed
            self.config["server"]["runtimes_dir"] = str(tiny.runtimes_dir())
        self.process: subprocess.Popen[bytes] | forker.Forked | None = None

    # life

    def start(self, *, wait: bool = True, **streams: Any) -> Daemon:
        """`streams`: other arguments of `Popen` than the log file for `stdout` and `stderr`."""
        self.config_path.write_text(yaml.safe_dump(self.config, sort_keys=False))
        env = {name: value for name, value in os.environ.items() if not name.startswith("LLMUX_")}
        env |= {"XDG_RUNTIME_DIR": str(self.folder)} | self.env  # no command finds it there unasked
        argv = [*self.program, "serve", *(["--config", str(self.config_path)] if self.has_file else [])]
        with self.log_path.open("ab") as log, open(os.devnull) as nothing:
            streams = {"stdin": nothing, "stdout": log, "stderr": log, **streams}
            if self.by_exec or not forker.can_start(self.program, env, streams):
                self.process = subprocess.Popen([sys.executable, *argv], cwd=REPOSITORY, env=env, **streams)
            else:
                self.process = forker.start(argv, cwd=REPOSITORY, env=env, **streams)
        if wait:
            wait_until(self._answers, what=f"the daemon listens; its log: {self.log_path}")
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the daemon ended:\n{self.log_text()}"
        try:
            return httpx.get(f"{self.url}/health", trust_env=False, verify=False, timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and reap it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = LIMIT_S) -> int:
        """SIGTERM, and wait for the end; the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        return self.process.returncode

    # asking

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **keys: Any) -> httpx.Client:
        kept = httpx.Limits(keepalive_expiry=None)  # else it leaves a connection after 5 s, on a busy machine too soon
        return httpx.Client(base_url=self.url, trust_env=False, verify=False, timeout=LIMIT_S, limits=kept, **keys)

    def get(self, path: str, **keys: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", trust_env=False, verify=False, timeout=LIMIT_S, **keys)

    def post(self, path: str, **keys: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", trust_env=False, verify=False, timeout=LIMIT_S, **keys)

    def chat(self, model: str, *, text: str = "Hello", **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
        return self.post("/v1/chat/completions", json=body)

    def model(self, name: str) -> dict[str, Any]:
        """`GET /v1/admin/models/{name}`."""
        answer = self.get(f"/v1/admin/models/{name}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def wait_state(self, name: str, state: str, timeout_s: float = LIMIT_S) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            view = self.model(name)
            return view if view["state"] == state else None

        return wait_until(reached, timeout_s, f"{name} is {state}")

    def wait_gone(self, name: str, pid: int) -> None:
        """Until the daemon knows that this worker has ended; before, it could give it one more request."""
        wait_until(lambda: (self.model(name)["worker"] or {}).get("pid") != pid, what=f"worker {pid} of {name} is gone")

    def wait_foretold(self, name: str) -> dict[str, Any]:
        """Until what a model's worker takes is what was foretold, within 30 %; its memory then."""
        deadline = time.monotonic() + 60.0
        while True:
            memory: dict[str, Any] = self.model(name)["memory"]
            measured_mib = memory["measured_mib"] or 0  # the first measurement may be from before it computed anything
            if measured_mib * 0.7 <= memory["estimate"]["mib"] <= measured_mib * 1.3:
                return memory
            assert time.monotonic() < deadline, f"{name}: {memory}"
            time.sleep(0.1)

    def decisions(self, model: str | None = None) -> list[dict[str, Any]]:
        return self.get("/v1/admin/decisions", params={"limit": 1000} | ({"model": model} if model else {})).json()[
            "data"
        ]

    # looking

    @property
    def instance(self) -> str:
        return (self.state_dir / "instance.lock").read_text().split()[0]

    def workers(self) -> list[int]:
        """Every living process that carries this instance's mark, shims included."""
        marker = f"LLMUX_INSTANCE={self.instance}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if marker in (entry / "environ").read_bytes().split(b"\0") and not _is_zombie(entry):
                        found.append(int(entry.name))
        return found

    def log_text(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        """The daemon's log lines of this event; of one that runs, with all it had to say before now."""
        if self.process is not None and self.process.poll() is None:
            wait_until(self._answers)  # it writes its lines when a turn of its loop ends, a moment after it answered
        lines = [json.loads(line) for line in self.log_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("event") == name]


def _is_zombie(entry: Path) -> bool:
    return (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"


@contextlib.contextmanager
def running(folder: Path, config: dict[str, Any], *, by_exec: bool = False, **keys: Any) -> Iterator[Daemon]:
    """A started daemon, which is stopped at the end and must then have left no process behind."""
    daemon = Daemon(folder, config, **keys)
    daemon.by_exec = by_exec
    try:
        daemon.start()
        yield daemon
    finally:
        if daemon.process is not None:
            daemon.stop()
            wait_until(lambda: not daemon.workers(), what="no worker is left")
