"""Measure every runtime that is installed for `cuda` on this machine's GPU, and write docs/gpu-results.md: `make bench-gpu`.

A failed subject doesn't stop the others, and each subject's figures are written at once: a run may be cut short.
"""

from __future__ import annotations

import argparse
import datetime as dt
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.gpu import card as cards
from bench.gpu import measures, page, subjects
from bench.gpu.card import Card
from supervisor.catalog.loading.folders import runtimes_dir
from tests.support import daemon as daemons


def measured(card: Card, name: str, folder: Path, runtimes: Path, *, swaps: int) -> page.Figures:
    """The figures of one subject. Raises AssertionError where the subject doesn't load, answer or free its memory."""
    subject = subjects.SUBJECTS[name]
    model = subject.config(card.id)
    config = {
        "devices": "auto",
        "server": {"runtimes_dir": str(runtimes)},
        "models": {"a": model, "b": model},
        "limits": subjects.LIMITS,
    }
    with daemons.running(folder, config, by_exec=True) as daemon:
        before_mib = measures.settled(card)
        load_s = measures.load(daemon, "a")
        measures.answered(daemon, subject, "a")  # the first answer compiles
        speed = measures.speed(daemon, subject, "a")
        found = measures.footprint(daemon, card, "a", before_mib)
        assert found.taken_mib > 0, "it takes no memory of the GPU: its program is for the processor alone"
        own = measures.contexts(daemon, card)
        assert own == [], f"the supervisor uses the GPU itself: {own}"
        back_s = measures.kill(daemon, card, "a", before_mib)
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
        back_s=back_s,
        swap_s=swapped.median_s,
        swaps=swapped.count,
        leak_mib=swapped.leak_mib,
    )


def measure(
    card: Card, names: Iterable[str], runtimes: Path, *, swaps: int, file: Path, echo: Callable[[str], None]
) -> list[str]:
    """Add the figures of these subjects to the file, one after the other; returns the names of failed subjects."""
    failed = []
    with subjects.written_by(runtimes), tempfile.TemporaryDirectory() as folder:
        for name in names:
            place = Path(folder, name)
            place.mkdir()
            try:
                if (reason := subjects.missing(name, card.id, runtimes)) is not None:
                    echo(f"{name}: left out: {reason}")
                    continue
                figures = measured(card, name, place, runtimes, swaps=swaps)
            except Exception as error:  # noqa: BLE001  # after any failure the other subjects are still measured
                failed.append(name)
                echo(f"{name}: failed: {type(error).__name__}: {error}")
                log = place / "daemon.log"
                for line in log.read_text("utf-8").splitlines()[-measures.LOG_LINES :] if log.exists() else ():
                    echo(f"  {line}")
            else:
                page.write(page.merged(page.read(file), [figures]), file)
                echo(f"{name}: {figures}")
    return failed


def main() -> int:
    """Report each subject, and the reason where one is left out; returns 1 without a GPU, or where a subject failed."""
    flags = argparse.ArgumentParser(prog="bench.gpu", description="Measure the runtimes on this machine's NVIDIA GPU.")
    flags.add_argument("--only", nargs="+", choices=subjects.SUBJECTS, default=list(subjects.SUBJECTS))
    flags.add_argument("--swaps", type=int, choices=range(2, 1001), metavar="2-1000", default=100)
    flags.add_argument("--runtimes-dir", type=Path, default=runtimes_dir())
    options = flags.parse_args()
    card = cards.first()
    if isinstance(card, str):
        print(card)
        return 1
    print(card.title, flush=True)
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the daemon and its workers end, too
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    try:
        failed = measure(
            card,
            options.only,
            options.runtimes_dir.absolute(),
            swaps=options.swaps,
            file=page.FILE,
            echo=lambda line: print(line, flush=True),
        )
    finally:
        subprocess.run([sys.executable, "-m", "tools.docs"], check=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
