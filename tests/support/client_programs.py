"""What other people's clients need, installed once per machine: for Python by a lock with hashes, for Node by npm's own."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.build_llama_server import CACHE
from tests.support.limits import LIMIT_S

CLIENTS = Path(__file__).parents[1] / "clients"
PROGRAMS = CLIENTS / "programs"


def _place(kind: str, *sources: str) -> Path:
    told = sys.version.encode() + b"".join((CLIENTS / name).read_bytes() for name in sources)
    digest = hashlib.sha256(told).hexdigest()[:12]
    CACHE.mkdir(parents=True, exist_ok=True)
    return CACHE / f"clients-{kind}-{digest}"


@contextlib.contextmanager
def _turn(place: Path) -> Iterator[bool]:
    """One process at a time; True for who has to install."""
    with place.with_suffix(".lock").open("wb") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield not (place / "complete").exists()
        (place / "complete").touch()


@cache
def python() -> Path:
    """The interpreter of an environment with every Python client."""
    place = _place("python", "requirements.lock")
    with _turn(place) as is_first:
        if is_first:
            uv = Path(sys.executable).with_name("uv")
            subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, place], check=True)
            wanted = ["--python", place / "bin" / "python", "--require-hashes", "-r", CLIENTS / "requirements.lock"]
            subprocess.run([uv, "pip", "install", "--quiet", "--compile-bytecode", *wanted], check=True)
    return place / "bin" / "python"


@cache
def node() -> tuple[str, Path]:
    """Node, and a folder with the programs and what they import."""
    program, npm = shutil.which("node"), shutil.which("npm")
    if program is None or npm is None:
        pytest.skip("needs node and npm (on Debian: apt-get install nodejs npm)")
    packages, programs = ("package.json", "package-lock.json"), sorted(PROGRAMS.glob("*.mjs"))
    place = _place("node", *packages, *(f"programs/{source.name}" for source in programs))
    with _turn(place) as is_first:
        if is_first:
            place.mkdir(exist_ok=True)
            for source in (*(CLIENTS / name for name in packages), *programs):
                shutil.copy(source, place)  # Node looks for packages beside the program
            subprocess.run([npm, "ci", "--silent", "--ignore-scripts"], cwd=place, check=True)
    return program, place


@cache
def agent(program: str) -> Path:
    """A program of `agents/`, by its path in node_modules; its own download is some hundred MB."""
    _, npm = shutil.which("node"), shutil.which("npm")
    if npm is None:
        pytest.skip("needs node and npm (on Debian: apt-get install nodejs npm)")
    packages = ("agents/package.json", "agents/package-lock.json")
    place = _place("agents", *packages)
    with _turn(place) as is_first:
        if is_first:
            place.mkdir(exist_ok=True)
            for name in packages:
                shutil.copy(CLIENTS / name, place)
            subprocess.run([npm, "ci", "--silent"], cwd=place, check=True)
    found = place / "node_modules" / program
    if not found.exists():
        pytest.skip(f"npm has no {program} for this machine")
    return found


def run(program: str, *words: str) -> Any:
    """What a program says with these arguments, the address first: its last line, as JSON."""
    if program.endswith(".mjs"):
        interpreter, folder = node()
        command = [interpreter, folder / program]
    else:
        command = [python(), "-I", PROGRAMS / program]
    environ = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run([*command, *words], env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
