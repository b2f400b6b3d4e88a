"""Writes GGUF files with only the standard library.

Layout (little endian): magic, version 3, tensor count, key count, keys, tensor table, padding to 32 bytes, tensors.
Tensors are f32. Zeros become a hole in the file, so a model of any size is written at once and takes no disk space. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.host.store.files import replacing

Scalar = bool | int | float | str

ALIGNMENT: Final = 32
_F32: Final = 0
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class Tensor:
    """`shape` has rows first, as in numpy; `values` are row-major, None for zeros."""

    shape: tuple[int, ...]
    values: array[float] | None = None

    @property
    def size_bytes(self) -> int:
        return 4 * math.prod(self.shape)


def ones(length: int) -> Tensor:
    """A tensor of ones: the weights of a norm."""
    return Tensor((length,), array("f", [1.0]) * length)


def write(path: Path, keys: Mapping[str, Scalar | Sequence[Scalar]], tensors: Mapping[str, Tensor]) -> None:
    """Write a file; once it is complete, it replaces an old one. Raises OSError."""
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)))
    for name, value in keys.items():
        head += _encode_string(name) + _encode_value(value)
    offset = 0
    for name, tensor in tensors.items():
        head += _encode_string(name) + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))  # GGUF has the fastest axis first
        head += struct.pack("<IQ", _F32, offset)
        offset += _padded_size(tensor.size_bytes)
    with replacing(path) as fresh, fresh.open("wb") as file:
        file.write(head)
        start = _padded_size(len(head))
        for tensor in tensors.values():
            if tensor.values is not None:
                assert len(tensor.values) == math.prod(tensor.shape)
                file.seek(start)
                tensor.values.tofile(file)
            start += _padded_size(tensor.size_bytes)
        file.truncate(start)


def _padded_size(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _encode_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _encode_value(value: Scalar | Sequence[Scalar]) -> bytes:
    if isinstance(value, Scalar):
        kind, data = _encode_scalar(value)
        return struct.pack("<I", kind) + data
    items = [_encode_scalar(item) for item in value]
    kind = items[0][0]
    if kind == _UINT32:  # other programs' files have signed lists
        kind = _INT32
    return struct.pack("<IIQ", _ARRAY, kind, len(items)) + b"".join(data for _, data in items)


def _encode_scalar(value: Scalar) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return _BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return _UINT32, struct.pack("<I", value)
    if isinstance(value, float):
        return _FLOAT32, struct.pack("<f", value)
    return _STRING, _encode_string(value)
