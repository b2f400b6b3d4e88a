"""Says what `make test` is going to install, and how much it is, before anything is. Needs only the standard library.

python3 -m tests.support.to_install
"""

from __future__ import annotations

from pathlib import Path

from tests.support import traefik
from tests.support.build_llama_server import CACHE

ENVIRONMENTS = {  # of runtimes, in MiB: to download, and on disk
    "llama_server": (33, 101),
    "faster_whisper": (105, 428),
    "ctranslate2": (70, 278),
    "whisper_cpp": (0, 170),  # nothing that faster_whisper hasn't
    "comfyui": (3, 34),
    "transformers": (230, 1202),
    "embeddings": (90, 1309),
    "diffusers": (45, 1000),
}
TOOLS = (213, 635)
MIB_A_MINUTE = 200


def missing() -> dict[Path, tuple[int, int]]:
    """What isn't there, with its sizes."""
    ready = Path(__file__).parents[2] / ".venv" / "ready-dev"
    there = {ready: TOOLS, traefik.PROGRAM: traefik.SIZES} | {
        CACHE / "runtimes" / name: sizes for name, sizes in ENVIRONMENTS.items()
    }
    return {path: sizes for path, sizes in there.items() if not path.exists()}


def main() -> None:
    if found := missing():
        download, disk = (sum(column) for column in zip(*found.values()))
        minutes = 2 + download // MIB_A_MINUTE
        print(f"To install first, once: some {download} MiB to download, {disk} MiB on disk, {minutes} minutes.")
        for path, (_, mib) in found.items():
            print(f"  {mib:5} MiB  {path.parent if path.name == 'ready-dev' else path}")


if __name__ == "__main__":
    main()
