"""Models of CTranslate2: code shared by the runtimes that use the library.

A model.bin is read without loading it: names, shapes, types and sizes of its variables.

The format (`ctranslate2/specs/model_spec.py`, version 6), little-endian: version (u32), name of the specification (u16
length, bytes), its revision (u32), number of variables (u32), and for each its name, rank (u8), dimensions (u32 each),
type (u8), bytes (u32), data.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, Literal

from runtimes.adapters.checkpoints import require_folder
from runtimes.base import LaunchContext, LaunchSpec, ModelUnusableError
from runtimes.device_kind import HOST
from runtimes.shared.regular import open_regular

ComputeType = Literal[
    "default",
    "auto",
    "int8",
    "int8_float32",
    "int8_float16",
    "int8_bfloat16",
    "int16",
    "float16",
    "bfloat16",
    "float32",
]
CUDA_LIBRARIES: Final = ("cublas", "cudnn", "cuda_nvrtc")  # of the wheels; CTranslate2 finds them by library path only
COMPUTE_BYTES: Final = {"int16": 2, "float16": 2, "bfloat16": 2, "float32": 4, "auto": 1}
DRIVER: Final = Path("/dev/nvidiactl")

NAME: Final = "model.bin"
VERSION: Final = 6
MAX_VARIABLES: Final = 100_000
VALUE_BYTES: Final = MappingProxyType({0: 4, 1: 1, 2: 2, 3: 4, 4: 2, 5: 2})
"""Bytes of a value by type: float32, int8, int16, int32, float16, bfloat16."""

WEIGHTS: Final = frozenset({0, 1, 2, 4, 5})  # types that are converted when the model is loaded in another


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The content of a model.bin. `values` counts the weights by type; `shapes` are those of all variables."""

    specification: str
    values: Mapping[int, int]
    shapes: Mapping[str, tuple[int, ...]]

    def bytes_as(self, value_bytes: int) -> int:
        """The size of the weights in bytes, with this many bytes for each value."""
        return value_bytes * sum(self.values.values())

    @property
    def widest(self) -> int:
        """Bytes of a value of the type that most weights have."""
        return VALUE_BYTES[max(self.values, key=lambda kind: self.values[kind])]

    def layers(self, part: str) -> int:
        """The number of layers in `encoder` or `decoder`."""
        numbers = {name.split("/")[1] for name in self.shapes if name.startswith(f"{part}/layer_") and "/" in name}
        return sum(number.removeprefix("layer_").isdigit() for number in numbers)


def read(folder: Path) -> ModelFile:
    """The model in this folder. Blocks on a seek for each variable. Raises ModelUnusableError with the reason."""
    require_folder(folder)
    file = folder / NAME
    try:
        with open_regular(file) as stream:
            return _read_model(stream, file)
    except FileNotFoundError as error:
        hint = ""
        if any(folder.glob("*.safetensors")):
            hint = (
                "; it is a Hugging Face folder: convert it with ct2-transformers-converter, or use runtime transformers"
            )
        raise ModelUnusableError(f"{folder}: there is no {NAME} in it{hint}") from error
    except OSError as error:
        raise ModelUnusableError(f"{file} can't be read: {error.strerror}") from error
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise ModelUnusableError(f"{file} is cut off, or not a model of CTranslate2") from error


def value_bytes(kind: ComputeType, model: ModelFile, devices: Collection[str]) -> int:
    """Bytes of a weight once loaded. CPUs convert float16 and bfloat16 to float32."""
    if kind.startswith("int8"):
        return 1
    if kind != "default":
        return COMPUTE_BYTES[kind]
    on_host = not DRIVER.exists() or (bool(devices) and set(devices) == {HOST.name})
    stored_halves = model.values.keys() & {4, 5}
    return 4 if on_host and stored_halves and model.widest == 2 else model.widest


def with_cuda(spec: LaunchSpec, context: LaunchContext, runtime: str) -> LaunchSpec:
    """The launch, extended so that a worker with a GPU finds the CUDA libraries in the runtime's environment."""
    if not context.device.kind.accelerates:
        return spec
    packages = (context.environment(runtime) / "lib").glob("python3*/site-packages/nvidia")
    folders = (str(nvidia / library / "lib") for nvidia in packages for library in CUDA_LIBRARIES)
    return dataclasses.replace(spec, library_path=tuple(folders))


def _read_model(stream: BinaryIO, file: Path) -> ModelFile:
    (version,) = _unpack(stream, "<I")
    if not 5 <= version <= VERSION:
        raise ModelUnusableError(f"{file} is not a model of CTranslate2 (version {version} instead of {VERSION})")
    specification = _read_text(stream)
    _revision, count = _unpack(stream, "<II")
    if count > MAX_VARIABLES:
        raise ModelUnusableError(f"{file} is not a model of CTranslate2")
    values: dict[int, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for _ in range(count):
        name = _read_text(stream)
        (rank,) = _unpack(stream, "<B")
        shapes[name] = _unpack(stream, f"<{rank}I")
        kind, size = _unpack(stream, "<BI")
        if kind in WEIGHTS and rank:
            values[kind] = values.get(kind, 0) + size // VALUE_BYTES[kind]
        stream.seek(size, 1)
    end = stream.tell()
    if stream.seek(0, 2) < end or not values:
        raise ModelUnusableError(f"{file} is cut off")
    return ModelFile(specification, values, shapes)


def _unpack(stream: BinaryIO, form: str) -> tuple[int, ...]:
    return struct.unpack(form, stream.read(struct.calcsize(form)))


def _read_text(stream: BinaryIO) -> str:
    (length,) = _unpack(stream, "<H")
    return stream.read(length).rstrip(b"\0").decode()
