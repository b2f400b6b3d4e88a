"""The needs of a program's files: libraries, and how new a glibc. Read from the files; no program is started.

The format is described in `man 5 elf`; only 64 bits, little-endian: x86-64 and AArch64 are.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAGIC: Final = b"\x7fELF\x02\x01"
_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRTAB, _VERNEED, _VERNEEDNUM = 1, 5, 0x6FFFFFFE, 0x6FFFFFFF
_GLIBC: Final = re.compile(rb"GLIBC_(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Needs:
    """`libraries` by soname; `glibc`: the oldest version that has all symbols, (0, 0) where none is needed."""

    libraries: frozenset[str]
    glibc: tuple[int, int] = (0, 0)


def needs(files: Iterable[Path]) -> Needs:
    """The needs of all these files together; files in another format than ELF are skipped. Raises OSError."""
    found = [_needs_of(path.read_bytes()) for path in files if _is_elf(path)]
    return Needs(
        frozenset().union(*(one.libraries for one in found)), max((one.glibc for one in found), default=(0, 0))
    )


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _needs_of(data: bytes) -> Needs:
    try:
        offset, size, count = *struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54)
        headers = [struct.unpack_from("<IIQQQQ", data, offset + at * size) for at in range(count)]
        loads = [(virtual, at, length) for kind, _, at, virtual, _, length in headers if kind == _LOAD]
        dynamic = [
            pair
            for kind, _, at, _, _, length in headers
            if kind == _DYNAMIC
            for pair in struct.iter_unpack("<qQ", data[at : at + length - length % 16])
        ]
        places = {tag: value for tag, value in dynamic if tag in (_STRTAB, _VERNEED, _VERNEEDNUM)}
        if _STRTAB not in places:
            return Needs(frozenset())
        strings = _file_offset(places[_STRTAB], loads)
        libraries = frozenset(_string_at(data, strings + value).decode() for tag, value in dynamic if tag == _NEEDED)
        names = _needed_versions(
            data, _file_offset(places.get(_VERNEED, 0), loads), strings, places.get(_VERNEEDNUM, 0)
        )
        wanted = [(int(match[1]), int(match[2])) for name in names if (match := _GLIBC.fullmatch(name))]
    except (struct.error, OverflowError, ValueError):
        return Needs(frozenset())  # a damaged program reports that itself at its start
    return Needs(libraries, max(wanted, default=(0, 0)))


def _needed_versions(data: bytes, at: int, strings: int, count: int) -> Iterator[bytes]:
    for _ in range(count):
        _, entries, _, first, following = struct.unpack_from("<HHIII", data, at)
        entry = at + first
        for _ in range(entries):
            _, _, _, name, step = struct.unpack_from("<IHHII", data, entry)
            yield _string_at(data, strings + name)
            entry += step
        at += following


def _file_offset(virtual: int, loads: list[tuple[int, int, int]]) -> int:
    """The offset in the file of the data that lies at this address once the file is loaded."""
    return next((virtual - start + at for start, at, length in loads if start <= virtual < start + length), 0)


def _string_at(data: bytes, at: int) -> bytes:
    return data[at : data.index(b"\0", at)]
