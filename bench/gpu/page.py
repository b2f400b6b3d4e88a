"""The measured figures, in bench/gpu/figures.json, and their table in docs/gpu-results.md.

A run replaces an earlier run's figures of the same card and subject.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

FILE: Final = Path(__file__).with_name("figures.json")
NONE: Final = "No figures have been taken yet: this project has had no machine with an NVIDIA GPU so far."
HEAD: Final = (
    "Subject",
    "Date",
    "Load, s",
    "First token, s",
    "Tokens/s",
    "Estimate, MiB",
    "Taken, MiB",
    "Back, s",
    "Swap, s",
    "Leak, MiB",
)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one subject on one card. None: the subject has no such figure."""

    card: str
    subject: str
    date: str
    load_s: float
    first_s: float | None
    tokens_per_s: float | None
    estimate_mib: int
    taken_mib: int
    back_s: float
    swap_s: float
    swaps: int
    leak_mib: int

    @property
    def row(self) -> tuple[str, ...]:
        """The row of the table."""
        return (
            f"`{self.subject}`",
            self.date,
            _number_text(self.load_s, 1),
            _number_text(self.first_s, 2),
            _number_text(self.tokens_per_s, 0),
            str(self.estimate_mib),
            str(self.taken_mib),
            _number_text(self.back_s, 1),
            _number_text(self.swap_s, 1),
            f"{self.leak_mib} ({self.swaps})",
        )


def read(file: Path = FILE) -> tuple[Figures, ...]:
    """All figures; none where there is no file."""
    if not file.exists():
        return ()
    return tuple(Figures(**entry) for entry in json.loads(file.read_text(encoding="utf-8")))


def merged(old: Sequence[Figures], new: Sequence[Figures]) -> tuple[Figures, ...]:
    """The new figures, and the old ones of other subjects or cards, sorted by card and subject."""
    found: Mapping[tuple[str, str], Figures] = {(one.card, one.subject): one for one in (*old, *new)}
    return tuple(found[key] for key in sorted(found))


def write(figures: Sequence[Figures], file: Path = FILE) -> None:
    """Replace the file."""
    file.write_text(json.dumps([asdict(one) for one in figures], indent=2) + "\n", encoding="utf-8")


def tables(figures: Sequence[Figures] | None = None) -> str:
    """A table for each card, as Markdown."""
    known = read() if figures is None else figures
    parts = []
    for card in dict.fromkeys(one.card for one in known):
        rows = [one.row for one in known if one.card == card]
        lines = [HEAD, ("---",) * len(HEAD), *rows]
        parts += [f"**{card}**", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join(parts) if parts else NONE


def _number_text(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
