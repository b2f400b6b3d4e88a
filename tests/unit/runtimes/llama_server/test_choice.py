"""Which of llama.cpp's builds suits which machine."""

from __future__ import annotations

import json

from runtimes.llama_server.adapter import LlamaServerAdapter, choice
from runtimes.machine import Gpu, Machine, Vulkan
from tests.support.cases import cases

VULKAN = Vulkan(loader=True, drivers=("radeon_icd.json",), opens=True)
X86 = Machine(glibc=(2, 36), vulkan=VULKAN)


def nvidia(cuda: tuple[int, int] | None, capability: tuple[int, int] | None, **facts: object) -> Machine:
    gpus = (Gpu("nvidia", "0000:01:00.0", "RTX", capability),)
    told = {"glibc": (2, 36), "driver": "590.1" if cuda else None, "vulkan": VULKAN, **facts}
    return Machine(gpus=gpus, cuda=cuda, **told)


def amd(**facts: object) -> Machine:
    gpus = (Gpu("amd", "0000:03:00.0", "RX"),)
    return Machine(**{"glibc": (2, 36), "gpus": gpus, "vulkan": VULKAN, **facts})


@cases(
    ("machine", "kinds", "told"),
    [
        (X86, (), ""),
        (nvidia((13, 4), (8, 9)), ("cuda-13.4", "cuda-12.8", "vulkan"), "runs programs of CUDA 13.4: cuda-13.4"),
        (nvidia((14, 0), (12, 0)), ("cuda-13.4", "cuda-12.8", "vulkan"), ""),
        (nvidia((13, 0), (8, 9)), ("cuda-12.8", "vulkan"), "cuda-12.8 is the build for it"),
        (nvidia((13, 4), (7, 0)), ("cuda-12.8", "vulkan"), ""),
        (nvidia((13, 4), None), ("cuda-13.4", "cuda-12.8", "vulkan"), ""),
        (nvidia((12, 4), (8, 9)), ("vulkan",), "A driver for CUDA 12.8 or newer would give cuda-12.8"),
        (nvidia((12, 4), (3, 5)), ("vulkan",), "No build for CUDA has kernels for a card that old"),
        (nvidia((12, 4), (8, 9), vulkan=Vulkan()), (), "apt install libvulkan1"),
        (nvidia(None, None), ("vulkan",), "NVIDIA's driver can't be asked"),
        (nvidia((13, 4), (12, 1), processor="aarch64", glibc=(2, 39)), ("vulkan",), "compile one"),
        (nvidia((13, 4), (8, 9), glibc=(2, 31)), (), "need glibc 2.34 or newer; this one is 2.31"),
        (nvidia((13, 4), (8, 9), glibc=None), (), "this system has none"),
        (amd(), ("vulkan",), ""),
        (amd(vulkan=Vulkan(loader=True, opens=True)), (), "apt install mesa-vulkan-drivers"),
        (amd(vulkan=Vulkan(loader=True, drivers=("x.json",))), (), "groups render,video"),
        (Machine(glibc=(2, 36), gpus=(Gpu("intel", "0000:03:00.0", "Arc"),), vulkan=VULKAN), ("vulkan",), ""),
        (
            Machine(glibc=(2, 36), gpus=(Gpu("intel", "0000:00:02.0", "UHD", unusable="is small"),), vulkan=VULKAN),
            (),
            "There is a GPU, UHD: it is small.",
        ),
    ],
)
def test_choice(machine, kinds, told):
    found = choice.choose(machine)
    assert found.kinds == kinds
    assert told in " ".join(found.reasons)


def test_every_kind_that_is_chosen_is_pinned():
    pins = json.loads(LlamaServerAdapter.archives.pins.read_text())
    names = {
        name
        for kind in (*choice.CUDA_BUILDS, "vulkan", "rocm-10.0")
        for name in choice.archive(pins["build"], kind, "x86_64")
    }
    names |= {choice.archive(pins["build"], "vulkan", "aarch64")[0]}
    assert names - {None} == set(pins["assets"])
