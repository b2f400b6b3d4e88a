"""Chooses the release build of llama.cpp for this machine's GPU, from facts of the machine, never with a vendor's tool.

| Machine | Build |
| --- | --- |
| NVIDIA, x86-64, the driver runs CUDA 13.4, compute capability 7.5 or newer | cuda-13.4 |
| NVIDIA, x86-64, the driver runs CUDA 12.8, compute capability 5.0 or newer | cuda-12.8 |
| other NVIDIA, AMD, Intel, where Vulkan has its loader and a driver | vulkan |
| none of these | no GPU build: the processor's |

A program compiled for a newer CUDA than the driver's may start, list the card, and die at its first kernel: so 13.0 is not
enough for 13.4. On NVIDIA cards Vulkan reads prompts at about half of CUDA's speed, so it comes last. ROCm's build is used
only on request: it needs ROCm's libraries, and whether it is faster than Vulkan differs from chip to chip.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from runtimes.machine import Choice, Machine, Version

CUDA_BUILDS: Final[dict[str, tuple[Version, Version]]] = {
    "cuda-13.4": ((13, 4), (7, 5)),
    "cuda-12.8": ((12, 8), (5, 0)),
}
"""Kind → the CUDA version that the driver must run, and the lowest compute capability of the kernels. Best first."""

X86: Final = frozenset({"x86_64", "amd64"})
ARM: Final = frozenset({"aarch64", "arm64"})
GLIBC: Final = {"x86_64": (2, 34), "aarch64": (2, 38)}
"""Processor → the oldest glibc that the builds run on."""


def choose(machine: Machine) -> Choice:
    """The build to install for the GPU of this machine."""
    if not machine.gpus:
        return Choice(())
    if all(gpu.unusable for gpu in machine.gpus):
        return Choice((), tuple(f"There is a GPU, {gpu.name}: it {gpu.unusable}." for gpu in machine.gpus))
    if (least := _least_glibc(machine)) is not None:
        return Choice(
            (), (f"llama.cpp's builds for GPUs need glibc {_dotted(least)} or newer; {_glibc_note(machine)}.",)
        )
    cuda, reasons = _cuda_builds(machine)
    vulkan, why_not = _vulkan_build(machine)
    if not cuda and vulkan and machine.gpus_of("nvidia"):
        reasons += (f"Vulkan computes on it, at about half of CUDA's speed for prompts. {_missing_for_cuda(machine)}",)
    elif not cuda and not vulkan:
        reasons += why_not
    return Choice((*cuda, *vulkan), reasons)


def _cuda_builds(machine: Machine) -> tuple[tuple[str, ...], tuple[str, ...]]:
    cards = machine.gpus_of("nvidia")
    if not cards:
        return (), ()
    if machine.processor not in X86:
        return (), ("There is no build for CUDA on this processor: compile one with --accelerator cuda.",)
    if machine.cuda is None:
        return (), ("NVIDIA's driver can't be asked: install it, or give the container its devices and libraries.",)
    known = [gpu.capability for gpu in cards if gpu.capability is not None]
    kinds = tuple(
        kind
        for kind, (cuda, least) in CUDA_BUILDS.items()
        if machine.cuda >= cuda and (not known or max(known) >= least)
    )
    driver_note = f"NVIDIA's driver {machine.driver or ''}".rstrip() + f" runs programs of CUDA {_dotted(machine.cuda)}"
    if kinds:
        return kinds, (f"{driver_note}: {kinds[0]} is the build for it.",)
    return (), (f"{driver_note}.",)


def _missing_for_cuda(machine: Machine) -> str:
    """A sentence about the missing requirements of the CUDA builds."""
    if machine.processor not in X86 or machine.cuda is None:
        return "See the sentence before."
    known = [gpu.capability for gpu in machine.gpus_of("nvidia") if gpu.capability is not None]
    for kind, (cuda, least) in reversed(CUDA_BUILDS.items()):
        if not known or max(known) >= least:
            return f"A driver for CUDA {_dotted(cuda)} or newer would give {kind}."
    return "No build for CUDA has kernels for a card that old."


def _vulkan_build(machine: Machine) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if missing := tuple(_vulkan_missing(machine)):
        return (), (f"Vulkan could compute on it, but {', and '.join(missing)}.",)
    return ("vulkan",), ()


def _vulkan_missing(machine: Machine) -> Iterator[str]:
    vulkan = machine.vulkan
    if not vulkan.loader:
        yield "its loader is missing (Debian, Ubuntu: apt install libvulkan1)"
    if not vulkan.drivers:
        yield "no driver of it is here (Debian, Ubuntu: apt install mesa-vulkan-drivers; NVIDIA's comes with its driver, not always in a container)"
    if not vulkan.opens and not machine.gpus_of("nvidia"):
        yield "you may not open the GPU: sudo usermod --append --groups render,video $USER; a container needs --device /dev/dri"


def _least_glibc(machine: Machine) -> Version | None:
    """The glibc that the builds need; None: this machine's is new enough."""
    least = GLIBC["aarch64" if machine.processor in ARM else "x86_64"]
    if machine.processor not in X86 | ARM or machine.glibc is None or machine.glibc < least:
        return least
    return None


def _glibc_note(machine: Machine) -> str:
    return f"this one is {_dotted(machine.glibc)}" if machine.glibc is not None else "this system has none"


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def archive(build: str, kind: str, processor: str) -> tuple[str, str | None]:
    """The files of a build: the program's, and that of CUDA's libraries."""
    program = f"llama-{build}-bin-ubuntu-{kind}-{'arm64' if processor in ARM else 'x64'}.tar.gz"
    return program, f"cudart-{program}" if kind.startswith("cuda") else None


def device(kind: str) -> str:
    """The device that a kind of build computes on."""
    return kind.partition("-")[0]
