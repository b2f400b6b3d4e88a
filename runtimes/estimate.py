"""A model's footprint before its first load: the sum of parts that an adapter computes from files.

Parts are named: the words are shown to people, and their endings tell which of them are weights, and which caches of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

MIB: Final = 1 << 20

_WEIGHT_PARTS: Final = ("weights", "draft", "mmproj", "lora")
_CACHE_PART: Final = "KV cache"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A footprint computed without loading: from the files' metadata, or only from their sizes."""

    mib: int
    source: Literal["computed", "file_size"]
    detail: str
    each_mib: int = 0  # in addition, for each further GPU with `gpus: auto`
    weights_mib: int = field(default=0, compare=False)  # of `mib`
    cache_mib: int = field(default=0, compare=False)  # of `mib`, for keys and values of prompts

    @classmethod
    def of(cls, parts: Mapping[str, int], note: str = "", *, each: int = 0) -> Estimate:
        """The sum of these parts, in bytes. The detail lists the parts in MiB, without empty ones."""
        words = " + ".join(f"{name} {-(-size // MIB)}" for name, size in parts.items() if size)
        text = f"{words} MiB{f' ({note})' if note else ''}"
        weights = sum(size for name, size in parts.items() if name.endswith(_WEIGHT_PARTS))
        cache = sum(size for name, size in parts.items() if name.endswith(_CACHE_PART))
        total = -(-sum(parts.values()) // MIB)
        return cls(total, "computed", text, -(-each // MIB), weights // MIB, cache // MIB)
