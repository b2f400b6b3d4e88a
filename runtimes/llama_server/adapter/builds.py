"""How to compile llama.cpp for each kind of GPU, on the machine that will run it: as a server, or as a library for Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from runtimes.build import Build

_COMPILERS: Final = {"c++": "g++ or clang++", "make": "make"}
_GPUS: Final = {
    "cuda": ("-DGGML_CUDA=ON", {"nvcc": "NVIDIA's CUDA toolkit, often in /usr/local/cuda/bin"}, "nvcc"),
    "rocm": ("-DGGML_HIP=ON", {"hipconfig": "AMD's ROCm, often in /opt/rocm/bin"}, "hipconfig"),
    "vulkan": (
        "-DGGML_VULKAN=ON",
        {"glslc": "Debian 13, Ubuntu 24.04: apt install glslc libvulkan-dev spirv-headers"},
        None,
    ),
}
_LEFT_OUT: Final = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"


def gpu_builds(module: str, program: str | None = None, *, options: str = "") -> Mapping[str, Build]:
    """Device → how to compile a package that contains llama.cpp. `options`: CMake options, beside those of the device."""
    return {
        device: Build(
            module, program, " ".join(filter(None, (option, _LEFT_OUT, options))), {**needs, **_COMPILERS}, toolkit
        )
        for device, (option, needs, toolkit) in _GPUS.items()
    }
