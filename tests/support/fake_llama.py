"""A `llama-server` program without llama.cpp: answers of fake_worker.py with its `timings`, and slots whose caches can be erased.

Like the real one it refuses to erase slots unless it was started with --slot-save-path. Other options are read over.

`program(folder)` makes it a program that can be started.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
SLOTS = 2
KEPT = 7  # tokens of each slot


def program(folder: Path) -> Path:
    """`folder`/llama-server, which runs this file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "llama-server"
    path.write_text(f"#!{sys.executable} -IS\nimport runpy\nrunpy.run_path({__file__!r}, run_name='__main__')\n")
    path.chmod(0o755)
    return path


def serve(words: list[str]) -> int:
    sys.path.insert(0, HERE)
    import fake_worker

    def option(name: str) -> str:
        return words[words.index(name) + 1]

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

    fake_worker.Answer = Answer
    return fake_worker.main(["--host", option("--host"), "--port", option("--port"), "--name", option("--alias")])


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
