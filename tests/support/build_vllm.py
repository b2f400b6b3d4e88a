"""A real vLLM for the processor, for the tests of vllm_serve and vllm, installed once by the code that users run.

python -m tests.support.build_vllm            # installs when needed: a minute or more, and twice 2.3 GB, mostly the same files
python -m tests.support.build_vllm --find     # never installs; exit code 1 without one
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from supervisor.cli.environments import environments as products
from supervisor.host.environments import venvs
from tests.support import environments

FOLDER = environments.FOLDER


def find() -> Path | None:
    """The program, where it has been installed; LLMUX_TEST_VLLM names another one."""
    named = os.environ.get("LLMUX_TEST_VLLM")
    path = Path(named) if named else FOLDER / "vllm_serve" / "bin" / "vllm"
    return path if os.access(path, os.X_OK) else None


def python() -> Path:
    """The Python of the environment of our own worker; it may not be there."""
    return FOLDER / "vllm" / "bin" / "python"


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description="Install a real vLLM for the tests.")
    flags.add_argument("--find", action="store_true", help="never install")
    if flags.parse_args().find:
        sys.exit(find() is None)
    for name in ("vllm_serve", "vllm"):
        venvs.install(products.recipe_of(name), FOLDER, print, device="cpu")
    print(find())
