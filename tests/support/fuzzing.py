"""Input that is nearly right: strategies for Hypothesis, and how often they are tried."""

from __future__ import annotations

import itertools
import struct

from hypothesis import strategies as st

ODD_NUMBERS = (0, 1, 8, 0x7F, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 60, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)


@st.composite
def damaged(draw: st.DrawFn, *wholes: bytes, words: tuple[bytes, ...] = ()) -> bytes:
    """One of `wholes` with a few pieces cut, repeated, moved, or replaced by other bytes, odd numbers or `words`."""
    data = draw(st.sampled_from(wholes))
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.sampled_from((0, 0, 1, 2, 4, 8, 40, 400, 1 << 30))))
        piece = draw(
            st.one_of(
                st.just(b""),
                st.just(data[at:end] * 2),
                st.binary(max_size=12),
                st.sampled_from(words or (b"",)),
                st.sampled_from(ODD_NUMBERS).map(lambda number: struct.pack("<Q", number)),
                st.sampled_from(ODD_NUMBERS).map(lambda number: struct.pack("<I", number & 0xFFFFFFFF)),
            )
        )
        data = data[:at] + piece + data[end:]
    return data


def pieces(data: bytes) -> st.SearchStrategy[list[bytes]]:
    """`data` cut anywhere, any number of times."""

    def cut(places: list[int]) -> list[bytes]:
        bounds = [0, *sorted(places), len(data)]
        return [data[start:end] for start, end in itertools.pairwise(bounds)]

    return st.lists(st.integers(0, len(data)), max_size=8).map(cut)
