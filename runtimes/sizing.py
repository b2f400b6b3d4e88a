"""The context and slots of a language model whose configuration leaves them open.

An agent's instructions and tools alone are some 10 000 tokens, so a context of 32 768 is chosen wherever it fits. A larger
one is chosen where the model leaves half of the device to others even so, a smaller one where there is no room. The choice
depends on the files and on the size of the device alone, never on free memory. So the choice is the same for every load, and
measured footprints stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

STEPS: Final = (131_072, 65_536, 32_768, 16_384, 8192, 4096)
ENOUGH: Final = 32_768
"""Tokens. Enough for an agent, and as much as a processor reads in bearable time."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that a model can have: the size of the largest device that it may run on, or its `vram_mib` (`is_own`)."""

    mib: int
    name: str
    accelerates: bool = True  # is it the memory of a GPU?
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class Size:
    """A context in tokens, and a number of requests at once. `is_luxury`: only if half of the device stays free."""

    context: int
    slots: int
    is_luxury: bool = False


@dataclass(frozen=True, slots=True)
class Sizing:
    """The size of a model, for people: `trained` is the longest context it was made for, 0 if unknown."""

    context: int
    slots: int
    trained: int
    why: str

    def __str__(self) -> str:
        whole = "all it was trained with" if self.context == self.trained else f"of {self.trained} trained"
        slots = "1 slot" if self.slots == 1 else f"{self.slots} slots"
        return f"context {self.context}{f' ({whole})' if self.trained else ''} in {slots}{f': {self.why}' if self.why else ''}"


def contexts(trained: int, most: int = STEPS[0]) -> tuple[int, ...]:
    """The contexts to choose from, largest first."""
    largest = min(trained, most)
    return (largest, *(step for step in STEPS if step < largest))


def choose(sizes: Sequence[Size], room: Room | None, footprint_mib: Callable[[Size], int]) -> tuple[Size, str]:
    """The first size that fits, and why the sizes before it don't; "" for the first. `footprint_mib` computes a size's MiB."""
    plain = next((size for size in sizes if not size.is_luxury), sizes[-1])
    if room is None:
        return plain, ""
    why = ""
    if not room.accelerates and sizes[0].context > ENOUGH:
        sizes = [size for size in sizes if size.context <= ENOUGH] or sizes[-1:]
        why = "a processor would read more for minutes"
    for size in sizes:
        need, (limit, share) = footprint_mib(size), _limit(size, room)
        if need <= limit:
            return size, why
        why = f"{size.context} in {size.slots} would take {need} MiB, more than {share} {room.name} ({room.mib} MiB)"
    return sizes[-1], f"the least, though it takes {need} MiB, more than {share} {room.name} ({room.mib} MiB)"


def _limit(size: Size, room: Room) -> tuple[int, str]:
    if room.is_own:
        return room.mib, "its"
    return (room.mib // 2, "half of") if size.is_luxury else (room.mib * 9 // 10, "nine tenths of")
