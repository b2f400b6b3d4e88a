"""A runtimes folder whose transformers has the package `kernels`: the newest pair that the registry has for each other.

The pinned transformers wants a `kernels` that the registry doesn't have, so the pair comes into a small environment of its
own, which takes torch and all else from the real one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests import environments
from tests.tiny import CACHE

PAIR = ("transformers==5.22.2", "kernels==0.17.2")


@cache
def runtimes_dir() -> Path:
    """Made when first asked for on this machine: seconds, and tens of megabytes."""
    real = (environments.installed("transformers") / "transformers").resolve()
    digest = hashlib.sha256(" ".join((*PAIR, str(real))).encode()).hexdigest()[:16]
    folder = CACHE / "kernels" / digest
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        uv = str(Path(sys.executable).with_name("uv"))
        path = folder.with_name(f"{digest}.{os.getpid()}") / "transformers"
        python = path / "bin" / "python"
        subprocess.run([uv, "venv", "--quiet", "--python", str(real / "bin" / "python"), str(path)], check=True)
        (packages,) = path.glob("lib/python*/site-packages")
        (borrowed,) = real.glob("lib/python*/site-packages")
        install = [uv, "pip", "install", "--quiet", "--python", str(python), "--compile-bytecode"]
        subprocess.run([*install, *PAIR], check=True, timeout=300)
        (packages / "borrowed.pth").write_text(f"{borrowed}\n")
        try:
            path.parent.rename(folder)
        except OSError:  # another run was quicker
            shutil.rmtree(path.parent)
    return folder


def python() -> Path:
    """Its Python."""
    return runtimes_dir() / "transformers" / "bin" / "python"
