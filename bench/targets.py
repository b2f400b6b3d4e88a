"""The targets of the comparison: the stub itself, nginx in front of it, the data path alone, and the whole daemon."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from bench.load import HEALTH, KEY, LIMITED_KEY, repeat, request_bytes

NGINX: Final = shutil.which("nginx") or ("/usr/sbin/nginx" if Path("/usr/sbin/nginx").exists() else None)
NGINX_MISSING: Final = "nginx is not installed, its column is left out (Debian: apt-get install nginx-light)"

LLMUX: Final = "llmux"
GO: Final = shutil.which("go")
GO_MISSING: Final = "Go is not installed, its column is left out (Debian: apt-get install golang-go)"

_NGINX_CONF: Final = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u;
  scgi_temp_path {folder}/s;
  client_max_body_size 64m;
  keepalive_requests 1000000;
  upstream stub {{ server 127.0.0.1:{upstream}; keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{
      proxy_pass http://stub;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""

_LLMUX_CONF: Final = """
server: {{api_keys: "{folder}/keys.yaml"}}
clients:
  limited: {{request_rate: 1000000/s, token_rate: 100000000/s}}
virtual_models:
  named: {{model: stub}}
  tuned: {{model: stub, defaults: {{temperature: 0.5}}}}
models:
  stub: &stub
    runtime: command
    cmd: ["{python}", "-m", "bench.stub", "--port", "${{port}}", "--core", "{core}", "--report", "{report}"]
    health_path: /health
    vram_mib: 64
    env: {{PYTHONPATH: "{root}"}}
  chats:
    <<: *stub
    endpoints: [/v1/chat/completions]
"""
_KEYS: Final = f"""
- {{name: bench, key: {KEY}}}
- {{name: limited, key: {LIMITED_KEY}}}
"""


def free_port() -> int:
    """A port on which no program listens now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Target:
    """A running server program: its port and the processes whose CPU and memory count."""

    def __init__(self, name: str, port: int, process: subprocess.Popen[bytes], *, with_children: bool = False) -> None:
        self.name = name
        self.port = port
        self.cold_cpu_s = 0.0  # CPU seconds to the first 200 of /health
        self.first_chat_cpu_s = 0.0  # CPU seconds to the first answer; for it, the daemon starts its worker
        self._process = process
        self._with_children = with_children

    def pids(self) -> list[int]:
        pids = [self._process.pid]
        if self._with_children:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
            pids += [int(pid) for pid in children.split()]
        return pids

    def cpu_ns(self) -> int:
        """CPU time used so far, of all threads including ended ones: the kernel's clock of each process."""
        return sum(
            time.clock_gettime_ns(~pid << 3 | 2) for pid in self.pids()
        )  # the clock id of clock_getcpuclockid(3)

    def memory_kib(self, field: str = "VmRSS") -> int:
        """VmRSS, or VmHWM: the peak since `reset_peak`."""
        total = 0
        for pid in self.pids():
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(field + ":"):
                    total += int(line.split()[1])
        return total

    def reset_peak(self) -> None:
        for pid in self.pids():
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    async def ready(self) -> None:
        """Wait for the first good answers, and record their CPU time."""
        await self._wait_for_answer(HEALTH)
        self.cold_cpu_s = self.cpu_ns() / 1e9
        await self._wait_for_answer(request_bytes())
        self.first_chat_cpu_s = self.cpu_ns() / 1e9

    async def _wait_for_answer(self, request: bytes) -> None:
        deadline = time.monotonic() + 60
        while True:
            assert self._process.poll() is None, f"{self.name} ended with {self._process.returncode}"
            with suppress(OSError, AssertionError, TimeoutError):
                if (await repeat(self.port, 1, 0.0, request=request)).count:
                    return
            assert time.monotonic() < deadline, f"{self.name} does not answer"
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _start_process(argv: list[str], core: int, more: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    log = None if os.environ.get("BENCH_VERBOSE") else subprocess.DEVNULL
    process = subprocess.Popen(argv, stdout=log, stderr=log, env=os.environ | (more or {}))
    os.sched_setaffinity(process.pid, {core})
    return process


def start_stub(core: int, report: int) -> Target:
    """The upstream of all targets but the daemon, which starts its own stub."""
    port = free_port()
    argv = [sys.executable, "-m", "bench.stub", "--port", str(port), "--core", str(core), "--report", str(report)]
    return Target("direct", port, _start_process(argv, core))


def start_nginx(core: int, upstream: int, folder: Path) -> Target:
    """nginx as a plain reverse proxy with one worker process."""
    assert NGINX
    port = free_port()
    conf = folder / "nginx.conf"
    conf.write_text(_NGINX_CONF.format(folder=folder, port=port, upstream=upstream))
    return Target("nginx", port, _start_process([NGINX, "-c", str(conf), "-p", str(folder)], core), with_children=True)


def start_go(core: int, upstream: int, folder: Path) -> Target:
    """Go's reverse proxy on one processor, compiled from `bench/go`."""
    assert GO
    port = free_port()
    program = folder / "proxy"
    source = Path(__file__).with_name("go") / "main.go"
    env = os.environ | {"GOCACHE": str(folder / "cache"), "GOFLAGS": "-mod=mod", "GO111MODULE": "off"}
    subprocess.run([GO, "build", "-o", str(program), str(source)], check=True, env=env)
    argv = [str(program), "-listen", f"127.0.0.1:{port}", "-upstream", f"http://127.0.0.1:{upstream}"]
    return Target("Go", port, _start_process(argv, core, {"GOMAXPROCS": "1"}))


def start_path_only(core: int, upstream: int) -> Target:
    """`bench.path_only`: the data path alone."""
    port = free_port()
    argv = [sys.executable, "-m", "bench.path_only", "--port", str(port), "--upstream", str(upstream)]
    return Target("path only", port, _start_process(argv, core))


def compiled() -> Path:
    """The checkout, with all modules compiled."""
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-m", "compileall", "-q", "supervisor", "runtimes"], check=True, cwd=root)
    return root


def start_llmux(core: int, stub_core: int, report: int, folder: Path) -> Target:
    """`llmux serve` with the stub as a `command` model, and keys; its modules are compiled, as an installer does."""
    port = free_port()
    conf = folder / "llmux.yaml"
    root = compiled()
    keys = folder / "keys.yaml"
    keys.touch(mode=0o600)
    keys.write_text(_KEYS)
    conf.write_text(_LLMUX_CONF.format(python=sys.executable, core=stub_core, report=report, root=root, folder=folder))
    argv = [sys.executable, "-m", "supervisor.cli", "serve", "--config", str(conf), "--port", str(port)]
    argv += ["--state-dir", str(folder / "state")]
    return Target(LLMUX, port, _start_process(argv, core))


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """For configurations and logs; nginx's workers, which may run as another user, must be able to enter it."""
    folder = tempfile.TemporaryDirectory(prefix="llmux-bench-")
    Path(folder.name).chmod(0o755)
    return folder
