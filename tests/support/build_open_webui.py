"""A real Open WebUI, for the tests of what its users see, installed once.

python -m tests.support.build_open_webui      # installs when needed: minutes, and 2.4 GB
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from supervisor.host.environments import installer
from tests.support.build_llama_server import CACHE

RELEASE = "0.12.4"
TORCH = "2.13.0"  # it embeds nothing here, so any will do: the processor's is the smallest
PLACE = CACHE / f"open-webui-{RELEASE}"
PROGRAM = PLACE / "bin" / "open-webui"


def find() -> Path | None:
    """The program, where it has been installed."""
    return PROGRAM if (PLACE / "complete").exists() else None


def install() -> None:
    """Make its environment anew. Raises CalledProcessError; uv has told why."""
    uv = Path(sys.executable).with_name("uv")
    links = installer.wheel_folders()
    local = installer.local_torch(TORCH, "cpu", links, sys.version_info[:2])
    flags = [word for link in links for word in ("--find-links", link)]
    if local is None:
        flags += ["--torch-backend", "cpu"]
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, PLACE], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as override:
        override.write(f"torch=={local or TORCH}\n")
        override.flush()
        wanted = [f"open-webui=={RELEASE}", "--override", override.name, *flags]
        python = PLACE / "bin" / "python"
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *wanted], check=True, env=os.environ)
    (PLACE / "complete").touch()


if __name__ == "__main__":
    if find() is None:
        print(f"Installing Open WebUI {RELEASE}: 2.4 GB", flush=True)
        install()
    print(find())
