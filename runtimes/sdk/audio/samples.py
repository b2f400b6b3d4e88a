"""Samples for speech models: 16 kHz, mono, float32 within [-1, 1]."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

RATE: Final = 16_000
QUIET: Final = 10 ** (-70 / 20)
"""Peaks below this are silence: ten of a 16-bit sample's 32768 steps, below any microphone's noise."""


def is_silent(samples: Samples) -> bool:
    """Are all samples silent? Models trained on speech make up words for silence."""
    return samples.size == 0 or float(max(samples.max(), -samples.min())) < QUIET
