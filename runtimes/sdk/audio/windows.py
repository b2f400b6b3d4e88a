"""Splits long audio where it is quiet, so that no word is cut in two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from runtimes.sdk.audio.samples import RATE, Samples, is_silent

STEP: Final = RATE // 10


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of audio, and where it begins, in seconds."""

    start_s: float
    samples: Samples

    @property
    def end_s(self) -> float:
        """The end of the window, in seconds."""
        return self.start_s + len(self.samples) / RATE


def windows(samples: Samples, longest_s: float, search_s: float) -> Iterator[Window]:
    """Pieces of at most `longest_s`, each cut at the quietest tenth of a second of its last `search_s`.

    Silent pieces are left out.
    """
    longest, search = int(longest_s * RATE), int(search_s * RATE)
    start = 0
    while start < len(samples):
        end = start + longest
        end = len(samples) if end >= len(samples) else _quietest_position(samples, end - search, end)
        piece = samples[start:end]
        if not is_silent(piece):
            yield Window(start / RATE, piece)
        start = end


def _quietest_position(samples: Samples, first: int, last: int) -> int:
    """The middle of the tenth of a second with the least energy; the last of several, for fewer pieces."""
    steps = samples[first : first + (last - first) // STEP * STEP].reshape(-1, STEP)
    energy = np.square(steps).sum(axis=1)
    quietest = len(energy) - 1 - int(np.argmin(energy[::-1]))
    return first + quietest * STEP + STEP // 2
