"""Whisper models by size, as people and their clients call them: where the files of each come from, for each engine.

`model: small` stands for a `source` on the hub, so that `llmux pull` gets the files, and `path` may be left out. `large` is
the newest large one, `turbo` its faster variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, get_args

from runtimes.model_config import Source

Size = Literal[
    "tiny",
    "tiny.en",
    "base",
    "base.en",
    "small",
    "small.en",
    "medium",
    "medium.en",
    "large",
    "large-v1",
    "large-v2",
    "large-v3",
    "turbo",
    "large-v3-turbo",
]
SIZES: Final[tuple[str, ...]] = get_args(Size)
ALIASES: Final[Mapping[str, str]] = MappingProxyType({"large": "large-v3", "turbo": "large-v3-turbo"})

_CONVERTED_ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    {"large-v3-turbo": "mobiuslabsgmbh/faster-whisper-large-v3-turbo"}
)
GGML_REPOSITORY: Final = "ggerganov/whisper.cpp"


def converted(size: str) -> Source:
    """The model in CTranslate2's format."""
    full = ALIASES.get(size, size)
    return Source(repo=_CONVERTED_ELSEWHERE.get(full, f"Systran/faster-whisper-{full}"))


def ggml(size: str, quantization: str | None = None) -> Source:
    """The model in whisper.cpp's format, a single file."""
    ending = "" if quantization is None else f"-{quantization}"
    return Source(repo=GGML_REPOSITORY, files=[f"ggml-{ALIASES.get(size, size)}{ending}.bin"])


def names(size: str | None) -> tuple[str, ...]:
    """Other names that clients use for a model of this size."""
    if size is None:
        return ()
    called = {size, ALIASES.get(size, size), *(short for short, full in ALIASES.items() if full == size)}
    return tuple(name for one in sorted(called) for name in (one, f"whisper-{one}", f"openai/whisper-{one}"))
