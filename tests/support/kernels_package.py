"""A runtimes folder whose transformers has the package `kernels`, as the environment for CUDA has it.

That environment takes gigabytes. So what its lock has for `kernels` comes into a small one of its own, by the same hashes;
torch, transformers and all else are those of the everyday environment, which is for the processor.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from supervisor.cli.environments.environments import recipe_of
from supervisor.host.environments.recipe import pinned
from tests.support import environments
from tests.support.made_once import made

NOT_ITS = {"bitsandbytes"}  # large, and nothing that `kernels` needs


def runtimes_dir() -> Path:
    """Made when first asked for on this machine: seconds, and tens of megabytes."""
    real = (environments.installed("transformers") / "transformers").resolve()
    lock = _lock()
    return made("kernels", lambda folder: _install(folder / "transformers", real, lock), None, (real, lock), by=())


def _install(path: Path, real: Path, lock: str) -> None:
    uv = str(Path(sys.executable).with_name("uv"))
    python = path / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", str(real / "bin" / "python"), str(path)], check=True)
    (packages,) = path.glob("lib/python*/site-packages")
    (borrowed,) = real.glob("lib/python*/site-packages")
    wanted = path / "requirements.lock"
    wanted.write_text(lock)
    install = [uv, "pip", "install", "--quiet", "--python", str(python), "--compile-bytecode"]
    subprocess.run([*install, "--require-hashes", "--no-deps", "-r", str(wanted)], check=True, timeout=300)
    (packages / "borrowed.pth").write_text(f"{borrowed}\n")


def python() -> Path:
    """Its Python."""
    return runtimes_dir() / "transformers" / "bin" / "python"


def _lock() -> str:
    """What the lock for CUDA has beyond the one of every device."""
    common, cuda, *_ = recipe_of("transformers").locks("cuda")
    there = pinned(common) | NOT_ITS
    entries = re.split(r"\n(?=\S)", cuda.read_text(encoding="utf-8").strip())
    return "\n".join(entry for entry in entries if entry.partition("==")[0] not in there)
