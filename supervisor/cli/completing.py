"""Names for the shell's completion: quickly, and in silence where they can't be had."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from supervisor.catalog.document import Table
from supervisor.cli.configuration import settings
from supervisor.errors import LlmuxError


def configured(config: Path | None, sections: Sequence[str]) -> list[str]:
    """The names in these sections of the configuration, each once. Checks nothing."""
    try:
        root = settings(config).tree()
    except (LlmuxError, OSError, RuntimeError):
        return []
    tables = [root.entries.get(name) for name in sections]
    return list(dict.fromkeys(name for table in tables if isinstance(table, Table) for name in table.entries))
