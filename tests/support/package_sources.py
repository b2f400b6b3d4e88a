"""The Python sources of a locked package that can't be imported here: downloaded once per machine, unpacked, never run.

`source("llama_cpp", "llama-cpp-python")` is the folder that holds them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from tests.support.limits import LIMIT_S
from tests.support.made_once import made

RUNTIMES = Path(__file__).parents[2] / "runtimes"


def source(runtime: str, package: str) -> Path:
    """The folder with the package's modules, of the version that the runtime's locks have."""
    locks = "\n".join(lock.read_text() for lock in sorted((RUNTIMES / runtime).glob("requirements*.lock")))
    (pinned,) = set(re.findall(rf"^{re.escape(package)}==(?:.*\\\n)*.*$", locks, re.MULTILINE))
    return made(f"{package}-sources", lambda folder: _fetch(pinned, folder), None, pinned, by=())


def _fetch(pinned: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as aside:
        _unpack(_downloaded(pinned, Path(aside)), folder)


def _downloaded(pinned: str, aside: Path) -> Path:
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
    return archive


def _unpack(archive: Path, folder: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                _put(folder, PurePosixPath(name), lambda name=name: wheel.read(name))
    else:
        with tarfile.open(archive) as sdist:
            for member in sdist.getmembers():
                name = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                if member.isfile():
                    _put(folder, name, lambda member=member: sdist.extractfile(member).read())


def _put(folder: Path, name: PurePosixPath, read) -> None:
    if name.suffix == ".py" and name.parts[0] not in {"vendor", "tests", "examples"} and ".." not in name.parts:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read())
