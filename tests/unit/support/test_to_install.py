"""`make test` says what it will install before there is anything but Python."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support import to_install, traefik
from tests.support.daemon import REPOSITORY


def told(home: str) -> str:
    """On a machine with this home; without any package."""
    command = [sys.executable, "-S", "-m", "tests.support.to_install"]
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"} | {"HOME": home}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True).stdout


def test_on_a_new_machine(tmp_path):
    shown = told(str(tmp_path))
    for name, (_, mib) in to_install.ENVIRONMENTS.items():
        assert f"{mib:5} MiB  {tmp_path}/.cache/llmux-test/runtimes/{name}\n" in shown
    disk = sum(mib for _, mib in to_install.ENVIRONMENTS.values()) + traefik.SIZES[1]
    assert f"{traefik.SIZES[1]:5} MiB  {tmp_path}/.cache/llmux-test/{traefik.PROGRAM.name}\n" in shown
    assert f"{disk} MiB on disk" in shown or f"{disk + to_install.TOOLS[1]} MiB on disk" in shown
    assert " minutes." in shown


def test_what_is_there_is_not_told(tmp_path):
    (tmp_path / ".cache" / "llmux-test" / "runtimes" / "transformers").mkdir(parents=True)
    shown = told(str(tmp_path))
    assert "/runtimes/embeddings\n" in shown
    assert "/runtimes/transformers\n" not in shown
