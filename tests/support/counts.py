"""How often a test does the same: a little at the gate, in full in a soak (`make soak`)."""

from __future__ import annotations

import os

SOAK = os.environ.get("LLMUX_SOAK") == "1"


def times(few: int, full: int) -> int:
    """How often a fault is injected: `few` at the gate, `full` in a soak."""
    return full if SOAK else few


def examples(usual: int) -> int:
    """How many inputs Hypothesis draws: a quarter of `usual` at the gate, twenty times as many in a soak."""
    return 20 * usual if SOAK else max(2, usual // 4)
