"""How much memory a model will take, from the best available source.

The sources, best first: the configuration; a measurement on this device with these launch arguments; the runtime's
estimate from the file's metadata; the size of the files times a factor; an estimate from the model's name; a default.
Every footprint contains its source, so that a prediction can be shown beside the measurement.
"""

from __future__ import annotations

import math
import re

from supervisor.core.types import Footprint, FootprintSource

DEFAULT_MIB = 4096
"""The footprint of a model without any information."""

NAME_FACTOR = 1.2
"""Factor on the weights for cache and buffers, when only the name is known."""

_PARAMETERS = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z0-9])")
_K_QUANT = re.compile(r"(?<![a-z0-9])i?q([1-8])(?![0-9])")
_FORMAT_BITS = (
    (re.compile(r"(?<![a-z])(?:fp32|f32|float32)(?![0-9])"), 32.0),
    (re.compile(r"(?<![a-z])(?:bf16|fp16|f16|float16)(?![0-9])"), 16.0),
    (re.compile(r"(?<![a-z])(?:fp8|f8|int8|w8a8|w8a16)(?![0-9])|(?<![0-9])8-?bit"), 8.0),
    (re.compile(r"(?<![a-z])(?:mxfp4|nvfp4|fp4|nf4|int4|w4a16|awq|gptq)(?![0-9])|(?<![0-9])4-?bit"), 4.5),
)
_UNQUANTISED_BITS = 16.0


def choose(*, name: str, explicit_mib: int | None = None, computed: Footprint | None = None) -> Footprint:
    """The footprint from the best source given, at least 1 MiB.

    `computed` is the runtime's own estimate and keeps its source (`computed` or `file_size`). A measurement on a device
    takes precedence: see `DeviceSpec.need`.
    """
    if explicit_mib is not None:
        return Footprint(explicit_mib, FootprintSource.EXPLICIT, "vram_mib of the configuration")
    return (
        computed
        or from_name(name)
        or Footprint(DEFAULT_MIB, FootprintSource.DEFAULT, "nothing is known; set vram_mib, or load it once")
    )


def from_name(name: str) -> Footprint | None:
    """A footprint by the size and bits in a name ("qwen3-35b-a3b-q4_k_m"); None when the name contains no size.

    Of several sizes the largest counts: a mixture of experts holds all of its weights, not the active ones.
    """
    text = name.lower()
    sizes = [
        int(experts or 1) * float(number) * (1e9 if unit == "b" else 1e6)
        for experts, number, unit in _PARAMETERS.findall(text)
    ]
    parameters = max(sizes, default=0.0)
    if parameters == 0:
        return None
    bits = _bits_per_weight(text)
    mib = max(1, math.ceil(parameters * bits / 8 * NAME_FACTOR / 2**20))
    return Footprint(mib, FootprintSource.NAME, f"{parameters / 1e9:g}B parameters at {bits:g} bits, by its name")


def _bits_per_weight(text: str) -> float:
    k_quant = _K_QUANT.search(text)
    if k_quant is not None:
        # Scales and the layers kept at higher precision: Q4_K_M is 4.85 bits a weight, Q6_K 6.56, Q8_0 8.5.
        return int(k_quant[1]) + 0.75
    return next((bits for pattern, bits in _FORMAT_BITS if pattern.search(text)), _UNQUANTISED_BITS)
