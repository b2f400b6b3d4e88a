"""Names for the shell's completion: quickly, and in silence where they can't be had."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from supervisor.catalog import find_config
from supervisor.catalog.document import Layer, Source, Table, read
from supervisor.errors import LlmuxError


def configured(config: Path | None, sections: Sequence[str]) -> list[str]:
    """The names in these sections of the configuration file, each once. Imports no runtime, checks nothing."""
    try:
        path = find_config(config)
        root, _ = read(path, Source(Layer.FILE, str(path), path.parent)) if path is not None else (None, [])
    except (LlmuxError, OSError, RuntimeError):
        return []
    tables = [root.entries.get(name) for name in sections] if isinstance(root, Table) else []
    return list(dict.fromkeys(name for table in tables if isinstance(table, Table) for name in table.entries))
