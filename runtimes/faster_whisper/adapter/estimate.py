"""Memory a faster-whisper worker takes: weights + activations of one window of 30 s + the program.

- weights: the width of a value depends on `compute_type`; quantised ones keep their scales.
- encoder: 1500 positions of the widest layer's activations, and the scores of its attention (64 values a head).
- decoder: keys and values of the encoder's output and of the text so far, for each beam.

Long files briefly take another megabyte of host memory for each second of a piece, of at most two minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from runtimes.base import MIB, Estimate
from runtimes.device_kind import HOST
from runtimes.faster_whisper.adapter.config import FasterWhisperConfig
from runtimes.faster_whisper.adapter.model_file import ModelFile

PROGRAM_MIB: Final = 135  # interpreter, CTranslate2, ONNX Runtime, PyAV, and the spectrum of a short file
POSITIONS, TOKENS, HEAD = 1500, 448, 64
COMPUTE_BYTES: Final = {"int16": 2, "float16": 2, "bfloat16": 2, "float32": 4, "auto": 1}
DRIVER: Final = Path("/dev/nvidiactl")


def footprint(config: FasterWhisperConfig, model: ModelFile) -> Estimate:
    """What a worker of this configuration takes."""
    width = value_bytes(config, model)
    weights = model.bytes_as(width)
    size, inner = _widths(model)
    activation = 4 if width in (1, 4) else 2
    encoder = POSITIONS * (4 * size + 2 * inner + POSITIONS * max(1, size // HEAD)) * activation
    kept = model.layers("decoder") * 2 * size * activation * (POSITIONS + TOKENS * config.beam_size)
    work = config.parallel * (encoder + kept)
    return Estimate.of({"weights": weights, "work": work, "program": PROGRAM_MIB * MIB})


def value_bytes(config: FasterWhisperConfig, model: ModelFile) -> int:
    """Bytes of a weight once loaded. CPUs convert float16 and bfloat16 to float32."""
    kind = config.compute_type
    if kind.startswith("int8"):
        return 1
    if kind != "default":
        return COMPUTE_BYTES[kind]
    on_host = not DRIVER.exists() or (bool(config.devices) and set(config.devices) == {HOST.name})
    stored_halves = model.values.keys() & {4, 5}
    return 4 if on_host and stored_halves and model.widest == 2 else model.widest


def _widths(model: ModelFile) -> tuple[int, int]:
    """Of the residual stream, and of the widest layer."""
    size = next((shape[0] for name, shape in model.shapes.items() if name == "encoder/conv1/weight"), 0)
    inner = max((shape[0] for name, shape in model.shapes.items() if "/ffn/linear_0/weight" in name), default=4 * size)
    return size, inner
