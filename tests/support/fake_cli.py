"""A command line program that answers a prompt, as Claude's CLI does. What it does is the last line of the prompt.

Run it as `fake_cli.py FORMAT SEEN [OPTIONS …]`: FORMAT is text, claude_json or claude_stream_json; it writes what it was
given to a file in the folder SEEN, named by its pid. Standard library alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

USAGE = {
    "input_tokens": 5,
    "cache_creation_input_tokens": 3,
    "cache_read_input_tokens": 2,
    "output_tokens": 4,
    "service_tier": "standard",
}
LINGER = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid(); time.sleep(3600)"


def line(fact: object) -> None:
    print(json.dumps(fact), flush=True)


def delta(text: str) -> None:
    piece = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    line({"type": "stream_event", "event": piece, "parent_tool_use_id": None})


def answer(style: str, text: str, wait: Path | None) -> None:
    """In pieces where it streams; after the first one it waits until the file is there."""
    first, rest = text[: len(text) // 2], text[len(text) // 2 :]
    result = {"type": "result", "subtype": "success", "is_error": False, "result": text, "usage": USAGE}
    if style == "claude_stream_json":
        line({"type": "system", "subtype": "init", "tools": []})
        delta(first)
    elif style == "text":
        print(first, end="", flush=True)
    while wait is not None and not wait.exists():
        time.sleep(0.01)
    if style == "claude_stream_json":
        delta(rest)
        line({"type": "assistant", "message": {"content": [{"type": "text", "text": text}]}})
        line({**result, "stop_reason": "end_turn"})
    elif style == "claude_json":
        line(result)
    else:
        print(rest)


def main() -> None:
    style, seen, *options = sys.argv[1:]
    prompt = sys.stdin.read()
    files = {name: Path(name).read_text() for name in options if name.startswith("/")}
    about = {
        "prompt": prompt,
        "options": options,
        "files": files,
        "env": dict(os.environ),
        "cwd": str(Path.cwd()),
        "here": sorted(os.listdir()),
        "mode": oct(Path.cwd().parent.stat().st_mode & 0o777),
        "stdin": os.isatty(0),
    }
    note = Path(seen, f"{os.getpid()}.part")
    note.write_text(json.dumps(about))
    note.rename(note.with_suffix(".json"))
    wish, _, argument = prompt.strip().rpartition("\n")[2].partition(" ")
    if wish == "hang":
        print("so far", end="", flush=True)
        time.sleep(3600)
    elif wish == "flood":
        while True:
            os.write(2 if argument == "stderr" else 1, b"x" * 65536)
    elif wish == "exit":
        print("the secret of the prompt", file=sys.stderr)
        sys.exit(int(argument))
    elif wish == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif wish == "linger":
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", LINGER], env={})
        while os.getsid(child.pid) != child.pid:
            time.sleep(0.01)
        Path(seen, "child").write_text(str(child.pid))
        if argument == "hang":
            time.sleep(3600)
        answer(style, f"left {child.pid}", None)
    elif wish == "nonsense":
        print("no JSON at all")
    elif wish == "fail":
        line({"type": "result", "subtype": "error_during_execution", "is_error": True, "result": "the secret limit"})
    else:
        answer(style, f"You said: {prompt}", Path(argument) if wish == "wait" else None)


if __name__ == "__main__":
    main()
