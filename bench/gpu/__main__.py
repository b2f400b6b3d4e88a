"""Measure every runtime that is installed for `cuda` on this machine's GPU, and write docs/gpu-results.md: `make bench-gpu`."""

from __future__ import annotations

import argparse
import datetime as dt
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.gpu import card as cards
from bench.gpu import measures, page, subjects
from bench.gpu.card import Card
from supervisor.catalog.folders import runtimes_dir
from tests.support import daemon as daemons


def measured(card: Card, name: str, folder: Path, runtimes: Path, *, swaps: int) -> page.Figures:
    """The figures of one subject. Raises AssertionError where it doesn't load, answer or give its memory back."""
    subject = subjects.SUBJECTS[name]
    model = subject.config(card.id)
    config = {
        "devices": "auto",
        "server": {"runtimes_dir": str(runtimes)},
        "models": {"a": model, "b": model},
        "limits": {"max_loaded": subjects.ONE_OF_EACH},
    }
    with daemons.running(folder, config) as daemon:
        before_mib = card.free_mib()
        load_s = measures.load(daemon, "a")
        measures.answered(daemon, subject, "a")  # the first answer compiles
        speed = measures.speed(daemon, subject, "a")
        found = measures.footprint(daemon, card, "a", before_mib)
        swapped = measures.swaps(daemon, card, subject, ("a", "b"), min(swaps, subject.swaps))
    return page.Figures(
        card=card.title,
        subject=name,
        date=dt.datetime.now(tz=dt.UTC).date().isoformat(),
        load_s=load_s,
        first_s=None if speed is None else speed.first_s,
        tokens_per_s=None if speed is None else speed.tokens_per_s,
        estimate_mib=found.estimate_mib,
        taken_mib=found.taken_mib,
        swap_s=swapped.median_s,
        swaps=swapped.count,
        leak_mib=swapped.leak_mib,
    )


def main() -> int:
    """Tell of each subject, and why one is left out; 1 without a GPU."""
    flags = argparse.ArgumentParser(prog="bench.gpu", description="Measure the runtimes on this machine's NVIDIA GPU.")
    flags.add_argument("--only", nargs="+", choices=subjects.SUBJECTS, default=list(subjects.SUBJECTS))
    flags.add_argument("--swaps", type=int, default=100)
    flags.add_argument("--runtimes-dir", type=Path, default=runtimes_dir())
    asked = flags.parse_args()
    card = cards.first()
    if isinstance(card, str):
        print(card)
        return 1
    print(card.title)
    taken = []
    with subjects.written_by(asked.runtimes_dir), tempfile.TemporaryDirectory() as folder:
        for name in asked.only:
            if (reason := subjects.missing(name, card.id, asked.runtimes_dir)) is not None:
                print(f"{name}: left out: {reason}")
                continue
            place = Path(folder, name)
            place.mkdir()
            taken.append(measured(card, name, place, asked.runtimes_dir, swaps=asked.swaps))
            print(f"{name}: {taken[-1]}")
    page.write(page.merged(page.read(), taken))
    subprocess.run([sys.executable, "-m", "tools.docs"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
