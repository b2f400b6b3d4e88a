"""Which kernels of the hub transformers computes quantised weights with: for the adapter, `llmux pull` and the worker.

These are the repositories and versions that the pinned transformers asks for by itself; a test compares them with it. For
FP8 it would take `deep-gemm` as well where it finds a data centre's GPU and a CUDA compiler; the worker keeps it from
that (model.py), so that a model computes alike on every machine and with nothing else to fetch.
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
"""By method, as config.json and the configuration call it."""
