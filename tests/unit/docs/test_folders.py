"""A folder has at most twenty modules; what has more is cut by concept (docs/adr/0033-rooms-by-concept.md)."""

from __future__ import annotations

from collections import Counter

from tests.support.daemon import REPOSITORY

MOST = 20


def test_folders_are_small():
    modules = (
        path.relative_to(REPOSITORY)
        for top in ("supervisor", "runtimes")
        for path in (REPOSITORY / top).rglob("*.py")
        if path.name != "__init__.py"
    )
    counts = Counter(str(path.parent) for path in modules)
    assert {folder: count for folder, count in counts.items() if count > MOST} == {}
