"""The kernels that transformers needs for quantised weights: for the adapter, `llmux pull` and the worker.

These are the repositories and versions that the pinned transformers asks for; a test compares them. For FP8 it would also
use `deep-gemm` on a data centre GPU with a CUDA compiler. The worker prevents that (model.py), so that a model computes
alike on every machine and nothing else has to be downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from runtimes.shared.kernel import Kernel

KERNELS: Final[Mapping[str, tuple[Kernel, ...]]] = MappingProxyType(
    {
        "fp8": (Kernel("kernels-community/finegrained-fp8", 4),),
        "mxfp4": (Kernel("kernels-community/gpt-oss-triton-kernels", 1),),
    }
)
"""By quantisation method, as named in config.json and the configuration."""
