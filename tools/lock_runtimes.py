"""Write the hash-pinned locks of the runtimes' environments anew: `python -m tools.lock_runtimes [--upgrade] [NAME ...]`.

`make lock` keeps pinned versions where the requirements allow them; `make upgrade` takes the newest versions.

A runtime's folder has the requirements, and gets the locks:

    requirements.in           →  requirements.lock            the same for every device
    requirements-<device>.in  →  requirements-<device>.lock   further packages for one device (cpu, cuda, rocm)
    overrides[-<device>].in      pins that override packages' own requirements; `; sys_platform == "never"` drops one
    (torch, where wanted)     →  requirements-torch.lock      torch's build, and packages that only that build needs

torch has a build for each kind of device, and an index for each kind. Its lock holds the build of the default index,
which is the one for CUDA, and pins it with `===`: `==` would take another build that lies in a folder of wheels. For other
devices the installer takes the same version of another build. All other packages are in the other locks, so that only
torch depends on the device.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tools.locks import ROOT, UV

TORCH_LOCK: Final = "requirements-torch.lock"
ACCELERATED: Final = re.compile(r"(torch|triton|pytorch-triton\S*|nvidia-\S+|cuda-\S+)==")
MACHINES: Final = ("aarch64", "x86_64")
ENVIRONMENTS: Final = ", ".join(
    f"\"platform_machine == '{machine}' and sys_platform == 'linux'\"" for machine in MACHINES
)
ANY_MACHINE: Final = " or ".join(f"platform_machine == '{machine}'" for machine in MACHINES)
COMMON_MARKER: Final = f" ; ({ANY_MACHINE}) and sys_platform == 'linux'"


def compiled(source: Path, pinned: str, *options: str) -> str:
    """Resolve requirements with uv, for Linux on these machines and every Python from 3.11 on, keeping the versions in `pinned`.

    Needs a package index.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "pyproject.toml").write_text(f"[tool.uv]\nenvironments = [{ENVIRONMENTS}]\n", encoding="utf-8")
        fixed = ("--quiet", "--universal", "--python-version=3.11", "--generate-hashes", "--no-annotate", "--no-header")
        lock = Path(folder, "requirements.lock")
        lock.write_text(pinned.replace("===", "=="), encoding="utf-8")
        argv = [UV, "pip", "compile", *fixed, *options, str(source), f"--output-file={lock}"]
        subprocess.run(argv, cwd=folder, check=True)
        return lock.read_text(encoding="utf-8").replace(COMMON_MARKER, "")


def split(lock: str) -> tuple[str, str]:
    """The lock without torch, and torch's part of it; the latter is empty where there is no torch."""
    entries = re.split(r"\n(?=\S)", lock.strip())
    if not any(entry.startswith("torch==") for entry in entries):
        return lock, ""
    torch = [re.sub(r"^torch==", "torch===", entry) for entry in entries if ACCELERATED.match(entry)]
    rest = [entry for entry in entries if not ACCELERATED.match(entry)]
    return "\n".join([*rest, ""]), "\n".join([*torch, ""])


def write(folder: Path, *, upgrade: bool) -> None:
    """Write all locks of one runtime. The common lock constrains the devices' locks."""
    common: list[str] = []
    torch_lock = folder / TORCH_LOCK
    for source in sorted(folder.glob("requirements*.in"), key=lambda path: len(path.name)):
        overrides = source.with_name(source.name.replace("requirements", "overrides"))
        options = [f"--override={overrides}"] if overrides.exists() else []
        there = () if upgrade else (source.with_suffix(".lock"), torch_lock)
        pinned = "\n".join(lock.read_text(encoding="utf-8") for lock in there if lock.exists())
        rest, torch = split(compiled(source, pinned, *options, *common))
        source.with_suffix(".lock").write_text(rest, encoding="utf-8")
        if torch and f"--constraint={torch_lock}" not in common:
            torch_lock.write_text(torch, encoding="utf-8")
        if source.stem == "requirements":
            common = [f"--constraint={source.with_suffix('.lock')}"]
            common += [f"--constraint={torch_lock}"] if torch else []


def main() -> None:
    """Lock the named runtimes, or all with an environment."""
    names = [word for word in sys.argv[1:] if word != "--upgrade"]
    for folder in sorted(path.parent for path in ROOT.glob("runtimes/*/requirements.in")):
        if not names or folder.name in names:
            sys.stderr.write(f"{folder.name}\n")
            write(folder, upgrade="--upgrade" in sys.argv)


if __name__ == "__main__":
    main()
