"""A `vllm` program without vLLM: real processes that come, answer and go as those of `vllm serve` do.

An engine core in a session of its own, with an executor below it, both deaf to SIGTERM; `/health` first and the list of
models a moment later; the key in VLLM_API_KEY, asked for under /v1; names that it doesn't know are refused. Answers are
those of fake_worker.py. Options that it has no use for are read over.

`program(folder)` makes it a program that can be started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS_AFTER_S = 0.3


def program(folder: Path) -> Path:
    """`folder`/vllm, which runs this file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "vllm"
    path.write_text(f"#!{sys.executable} -IS\nimport runpy\nrunpy.run_path({__file__!r}, run_name='__main__')\n")
    path.chmod(0o755)
    return path


def sleep_for_ever() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(3600)


def engine() -> None:
    """The engine core: one executor below it."""
    if os.fork() == 0:
        sleep_for_ever()
    sleep_for_ever()


def option(words: list[str], name: str) -> list[str]:
    """The values behind an option, up to the next one."""
    if name not in words:
        return []
    rest = words[words.index(name) + 1 :]
    return rest[: next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))]


def serve(words: list[str]) -> int:
    sys.path.insert(0, HERE)
    import fake_worker

    print("argv:", json.dumps(words), flush=True)
    if not os.path.exists(os.path.join(words[0], "config.json")):
        print(f"OSError: {words[0]} does not appear to have a file named config.json", flush=True)
        return 1
    if option(words, "--quantization") == ["none-such"]:
        print("ValueError: Unknown quantization method: none-such", flush=True)
        return 1
    names = option(words, "--served-model-name")
    core = subprocess.Popen([sys.executable, "-IS", __file__, "engine"], start_new_session=True)
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
                self.send_response(200)
                body = b'vllm:num_requests_running{model_name="model"} 0\nvllm:kv_cache_usage_perc{model_name="model"} 0.25\n'
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            elif self.path == "/v1/models" and time.monotonic() - began < MODELS_AFTER_S:
                self.send_json(503, {"error": {"message": "the engine isn't there yet"}})
            elif not self.refused():
                super().do_GET()

        def answer(self, raw: bytes) -> None:
            if self.refused():
                return
            if self.path == "/v1/chat/completions" and json.loads(raw).get("model") not in names:
                self.send_json(404, {"error": {"message": "no such model", "type": "NotFoundError", "code": 404}})
                return
            if self.path == "/v1/messages":
                self.send_json(
                    200, {"type": "message", "role": "assistant", "content": [], "received": json.loads(raw)}
                )
                return
            super().answer(raw)

    fake_worker.Answer = Answer
    where = ["--host", *option(words, "--host"), "--port", *option(words, "--port")]
    return fake_worker.main([*where, "--name", names[0]])


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        engine()
    sys.exit(serve(sys.argv[2:]))
