"""The Python sources of a locked package that can't be imported here: downloaded once per machine, unpacked, never run.

`source("llama_cpp", "llama-cpp-python")` is the folder that holds them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from tests.support.build_llama_server import CACHE
from tests.support.limits import LIMIT_S

RUNTIMES = Path(__file__).parents[2] / "runtimes"


def source(runtime: str, package: str) -> Path:
    """The folder with the package's modules, of the version that the runtime's locks have."""
    locks = "\n".join(lock.read_text() for lock in sorted((RUNTIMES / runtime).glob("requirements*.lock")))
    (pinned,) = set(re.findall(rf"^{re.escape(package)}==(?:.*\\\n)*.*$", locks, re.MULTILINE))
    version = pinned.split()[0].partition("==")[2]
    folder = CACHE / "sources" / f"{package}-{version}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
            _fetch(pinned, Path(aside))
            made = Path(aside) / "made"
            try:
                made.rename(folder)
            except OSError:  # another run was quicker
                shutil.rmtree(made)
    return folder


def _fetch(pinned: str, aside: Path) -> None:
    wanted = aside / "wanted.txt"
    wanted.write_text(pinned + "\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*pip, "--require-hashes", "-r", str(wanted), "-d", str(aside / "files")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "SKBUILD_WHEEL_CMAKE": "false"},  # its metadata alone: nothing is compiled
    )
    assert done.returncode == 0, done.stderr
    (archive,) = (aside / "files").iterdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                _put(aside / "made", PurePosixPath(name), lambda name=name: wheel.read(name))
    else:
        with tarfile.open(archive) as sdist:
            for member in sdist.getmembers():
                name = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                if member.isfile():
                    _put(aside / "made", name, lambda member=member: sdist.extractfile(member).read())


def _put(folder: Path, name: PurePosixPath, read) -> None:
    if name.suffix == ".py" and name.parts[0] not in {"vendor", "tests", "examples"} and ".." not in name.parts:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read())
