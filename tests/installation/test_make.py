"""`make` compiles llmux once, when it installs it, and no program that it starts is kept from using that."""

from __future__ import annotations

import os
import subprocess

from tests.support.daemon import REPOSITORY


def make(*words: str) -> str:
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=True).stdout


def test_what_it_starts_may_keep_what_was_compiled():
    told = make("--eval=told: ; @env", "told")
    assert "PATH=" in told
    assert "PYTHONDONTWRITEBYTECODE" not in told


def test_what_it_installs_is_compiled():
    commands = make("--dry-run", "--always-make", ".venv/ready").splitlines()
    assert next(at for at, line in enumerate(commands) if "-e ." in line) < next(
        at for at, line in enumerate(commands) if "compileall -q supervisor runtimes" in line
    )
