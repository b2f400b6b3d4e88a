"""Real environments of the runtimes, built for the processor by the code that users run, once per machine.

`installed("transformers")` takes seconds to a minute the first time (from uv's cache, or the index), and nothing once it
is there and still what its locks say. Processes that ask at the same time take turns. `python -m tests.support.environments`
installs those that `make test` needs.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from supervisor.cli.environments import environments
from supervisor.host.environments import venvs
from tests.support.build_llama_server import CACHE
from tests.support.to_install import ENVIRONMENTS

FOLDER = CACHE / "runtimes"


@cache
def installed(name: str) -> Path:
    """The folder of runtimes, with this one in it: what `server.runtimes_dir` is set to."""
    venvs.install(environments.recipe_of(name), FOLDER, lambda _line: None, device="cpu")
    return FOLDER


def borrowing(folder: Path) -> Path:
    """A venv there that has what transformers' has, for a fake library to be put beside it; the folder of its packages."""
    source = installed("transformers") / "transformers"
    subprocess.run([source / "bin" / "python", "-m", "venv", "--without-pip", folder], check=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (borrowed,) = source.resolve().glob("lib/python*/site-packages")
    (site_packages / "transformers.pth").write_text(f"{borrowed}\n")
    return site_packages


if __name__ == "__main__":  # ahead of the tests, whose time is limited
    for name in ENVIRONMENTS:  # others are for tests of their own
        venvs.install(environments.recipe_of(name), FOLDER, print, device="cpu")
