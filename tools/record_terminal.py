"""Write docs/terminal.md: the output of every command, run on a real terminal against a demo daemon.

`make docs` leaves that page alone: recording takes half a minute, port 8081 and an installed llama.cpp runtime, and its
numbers differ each time. After a change of commands' output: `python -m tools.record_terminal`.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from supervisor.cli.environments.environments import resolve
from tools.locks import ROOT

PAGE: Final = ROOT / "docs" / "terminal.md"
COLUMNS, ROWS = 118, 40
MOST_LINES: Final = 40
ENOUGH_S: Final = 60.0
RUNTIMES: Final = resolve(None)  # use the installed runtimes

INTRODUCTION: Final = """\
# Commands, as they look

Recorded against `llmux demo` by `tools/record_terminal.py`; colours and what was painted over are left out, long output is cut.
[All options](cli.md).
"""

Step = tuple[str, Sequence[tuple[str, str]]]
"""A command, and pairs of a text to wait for on the screen and the keys to type then."""

LISTEN: Final = "timeout 4 llmux events --types decision,model &"

STEPS: Final[Sequence[tuple[str, Sequence[Step]]]] = (
    ("Models", (("llmux ps", ()), ("llmux load tiny-chat", ()), ("llmux ps --wide", ()), ("llmux load nothing", ()))),
    (
        "Talking",
        (
            ("llmux chat Tiny-Thinking 'Hello there'", ()),
            ("echo Hello | llmux chat Tiny-Instruct", ()),
            (
                "llmux chat Tiny-Instruct",
                (("> ", "Hello\n"), ("> ", "/system Be brief.\n"), ("> ", "/quit\n")),
            ),
        ),
    ),
    (
        "Watching",
        (
            ("llmux top --once", ()),
            (f"{LISTEN} sleep 1; llmux load tiny-other > /dev/null 2>&1; wait", ()),
            ("llmux logs tiny-chat -n 4", ()),
            ("llmux why -n 6", ()),
            ("llmux why --request 1", ()),
            ("llmux unload tiny-chat", ()),
            ("llmux why tiny-chat -n 1 --json", ()),
        ),
    ),
    (
        "Configuration and keys",
        (
            ("llmux config check --config demo/llmux.yaml", ()),
            ("llmux config show --config demo/llmux.yaml", ()),
            ("llmux reload", ()),
            ("llmux keys add webui", ()),
            ("llmux keys add ops --scope admin --expires 2030-01-31", ()),
            ("llmux keys list", ()),
            ("llmux keys revoke webui", ()),
        ),
    ),
    (
        "The machine",
        (
            ("llmux doctor --config demo/llmux.yaml", ()),
            ("llmux runtimes list", ()),
            ("llmux runtimes install llama_server", ()),
            ("llmux runtimes remove nothing", ()),
            ("llmux service status", ()),
            ("llmux completion fish", ()),
        ),
    ),
    ("When nothing answers", (("llmux ps --url http://127.0.0.1:9; echo $?", ()),)),
)


def run(command: str, typed: Sequence[tuple[str, str]], env: Mapping[str, str], cwd: Path) -> str:
    """The output of a command on its own terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    words = ["bash", "-c", command]
    process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, env=env, cwd=cwd, start_new_session=True)
    os.close(slave)
    screen, seen, left = "", 0, list(typed)
    deadline = time.monotonic() + ENOUGH_S
    while time.monotonic() < deadline:
        if left and left[0][0] in screen[seen:]:
            seen = len(screen)
            os.write(master, left.pop(0)[1].encode())
        if select.select([master], [], [], 0.2)[0]:
            try:
                screen += os.read(master, 65536).decode("utf-8", "replace")
            except OSError:  # the command has ended
                break
    os.close(master)
    process.wait(ENOUGH_S)
    return screen


def shown(screen: str, instead: Mapping[str, str]) -> str:
    """The screen's text without overwritten lines, colours, secrets, and folders of this machine."""
    screen = re.sub(r"[^\n]*\n\S*\r\x1b\[1A\x1b\[2K", "", screen.replace("\r\n", "\n"))  # remove a progress line
    for found, name in instead.items():
        screen = screen.replace(found, name)
    lines = []
    for line in screen.split("\n"):
        last = re.split(r"\r(?:\x1b\[2?K)?", line)[-1]
        plain = re.sub(r"\x1b(?:\[[0-9;?]*[a-zA-Z]|\(B|[=>])", "", last)
        lines.append(re.sub(r"sk-llmux-\S+", "sk-llmux-…", plain).rstrip())
    text = "\n".join(lines).strip("\n").split("\n")
    return "\n".join(text[:MOST_LINES] + (["…"] if len(text) > MOST_LINES else []))


def page(env: Mapping[str, str], state: Path) -> str:
    """Run all commands, and assemble the page."""
    parts = [INTRODUCTION]
    for title, steps in STEPS:
        parts.append(f"## {title}\n")
        for command, typed in steps:
            screen = shown(
                run(command, typed, env, state),
                {
                    env["HOME"]: "~",
                    str(RUNTIMES): "~/.local/share/llmux/runtimes",
                    str(Path(sys.prefix).resolve()): "~/llmux/.venv",
                    str(ROOT): "~/llmux",
                },
            )
            text = command.replace("demo/llmux.yaml", "~/.local/state/llmux/demo/llmux.yaml")
            parts.append(f"```console\n$ {text}\n{screen}\n```\n")
    return "\n".join(parts)


def main() -> None:
    """Start the demo, run the commands, write the page."""
    folder = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as home:
        state = Path(home) / ".local" / "state" / "llmux"
        state.mkdir(parents=True)
        runtimes = Path(home) / ".local" / "share" / "llmux" / "runtimes"
        runtimes.parent.mkdir(parents=True)
        runtimes.symlink_to(RUNTIMES)
        env = {
            "HOME": home,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "TERM": "xterm",
            "LANG": "C.UTF-8",
            "NO_COLOR": "1",  # a bar's empty part differs by colour; without colours it is blank
        }
        with (state / "daemon.log").open("wb") as log:
            daemon = subprocess.Popen(
                [str(folder / "llmux"), "demo"], env=env, cwd=state, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            while "models" not in run("llmux ps --json", (), env, state):
                if daemon.poll() is not None:
                    sys.exit((state / "daemon.log").read_text(encoding="utf-8"))
                time.sleep(0.2)
            written = page(env, state)
        finally:
            daemon.terminate()
            daemon.wait()
    PAGE.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
