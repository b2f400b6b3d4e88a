"""Metadata of a GGUF file, read lazily from its header.

A GGUF file is: magic, version, tensor count, key count, then the keys (name, type, value), the tensor table and the
tensors. The keys for an estimate precede the tokenizer, and its vocabulary is most of the header. So reading stops once
the vocabulary's length is known, and takes about a millisecond for a model of any size. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

The file is untrusted, and may change meanwhile. It is read, not mapped, because a mapping of a file that shrinks ends the
process. Whatever lengths the file claims, at most MOST_HEADER of it is read.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from runtimes.base import ModelUnusableError
from runtimes.shared.regular import open_regular

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]
T = TypeVar("T")

MOST_HEADER: Final = 64 << 20
"""Bytes. The largest known vocabulary takes a third of it."""

_STRING, _ARRAY, _UINT32 = 8, 9, 4
_ALIGNMENT = 32  # unless the file has another
_MOST_DIMENSIONS = 8  # ggml has 4
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BLOCKS: Final = MappingProxyType(
    {0: (1, 4), 1: (1, 2), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2)}  # not quantised
    | {2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 20: (32, 18), 39: (32, 17)}
    | {10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292)}
    | {16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 21: (256, 110), 22: (256, 82), 23: (256, 136)}
    | {29: (256, 56), 34: (256, 54), 35: (256, 66), 40: (64, 36), 41: (128, 18)}
)
"""Values of a block, and its bytes, by the number that the tensor table gives its type."""

_LONG_ARRAY = 65_536  # longer than any per-layer list; longer lists, such as vocabularies, are only counted
_MOST_KEYS = 100_000
_MOST_ITEMS = 1_000_000  # of all lists together
_MOST_LAYERS = 4096  # llama.cpp takes 512
_MOST_NUMBER = 1 << 40  # of anything else
_PREFIXES = (1 << 20, 16 << 20, MOST_HEADER)
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-00001-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata. `values` excludes the tokenizer; `vocabulary` is its length, 0 if unknown."""

    architecture: str
    values: dict[str, Value]
    vocabulary: int
    file_bytes: int  # of all parts

    @property
    def layers(self) -> int:
        """The number of blocks."""
        return min(self.number("block_count"), _MOST_LAYERS)

    def number(self, key: str, default: int = 0) -> int:
        """`<architecture>.<key>` as a size, which is never negative; of a list, its largest."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, tuple):
            value = max((item for item in value if isinstance(item, int | float)), default=default)
        return _as_size(value, default)

    def per_layer(self, key: str, layers: int, default: int = 0) -> tuple[int, ...]:
        """`<architecture>.<key>` for each layer; a single number applies to all of them."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, tuple):
            numbers = tuple(_as_size(item, default) for item in value if isinstance(item, int | float))
            return (numbers + (default,) * layers)[:layers]
        return (_as_size(value, default),) * layers


def _as_size(value: Scalar, default: int) -> int:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return default
    return max(0, min(int(value), _MOST_NUMBER))


def parts(path: Path) -> tuple[Path, ...]:
    """All files of a model: itself, or every part of a split one given by its first."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    return tuple(path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))


def read(path: Path) -> Metadata:
    """The metadata of a GGUF file. Blocks on opening it.

    Raises ModelUnusableError for a missing part, an unreadable file, or one that isn't GGUF.
    """
    return _read_header(path, lambda reader: _parse_metadata(reader, sum(part.stat().st_size for part in parts(path))))


def chat_template(path: Path) -> str | None:
    """The chat template in a GGUF file; None without one. Skips over the vocabulary, which takes up to 0.2 s.

    Raises ModelUnusableError as `read` does.
    """
    return _read_header(path, _chat_template)


def cut_short(path: Path) -> str | None:
    """A message about a file that ends before its last tensor, such as a half copied one; None: the file is complete.

    Looks at a file once, for up to 0.2 s. Raises ModelUnusableError as `read` does.
    """
    for part in parts(path):
        stat = part.stat()
        if stat.st_size < (least := _least_size(part, stat.st_size, stat.st_mtime_ns)):
            return f"{part}: it is cut short: {stat.st_size} bytes of at least {least}; get it again"
    return None


@lru_cache(maxsize=20_000)
def _least_size(path: Path, _as_size: int, _changed: int) -> int:
    return _read_header(path, _tensors_end)


def _tensors_end(reader: _Reader) -> int:
    """The offset in the file at which the last tensor ends."""
    alignment = _ALIGNMENT
    for key, kind in reader.entries():
        if key == "general.alignment" and kind == _UINT32:
            alignment = reader.number() or _ALIGNMENT
        else:
            reader.skip(kind)
    return reader.last_tensor(alignment)


def _chat_template(reader: _Reader) -> str | None:
    for key, kind in reader.entries():
        if key == "tokenizer.chat_template" and kind == _STRING:
            return reader.string()
        reader.skip(kind)
    return None


class _TruncatedError(ValueError):
    """The header is longer than the part that was read."""

    def __init__(self) -> None:
        super().__init__("it is cut short")


def _read_header(path: Path, parse: Callable[[_Reader], T]) -> T:
    """The result of `parse` on the beginning of the file. Reads more of the file until `parse` has enough.

    Raises ModelUnusableError for whatever goes wrong while the file is read.
    """
    try:
        with open_regular(path) as file:
            head = b""
            for most in _PREFIXES:
                head += file.read(most - len(head))
                try:
                    return parse(_Reader(head))
                except (_TruncatedError, struct.error, OverflowError) as error:
                    if len(head) < most or most == MOST_HEADER:
                        raise _TruncatedError from error
            raise _TruncatedError
    except FileNotFoundError as error:
        raise ModelUnusableError(f"{error.filename}: there is no such file") from error
    except ValueError as error:
        raise ModelUnusableError(f"{path}: not a readable GGUF file ({error})") from error
    except OSError as error:
        raise ModelUnusableError(f"{path}: {error.strerror or error}") from error


def _parse_metadata(reader: _Reader, size: int) -> Metadata:
    values: dict[str, Value] = {}
    vocabulary = 0
    for key, kind in reader.entries():
        if key == "tokenizer.ggml.tokens" and kind == _ARRAY:
            _, vocabulary = reader.array()
            break
        values[key] = reader.value(kind)
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError("it names no architecture")  # noqa: TRY004 - about the file's content, not an argument
    declared = values.get(f"{architecture}.vocab_size")
    return Metadata(architecture, values, _as_size(declared, 0) if isinstance(declared, int) else vocabulary, size)


class _Reader:
    """A cursor over the header; struct checks the bounds of every read."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0
        self._tensors = 0
        self._items_left = _MOST_ITEMS

    def entries(self) -> Iterator[tuple[str, int]]:
        """Name and type of each key in file order. After each, its value must be read or skipped."""
        if not self._data:
            raise ValueError("it is empty")
        if self._data[:4] != b"GGUF":
            raise ValueError("it doesn't begin with GGUF")
        self._offset = 4
        version = self._unpack("I")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported")
        self._tensors = int(self._unpack("Q"))
        count = int(self._unpack("Q"))
        if count > _MOST_KEYS:
            raise ValueError(f"{count} metadata keys can't be right")
        for _ in range(count):
            yield self.string(), int(self._unpack("I"))

    def last_tensor(self, alignment: int) -> int:
        """The offset in the file at which the last tensor ends; 0 without tensors. The cursor must be at the tensor table."""
        if self._tensors > _MOST_ITEMS:
            raise ValueError(f"{self._tensors} tensors can't be right")
        last = 0
        for _ in range(self._tensors):
            self.string()
            values = math.prod(int(self._unpack("Q")) for _ in range(min(int(self._unpack("I")), _MOST_DIMENSIONS)))
            block, size = BLOCKS.get(int(self._unpack("I")), (values or 1, 1))  # of a new type: at least its first byte
            last = max(last, int(self._unpack("Q")) + values // block * size)
        return -(-self._offset // alignment) * alignment + last if last else 0

    def array(self) -> tuple[int, int]:
        """The type and number of a list's items. The items follow in the header."""
        item, count = int(self._unpack("I")), int(self._unpack("Q"))
        if count > len(self._data):
            raise _TruncatedError
        return item, count

    def value(self, kind: int) -> Value:
        """Read a value of this type; a long list is skipped."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self._unpack(_struct_code(kind))
        item, count = self.array()
        if count > min(_LONG_ARRAY, self._items_left):
            self._skip(item, count)
            return ()
        self._items_left -= count
        if item == _STRING:
            return tuple(self.string() for _ in range(count))
        layout = struct.Struct(f"<{count}{_struct_code(item)}")
        found: tuple[Scalar, ...] = layout.unpack_from(self._data, self._offset)
        self._offset += layout.size
        return found

    def skip(self, kind: int) -> None:
        """Skip a value of this type."""
        self._skip(*(self.array() if kind == _ARRAY else (kind, 1)))

    def number(self) -> int:
        """An unsigned number of four bytes."""
        return int(self._unpack("I"))

    def string(self) -> str:
        """Read a string: its length, then its bytes."""
        length = int(self._unpack("Q"))
        end = self._offset + length
        if end > len(self._data):
            raise _TruncatedError
        text = self._data[self._offset : end].decode("utf-8", errors="replace")
        self._offset = end
        return text

    def _skip(self, kind: int, count: int) -> None:
        if kind != _STRING:
            self._offset += count * struct.calcsize("<" + _struct_code(kind))
            return
        at, data, length_at = self._offset, self._data, struct.Struct("<Q").unpack_from
        for _ in range(count):  # the whole cost of a vocabulary is in this loop
            at += 8 + length_at(data, at)[0]
        self._offset = at

    def _unpack(self, code: str) -> Scalar:
        layout = struct.Struct("<" + code)
        value: Scalar
        (value,) = layout.unpack_from(self._data, self._offset)
        self._offset += layout.size
        return value


def _struct_code(kind: int) -> str:
    if kind not in _FORMATS:
        raise ValueError(f"unknown metadata type {kind}")
    return _FORMATS[kind]
