"""The progress of a starting worker, by the bytes that its processes have read and hold, and by its log."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.host.process.logs import tail
from supervisor.host.process.procfs import ProcessTable, bytes_read, resident_quickly

TAIL_BYTES: Final = 4096
_PERCENT: Final = re.compile(r"(?<![\d.])(\d{1,3})(?:\.\d+)? ?%")
_PROGRESS_WORDS: Final = re.compile(r"\b(?:load|shard|progress)", re.IGNORECASE)  # other percentages may be of anything
_DOTS: Final = re.compile(r"\.{2,}")


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a start, in bytes: the log's size, bytes read by the tree, bytes in the tree's memory.

    `file_bytes` are those read by calls or through mapped files, whichever are more.
    """

    log_size: int = 0
    bytes_read: int = 0
    rss: int = 0
    file_bytes: int = 0
    stage: str = ""  # the last line of its log
    stage_share: float | None = None  # the share done, according to that line; None: unknown


def read_progress(roots: Iterable[int], log: Path) -> Progress:
    """Measure a starting worker's progress. Blocks for a few milliseconds. Raises OSError only when we are out of descriptors."""
    tree = ProcessTable.scan().tree(roots)
    try:
        log_size = log.stat().st_size
    except FileNotFoundError:
        log_size = 0
    lines = [line for line in tail(log, 5, TAIL_BYTES) if line.strip()] if log_size else []
    stage = lines[-1].strip() if lines else ""
    read = [bytes_read(pid) for pid in tree]
    by_calls, mapped = (sum(kind) for kind in zip(*read, strict=True)) if read else (0, 0)
    return Progress(
        log_size,
        by_calls + mapped,
        sum(resident_quickly(pid).total_bytes for pid in tree),
        max(by_calls, mapped),
        stage,
        stage_share(stage),
    )


def stage_share(line: str) -> float | None:
    """The share done according to a log's line: "45%", or llama.cpp's dots, one for each percent. None: unknown."""
    if _PROGRESS_WORDS.search(line) and (found := _PERCENT.findall(line)):
        return min(1.0, int(found[-1]) / 100)
    if _DOTS.fullmatch(line):
        return min(1.0, len(line) / 100)
    return None
