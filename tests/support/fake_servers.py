"""Servers of other projects without their engines: programs that are started and asked as the real ones are.

Each is laid out as its installer would: llama-server, vllm and TGI's launcher are programs, SGLang a package in an environment of
its own, TabbyAPI a checkout with an environment in its folder `venv`. The last three refuse options that the real program
doesn't have (tests/support/options); all find their keys where it does, and fail on a model that it doesn't know, with its
words. What they answer is fake_worker's, and what is said of each below.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.support import fake_programs, fake_worker

OPTIONS = Path(__file__).parent / "options"
SLOTS = 2
KEPT = 7  # tokens of each slot
MODELS_AFTER_S = 0.3


# ------------------------------------------------------------------------------------------------------------ as installed


def llama_server(folder: Path) -> Path:
    """The program."""
    return fake_programs.program(folder / "llama-server", "fake_servers.run_llama_server")


def vllm(folder: Path) -> Path:
    """The program."""
    return fake_programs.program(folder / "vllm", "fake_servers.run_vllm")


def tgi(folder: Path) -> Path:
    """The launcher."""
    return fake_programs.program(folder / "text-generation-launcher", "fake_servers.run_tgi")


def sglang(folder: Path) -> Path:
    """The interpreter of its environment."""
    package = _environment(folder / "environment") / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(fake_programs.code("fake_servers.run_sglang"))
    return folder / "environment" / "bin" / "python"


def tabbyapi(folder: Path) -> Path:
    """The checkout; in it a configuration and keys that aren't ours."""
    checkout = folder / "tabbyAPI"
    _environment(checkout / "venv")
    (checkout / "templates").mkdir()
    (checkout / "templates" / "alpaca.jinja").touch()
    (checkout / "api_tokens.yml").write_text('{"api_key": "theirs", "admin_key": "theirs"}')
    (checkout / "config.yml").write_text("model: {model_name: theirs}")
    (checkout / "main.py").write_text(fake_programs.code("fake_servers.run_tabbyapi"))
    return checkout


def _environment(folder: Path) -> Path:
    """An environment without anything; its packages' folder."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    return packages


# ------------------------------------------------------------------------------------------------------------ as started


class Words:
    """What one was started with; nothing that isn't among the options of the `program`, if that is given."""

    def __init__(self, words: Sequence[str], program: str | None = None) -> None:
        print("argv:", json.dumps(words), flush=True)
        self.words = words
        if program is not None:
            known = (OPTIONS / f"{program}.txt").read_text().split()
            for word in words:
                if word.startswith("--") and word.partition("=")[0] not in known:
                    sys.exit(f"error: unexpected argument {word}")

    def all(self, option: str) -> Sequence[str]:
        """The values behind it, up to the next one."""
        if option not in self.words:
            return []
        rest = self.words[self.words.index(option) + 1 :]
        return rest[: next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))]

    def __getitem__(self, option: str) -> str:
        return self.all(option)[0]

    def check(self, folder: str, complaint: str) -> None:
        """Ends where this isn't a model that it knows."""
        (architecture,) = json.loads(Path(folder, "config.json").read_text())["architectures"]
        if architecture.startswith("NoSuch"):
            print(complaint.format(architecture), flush=True)
            sys.exit(1)

    def serve(self, host: str, port: str, name: str, key: str | None = None, answer=fake_worker.Answer) -> int:
        flags = ["--host", host, "--port", port, "--name", name]
        if key is not None:
            os.environ["FAKE_KEY"] = key
            flags += ["--key-env", "FAKE_KEY"]
        return fake_worker.main(flags, answer)


def run_tgi(words: Sequence[str]) -> int:
    said = Words(words, "tgi")
    said.check(said["--model-id"], "ValueError: Unsupported model type {}")
    shard = socket.socket(socket.AF_UNIX)
    shard.bind(said["--shard-uds-path"] + "-0")
    return said.serve(said["--hostname"], said["--port"], said["--model-id"], os.environ["API_KEY"])


def run_sglang(words: Sequence[str]) -> int:
    said = Words(words, "sglang")
    said.check(said["--model-path"], "ValueError: Model architectures ['{}'] are not supported for now.")
    return said.serve(said["--host"], said["--port"], said["--served-model-name"], said["--api-key"])


def run_tabbyapi(words: Sequence[str]) -> int:
    said = Words(words, "tabbyapi")
    said.check(os.path.join(said["--model-dir"], said["--model-name"]), "AssertionError: Unknown architecture {}")
    assert os.listdir("templates") == ["alpaca.jinja"]  # it looks for them where it runs
    assert not os.path.exists("config.yml")
    key = json.loads(Path("api_tokens.yml").read_text())["api_key"]
    return said.serve(said["--host"], said["--port"], said["--model-name"], key)


def run_llama_server(words: Sequence[str]) -> int:
    """With `timings`, and slots whose caches can be erased: like the real one only if it was started with --slot-save-path."""
    said = Words(words)

    class Answer(fake_worker.Answer):
        def do_GET(self) -> None:
            if self.path == "/slots":
                self.send_json(200, [{"id": number, "is_processing": False} for number in range(SLOTS)])
            else:
                super().do_GET()

        def answer(self, raw: bytes) -> None:
            path, _, query = self.path.partition("?")
            if not (path.startswith("/slots/") and query == "action=erase"):
                super().answer(raw)
            elif "--slot-save-path" in words:
                self.send_json(200, {"id_slot": int(path.rpartition("/")[2]), "n_erased": KEPT})
            else:
                self.send_json(501, {"error": {"message": "This server does not support slots action.", "code": 501}})

        def completion(self, choice: dict[str, object], kind: str = "chat.completion") -> dict[str, object]:
            timings = {"cache_n": KEPT, "prompt_n": 1, "prompt_ms": 10.5, "predicted_n": 5, "predicted_ms": 20.0}
            return super().completion(choice, kind) | {"timings": timings}

    return said.serve(said["--host"], said["--port"], said["--alias"], answer=Answer)


def run_vllm(words: Sequence[str]) -> int:
    """Processes that come, answer and go as those of `vllm serve` do.

    An engine core in a session of its own, with an executor below it, both deaf to SIGTERM; `/health` first and the list of
    models a moment later; the key in VLLM_API_KEY, asked for under /v1; names that it doesn't know are refused.
    """
    if words[0] == "engine":
        os.fork()  # the executor
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        fake_worker.sleep_for_ever()
    _, model, *rest = words
    said = Words([model, *rest])
    if not Path(model, "config.json").exists():
        print(f"OSError: {model} does not appear to have a file named config.json", flush=True)
        return 1
    if said.all("--quantization") == ["none-such"]:
        print("ValueError: Unknown quantization method: none-such", flush=True)
        return 1
    names = said.all("--served-model-name")
    core = subprocess.Popen([sys.executable, "-IS", sys.argv[0], "engine"], start_new_session=True)
    print(f"engine core {core.pid}", flush=True)
    key = f"Bearer {os.environ['VLLM_API_KEY']}"
    began = time.monotonic()

    class Answer(fake_worker.Answer):
        def refused(self) -> bool:
            if self.path.startswith("/v1") and self.headers.get("Authorization") != key:
                self.send_json(401, {"error": "Unauthorized"})
                return True
            return False

        def do_GET(self) -> None:
            if self.path == "/metrics":
                figures = b'vllm:num_requests_running{model_name="model"} 0\nvllm:kv_cache_usage_perc{model_name="model"} 0.25\n'
                self.send(200, figures, "text/plain; version=0.0.4; charset=utf-8")
            elif self.path == "/v1/models" and time.monotonic() - began < MODELS_AFTER_S:
                self.send_json(503, {"error": {"message": "the engine isn't there yet"}})
            elif not self.refused():
                super().do_GET()

        def answer(self, raw: bytes) -> None:
            if self.refused():
                return
            if self.path == "/v1/chat/completions" and json.loads(raw).get("model") not in names:
                self.send_json(404, {"error": {"message": "no such model", "type": "NotFoundError", "code": 404}})
            elif self.path == "/v1/messages":
                received = json.loads(raw)
                self.send_json(200, {"type": "message", "role": "assistant", "content": [], "received": received})
            else:
                super().answer(raw)

    return said.serve(said["--host"], said["--port"], names[0], answer=Answer)
