"""The choice among several sizes, and its reason."""

from __future__ import annotations

from runtimes.sizing import Room, Size, Sizing, choose, contexts
from tests.support.cases import cases

SIZES = [Size(step, 1, step > 32768) for step in contexts(131072)]
GIB = 1024


def takes(size: Size) -> int:
    """Weights of 4 GiB, and 1 GiB for 8192 tokens."""
    return 4 * GIB + size.context // 8


class TestContexts:
    """The trained context, and every step below it."""

    def test_steps(self):
        assert contexts(40960) == (40960, 32768, 16384, 8192, 4096)
        assert contexts(1 << 20)[0] == 131072
        assert contexts(2048) == (2048,)
        assert contexts(32768, most=8192) == (8192, 4096)


class TestChoose:
    """Enough for an agent where it fits; more where half stays free; the same for the same device."""

    @cases(
        ("gib", "context", "why"),
        [
            (80, 131072, ""),
            (32, 65536, "131072 in 1 would take 20480 MiB, more than half of gpu0 (32768 MiB)"),
            (12, 32768, "65536 in 1 would take 12288 MiB, more than half of gpu0 (12288 MiB)"),
            (7, 16384, "32768 in 1 would take 8192 MiB, more than nine tenths of gpu0 (7168 MiB)"),
            (5, 4096, "8192 in 1 would take 5120 MiB, more than nine tenths of gpu0 (5120 MiB)"),
            (4, 4096, "the least, though it takes 4608 MiB, more than nine tenths of gpu0 (4096 MiB)"),
        ],
    )
    def test_by_the_device(self, gib, context, why):
        size, told = choose(SIZES, Room(gib * GIB, "gpu0"), takes)
        assert (size.context, told) == (context, why)

    def test_what_the_configuration_gives_it_is_filled(self):
        size, told = choose(SIZES, Room(12 * GIB, "vram_mib", is_own=True), takes)
        assert (size.context, told) == (65536, "131072 in 1 would take 20480 MiB, more than its vram_mib (12288 MiB)")

    def test_a_processor_gets_no_more_than_it_reads(self):
        size, told = choose(SIZES, Room(500 * GIB, "host", accelerates=False), takes)
        assert (size.context, told) == (32768, "a processor would read more for minutes")

    def test_without_a_device(self):
        assert choose(SIZES, None, takes)[0].context == 32768


class TestSizing:
    def test_words(self):
        assert str(Sizing(8192, 1, 131072, "so")) == "context 8192 (of 131072 trained) in 1 slot: so"
        assert str(Sizing(2048, 4, 2048, "")) == "context 2048 (all it was trained with) in 4 slots"
        assert str(Sizing(4096, 2, 0, "")) == "context 4096 in 2 slots"
