"""Make the files of a release, which a person checks and publishes: `make release`.

    dist/llmux-VERSION/    the wheel, the lock of its dependencies, install.sh, CHANGELOG.md of this version, SHA256SUMS of all

Nothing is uploaded and no tag is made. The wheel's timestamps are the last commit's, so that a commit always gives the
same bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

from tools.locks import ROOT, UV

SUMS: Final = "SHA256SUMS"


def notes(changelog: str, version: str) -> str:
    """The changes of a version. Raises LookupError where its heading is missing."""
    found = re.search(rf"^## {re.escape(version)}\b.*?(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE)
    if found is None:
        raise LookupError(f"CHANGELOG.md has no heading '## {version}'")
    return found[0].rstrip() + "\n"


def release(dist: Path) -> Path:
    """Make a new folder of this version's files below `dist`; returns it."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    changed = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    folder = dist / f"llmux-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    time = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    build = [UV, "build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable]
    env = {"SOURCE_DATE_EPOCH": time.stdout.strip() or "0"}
    subprocess.run([*build, "--out-dir", str(folder), str(ROOT)], env=os.environ | env, check=True)
    (folder / ".gitignore").unlink(missing_ok=True)  # written by uv
    (folder / "CHANGELOG.md").write_text(changed, encoding="utf-8")
    shutil.copy(ROOT / "requirements.lock", folder)
    shutil.copy(ROOT / "deploy" / "release" / "install.sh", folder)
    sums = "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(folder.iterdir()))
    (folder / SUMS).write_text(sums, encoding="utf-8")
    return folder


def main() -> None:
    folder = release(ROOT / "dist")
    unsaved = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    if "unreleased" in (folder / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n")[0]:
        sys.stdout.write("CHANGELOG.md calls this version unreleased: write its date there.\n")
    if unsaved.stdout:
        sys.stdout.write("Not all changes are committed: a release is made of a commit.\n")
    sys.stdout.write(f"{folder}: look at it, try install.sh, then publish all files of it.\n")


if __name__ == "__main__":
    main()
