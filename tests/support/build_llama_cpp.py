"""A real llama-cpp-python, compiled once by the code that users run, for the tests of llama_cpp.

python -m tests.support.build_llama_cpp            # installs when needed: 5 to 20 minutes and a C++ compiler
python -m tests.support.build_llama_cpp --find     # never installs; exit code 1 without one
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from supervisor.cli.environments import environments as products
from supervisor.host.environments import venvs
from tests.support import environments

MISSING = "there is no llama-cpp-python here; make test-llama-cpp compiles it"
OPTIONS = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAVA_BUILD=OFF"


def find() -> Path | None:
    """Its environment, where it is there as its lock says."""
    environment = venvs.installed("llama_cpp", environments.FOLDER)
    recipe = products.recipe_of("llama_cpp")
    return None if environment is None or environment.lock_digest != recipe.digest() else environment.path


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description="Compile a real llama-cpp-python for the tests.")
    flags.add_argument("--find", action="store_true", help="never install")
    if flags.parse_args().find:
        sys.exit(find() is None)
    os.environ["CMAKE_ARGS"] = OPTIONS
    venvs.install(products.recipe_of("llama_cpp"), environments.FOLDER, print, device="cpu")
